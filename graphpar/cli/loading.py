"""MODEL on the command line: ``package.module:callable`` or ``file.py:callable``."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from graphpar.collector import collector_paused
from graphpar.errors import InputError
from graphpar.provenance import Source
from graphpar.trace import bind, example_inputs
from graphpar.trace.where import user_line

HELP = (
    "package.module:callable or file.py:callable; the callable takes no arguments and returns a "
    "torch.nn.Module that has dummy_inputs, or (module, args, kwargs)"
)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model and the arguments of one call."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def load_model(text: str) -> Loaded:
    """The model that ``text`` names, made with torch's seed 0.

    Raises:
        InputError: says what is wrong, and where in the user's file.
    """
    place, _, name = text.rpartition(":")
    if not place or not name.isidentifier():
        raise InputError(f"MODEL is package.module:callable or file.py:callable, not {text!r}")
    with collector_paused():
        module = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    found = _attribute(module, place, name)
    torch.manual_seed(0)
    made = found if isinstance(found, nn.Module) else _call(found, name)
    return _checked(made, text)


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise InputError(f"there is no file {path}")
    path = path.resolve()
    sys.path.insert(0, str(path.parent))  # as python does, so that it finds its neighbours
    name = f"_graphpar_{path.stem}"  # hides no module of that name
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise _raised(f"{path.name}", error) from error
    return module


def _import_module(name: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and f"{name}.".startswith(f"{error.name}."):
            hint = f"; for a file write {name}.py" if Path(f"{name}.py").exists() else ""
            raise InputError(f"there is no module {error.name}{hint}") from error
        raise _raised(f"importing {name}", error) from error
    except (Exception, SystemExit) as error:
        raise _raised(f"importing {name}", error) from error


def _attribute(module: ModuleType, place: str, name: str) -> Any:
    found = getattr(module, name, None)
    if callable(found):
        return found
    known = [
        key
        for key, value in vars(module).items()
        if callable(value)
        and not key.startswith("_")
        and getattr(value, "__module__", None) == module.__name__
    ]
    wrong = f"{place} has no callable {name!r}"
    if close := difflib.get_close_matches(name, known, 1):
        wrong += f"; did you mean {close[0]!r}?"
    raise InputError(f"{wrong}\n  its callables: {', '.join(known) or 'none'}")


def _call(function: Callable[..., Any], name: str) -> Any:
    try:
        signature = inspect.signature(function)
        signature.bind()
    except TypeError as error:
        raise InputError(f"{name}{signature} must be callable without arguments") from error
    except ValueError:
        pass  # some builtins have no signature
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise _raised(f"{name}()", error) from error


def _raised(what: str, error: BaseException) -> InputError:
    told = InputError(f"{what} raised {type(error).__name__}: {error}".rstrip(": "))
    if isinstance(error, SyntaxError) and error.filename:
        told.add_note(f"at {Source(error.filename, error.lineno or 0)}")
    elif line := user_line(traceback.extract_tb(error.__traceback__)):
        told.add_note(f"at {line}")
    return told


def _checked(made: Any, text: str) -> Loaded:
    if isinstance(made, nn.Module):
        call = example_inputs(made)
        if call is None:
            raise InputError(
                f"no example inputs are known: {type(made).__name__} has no dummy_inputs; let "
                f"{text} return (module, args, kwargs)"
            )
        return Loaded(made, *call)
    match made:
        case (nn.Module() as module, tuple() | list() as args, Mapping() as kwargs):
            return Loaded(module, *bind(module, tuple(args), dict(kwargs)))
    what = type(made).__name__
    if isinstance(made, tuple):
        what = f"({', '.join(type(value).__name__ for value in made)})"
    raise InputError(
        f"{text} returned {what}, not a torch.nn.Module or (module, args, kwargs) with a tuple "
        "and a dict"
    )
