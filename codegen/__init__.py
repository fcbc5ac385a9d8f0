"""Generated kernels: plan, kernel text, launch."""

if __name__ != "graphpar.codegen":
    raise ImportError("import this package as graphpar.codegen, not as codegen")
