"""Stand-ins of parameters are those that torch makes, and share memory where the parameters do."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from graphpar.trace.parameters import quick_parameters
from graphpar.trace.patches import patched


def parameter(*shape: int, **options: Any) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape, **options))


def with_gradient() -> nn.Parameter:
    made = parameter(3, 4)
    made.sum().backward()
    return made


PARAMETERS = {
    "plain": parameter(3, 4),
    "half": parameter(3, 4, dtype=torch.bfloat16),
    "number": parameter(),
    "empty": parameter(0, 4),
    "frozen": nn.Parameter(torch.ones(2), requires_grad=False),
    "meta": parameter(3, 4, device="meta"),
    "turned": nn.Parameter(torch.ones(3, 4).t()),
    "part": nn.Parameter(torch.ones(8)[2:6]),
    "expanded": nn.Parameter(torch.ones(1).expand(4)),
    "with gradient": with_gradient(),
    "buffer": nn.Buffer(torch.ones(3)),
    "tensor": torch.ones(3),
}


def looks(fake: Tensor) -> dict[str, Any]:
    questions = ("shape", "dtype", "device", "requires_grad", "is_leaf", "_version")
    found = {name: getattr(fake, name) for name in questions}
    return found | {
        "names": set(vars(fake)),
        "gradient": fake.grad is not None,
        "parameter": isinstance(fake, nn.Parameter),
        "place": (fake.stride(), fake.storage_offset(), fake.untyped_storage().nbytes()),
    }


@pytest.mark.parametrize("name", PARAMETERS)
def test_they_look_like_those_of_torch(name: str) -> None:
    value = PARAMETERS[name]
    plain = FakeTensorMode().from_tensor(value, static_shapes=True)
    mode = FakeTensorMode()
    with patched([quick_parameters()]):
        quick = mode.from_tensor(value, static_shapes=True)
        assert mode.from_tensor(value, static_shapes=True) is quick
    assert quick.fake_mode is mode
    assert looks(quick) == looks(plain)


def test_memory_is_shared_where_it_was() -> None:
    weight = parameter(3, 4)
    other, views = nn.Parameter(weight.data), [weight.detach(), weight.data.view(12)]
    mode = FakeTensorMode()
    with patched([quick_parameters()]):
        fakes = [mode.from_tensor(x, static_shapes=True) for x in (weight, other, *views)]
        apart = mode.from_tensor(parameter(3, 4), static_shapes=True)
    memory = {fake.untyped_storage()._cdata for fake in fakes}
    assert len(memory) == 1
    assert apart.untyped_storage()._cdata not in memory
