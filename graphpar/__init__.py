"""graphpar: tensor and sequence parallelism for unmodified PyTorch models."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphpar import testing
    from graphpar.api import transform
    from graphpar.checkpoint import load_checkpoint, save_checkpoint
    from graphpar.cost import CostModel
    from graphpar.errors import GraphparError, GraphparWarning
    from graphpar.parallel_module import ParallelModule
    from graphpar.passes.rules import register_rule
    from graphpar.weights import load_safetensors

__all__ = [
    "CostModel",
    "GraphparError",
    "GraphparWarning",
    "ParallelModule",
    "load_checkpoint",
    "load_safetensors",
    "register_rule",
    "save_checkpoint",
    "testing",
    "transform",
]

_HOMES = {
    "CostModel": "graphpar.cost",
    "GraphparError": "graphpar.errors",
    "GraphparWarning": "graphpar.errors",
    "ParallelModule": "graphpar.parallel_module",
    "load_checkpoint": "graphpar.checkpoint",
    "load_safetensors": "graphpar.weights",
    "register_rule": "graphpar.passes.rules",
    "save_checkpoint": "graphpar.checkpoint",
    "transform": "graphpar.api",
}


if not TYPE_CHECKING:  # a type checker would let any name pass

    def __getattr__(name: str) -> Any:
        """What the package offers, imported at its first use: torch.export alone takes seconds."""
        from graphpar.collector import collector_paused

        with collector_paused():
            if name == "testing":
                return import_module("graphpar.testing")
            if name not in _HOMES:
                raise AttributeError(f"module 'graphpar' has no attribute {name!r}")
            value = globals()[name] = getattr(import_module(_HOMES[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
