"""Pieces of values: columns of a node's last dimension, as those of what it is cut from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphpar.program import TensorSpec, info, is_getitem

aten = torch.ops.aten
CASTS = (aten.to.dtype, aten._to_copy.default, aten.to.dtype_layout)
SAME = (aten.clone.default, aten.contiguous.default, aten.alias.default)
SPLITS = (
    aten.split.Tensor,
    aten.unsafe_split.Tensor,
    aten.split_with_sizes.default,
    aten.unsafe_split_with_sizes.default,
    aten.chunk.default,
    aten.unsafe_chunk.default,
    aten.tensor_split.sections,
    aten.tensor_split.indices,
)


@dataclass(frozen=True, slots=True)
class Piece:
    """Columns [start, start + size) of the last dimension of ``node``."""

    node: fx.Node
    start: int
    size: int

    @property
    def is_whole(self) -> bool:
        return self.size == width_of(self.node)


def shape_of(value: Any) -> tuple[int, ...]:
    """The shape of a node that holds one tensor; () of all else."""
    spec = info(value).spec if isinstance(value, fx.Node) else None
    return spec.shape if isinstance(spec, TensorSpec) else ()


def width_of(node: fx.Node) -> int:
    return shape_of(node)[-1] if shape_of(node) else 0


def whole(node: fx.Node) -> fx.Node:
    """The node that a copy is of."""
    while node.target in SAME:
        node = node.args[0]  # type: ignore[assignment]
    return node


def piece(node: fx.Node, start: int = 0, size: int | None = None) -> Piece:
    """Columns of a node, as those of what it is cut from."""
    size = width_of(node) if size is None else size
    while True:
        rank = len(shape_of(node))
        cut = _cut(node, rank)
        if cut is None:
            return Piece(node, start, size)
        node, start = cut[0], start + cut[1]


def _cut(node: fx.Node, rank: int) -> tuple[fx.Node, int] | None:
    """What a node is cut from along its last dimension, and where."""
    args: Any = node.args
    if node.target in SAME:
        return args[0], 0
    if is_getitem(node) and args[0].target in SPLITS:
        source, index = args
        dim = source.args[2] if len(source.args) > 2 else source.kwargs.get("dim", 0)
        if dim % rank == rank - 1:
            specs: Any = info(source).spec
            return source.args[0], sum(s.shape[-1] for s in specs[:index])
    if node.target is aten.slice.Tensor and (len(args) < 5 or args[4] == 1):
        dim, first = args[1] if len(args) > 1 else 0, args[2] if len(args) > 2 else 0
        length = shape_of(args[0])[dim]
        first = 0 if first is None else first + length if first < 0 else first
        if dim % rank == rank - 1:
            return args[0], min(first, length)
    if node.target is aten.narrow.default and args[1] % rank == rank - 1:
        return args[0], args[2] % shape_of(args[0])[-1]
    grouped = _grouped(node)
    return None if grouped is None else (grouped[0], grouped[1] * width_of(node))


def _grouped(node: fx.Node) -> tuple[fx.Node, int] | None:
    """What ``select`` or ``unbind`` takes of [B, G * H] seen as [B, G, H], and which."""
    args: Any = node.args
    if is_getitem(node) and args[0].target is aten.unbind.int:
        (source, *dims), index = args[0].args, args[1]
        dim = dims[0] if dims else 0
    elif node.target is aten.select.int:
        source, dim, index = args
    else:
        return None
    views = (aten.view.default, aten.reshape.default, aten.unflatten.int)
    shape = shape_of(source)
    if source.target not in views or len(shape) != 3 or dim % 3 != 1:
        return None
    before = source.args[0]
    if shape_of(before) != (shape[0], shape[1] * shape[2]):
        return None
    return before, index % shape[1]
