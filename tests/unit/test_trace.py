"""State, inputs, outputs, provenance and specs of traced programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils import _pytree as pytree

from graphpar.program import info, is_tensor, outputs, program_hash, tensor_spec
from graphpar.testing import assert_equivalent
from graphpar.trace import skeleton, trace
from tests import zoo
from tests.unit.trace_checks import Lambda, call, check, x_
from tests.zoo.own import LSTMClassifier

aten = torch.ops.aten


@dataclass
class Out:
    loss: Tensor
    logits: Tensor | None = None
    name: str = "out"


class Pair(NamedTuple):
    left: Tensor
    right: Any


def test_ties_keep_all_names() -> None:
    program = check(Lambda(lambda m, x, y, flag: m.b(m.a(x))), x_())
    assert list(program.state) == ["a.weight", "a.bias", "b.bias"]
    assert program.state["a.weight"].names == ("a.weight", "b.weight")
    reads = [str(n.target) for n in program.graph.nodes if n.op == "get_attr"]
    assert reads == ["a.weight", "a.bias", "b.bias"]
    assert program.ranks == 1
    assert not program.blocks


def test_unused_state_is_kept_and_frozen_is_not_differentiable() -> None:
    model = Lambda(lambda m, x, y, flag: m.a(x))
    model.a.bias.requires_grad_(False)
    program = check(model, x_())
    assert "b.bias" in program.state
    assert not program.state["a.bias"].spec.differentiable
    assert program.state["a.weight"].spec.differentiable


def test_optional_and_constant_arguments() -> None:
    model = Lambda(lambda m, x, y, flag: m.a(x) * (2 if flag else 3) + (0 if y is None else y["k"]))
    assert check(model, x_()).placeholders == (0,)
    program = check(model, x_(), {"k": x_(), "unused": x_()}, flag=False)
    assert [str(n.target) for n in program.graph.nodes if n.op == "placeholder"] == ["x", "y_k"]
    assert program.placeholders == (0, 1)


@pytest.mark.parametrize(
    "build",
    [
        lambda x: Out(x.sum(), x),
        lambda x: Out(x.sum()),
        lambda x: Pair(x, {"a": [x * 2, None, 3, "s"], "b": (x,)}),
        lambda x: [x, (x + 1, {"z": x, "a": x})],
        lambda x: x,
    ],
)
def test_outputs_keep_their_structure(build: Any) -> None:
    model = Lambda(lambda m, x, y, flag: build(m.a(x)))
    x = x_()
    found, expected = call(trace(model, (x,)), model, x), model(x)
    assert type(found) is type(expected)
    left, left_spec = pytree.tree_flatten(found)
    right, right_spec = pytree.tree_flatten(expected)
    assert left_spec == right_spec
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


def test_dataclass_argument() -> None:
    model = Lambda(lambda m, x, y, flag: m.a(y.logits) + y.loss if y.name == "out" else x)
    check(model, x_(), Out(x_(), x_()))


def test_one_tensor_passed_twice_stays_two() -> None:
    x = x_()
    model = Lambda(lambda m, x, y, flag: m.a(x) - 2 * y)
    program = trace(model, (x, x))
    other = x_()
    assert torch.equal(call(program, model, x, other), model(x, other))


def test_shape_conditions_are_decided() -> None:
    model = Lambda(lambda m, x, y, flag: m.a(x) if x.shape[0] > 2 else m.b(x) * x.shape[0])
    check(model, x_(4, 8))
    check(model, x_(2, 8))


def test_inputs_and_states_as_outputs() -> None:
    check(Lambda(lambda m, x, y, flag: (x, m.a.weight, x.shape[0], m.a(x))), x_())


def test_reading_trace_changes_nothing() -> None:
    model, kwargs = zoo.build("lstm")
    state = torch.get_rng_state()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    assert program_hash(trace(model, (), kwargs)) == program_hash(trace(model, (), kwargs))
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert isinstance(model, LSTMClassifier)
    assert model.lstm._flat_weights[0] is model.lstm.weight_ih_l0
    assert not model._forward_hooks


def test_every_node_has_a_source_line_and_a_module_call() -> None:
    model = Lambda(lambda m, x, y, flag: m.a(m.a(m.b(x))))
    program = check(model, x_())
    linears = [info(n).source for n in program.graph.nodes if n.target is aten.linear.default]
    assert [s.module for s in linears] == ["b", "a", "a@1"]
    for node in program.graph.nodes:
        assert set(node.meta) == {"graphpar"}
        assert info(node).source.line > 0
        assert info(node).origin == "trace"
    gpt2, kwargs = zoo.build("gpt2", layers=1)
    program = trace(gpt2, (), kwargs)
    found = next(
        n for n in program.graph.nodes if n.target is aten.gelu.default or "tanh" in n.name
    )
    assert info(found).source.module.startswith("transformer.h.0.mlp.act")
    assert all(info(n).source.line > 0 for n in program.graph.nodes)


def test_specs_and_differentiability() -> None:
    def forward(m: Any, x: Tensor, y: Any, flag: bool) -> Any:
        z = m.a(x)
        mask = z > 0
        with torch.no_grad():
            scale = z.mean()
        return z / scale, mask, z.argmax(-1), z.detach(), torch.ones_like(z), z.topk(2), x.round()

    program = check(Lambda(forward), x_())
    flags = [tensor_spec(n).differentiable for n in outputs(program.graph)]
    assert flags == [True, False, False, False, False, True, False, True]
    for node in program.graph.nodes:
        if node.op == "call_function" and is_tensor(node):
            assert all(isinstance(size, int) for size in tensor_spec(node).shape)
    topk = next(n for n in program.graph.nodes if n.target is aten.topk.default)
    spec = info(topk).spec
    assert isinstance(spec, tuple)
    assert [s.differentiable for s in spec if s is not None] == [True, False]


def test_skeleton_of_computed_weights() -> None:
    for wrap in (
        parametrizations.spectral_norm,
        lambda m: prune.l1_unstructured(m, "weight", 0.5),
    ):
        model = wrap(nn.Linear(8, 8))
        model(x_())
        hollow = skeleton(model)
        assert program_hash(trace(hollow, (x_(),))) == program_hash(trace(model, (x_(),)))
        assert [n for n, _ in hollow.named_parameters()] == [n for n, _ in model.named_parameters()]


def test_a_model_that_was_typed_in() -> None:
    source = "class Typed(nn.Module):\n    def forward(self, x):\n        return x * 2\n"
    names: dict[str, Any] = {"nn": nn}
    exec(source, names)
    program = trace(names["Typed"](), (torch.ones(2),))
    (node,) = [n for n in program.graph.nodes if n.op == "call_function"]
    assert (info(node).source.file, info(node).source.line) == ("<string>", 3)


@pytest.mark.filterwarnings("ignore:aten.cross_entropy_loss:graphpar.GraphparWarning")
def test_dropout_of_a_loss_draws_in_the_order_of_its_memory() -> None:
    """The strides of the loss are not those of its transposed targets."""

    class Losses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor, targets: Tensor) -> Tensor:
            loss = F.cross_entropy(self.layer(x).movedim(-1, 1), targets.mT, reduction="none")
            return F.dropout(loss, 0.5)

    torch.manual_seed(0)
    x, targets = torch.randn(2, 3, 5, 4), torch.randint(0, 4, (2, 5, 3))
    for tp in (1, 2):
        assert_equivalent(Losses().double(), (x.double(), targets), tp=tp)


def test_random_numbers_like_a_tensor_are_those_of_its_size() -> None:
    """The tensor is not read; but one in another order of memory is filled in that order."""

    class Noise(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x + torch.randn_like(x) * torch.rand_like(x), torch.randn_like(x.mT)

    x, model = torch.randn(4, 6), Noise()
    program = check(model, x)
    targets = [n.target for n in program.graph.nodes if "rand" in str(n.target)]
    assert targets == [aten.randn.default, aten.rand.default, aten.randn_like.default]
