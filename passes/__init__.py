"""The passes, one file each; the rules of single ops are in `rules/`."""

if __name__ != "graphpar.passes":
    raise ImportError("import this package as graphpar.passes, not as passes")
