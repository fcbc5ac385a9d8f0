"""What depends on no input, no parameter and no random number is computed now.

Results become constants, except creation ops, which stay as they are, and results whose elements
are all equal, which become ``full``. An attention mask that turns out to be causal becomes
``is_causal=True``; one that masks nothing is dropped.

On the meta device there are no values of buffers, but what is built from creation ops alone (an
attention mask, positions) is computed on the CPU.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from graphpar.trace.build import Builder, argument, aten, op_name

MAX_CONSTANT_BYTES = 64 << 20
MAX_COMPUTED_BYTES = 1 << 30
_CREATION = {
    f"aten::{name}"
    for name in ("arange", "eye", "full", "linspace", "ones", "scalar_tensor", "zeros")
}


# The argument which, if zero, makes the op draw nothing.
_PROBABILITY = {
    "dropout": "p",
    "feature_dropout": "p",
    "alpha_dropout": "p",
    "feature_alpha_dropout": "p",
    "scaled_dot_product_attention": "dropout_p",
    "lstm": "dropout",
    "gru": "dropout",
    "rnn_tanh": "dropout",
    "rnn_relu": "dropout",
}


def draws(node: fx.Node) -> bool:
    """Whether the op advances the random number generator."""
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    call = (target, node.args, node.kwargs)
    if not all(argument(call, name, True) for name in ("train", "training")):
        return False
    probability = _PROBABILITY.get(op_name(target))
    return probability is None or argument(call, probability, 0.0) != 0


def live_nodes(graph: fx.Graph, outputs: Iterable[Any]) -> set[fx.Node]:
    """What the outputs need, and what advances the random number generator."""
    live = {n for n in outputs if isinstance(n, fx.Node)}
    for node in reversed(graph.nodes):
        if node in live or (node.op == "call_function" and draws(node)):
            live.add(node)
            live.update(node.all_input_nodes)
    return live


class Folding:
    """``values`` holds the known tensors by the names of the ``get_attr`` nodes that read them."""

    def __init__(self, builder: Builder, outputs: list[Any], values: Mapping[str, Tensor]) -> None:
        self.b = builder
        self.outputs = outputs
        self.values = values
        self.live = live_nodes(builder.graph, outputs)
        self.known: set[fx.Node] = set()
        self.computed: dict[fx.Node, Any] = {}

    def run(self) -> list[Any]:
        """Fold; the outputs with folded nodes replaced."""
        self.mark()
        if not any(n.op == "call_function" for n in self.known):
            return self.outputs
        self.simplify_attention()
        self.live = live_nodes(self.b.graph, self.outputs)
        replaced: dict[fx.Node, fx.Node] = {}
        made: dict[Any, fx.Node] = {}
        for node in self.frontier():
            with self.b.graph.inserting_before(node):
                self.b.source = self.b.facts[node].source
                new = self.constant(node, made)
            if new is not node:
                self.computed[new] = self.computed[node]
                node.replace_all_uses_with(new)
                replaced[node] = new
        return [replaced.get(o, o) if isinstance(o, fx.Node) else o for o in self.outputs]

    def mark(self) -> None:
        for node in self.b.graph.nodes:
            if node not in self.live:
                continue
            if self.is_known(node):
                self.known.add(node)

    def is_known(self, node: fx.Node) -> bool:
        if node.op == "get_attr":
            value = self.values.get(str(node.target))
            return value is not None and value.device.type != "meta"
        if node.op != "call_function" or any(n not in self.known for n in node.all_input_nodes):
            return False
        return not draws(node) and self.nbytes(node) <= MAX_COMPUTED_BYTES

    def nbytes(self, node: fx.Node) -> int:
        leaves = pytree.tree_leaves(self.b.facts[node].val)
        return sum(v.untyped_storage().nbytes() for v in leaves if isinstance(v, Tensor))

    def frontier(self) -> list[fx.Node]:
        """Known nodes whose values are wanted by unknown ones, in order."""
        found: list[fx.Node] = []
        wanted = {o for o in self.outputs if isinstance(o, fx.Node)}
        for node in reversed(self.b.graph.nodes):
            if node not in self.live:
                continue
            if node not in self.known:
                wanted.update(node.all_input_nodes)
            elif node in wanted and node.op == "call_function":
                size = self.nbytes(node)
                reads = max(map(self.nbytes, node.all_input_nodes), default=0)
                several = not isinstance(self.b.facts[node].val, Tensor)
                if several or size > max(MAX_CONSTANT_BYTES, reads):
                    self.known.discard(node)
                    wanted.update(node.all_input_nodes)
                else:
                    found.append(node)
        return found[::-1]

    def compute(self, node: fx.Node) -> Any:
        """The value of a known node; ``None`` if it cannot be computed."""
        stack = [node]
        while stack:
            top = stack[-1]
            missing = [n for n in top.all_input_nodes if n not in self.computed]
            if top in self.computed:
                stack.pop()
            elif missing:
                stack.extend(missing)
            else:
                self.computed[stack.pop()] = self.evaluate(top)
        return self.computed[node]

    def evaluate(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return self.values[str(node.target)]
        if any(self.computed[n] is None for n in node.all_input_nodes):
            return None
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.computed.__getitem__)
        args, kwargs = pytree.tree_map(_off_meta, (args, kwargs))
        try:
            with torch.no_grad():
                return node.target(*args, **kwargs)  # type: ignore[operator]
        except Exception:
            return None

    def constant(self, node: fx.Node, made: dict[Any, fx.Node]) -> fx.Node:
        target: OpOverload = node.target  # type: ignore[assignment]
        if isinstance(target, OpOverload) and target._schema.name in _CREATION:
            return node
        value = self.compute(node)
        if not isinstance(value, Tensor):
            return node
        fact = self.b.facts[node]
        if (scalar := _uniform(value)) is not None:
            placed = {"dtype": fact.val.dtype, "device": fact.val.device}
            return self.b.emit(aten.full.default, (list(value.shape), scalar), placed, fact.val)
        key = _content(value)
        if key is None or key not in made:
            new = self.b.constant(value)
            self.b.facts[new].val = fact.val
            if key is None:
                return new
            made[key] = new
        return made[key]

    def simplify_attention(self) -> None:
        kinds: dict[fx.Node, str] = {}
        for node in self.b.graph.nodes:
            if node.target is not aten.scaled_dot_product_attention.default:
                continue
            call = (node.target, node.args, node.kwargs)
            mask = argument(call, "attn_mask")
            if node not in self.live or mask not in self.known:
                continue
            if mask not in kinds:
                kinds[mask] = _mask_kind(self.compute(mask))
            if kinds[mask] != "other":
                query, key, value = node.args[:3]
                p = argument(call, "dropout_p", 0.0)
                rest = {k: v for k, v in node.kwargs.items() if k in ("scale", "enable_gqa")}
                node.args = (query, key, value, None, p, kinds[mask] == "causal")
                node.kwargs = rest


def _off_meta(value: Any) -> Any:
    meta = isinstance(value, torch.device) and value.type == "meta"
    return torch.device("cpu") if meta else value


def _mask_kind(mask: Any) -> str:
    """``causal``, ``full`` (nothing masked), or ``other``."""
    if not isinstance(mask, Tensor) or mask.dim() < 2:
        return "other"
    if mask.dtype == torch.bool:
        seen, hidden = mask, ~mask
    else:
        seen, hidden = mask == 0, mask <= torch.finfo(mask.dtype).min
    for dim in range(mask.dim() - 2):  # equal along broadcast dimensions
        if mask.stride(dim) == 0:
            seen, hidden = seen.narrow(dim, 0, 1), hidden.narrow(dim, 0, 1)
    if bool(seen.all()):
        return "full"
    rows, columns = mask.shape[-2:]
    if rows != columns:
        return "other"
    causal = torch.ones(rows, columns, dtype=torch.bool, device=mask.device).tril()
    return "causal" if bool((seen == causal).all() and (hidden == ~causal).all()) else "other"


def _uniform(value: Tensor) -> Any:
    """The one value of all elements; ``None`` if they differ."""
    if value.numel() == 0 or value.layout is not torch.strided:
        return None
    first = value.flatten()[0]
    if not bool((value == first).all()):
        return None
    if value.is_floating_point() and not bool((value.signbit() == first.signbit()).all()):
        return None
    return first.item()


def _content(value: Tensor) -> Any:
    """Equal for tensors that are equal in every respect; ``None`` if that is costly to know."""
    if value.numel() * value.element_size() > MAX_CONSTANT_BYTES:
        return None
    data = value.detach().cpu().contiguous().flatten().view(torch.uint8)
    digest = hashlib.sha256(data.numpy().tobytes()).digest()
    return (digest, value.dtype, tuple(value.shape), value.stride(), str(value.device))
