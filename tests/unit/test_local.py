"""What a rank holds of its parameters, against DTensor's own ``to_local`` and plain parameters."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from graphpar.local import local, local_all
from graphpar.printer import format_python
from graphpar.testing import rewrite

Read = Callable[[Sequence[Tensor]], list[Tensor]]
ONE_BY_ONE: Read = lambda values: [local(v) for v in values]  # noqa: E731
TOGETHER: Read = lambda values: local_all(*values)  # noqa: E731


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


def values(count: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(4, 4, dtype=torch.float64) for _ in range(count)]


def sharded(mesh: DeviceMesh, count: int) -> list[nn.Parameter]:
    made = [DTensor.from_local(v, mesh, [Shard(0)], run_check=False) for v in values(count)]
    return [nn.Parameter(v) for v in made]


def plain(count: int) -> list[nn.Parameter]:
    return [nn.Parameter(v) for v in values(count)]


def held(value: Tensor | None) -> Tensor:
    assert isinstance(value, DTensor)
    return value.to_local()


def same(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("read", [ONE_BY_ONE, TOGETHER])
def test_gradients_of_a_sum_share_no_memory(mesh: DeviceMesh, read: Read) -> None:
    """``to_local`` gives both parameters one tensor as gradient, which clipping scales twice."""
    found, wanted = sharded(mesh, 2), plain(2)
    for parameters, parts in ((found, read(found)), (wanted, list(wanted))):
        ((parts[0] + parts[1]) * values(1)[0]).sum().backward()
        nn.utils.clip_grad_norm_(parameters, 0.1)
    first, second = (held(p.grad) for p in found)
    assert first.data_ptr() != second.data_ptr()
    same([first, second], [p.grad for p in wanted if p.grad is not None])


@pytest.mark.parametrize("read", [ONE_BY_ONE, TOGETHER])
def test_gradients_are_laid_out_as_parameters(mesh: DeviceMesh, read: Read) -> None:
    found, wanted = sharded(mesh, 4), plain(4)
    found[2].requires_grad_(False)
    seen: list[Tensor] = []
    found[1].register_hook(seen.append)
    for _ in range(2):  # accumulated
        for parts in (read(found), list(wanted)):
            a, b, c, _unused = parts
            loss = (a @ b.t() * c).sum() + a.sum()  # one product's gradient is transposed
            loss.backward()
    assert found[2].grad is None
    assert found[3].grad is None
    assert all(isinstance(grad, DTensor) for grad in seen)
    for mine, theirs in zip(found[:2], wanted[:2], strict=True):
        grad = mine.grad
        assert isinstance(grad, DTensor)
        assert isinstance(mine, DTensor)
        assert grad.placements == mine.placements
        assert grad.device_mesh is mine.device_mesh
        assert grad.stride() == mine.stride() == held(grad).stride()
        assert theirs.grad is not None
        same([held(grad)], [theirs.grad])


def test_gradients_that_users_see_are_dtensors(mesh: DeviceMesh) -> None:
    """Those of parameters are of its very class; those on their way do what it does."""
    found, wanted = sharded(mesh, 2), plain(2)
    found[0].register_hook(lambda grad: grad * 2)
    wanted[0].register_hook(lambda grad: grad * 2)
    for parameters, parts in ((found, local_all(*found)), (wanted, list(wanted))):
        (parts[0] @ parts[1]).sum().backward()
        parameters[1].register_hook(lambda grad: grad.mul_(3))
    assert all(type(p.grad) is DTensor for p in found)
    same([held(p.grad) for p in found], [p.grad for p in wanted if p.grad is not None])
    results = []
    for parameters, parts in ((found, local_all(*found)), (wanted, list(wanted))):
        grads = torch.autograd.grad((parts[0] @ parts[1]).sum(), parameters)
        results.append([grads[0] + parameters[1], copy.deepcopy(grads[1]), *grads])
    same([held(x) for x in results[0]], results[1])
    first, second, *given = results[0]
    assert type(first) is type(second) is type(given[0].detach()) is DTensor
    same([x.full_tensor() for x in given], results[1][2:])  # type: ignore[attr-defined]
    torch.save(given[0], stored := io.BytesIO())
    stored.seek(0)
    again = torch.load(stored, weights_only=False)
    assert type(again) is DTensor
    same([held(again)], results[1][2:3])
    assert nn.utils.get_total_norm(given).full_tensor() > 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("read", [ONE_BY_ONE, TOGETHER])
def test_second_derivatives(mesh: DeviceMesh, read: Read) -> None:
    found, wanted = sharded(mesh, 2), plain(2)
    results = []
    for parameters, parts in ((found, read(found)), (wanted, list(wanted))):
        loss = (parts[0] @ parts[1]).square().sum()
        first = torch.autograd.grad(loss, parameters, create_graph=True)
        inner = [g.to_local() if isinstance(g, DTensor) else g for g in first]
        second = torch.autograd.grad(sum(g.square().sum() for g in inner), parameters)  # type: ignore[arg-type]
        results.append([g.to_local() if isinstance(g, DTensor) else g for g in second])
    same(*results)


def test_without_gradients(mesh: DeviceMesh) -> None:
    one, two = sharded(mesh, 2)
    buffer = torch.ones(3)
    with torch.no_grad():
        parts = local_all(one, buffer, two)
    assert not any(part.requires_grad for part in parts)
    assert parts[1] is buffer
    trained, given = local_all(one, buffer)
    assert trained.requires_grad
    assert given is buffer
    assert trained is not held(one.detach())
    assert trained.data_ptr() == held(one.detach()).data_ptr()
    assert local(one, 1, 3).shape == (4, 3)


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.o = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.o(self.q(x) * self.k(x))
        return x + y


def test_ops_with_nodes_of_their_own_read_parameters() -> None:
    text = format_python(rewrite(Products(), (torch.randn(2, 4, 8),), tp=2, sp=True), rank=0)
    assert "[state_at(self, 'q', 'weight'), state_at(self, 'k', 'weight')]" in text
    assert "local(state_at(self, 'o', 'weight'))" in text
