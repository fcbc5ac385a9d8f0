"""What surrounds a program's ops while they run: autocast, the generators of random numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def autocast_off() -> Iterator[None]:
    """No autocast: traced programs hold their casts."""
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


class Generators:
    """The states, now, of the generators of the CPU and of the devices that ``values`` are on."""

    def __init__(self, values: Iterable[Tensor]) -> None:
        devices = {x.device for x in values if x.device.type not in ("cpu", "meta")}
        self._modules: list[tuple[Any, Any]] = [(torch, ())]
        self._modules += [(torch.get_device_module(device), (device,)) for device in devices]
        self._states = self._now()

    def _now(self) -> list[Tensor]:
        return [module.get_rng_state(*device) for module, device in self._modules]

    def _set(self, states: Iterable[Tensor]) -> None:
        for (module, device), state in zip(self._modules, states, strict=True):
            module.set_rng_state(state, *device)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Within, the generators go on from these states."""
        now = self._now()
        self._set(self._states)
        try:
            yield
        finally:
            self._set(now)
