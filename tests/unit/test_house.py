"""The layout of the project: symlinks, wheel, direction of the imports."""

import ast
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINKS = ("passes", "codegen")

# Low to high. A module belongs to the longest name here that it is or lies below.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "collector", "local", "native"),
    ("provenance", "types", "axes"),
    ("program",),
    ("joined", "snapshots", "passes.rules"),
    ("cost", "ops", "printer", "formats", "simulate", "unfuse", "verify", "trace", "interpret"),
    ("codegen",),
    ("passes",),
    ("pipeline",),
    ("mesh", "state", "container", "runtime", "memory", "parallel_module", "api", "testing"),
    ("checkpoint", "weights", "plan"),
    ("__init__",),
    ("cli", "__main__"),
)
HEIGHT = {f"graphpar.{name}": height for height, names in enumerate(LAYERS) for name in names}


def modules() -> dict[str, Path]:
    """Every module of graphpar by its name; a package is `package.__init__`."""
    found = {}
    for folder, _, files in os.walk(ROOT / "graphpar", followlinks=True):
        for path in (Path(folder, file) for file in files if file.endswith(".py")):
            found[".".join(path.relative_to(ROOT).with_suffix("").parts)] = path
    return found


def height(module: str) -> int:
    name = module
    while name not in HEIGHT:
        name, _, last = name.rpartition(".")
        assert last, f"{module} is in no layer: add it to LAYERS"
    return HEIGHT[name]


def imported(source: str, known: dict[str, Path]) -> Iterator[tuple[int, str]]:
    """Line and name of each module of graphpar that the source imports, at any depth."""

    def module(name: str) -> str:
        return f"{name}.__init__" if f"{name}.__init__" in known else name

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: relative import"
            parts = [module(f"{node.module}.{alias.name}") for alias in node.names]
            names = [part if part in known else str(node.module) for part in parts]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "graphpar":
                yield node.lineno, module(name)


def upward_imports(module: str, source: str, known: dict[str, Path]) -> list[str]:
    own = height(module)
    return [
        f"{module}:{line} imports {name}, of a higher layer"
        for line, name in imported(source, known)
        if height(name) > own
    ]


def test_imports_run_one_way() -> None:
    known = modules()
    assert "graphpar.codegen.__init__" in known
    wrong = [
        line
        for module, path in known.items()
        for line in upward_imports(module, path.read_text(), known)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "source",
    [
        "import graphpar",
        "import graphpar.codegen",
        "from graphpar import codegen",
        "from graphpar import __version__",
        "def f():\n    from graphpar.codegen import something",
    ],
)
def test_an_upward_import_is_seen(source: str) -> None:
    known = modules()
    assert upward_imports("graphpar.errors", source, known)
    assert not upward_imports("graphpar.__main__", source, known)


def test_a_module_without_a_layer_is_refused() -> None:
    with pytest.raises(AssertionError, match="unheard is in no layer"):
        height("graphpar.unheard")


@pytest.mark.parametrize("name", LINKS)
def test_symlink_resolves(name: str) -> None:
    link = ROOT / "graphpar" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..", name)
    assert (link / "__init__.py").is_file()


@pytest.mark.parametrize("name", LINKS)
def test_direct_import_is_refused(name: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 1
    assert f"ImportError: import this package as graphpar.{name}, not as {name}" in run.stderr


def test_wheel_holds_only_graphpar(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a copy, since setuptools leaves build/ where it runs
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("graphpar", *LINKS, "tests"):
        shutil.copytree(
            ROOT / name,
            source / name,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    run = subprocess.run(
        [sys.executable, "-c", build, tmp_path], cwd=source, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    version = wheel.name.split("-")[1]
    assert {name.split("/")[0] for name in names} == {"graphpar", f"graphpar-{version}.dist-info"}
    code = {name for name in names if name.endswith(".py")}
    assert code == {str(path.relative_to(ROOT)) for path in modules().values()}
    assert "graphpar/py.typed" in names
