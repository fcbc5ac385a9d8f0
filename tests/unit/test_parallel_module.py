"""ParallelModule in one process: signature, names, retracing, errors."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import parametrize

import graphpar
from graphpar.errors import GraphparError, GraphparWarning, InputError, MeshError, TraceError
from graphpar.pipeline import format_pipeline, parse_pipeline, step


class Net(nn.Module):
    def __init__(self, width: int = 8, inner: int = 16) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor, scale: float = 1.0, *, shift: Tensor | None = None) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x))) * scale
        return y if shift is None else y + shift


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def x(batch: int = 2, width: int = 8) -> Tensor:
    return torch.randn(batch, width, dtype=torch.float64)


# --- one rank -----------------------------------------------------------------------------------


def test_names_order_and_values_are_the_originals() -> None:
    model = net()
    parallel = graphpar.transform(model, (x(),), tp=1)
    names = [name for name, _ in model.named_parameters()]
    assert [name for name, _ in parallel.named_parameters()] == names
    assert list(parallel.state_dict()) == list(model.state_dict())
    for name, value in parallel.full_state_dict().items():
        assert torch.equal(value, model.state_dict()[name])


def test_the_original_is_untouched() -> None:
    model = net()
    before = copy.deepcopy(model.state_dict())
    parallel = graphpar.transform(model, (x(),), tp=1)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=1.0)
    parallel(x()).sum().backward()
    optimizer.step()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(p.grad is None for p in model.parameters())
    assert not torch.equal(parallel.get_parameter("up.weight"), model.up.weight)


def test_call_conventions() -> None:
    model = net()
    parallel = graphpar.transform(model, (x(),), tp=1)
    value, shift = x(), x()
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((value,), {}),
        ((), {"x": value}),
        ((value, 2.0), {}),
        ((value,), {"shift": shift}),
        ((value,), {"scale": 3.0, "shift": shift}),
        ((x(5),), {}),
        ((value,), {"shift": value}),
    ]
    for args, kwargs in calls:
        assert torch.equal(parallel(*args, **kwargs), model(*args, **kwargs))


@dataclass
class Output:
    loss: Tensor
    hidden: Tensor | None = None


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.layer = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor, *, mask: Tensor | None = None, details: bool = False) -> Output:
        y = self.drop(self.layer(self.norm(x)))
        if x.shape[0] > 4:
            y = y * 2
        if mask is not None:
            y = y.masked_fill(mask, 0.0)
        return Output(y.pow(2).mean(), y if details else None)


def test_dataclasses_branches_buffers_and_modes() -> None:
    torch.manual_seed(0)
    model = Branching()
    parallel = graphpar.transform(model, (torch.randn(3, 8),), tp=1, rng="exact")
    twin = copy.deepcopy(model)
    for size, training, details in ((3, True, False), (6, True, True), (6, False, True)):
        value, mask = torch.randn(size, 8), torch.rand(size, 8) < 0.5
        twin.train(training)
        parallel.train(training)
        calls: list[dict[str, Any]] = [{}, {"mask": mask, "details": details}]
        for kwargs in calls:
            torch.manual_seed(1)
            expected = twin(value, **kwargs)
            torch.manual_seed(1)
            found = parallel(value, **kwargs)
            assert type(found) is Output
            assert torch.equal(found.loss, expected.loss)
            assert (found.hidden is None) == (expected.hidden is None)
    for name, value in twin.state_dict().items():
        assert torch.equal(value, parallel.state_dict()[name]), name


def test_tied_parameters_stay_one() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(6, 4)
            self.head = nn.Linear(4, 6, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids: Tensor) -> Tensor:
            out: Tensor = self.head(self.embedding(ids))
            return out

    parallel = graphpar.transform(Tied(), (torch.tensor([[1, 2]]),), tp=1)
    embedding = parallel.get_parameter("embedding.weight")
    assert embedding is parallel.get_parameter("head.weight")
    assert set(parallel.state_dict()) == {"embedding.weight", "head.weight"}
    assert len(list(parallel.parameters())) == 1


def test_frozen_parameters_stay_frozen() -> None:
    model = net()
    model.up.weight.requires_grad_(False)
    parallel = graphpar.transform(model, (x(),), tp=1)
    parallel(x()).sum().backward()
    assert parallel.get_parameter("up.weight").grad is None
    assert parallel.get_parameter("down.weight").grad is not None


def test_first_call_traces_where_no_example_is_known() -> None:
    model = net()
    parallel = graphpar.transform(model, tp=1)
    with pytest.raises(GraphparError, match="call it once, or give example inputs"):
        list(parallel.parameters())
    with pytest.raises(GraphparError, match="call it once"):
        parallel.state_dict()
    value = x()
    assert torch.equal(parallel(value), model(value))
    assert len(list(parallel.parameters())) == 4


def test_dummy_inputs_are_the_example() -> None:
    model = net()
    model.dummy_inputs = {"x": x()}  # type: ignore[assignment]
    assert len(list(graphpar.transform(model, tp=1).parameters())) == 4


def test_hooks_on_blocks_run() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Net() for _ in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    parallel = graphpar.transform(Stack().double(), (x(),), tp=1)
    seen: list[int] = []
    parallel.get_submodule("layers.1").register_forward_hook(lambda *_: seen.append(1))
    parallel(x())
    assert seen == [1]


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class HandsOn(nn.Module):
    """A wrapper as torch's are, whose attributes are those of what it wraps."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)


def test_parameters_are_read_at_each_call() -> None:
    parallel: Any = graphpar.transform(net(), (x(),), tp=1)
    value = x()
    up, down = (copy.deepcopy(getattr(net(), name)) for name in ("up", "down"))

    def check(factor: float) -> None:
        wanted = down(F.gelu(F.linear(value, factor * up.weight, up.bias)))
        torch.testing.assert_close(parallel(value), wanted, rtol=1e-12, atol=1e-12)

    check(1)
    parallel.up.weight = nn.Parameter(3 * up.weight.detach())
    check(3)
    parametrize.register_parametrization(parallel.up, "weight", Doubled())
    check(6)
    parallel(value).sum().backward()
    assert parallel.up.parametrizations.weight.original.grad is not None
    parallel.up = HandsOn(parallel.up)
    check(6)
    name = "up.inner.parametrizations.weight.original"
    swapped = torch.func.functional_call(parallel, {name: up.weight.detach()}, (value,))
    assert not torch.equal(swapped, parallel(value))
    parametrize.remove_parametrizations(parallel.up.inner, "weight")
    check(6)


def test_a_submodule_may_have_any_name() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.program = nn.Linear(8, 8)
            self.stages = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.stages(self.program(x))
            return out

    model = Odd().double()
    parallel = graphpar.transform(model, (x(),), tp=1)
    value = x()
    assert torch.equal(parallel(value), model(value))


# --- read without processes ---------------------------------------------------------------------


def test_a_plan_can_be_read_without_processes(capsys: pytest.CaptureFixture[str]) -> None:
    parallel = graphpar.transform(net(), (x(),), tp=4)
    assert next(iter(parallel.stages)) == "trace"
    assert list(parallel.stages)[-1] == "fuse-collectives"
    assert "ops.all_reduce" in parallel.print_readable()
    assert "ops.all_reduce" in capsys.readouterr().out
    assert parallel.report["partition"]["objective_us"] > 0
    assert format_pipeline(parse_pipeline(parallel.pipeline)) == parallel.pipeline
    assert "annotate-partitions{tp=4}" in parallel.pipeline
    with pytest.raises(MeshError, match="tp=4 needs 4 processes"):
        parallel(x())


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [0, -1, 1.5, "2", True, None])
def test_bad_tp(tp: Any) -> None:
    with pytest.raises(InputError, match="tp must be"):
        graphpar.transform(net(), (x(),), tp=tp)


def test_bad_model_and_flags() -> None:
    with pytest.raises(InputError, match=r"must be a torch\.nn\.Module, not function"):
        graphpar.transform(lambda x: x, tp=2)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="sp must be a bool"):
        graphpar.transform(net(), (x(),), tp=2, sp="yes")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="tuple of arguments, not a tensor"):
        graphpar.transform(net(), x(), tp=2)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="already parallel"):
        graphpar.transform(graphpar.transform(net(), (x(),), tp=1), tp=1)


def test_unknown_and_missing_arguments() -> None:
    with pytest.raises(InputError, match=r"unexpected keyword argument 'y'.*scale"):
        graphpar.transform(net(), (x(),), {"y": 1}, tp=2)
    with pytest.raises(InputError, match="missing a required argument: 'x'"):
        graphpar.transform(net(), (), {}, tp=2)
    parallel = graphpar.transform(net(), (x(),), tp=1)
    with pytest.raises(InputError, match="unexpected keyword argument 'typo'"):
        parallel(x(), typo=1)


def test_more_ranks_than_elements_warn() -> None:
    with pytest.warns(GraphparWarning, match=r"nothing was sharded: .*has tp=17 .*legal: 1 to 16"):
        graphpar.transform(net(), (x(),), tp=17)


class Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.randn(6, 8))

    def forward(self, x: Tensor) -> Tensor:
        return (self.scales * x[:, None]).sum(1)


def test_nothing_to_shard_warns() -> None:
    with pytest.warns(GraphparWarning, match="the model has no axis that may be cut"):
        graphpar.transform(nn.BatchNorm1d(8), (torch.randn(4, 8),), tp=2)
    with pytest.warns(GraphparWarning, match="to cut any axis costs more in communication than"):
        graphpar.transform(Scales(), (torch.randn(4, 8),), tp=2)


def test_data_dependent_control_flow_names_the_line() -> None:
    class Choosing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.sum() > 0:
                return x
            return -x

    with pytest.raises(TraceError) as error:
        graphpar.transform(Choosing(), (x(),), tp=2)
    text = "\n".join([str(error.value), *error.value.__notes__])
    assert "test_parallel_module.py" in text
    assert "if x.sum() > 0" in text


def test_cache_in_the_output_says_what_to_do() -> None:
    from tests import zoo

    model, kwargs = zoo.build("llama", layers=1)
    with pytest.raises(TraceError, match="use_cache=False"):
        graphpar.transform(model, (), {"input_ids": kwargs["input_ids"], "use_cache": True}, tp=2)


def test_mesh_without_the_dimension() -> None:
    torch.distributed.init_process_group("fake", rank=0, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
        with pytest.raises(InputError, match="no dimension 'tp'; it has data, model"):
            graphpar.transform(net(), (x(),), tp=2, mesh=mesh)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        with pytest.raises(InputError, match="has 2 ranks, not 4"):
            graphpar.transform(net(), (x(),), tp=4, mesh=mesh)
        with pytest.raises(InputError, match="4 processes cannot form groups of tp=3"):
            graphpar.transform(net(), (x(),), tp=3)
    finally:
        torch.distributed.destroy_process_group()


def test_uneven_parameters_may_be_frozen_and_show_their_own_shape() -> None:
    torch.distributed.init_process_group("fake", rank=1, world_size=4)
    try:
        model = Net(inner=10).double()
        model.up.requires_grad_(False)
        parallel = graphpar.transform(model, (x(),), tp=4)
        for name in ("up.weight", "down.weight"):
            parameter: Any = parallel.get_parameter(name)
            whole = model.get_parameter(name)
            assert parameter.requires_grad == whole.requires_grad
            assert parameter.numel() == 12 * 8
            assert parameter.full_tensor().shape == whole.shape
            assert parallel.state_dict()[name].shape == whole.shape
        assert [parameter.shape, parallel.local_tensors()["up.weight"].shape] == [(8, 12), (3, 8)]
    finally:
        torch.distributed.destroy_process_group()


def test_unknown_pass_and_option() -> None:
    with pytest.raises(
        InputError, match="no pass is named 'fuse'; known: lower-recurrences, outline"
    ):
        step("fuse")
    with pytest.raises(InputError, match="outline has no option 'depth'; known: min_contractions"):
        step("outline", depth=1)
    with pytest.raises(InputError, match="cannot read the pipeline"):
        parse_pipeline("outline}{")


def test_autocast_is_part_of_the_trace() -> None:
    model = net().float()
    parallel = graphpar.transform(model, (x().float(),), tp=1)
    value = x().float()
    for enabled in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found, expected = parallel(value), model(value)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
