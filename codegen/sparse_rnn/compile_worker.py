"""The process that compiles kernels: orders on stdin, results on stdout, both JSON.

It imports nothing of graphpar, and so not torch: that would take longer than most kernels.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

WARP = 32


def main() -> None:
    print(json.dumps([compile_order(order) for order in json.loads(sys.stdin.read())]))


def compile_order(order: dict[str, Any]) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget

    path = Path(order["path"])
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    kernel = getattr(module, order["name"])
    types, constants = order["types"], order["constants"]
    signature, values, attributes = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[(place,)] = "constexpr", constants[name]
            continue
        signature[name] = types[name]
        if types[name].startswith("*"):
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = _source(kernel)(kernel, signature, values, attributes)
    target = GPUTarget("cuda", order["capability"], WARP)
    compiled = triton.compile(source, target=target, options=order["options"])
    return {
        "ptx": compiled.asm["ptx"],
        **_inspect(compiled.asm["cubin"]),
        "shared_bytes": compiled.metadata.shared,
    }


def _source(kernel: Any) -> Any:
    from triton.compiler import ASTSource

    if type(kernel).__name__ != "GluonJITFunction":
        return ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource


def _inspect(cubin: bytes) -> dict[str, Any]:
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        sass = _output(tools / "nvdisasm", "-c", path)
        usage = _output(tools / "cuobjdump", "-res-usage", path)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    return {"sass": sass, "registers": int(found[1]), "stack_bytes": int(found[2])}


def _output(*command: object) -> str:
    run = subprocess.run([*map(str, command)], capture_output=True, text=True, check=True)
    return run.stdout


if __name__ == "__main__":
    main()
