"""graphpar: tensor and sequence parallelism for unmodified PyTorch models."""

from __future__ import annotations

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
