"""MODEL: what can be named, and the message for everything that cannot."""

from pathlib import Path

import pytest
import torch
from torch import nn

from graphpar.cli.loading import load_model
from graphpar.errors import InputError
from tests.cli.conftest import MODELS, Command, at

RAISES = at('raise ValueError("no weights here")')


@pytest.fixture(autouse=True)
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setattr(sys, "path", list(sys.path))


def message(text: str) -> str:
    with pytest.raises(InputError) as found:
        load_model(text)
    return "\n".join([str(found.value), *getattr(found.value, "__notes__", ())])


def test_a_file_and_a_module_give_the_same() -> None:
    one, two = load_model(f"{MODELS}:mlp"), load_model("tests.cli.models:mlp")
    assert isinstance(one.module, nn.Sequential)
    assert list(one.kwargs) == ["input"]
    assert torch.equal(one.kwargs["input"], two.kwargs["input"])
    for a, b in zip(one.module.parameters(), two.module.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["Declared", "ready"])
def test_a_module_with_dummy_inputs(name: str) -> None:
    loaded = load_model(f"{MODELS}:{name}")
    assert loaded.kwargs["input"].shape == (2, 8)


def test_a_file_finds_its_neighbours(tmp_path: Path) -> None:
    tmp_path.joinpath("neighbour.py").write_text("width = 4\n")
    tmp_path.joinpath("user.py").write_text(
        "import torch, neighbour\n"
        "def model():\n"
        "    x = torch.ones(1, neighbour.width)\n"
        "    return torch.nn.Linear(neighbour.width, 2), (x,), {}\n"
    )
    assert load_model(f"{tmp_path}/user.py:model").kwargs["input"].shape == (1, 4)


@pytest.mark.parametrize("text", ["model.py", "a.b", ":model", "file.py:", "file.py:a b"])
def test_not_of_the_form(text: str) -> None:
    wanted = f"MODEL is package.module:callable or file.py:callable, not {text!r}"
    assert message(text) == wanted


def test_no_such_file() -> None:
    assert message("nowhere/x.py:model") == "there is no file nowhere/x.py"


def test_no_such_module() -> None:
    assert message("no_such_package.part:model") == "there is no module no_such_package"
    assert message("tests.cli.nothing:model") == "there is no module tests.cli.nothing"


def test_a_file_named_as_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.joinpath("a").mkdir()
    tmp_path.joinpath("a", "gpt.py").write_text("")
    assert message("a/gpt:model") == "there is no module a/gpt; for a file write a/gpt.py"


def test_no_such_callable_lists_those_there_are() -> None:
    text = message(f"{MODELS}:mpl")
    assert text.startswith(f"{MODELS} has no callable 'mpl'; did you mean 'mlp'?\n")
    assert "  its callables: Layer, mlp, Declared," in text
    assert "_private" not in text
    assert "has no callable '_private'" in message(f"{MODELS}:_private")


def test_it_raised() -> None:
    assert message(f"{MODELS}:raises") == (
        "raises() raised ValueError: no weights here\n" + RAISES.strip()
    )
    assert message(f"{MODELS}:exits").startswith("exits() raised SystemExit: 3\nat models.py:")


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("\n1 / 0\n", "ZeroDivisionError: division by zero\nat user.py:2: 1 / 0"),
        (
            "import no_such\n",
            "ModuleNotFoundError: No module named 'no_such'\nat user.py:1: import no_such",
        ),
        ("def f(:\n", "SyntaxError: invalid syntax (user.py, line 1)\nat user.py:1: def f(:"),
    ],
)
def test_the_file_raised(source: str, wanted: str, tmp_path: Path) -> None:
    tmp_path.joinpath("user.py").write_text(source)
    assert message(f"{tmp_path}/user.py:model") == f"user.py raised {wanted}"


def test_it_returned_something_else() -> None:
    wanted = "not a torch.nn.Module or (module, args, kwargs) with a tuple and a dict"
    name = f"{MODELS}:returns_"
    assert message(f"{name}text") == f"{name}text returned str, {wanted}"
    assert message(f"{name}pair") == f"{name}pair returned (Linear, Tensor), {wanted}"


def test_it_needs_arguments() -> None:
    text = message(f"{MODELS}:needs_size")
    assert text.startswith("needs_size(size: int)")
    assert text.endswith("must be callable without arguments")


def test_no_inputs_are_known() -> None:
    name = f"{MODELS}:no_inputs"
    assert message(name) == (
        f"no example inputs are known: Linear has no dummy_inputs; let {name} return "
        "(module, args, kwargs)"
    )


def test_the_inputs_do_not_fit() -> None:
    text = message(f"{MODELS}:wrong_argument")
    assert "missing a required argument: 'input'" in text
    assert "the model's arguments are: input" in text


def test_the_command_exits_with_2(graphpar: Command) -> None:
    found = graphpar("verify", f"{MODELS}:raises", "--tp", 2)
    assert (found.code, found.out) == (2, "")
    assert found.err.splitlines() == [
        "raises() raised ValueError: no weights here",
        RAISES,
    ]
