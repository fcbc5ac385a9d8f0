"""Batch norms of images with a dimension of size 1 take the pixels as one dimension.

The strides of such a dimension mean nothing, so that torch may read the gradient in one order of
the memory and the image in another (CPU, torch 2.11 to 2.13: wrong gradients). The model may not
meet that; its rewritten program, in which strides are others, could.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch
from torch import fx

from graphpar.program import annotate, derive, info, is_getitem, tensor_spec

aten = torch.ops.aten
_NORMS = {
    aten.batch_norm.default,
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit_functional.default,
}


def flatten_images(graph: fx.Graph) -> None:
    """Reshape [N, C, H, W] with a size of 1 to [N, C, H W] for the norm, and its result back."""
    for node in list(graph.nodes):
        if node.target in _NORMS:
            x = node.args[0]
            assert isinstance(x, fx.Node)
            if len(tensor_spec(x).shape) > 3 and 1 in tensor_spec(x).shape:
                _flatten(node, x)


def _flatten(node: fx.Node, x: fx.Node) -> None:
    image = tensor_spec(x)
    shape = (*image.shape[:2], prod(image.shape[2:]))
    with node.graph.inserting_before(node):
        flat = derive(
            node.graph,
            aten.reshape.default,
            (x, list(shape)),
            like=x,
            origin="trace",
            name="reshape",
            spec=replace(image, shape=shape),
        )
    node.args = (flat, *node.args[1:])
    spec = info(node).spec
    if isinstance(spec, tuple):
        first = None if spec[0] is None else replace(spec[0], shape=shape)
        annotate(node, spec=(first, *spec[1:]))
        results = [user for user in node.users if is_getitem(user) and user.args[1] == 0]
    else:
        results = [node]
    for result in results:
        whole, users = tensor_spec(result), list(result.users)
        with node.graph.inserting_after(result):
            args = (result, list(image.shape))
            back = derive(
                node.graph,
                aten.reshape.default,
                args,
                like=result,
                origin="trace",
                name="reshape",
                spec=replace(whole, shape=image.shape),
            )
        annotate(result, spec=replace(whole, shape=shape))
        for user in users:
            user.replace_input_with(result, back)
