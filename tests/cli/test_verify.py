import pytest
from torch import fx

from graphpar.cli import verify
from graphpar.cli.build import build_stages
from graphpar.program import Program, copy_program
from graphpar.unfuse import unfused
from tests.cli.conftest import MODELS, Command


@pytest.mark.parametrize("options", [("--tp", 1), ("--tp", 2), ("--tp", 4, "--sp")])
def test_equivalent(options: tuple[object, ...], graphpar: Command) -> None:
    found = graphpar("verify", f"{MODELS}:mlp", *options)
    assert (found.code, found.err) == (0, "")
    *stages, last = found.out.splitlines()
    assert stages[0].startswith("trace                verified: lint, ")
    if options[1] != 1:
        assert stages[-1].startswith("fuse-collectives     verified: lint, ")
        assert "types" in stages[-1]
    # The output and twelve parameters, and each on every rank where it is not sharded.
    assert last.startswith("equivalent: ")
    assert f"compared on {options[1]} simulated rank" in last
    assert "the gradients of 12 parameters and 0 inputs;" in last


@pytest.mark.parametrize("rng", ["exact", "invariant"])
def test_masks(rng: str, graphpar: Command) -> None:
    found = graphpar("verify", f"{MODELS}:dropping", "--tp", 2, "--rng", rng)
    assert (found.code, found.err) == (0, "")
    assert "equivalent: " in found.out
    assert ("seed-dropout" in found.out) == (rng == "invariant")


def without_conversion(program: Program) -> Program:
    """The program with the gradient of a norm's weight left partial."""
    broken = copy_program(unfused(program))
    for _, graph in broken.graphs():
        for node in graph.nodes:
            value = node.args[0] if node.args else None
            if "norm_weight_rep" in node.name:
                assert isinstance(value, fx.Node)
                node.replace_all_uses_with(value)
    return broken


def test_not_equivalent(graphpar: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        verify, "build_stages", lambda *arguments: without_conversion(build_stages(*arguments))
    )
    found = graphpar("verify", f"{MODELS}:mlp", "--tp", 2, "--sp")
    assert found.code == 1
    assert "equivalent: " not in found.out
    assert found.err.startswith("not equivalent: gradient of 0.norm.weight (Invariant) on rank 0 ")
    assert "differs at" in found.err


def test_progress_on_a_terminal(graphpar: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    found = graphpar("verify", f"{MODELS}:mlp", "--tp", 2)
    assert found.code == 0
    assert "simulate 2 ranks" in found.err
