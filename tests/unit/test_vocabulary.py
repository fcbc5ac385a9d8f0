"""Lookups and losses over a sharded vocabulary (C30 … C32), on simulated ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graphpar.cost import CostModel
from graphpar.errors import InternalError
from graphpar.ops import is_conversion
from graphpar.passes.rules import is_form
from graphpar.program import Program, is_tensor, one_type, outputs, tensor_spec
from graphpar.simulate import run_ranks
from graphpar.testing import assert_equivalent, compare, rewrite
from graphpar.types import Shard, local_shape
from graphpar.verify import verify
from tests.unit import mutants
from tests.unit.case_models import PreNorm, Traffic

aten, forms = torch.ops.aten, torch.ops.graphpar

both_sp = pytest.mark.parametrize("sp", [False, True], ids=["tp", "sp"])
both_tp = pytest.mark.parametrize("tp", [2, 4])
NO_LATENCY = CostModel(latency_us=0.0)
BATCH, LENGTH, WIDTH = 2, 8, 8


@pytest.fixture(autouse=True)
def doubles() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


class Language(nn.Module):
    """Token embedding, two blocks, a head, cross entropy; ``give`` names what is returned."""

    def __init__(
        self, vocabulary: int = 24, *, tied: bool = False, give: str = "loss", **loss: Any
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, WIDTH, padding_idx=3)
        self.blocks = nn.Sequential(PreNorm(WIDTH, 4), PreNorm(WIDTH, 4))
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        self.give, self.loss = give, loss

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        logits = self.head(self.blocks(self.tokens(ids)))
        flat = logits.view(-1, logits.shape[-1])
        loss = F.cross_entropy(flat, labels.view(-1), **self.loss)
        return {"loss": loss, "both": (loss, logits), "chances": (loss, logits.softmax(-1))}[
            self.give
        ]


def text(vocabulary: int = 24) -> tuple[Tensor, Tensor]:
    """Ids with padding, labels of which the first half of one row and all of the other's start
    are ignored."""
    ids, labels = torch.randint(0, vocabulary, (2, BATCH, LENGTH)).unbind()
    ids[0, 2] = ids[1, 5] = 3
    labels[:, : LENGTH // 2] = -100
    return ids, labels


def ops_of(program: Program) -> list[Any]:
    return [n.target for _, graph in program.graphs() for n in graph.nodes]


def largest_value(program: Program) -> int:
    """The elements of the largest value that a rank holds, state apart."""
    return max(
        torch.Size(local_shape(tensor_spec(n).shape, one_type(n), 0, program.ranks)).numel()
        for _, graph in program.graphs()
        for n in graph.nodes
        if n.op != "get_attr" and is_tensor(n)
    )


# --- C30, C31: vocabularies ---------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:aten.softmax.*needs the axis:graphpar.GraphparWarning")
@both_sp
@both_tp
@pytest.mark.parametrize("give", ["loss", "both", "chances"])
@pytest.mark.parametrize("tied", [False, True])
def test_c30_c31_a_vocabulary_that_divides(tied: bool, give: str, tp: int, sp: bool) -> None:
    model = Language(tied=tied, give=give)
    program = assert_equivalent(model, text(), tp=tp, sp=sp, atol=1e-10).program
    assert forms.cross_entropy.default in ops_of(program)
    assert program.state[program.canonical("head.weight")].type == Shard(0, (24,))
    if tied:
        assert forms.embedding.default in ops_of(program)
        assert program.state["tokens.weight"].names == ("tokens.weight", "head.weight")


@both_sp
@both_tp
@pytest.mark.parametrize("tied", [False, True])
def test_c30_c31_an_odd_vocabulary_is_cut_unevenly(tied: bool, tp: int, sp: bool) -> None:
    model = Language(11, tied=tied, give="both")
    program = assert_equivalent(model, text(11), tp=tp, sp=sp, atol=1e-10).program
    assert forms.cross_entropy.default in ops_of(program)
    assert program.state[program.canonical("head.weight")].type == Shard(0, (11,), 11)
    logits = outputs(program.graph)[1]
    assert tensor_spec(logits).shape == (BATCH, LENGTH, 11)


@both_sp
@both_tp
def test_an_embedding_of_its_own_is_cut_where_that_is_cheaper(tp: int, sp: bool) -> None:
    model = Language(2048)
    program = assert_equivalent(model, text(2048), tp=tp, sp=sp, cost=NO_LATENCY).program
    assert program.state["tokens.weight"].type == Shard(0, (2048,))


class Lookup(nn.Module):
    """A large table, looked up and projected."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table, self.options = nn.Parameter(torch.randn(4096, 7)), options
        self.down = nn.Linear(7, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.down(F.embedding(ids, self.table, **self.options))  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:nothing was sharded:graphpar.GraphparWarning")
@pytest.mark.parametrize(
    ("options", "cut"),
    [
        ({}, True),
        ({"padding_idx": 0}, True),
        ({"padding_idx": -1}, True),
        ({"scale_grad_by_freq": True}, False),
    ],
)
@both_tp
def test_lookups(options: dict[str, Any], cut: bool, tp: int) -> None:
    ids = torch.tensor([[0, 4095, 5, 0], [1700, 2400, 4095, 5]])
    found = assert_equivalent(Lookup(**options), (ids,), tp=tp, atol=1e-10, cost=NO_LATENCY)
    kind = found.program.state["table"].type
    assert (kind == Shard(0, (4096,))) == cut
    assert (forms.embedding.default in ops_of(found.program)) == cut


# --- C32: options of the loss -------------------------------------------------------------------


class Loss(nn.Module):
    """A head and a loss of any options; ``apart`` writes it as two ops."""

    def __init__(self, classes: int, weighted: bool, apart: str = "", **options: Any) -> None:
        super().__init__()
        self.head, self.apart, self.options = nn.Linear(WIDTH, classes), apart, options
        self.register_buffer("weights", torch.rand(classes) + 0.1 if weighted else None)
        self.weights: Tensor | None

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(x)
        if logits.dim() > 2:
            logits = logits.transpose(1, 2)
        if not self.apart:
            return F.cross_entropy(logits, labels, self.weights, **self.options)
        chances = F.log_softmax(logits, 1)
        if self.apart == "nll":
            return F.nll_loss(chances, labels, self.weights, **self.options)
        return -chances.gather(1, labels.clamp(0).unsqueeze(1)).squeeze(1)


def labelled(
    *shape: int, classes: int = 16, ignore: int = -100, ignored: str = "some"
) -> tuple[Tensor, Tensor]:
    labels = torch.randint(0, classes, shape)
    if ignored == "all":
        labels.fill_(ignore)
    elif labels.dim():
        labels[: len(labels) // 2] = ignore
    return torch.randn(*shape, WIDTH, requires_grad=True), labels


OPTIONS = [
    (weighted, smoothing, reduction)
    for weighted in (False, True)
    for smoothing in (0.0, 0.1)
    for reduction in ("none", "mean", "sum")
]


@both_sp
@both_tp
@pytest.mark.parametrize(("weighted", "smoothing", "reduction"), OPTIONS)
@pytest.mark.parametrize("shape", [(6,), (4, 3), ()], ids=str)
def test_c32_options_of_cross_entropy(
    shape: tuple[int, ...], weighted: bool, smoothing: float, reduction: str, tp: int, sp: bool
) -> None:
    model = Loss(16, weighted, label_smoothing=smoothing, reduction=reduction)
    found = assert_equivalent(model, labelled(*shape), tp=tp, sp=sp, atol=1e-10)
    assert forms.cross_entropy.default in ops_of(found.program)
    assert found.compared > tp + 2


@pytest.mark.parametrize(("weighted", "smoothing", "reduction"), OPTIONS)
def test_c32_all_rows_are_ignored(weighted: bool, smoothing: float, reduction: str) -> None:
    model = Loss(16, weighted, label_smoothing=smoothing, reduction=reduction, ignore_index=5)
    call = labelled(6, ignored="all", ignore=5)
    assert model(*call).isnan().all() == (reduction == "mean")
    assert_equivalent(model, call, tp=2, atol=1e-10)


@both_tp
@pytest.mark.parametrize("ignore", [-1, 0, 15])
def test_c32_an_ignored_class(ignore: int, tp: int) -> None:
    model = Loss(16, True, label_smoothing=0.1, ignore_index=ignore)
    assert_equivalent(model, labelled(6, ignore=ignore), tp=tp, atol=1e-10)


def test_targets_that_are_probabilities_gather_the_logits() -> None:
    call = torch.randn(6, WIDTH), torch.rand(6, 16)
    with pytest.warns(match="nothing was sharded"):
        found = assert_equivalent(Loss(16, False), call, tp=2, atol=1e-10)
    assert not any(map(is_form, ops_of(found.program)))


@both_sp
@both_tp
@pytest.mark.parametrize(("weighted", "reduction"), [(o[0], o[2]) for o in OPTIONS if not o[1]])
@pytest.mark.parametrize("shape", [(6,), (4, 3)], ids=str)
def test_log_softmax_and_a_loss_apart(
    shape: tuple[int, ...], weighted: bool, reduction: str, tp: int, sp: bool
) -> None:
    model = Loss(16, weighted, "nll", reduction=reduction)
    found = assert_equivalent(model, labelled(*shape), tp=tp, sp=sp, atol=1e-10)
    assert {forms.log_softmax.default, forms.nll_loss.default} <= {*ops_of(found.program)}


@both_tp
def test_log_probabilities_of_tokens(tp: int) -> None:
    model, call = Loss(16, False, "gather"), labelled(6)
    found = assert_equivalent(model, call, tp=tp, atol=1e-10, cost=NO_LATENCY)
    assert {forms.log_softmax.default, forms.gather.default} <= {*ops_of(found.program)}


@both_tp
@pytest.mark.parametrize("apart", ["", "nll"])
def test_bfloat16_computes_in_float32(apart: str, tp: int) -> None:
    """Many classes: sums in bfloat16 would be off by percents. The logits and results round."""
    model, (x, labels) = Loss(512, False, apart).bfloat16(), labelled(6, classes=512)
    x = x.detach().bfloat16().requires_grad_()
    program = rewrite(model, (x, labels), tp=tp)
    compare(program, model, (x, labels), atol=1e-3, rtol=1e-2)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    _, found = run_ranks(program, state, [x, labels])
    exact = model.double()(x.double(), labels)
    assert abs(found[0][0] - exact) / exact < 2**-7
    assert found[0][0].dtype == torch.bfloat16


def test_large_and_infinite_logits() -> None:
    model = Loss(16, False)
    x, labels = labelled(6)
    model.head.weight.data.mul_(1e4)
    model.head.bias.data[:8] = -torch.inf
    labels[labels >= 0] = 9
    assert torch.isfinite(model(x, labels))
    assert_equivalent(model, (x, labels), tp=2, atol=1e-10)


# --- memory and traffic -------------------------------------------------------------------------


class Shapes(TorchDispatchMode):
    """The shapes of all tensors that are made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[torch.Size] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        self.found |= {x.shape for x in tree_leaves(result) if isinstance(x, Tensor)}
        return result


@both_sp
@both_tp
@pytest.mark.parametrize("tied", [False, True])
def test_no_rank_holds_whole_logits(tied: bool, tp: int, sp: bool) -> None:
    """Neither among the values of the program nor within its ops, forward or backward."""
    vocabulary, tokens = 96, BATCH * LENGTH
    model = Language(vocabulary, tied=tied, label_smoothing=0.1)
    program = rewrite(model, text(vocabulary), tp=tp, sp=sp)
    assert tokens * vocabulary // tp <= largest_value(program) < tokens * vocabulary
    shapes = Shapes()
    with shapes:
        _, found = run_ranks(program, dict(model.named_parameters()), text(vocabulary))
        torch.autograd.backward([rank[0] for rank in found])
    assert torch.Size((tokens, vocabulary // tp)) in shapes.found
    whole = [s for s in shapes.found if vocabulary in s and tokens in (*s[:-1], s[:-1].numel())]
    assert not whole


@both_sp
def test_logits_are_gathered_once_for_the_caller(sp: bool) -> None:
    model = Language(give="both")
    program = rewrite(model, text(), tp=2, sp=sp)
    (gather,) = (
        n
        for n in program.graph.nodes
        if is_conversion(n.target) and tensor_spec(n).shape[-1:] == (24,)
    )
    assert [n.op for n in gather.users] == ["output"]


def test_the_loss_adds_no_collective_to_backward() -> None:
    """Backward has the one of the head's input and two of each block (Invariant → Replicate)."""
    model = Language()
    traffic = Traffic(rewrite(model, text(), tp=2), model, *text())
    assert traffic.backward == {"all_reduce": 5}
    assert traffic.shapes == [(BATCH, LENGTH, WIDTH)] * 5


@pytest.mark.parametrize("apart", ["", "nll", "gather"])
def test_the_verifier_refuses_other_forms(apart: str) -> None:
    program = rewrite(Loss(16, True, apart), labelled(6), tp=2, cost=NO_LATENCY)
    made = [*mutants.mutants_of_forms(program), *mutants.mutants_of_arguments(program)]
    kinds = {mutant.kind for mutant in made}
    assert kinds >= {"no reduction", "other blocks", "other axis", "other group", "declared"}
    for mutant in made:
        with pytest.raises(InternalError):
            verify(mutant.program)
