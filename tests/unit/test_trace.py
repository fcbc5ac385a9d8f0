"""What trace makes of models: state, provenance, constants, regions, outputs, errors."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from graphpar.errors import GraphparWarning, InputError, TraceError
from graphpar.interpret import model_state, run
from graphpar.program import Program, info, is_tensor, outputs, program_hash, tensor_spec
from graphpar.trace import bind, flatten, skeleton, trace, unflatten
from tests import zoo

aten = torch.ops.aten


def call(program: Program, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The program's outputs in the model's structure; mutated buffers are written."""
    leaves, _ = flatten(*bind(model, args, kwargs))
    results = run(program, model_state(model), leaves)
    count = len(results) - len(program.mutations)
    buffers = dict(model.named_buffers())
    with torch.no_grad():
        for name, value in zip(program.mutations, results[count:], strict=True):
            buffers[name].copy_(value)
    return unflatten(results[:count], program.out_spec)


def check(model: nn.Module, *args: Any, **kwargs: Any) -> Program:
    """Trace and run; outputs, gradients and buffers are bitwise the original's."""
    model.zero_grad(set_to_none=True)
    original = copy.deepcopy(model) if _copyable(model) else model
    program = trace(model, args, kwargs)
    torch.manual_seed(1)
    expected = pytree.tree_leaves(original(*args, **kwargs))
    torch.manual_seed(1)
    found = pytree.tree_leaves(call(program, model, *args, **kwargs))
    for a, b in zip(found, expected, strict=True):
        assert type(a) is type(b)
        assert torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, Tensor) else a == b
    losses = [
        sum(x.double().pow(2).sum() for x in leaves if isinstance(x, Tensor) and x.requires_grad)
        for leaves in (found, expected)
    ]
    if isinstance(losses[1], Tensor):
        for loss in losses:
            assert isinstance(loss, Tensor)
            loss.backward()
    pairs = zip(model.named_parameters(), original.parameters(), strict=True)
    for (name, a), b in pairs:
        assert (a.grad is None) == (b.grad is None), name
        assert a.grad is None or b.grad is None or torch.equal(a.grad, b.grad), name
    for (name, a), b in zip(model.named_buffers(), original.buffers(), strict=True):
        assert torch.equal(a, b), name
    return program


def _copyable(model: nn.Module) -> bool:
    return all(
        t.is_leaf for m in model.modules() for t in vars(m).values() if isinstance(t, Tensor)
    )


def targets(program: Program) -> list[str]:
    return [str(n.target) for n in program.graph.nodes if n.op == "call_function"]


class Lambda(nn.Module):
    """``fn(self, *args)``, with a linear layer ``a`` and its tied twin ``b``."""

    def __init__(self, fn: Any) -> None:
        super().__init__()
        self.fn = fn
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor, y: Any = None, *, flag: bool = True) -> Any:
        return self.fn(self, x, y, flag)


@dataclass
class Out:
    loss: Tensor
    logits: Tensor | None = None
    name: str = "out"


class Pair(NamedTuple):
    left: Tensor
    right: Any


def x_(*shape: int) -> Tensor:
    return torch.randn(shape or (2, 8))


# State and structure


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
    assert isinstance(model, zoo.LSTMClassifier)
    assert model.lstm._flat_weights[0] is model.lstm.weight_ih_l0
    assert not model._forward_hooks


# Provenance


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


# Simplification and constants


def test_idle_ops_are_dropped() -> None:
    def forward(m: Any, x: Tensor, y: Any, flag: bool) -> Tensor:
        x = x.to(torch.float32).contiguous().clone().view(2, 8).expand(2, 8)[:, :]
        x = F.dropout(x, 0.0, True)
        return m.a(F.dropout(x, 0.5, False)).view(16)  # type: ignore[no-any-return]

    assert targets(check(Lambda(forward), x_())) == ["aten.linear.default", "aten.reshape.default"]


def test_constants_are_folded() -> None:
    def forward(m: Any, x: Tensor, y: Any, flag: bool) -> Any:
        angles = torch.outer(torch.arange(2.0), 1 / torch.arange(1, 9)).cos()
        ones = torch.ones_like(x) * 3
        return m.a(x) * angles + ones + torch.arange(8) + torch.tensor([[1.0], [2.0]])

    program = check(Lambda(forward), x_())
    assert list(program.constants) == ["constant_0", "constant_1"]
    assert program.state["constant_0"].kind == "constant"
    assert targets(program).count("aten.full.default") == 1
    assert targets(program).count("aten.arange.default") == 1
    assert "aten.cos.default" not in targets(program)


def test_only_what_a_checkpoint_cannot_change_is_folded() -> None:
    class Buffers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kept", torch.ones(8))
            self.register_buffer("fixed", torch.arange(8.0), persistent=False)
            self.kept: Tensor
            self.fixed: Tensor

        def forward(self, x: Tensor) -> Tensor:
            return x + self.kept.sqrt() + self.fixed.sqrt()

    program = check(Buffers(), x_())
    assert targets(program) == ["aten.sqrt.default", "aten.add.Tensor", "aten.add.Tensor"]


def attention(mask: Any) -> Any:
    def forward(m: Any, x: Tensor, y: Any, flag: bool) -> Tensor:
        q = m.a(x).view(2, 4, 2, 4).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask(x))

    return forward


def causal(x: Tensor) -> Tensor:
    return torch.ones(4, 4, dtype=torch.bool).tril()


def additive(x: Tensor) -> Tensor:
    low = torch.finfo(x.dtype).min
    return torch.full((4, 4), low).triu(1)[None, None].expand(2, 1, 4, 4)


def window(x: Tensor) -> Tensor:
    return causal(x).triu(-1)


@pytest.mark.parametrize(
    ("mask", "kind"),
    [
        (causal, (None, True)),
        (additive, (None, True)),
        (lambda x: torch.ones(2, 1, 4, 4, dtype=torch.bool), (None, False)),
        (window, "kept"),
        (lambda x: causal(x) & (x[0, 0, 0] < 100), "kept"),
    ],
)
def test_masks(mask: Any, kind: Any) -> None:
    program = check(Lambda(attention(mask)), x_(2, 4, 8))
    node = next(n for n in program.graph.nodes if "scaled_dot" in n.name)
    if kind == "kept":
        assert node.args[3] is not None
    else:
        assert (node.args[3], node.args[5]) == kind


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "mixtral"])
def test_transformers_masks_are_causal_on_meta_too(name: str) -> None:
    with torch.device("meta"):
        model, kwargs = zoo.build(name, layers=1)
    program = trace(model, (), kwargs)
    node = next(n for n in program.graph.nodes if "scaled_dot" in n.name)
    assert (node.args[3], node.args[5]) == (None, True)
    assert all(v.device.type == "cpu" for v in program.constants.values())


def test_big_constants_are_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphpar.trace.fold.MAX_CONSTANT_BYTES", 100)

    def forward(m: Any, x: Tensor, y: Any, flag: bool) -> Tensor:
        row = torch.arange(8).float().sqrt()
        return m.a(x) + (row[:, None] * row)[:2]  # type: ignore[no-any-return]

    program = check(Lambda(forward), x_())
    assert [v.shape for v in program.constants.values()] == [(2, 8)]

    def wide(m: Any, x: Tensor, y: Any, flag: bool) -> Tensor:
        row = torch.arange(8).float().sqrt()
        return m.a(x) @ (row[:, None] * row)  # type: ignore[no-any-return]

    program = check(Lambda(wide), x_())
    assert sorted(v.shape for v in program.constants.values()) == [(8,), (8, 1)]


# Regions


def mixed(m: Any, x: Tensor, y: Any, flag: bool) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        h = m.b(m.a(x)) + x
        with torch.no_grad():
            frozen = m.a(h)
        with torch.autocast("cpu", enabled=False):
            h = m.a(h.float())
        h = F.layer_norm(m.a(h), (8,)).softmax(-1) @ m.a.weight
        h = torch.einsum("ij,kj->ik", h, h) @ x
        h = torch.cat([h, x]) + F.gelu(m.a(h)).sum(-1, keepdim=True).repeat(2, 1)
        low = h + frozen.repeat(2, 1)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        high = m.a(x)
        with torch.enable_grad():
            inner = m.a(high)
    return low, m.a(x), F.mse_loss(low[:2], x), high, inner


def inferred(m: Any, x: Tensor, y: Any, flag: bool) -> Any:
    with torch.inference_mode():
        scale = m.a(x).sum()
    return m.b(x) * (scale > 0)


def toggled(m: Any, x: Tensor, y: Any, flag: bool) -> Any:
    torch.set_grad_enabled(False)
    z = m.a(x)
    torch.set_grad_enabled(True)
    return decorated(m, x) + m.b(x) * z


@torch.no_grad()
def decorated(m: Any, x: Tensor) -> Any:
    return m.b(x)


@pytest.mark.parametrize("fn", [inferred, toggled], ids=lambda fn: fn.__name__)
def test_gradient_modes(fn: Any) -> None:
    check(Lambda(fn), x_())


def test_dead_ops_that_draw_are_kept() -> None:
    def forward(m: Any, x: Tensor, y: Any, flag: bool) -> Any:
        F.dropout(x, 0.5)
        F.dropout(x, 0.0)
        F.scaled_dot_product_attention(x, x, x)
        F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
        m.b(x)
        return F.dropout(m.a(x), 0.5)

    program = check(Lambda(forward), x_())
    assert [t.split(".")[1] for t in targets(program)] == [
        "dropout",
        "scaled_dot_product_attention",
        "linear",
        "dropout",
    ]


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h.t(),
        lambda h: h[:, None].expand(2, 3, 8),
        lambda h: h.view(2, 2, 2, 2).permute(2, 0, 3, 1),
        lambda h: h[:, :5].t(),
        lambda h: h.view(2, 1, 8).transpose(0, 2),
    ],
)
def test_dropout_draws_in_the_order_of_memory(change: Any) -> None:
    check(Lambda(lambda m, x, y, flag: F.dropout(change(m.a(x)), 0.5)), x_())


@contextmanager
def ambient() -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16):
        yield


@pytest.mark.parametrize("around", [nullcontext, ambient])
def test_autocast(around: Any) -> None:
    with around():
        program = check(Lambda(mixed), x_())
    assert "aten.to.dtype" in targets(program)


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm(training: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
    x = torch.randn(2, 3, 8, 8)
    program = check(model.train(training), x)
    names = ("1.running_mean", "1.running_var", "1.num_batches_tracked")
    assert program.mutations == (names if training else ())
    with torch.autocast("cpu", torch.bfloat16):
        check(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).train(training), x)


@pytest.mark.parametrize(
    "wrap",
    [
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        parametrizations.orthogonal,
        torch.nn.utils.spectral_norm,
        lambda m: prune.l1_unstructured(m, "weight", 0.5),
    ],
)
def test_computed_weights(wrap: Any) -> None:
    check(wrap(nn.Linear(8, 8)), x_())


# The skeleton


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


# Errors and warnings


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


class Box:
    def __init__(self, x: Tensor) -> None:
        self.x = x


def straight(m: Any, x: Tensor, y: Any, flag: bool) -> Any:
    return Straight.apply(m.a(x))  # type: ignore[no-untyped-call]


def seeded(m: Any, x: Tensor, y: Any, flag: bool) -> Any:
    torch.manual_seed(0)
    return m.a(x) * torch.rand(8)


def forked(m: Any, x: Tensor, y: Any, flag: bool) -> Any:
    with torch.random.fork_rng():
        return m.a(x)


def own_gradient(m: Any, x: Tensor, y: Any, flag: bool) -> Any:
    x = x.detach().requires_grad_()
    return m.b(torch.autograd.grad(m.a(x).sum(), x)[0])


def own_backward(m: Any, x: Tensor, y: Any, flag: bool) -> Any:
    m.a(x).sum().backward()
    return m.b(x)


def hooked(m: Any, x: Tensor, y: Any, flag: bool) -> Tensor:
    h: Tensor = m.a(x)
    h.register_hook(lambda g: g * 2)
    return h


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (lambda m, x, y, flag: m.a(x) if x.sum() > 0 else x, "torch.where"),
        (lambda m, x, y, flag: m.a(x) * x.sum().item(), "values of tensors"),
        (lambda m, x, y, flag: m.a(x)[: int(x.sum())], "values of tensors"),
        (lambda m, x, y, flag: m.a(x)[x > 0], "values of tensors"),
        (lambda m, x, y, flag: x.nonzero(), "values of tensors"),
        (
            lambda m, x, y, flag: torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x, (x,)),
            "values of tensors",
        ),
        (lambda m, x, y, flag: Box(x), "register_pytree_node"),
        (straight, "Straight"),
        (seeded, "seeded"),
        (forked, "seeded"),
        (own_gradient, "gradient is computed"),
        (own_backward, "gradient is computed"),
        (lambda m, x, y, flag: torch.vmap(m.a)(x), "torch.func"),
        (lambda m, x, y, flag: m.a(x).to_sparse(), "sparse"),
        (
            lambda m, x, y, flag: torch.rand(8, generator=torch.Generator().manual_seed(0)),
            "torch.Generator",
        ),
        (hooked, "hook"),
        (lambda m, x, y, flag: m.a(x) + m.nothing, "AttributeError"),
        (lambda m, x, y, flag: m.a(x) @ torch.ones(3, 3), "RuntimeError"),
    ],
)
def test_errors_name_the_line(fn: Any, says: str) -> None:
    with pytest.raises(TraceError, match=says) as caught:
        trace(Lambda(fn), (x_(),))
    if says != "register_pytree_node":  # raised after the forward
        assert "test_trace.py:" in caught.value.__notes__[0]


def test_errors_leave_torch_and_the_model_as_they_were() -> None:
    model = Lambda(straight)
    apply, setter = torch.autograd.Function.apply, nn.Module.__setattr__
    with pytest.raises(TraceError):
        trace(model, (x_(),))
    assert torch.autograd.Function.apply == apply
    assert nn.Module.__setattr__ is setter
    assert not model._forward_hooks
    assert model(x_()).grad_fn is not None


def test_cache_in_the_output() -> None:
    model, kwargs = zoo.build("gpt2", layers=1)
    with pytest.raises(TraceError, match="use_cache=False"):
        trace(model, (), {**kwargs, "use_cache": True})


def test_arguments_that_do_not_fit() -> None:
    with pytest.raises(InputError, match=r"unexpected.*'z'.*flag"):
        trace(Lambda(lambda m, x, y, flag: x), (x_(),), {"z": 1})
    with pytest.raises(InputError, match=r"missing.*'x'"):
        trace(Lambda(lambda m, x, y, flag: x))


def test_tensor_attribute_with_gradients() -> None:
    model = Lambda(lambda m, x, y, flag: m.a(x) * m.loose)
    model.loose = torch.ones(8, requires_grad=True)
    with pytest.raises(TraceError, match="loose"):
        trace(model, (x_(),))


def remembers(m: Any, x: Tensor, y: Any, flag: bool) -> Tensor:
    m.state = m.a(x).detach() + m.state
    return m.state * x  # type: ignore[no-any-return]


def test_state_outside_buffers() -> None:
    model = Lambda(remembers)
    model.state = torch.zeros(2, 8)
    with pytest.raises(TraceError, match=r"state.*buffer"):
        trace(model, (x_(),))


def test_module_hooks() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    model[0].register_forward_hook(lambda module, args, result: result * 2)
    check(model, x_())
    model[0].register_full_backward_hook(lambda module, a, b: None)
    with pytest.raises(TraceError, match="backward hook"):
        trace(model, (x_(),))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_is_dropped_with_a_warning(reentrant: bool) -> None:
    def forward(m: Any, x: Tensor, y: Any, flag: bool) -> Any:
        return checkpoint(m.a, m.b(x), use_reentrant=reentrant)

    model = Lambda(forward)
    with pytest.warns(GraphparWarning, match=r"activation checkpointing[^$]*test_trace.py:"):
        program = trace(model, (x_(),))
    assert targets(program) == ["aten.linear.default"] * 2
    x = x_()
    call(program, model, x).sum().backward()
    assert model.a.bias.grad is not None


def test_transformers_checkpointing_is_seen() -> None:
    model, kwargs = zoo.build("llama", layers=1)
    model.activation_checkpointing_enable()  # type: ignore[operator]
    with pytest.warns(GraphparWarning, match="activation checkpointing"):
        trace(model, (), kwargs)


def test_changed_attributes_warn() -> None:
    def forward(m: Any, x: Tensor, y: Any, flag: bool) -> Any:
        m.calls += 1
        return m.a(x) * m.calls

    model = Lambda(forward)
    model.calls = 0  # type: ignore[assignment]
    with pytest.warns(GraphparWarning, match="calls"):
        trace(model, (x_(),))


def test_random_numbers_of_python_warn() -> None:
    state = random.getstate()
    with pytest.warns(GraphparWarning, match="random numbers outside torch"):
        trace(Lambda(lambda m, x, y, flag: m.a(x) * random.random()), (x_(),))
    assert random.getstate() == state


def test_a_models_own_warnings_come_through() -> None:
    def forward(m: Any, x: Tensor, y: Any, flag: bool) -> Any:
        warnings.warn("mine", DeprecationWarning, stacklevel=1)
        return m.a(x)

    with pytest.warns(DeprecationWarning, match="mine"):
        trace(Lambda(forward), (x_(),))
