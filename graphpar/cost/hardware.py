"""Devices and their links as data. Every figure names its source."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from graphpar.errors import InputError

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class WireProtocol:
    """One of NCCL's ways to send: start-up, latency of a step, and the share of the bandwidth."""

    start_us: float
    step_us: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What one device sends over, in one direction.

    While a collective runs over it, its kernel ``occupies`` a share of the device's multiprocessors
    (of a CPU: cores), and moves ``memory_passes`` bytes of the device's memory for each it sends.
    """

    bytes_per_us: float
    protocols: tuple[WireProtocol, ...]
    occupies: float = 0.0
    memory_passes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One device and its links.

    ``flops_per_us`` is the peak rate of dense matrix products by dtype, ``matmul_share`` the share
    of it that the best products reach, ``launch_us`` the least time between two kernels.
    ``multiprocessors`` work on tiles of a product at once (0: it is not cut into tiles).
    ``draws_per_us`` are numbers from the device's generator, ``masks_per_us`` those of a counter
    that :func:`graphpar.ops.seeded_dropout` makes: while the op waits for memory
    (``draws_hide``), or beside that.
    ``sources`` says for every field where its figure comes from.
    """

    name: str
    flops_per_us: Mapping[torch.dtype, float]
    matmul_share: float
    memory_bytes_per_us: float
    memory_bytes: int
    launch_us: float
    nvlink: Link
    network: Link
    multiprocessors: int = 0
    draws_per_us: float = math.inf
    masks_per_us: float = math.inf
    draws_hide: bool = False
    sources: Mapping[str, str] = field(default_factory=dict)

    def flops_rate(self, dtype: torch.dtype) -> float:
        """FLOPs per microsecond of products of ``dtype``; of an unknown one, those of float32."""
        rate = self.flops_per_us.get(dtype, self.flops_per_us[torch.float32])
        return rate * self.matmul_share

    def tile_share(self, tiles: int, occupied: float = 0.0) -> float:
        """The share of all multiprocessors that work on a product of so many tiles, on average,
        while something else occupies some of them.

        Each takes one tile at a time, so the last wave may leave most of them idle. Below one wave
        libraries take smaller tiles or split sums: all that are free work.
        """
        free = round(self.multiprocessors * (1 - occupied))
        if tiles <= free or not self.multiprocessors:
            return 1 - occupied
        return tiles / (-(-tiles // free) * self.multiprocessors) if free else 0.0


def _link(gb_per_s: float, steps_us: tuple[float, float, float], occupies: float) -> Link:
    """A link under NCCL's protocols LL, LL128 and Simple."""
    starts_us, shares = (6.6, 14.0, 8.4), (1 / 2, 120 / 128, 1.0)
    rows = zip(starts_us, steps_us, shares, strict=True)
    protocols = tuple(WireProtocol(start_us=a, step_us=b, share=c) for a, b, c in rows)
    return Link(
        bytes_per_us=gb_per_s * 1e3, protocols=protocols, occupies=occupies, memory_passes=3
    )


_NVLINK_STEPS_US, _NETWORK_STEPS_US = (0.6, 1.9, 3.4), (2.7, 4.0, 14.0)
_NVLINK_CHANNELS, _NETWORK_CHANNELS = 24, 16
_NCCL = (
    "latencies: NCCL, src/graph/tuning.cc, baseLat and hwLat of the ring (LL, LL128, Simple); "
    "shares: the payload in a word of LL and in a line of LL128"
)
_CHANNELS = (
    "24 channels, each on a multiprocessor, as NCCL logs on eight A100 (nccl-tests, issue 100) and "
    "as blocks on H100 (NVIDIA's developer forum, topic 337991); 3 bytes of memory moved for each "
    "sent: through NCCL's buffer, and read or written in the tensor (src/device/all_gather.h)"
)
_LAUNCH = "assumed: about the least distance of two small kernels that PyTorch launches in turn"
_MAMF = "ml-engineering (S. Bekman), Maximum Achievable Matmul FLOPS, bf16: "


def _gpu(
    name: str,
    *,
    tflops: Mapping[torch.dtype, float],
    share: float,
    tb_per_s: float,
    mib: int,
    multiprocessors: int,
    mhz: int,
    nvlink_gb_per_s: float,
    network_gb_per_s: float,
    sheet: str,
    achieved: str,
    system: str,
) -> Hardware:
    return Hardware(
        name=name,
        flops_per_us={dtype: rate * 1e6 for dtype, rate in tflops.items()},
        matmul_share=share,
        memory_bytes_per_us=tb_per_s * 1e6,
        memory_bytes=mib * MIB,
        launch_us=4.0,
        multiprocessors=multiprocessors,
        draws_per_us=multiprocessors * mhz * INTEGER_LANES * 4 / (PHILOX_INSTRUCTIONS + 4),
        draws_hide=True,
        nvlink=_link(nvlink_gb_per_s, _NVLINK_STEPS_US, _NVLINK_CHANNELS / multiprocessors),
        network=_link(network_gb_per_s, _NETWORK_STEPS_US, _NETWORK_CHANNELS / multiprocessors),
        sources={
            "flops_per_us": f"{sheet}, dense tensor cores; float32 without TF32, torch's default",
            "matmul_share": _MAMF + achieved,
            "memory_bytes_per_us": sheet,
            "memory_bytes": "total memory as nvidia-smi reports it",
            "launch_us": _LAUNCH,
            "multiprocessors": f"{sheet}; tiles of 256 x 128 in waves: NVIDIA, Matrix "
            "Multiplication Background User's Guide, sections 2.3 and 3.2",
            "draws_per_us": f"{INTEGER_LANES} integer instructions per clock and multiprocessor "
            f"(NVIDIA, CUDA C++ Programming Guide, Arithmetic Instructions, 8.0 and 9.0) at {mhz} "
            f"MHz; for four numbers {PHILOX_INSTRUCTIONS} of Philox 4x32-10, both halves of two "
            "products and two exclusive ors a round (Salmon et al. 2011), and a comparison each",
            "draws_hide": "as other instructions do; dropout by itself is bound by memory "
            "(T. Dao, flash-attention, issue 56)",
            "masks_per_us": "not modelled: a kernel of Triton (graphpar.ops.mask_kernel) reads the "
            "values and writes the results once, and its instructions issue in less time than that",
            "nvlink": f"{sheet}, half of the sum of both directions, at the 80% that nccl-tests "
            f"reach on eight A100 (about 240 of 300 GB/s); {_NCCL}; {_CHANNELS}",
            "network": f"{system}, one adapter per GPU; {_NCCL}; 16 channels, two for each of 8 "
            "adapters (nccl, issues 320 and 1453); memory as over NVLink",
        },
    )


INTEGER_LANES = 64
PHILOX_INSTRUCTIONS = 10 * (2 * 2 + 2)

_A100 = {
    torch.bfloat16: 312.0,
    torch.float16: 312.0,
    torch.float32: 19.5,
    torch.float64: 19.5,
}
_H100 = {
    torch.bfloat16: 989.4,
    torch.float16: 989.4,
    torch.float32: 66.9,
    torch.float64: 66.9,
}
_DGX_A100 = "NVIDIA DGX A100: InfiniBand HDR, 200 Gb/s"
_DGX_H100 = "NVIDIA DGX H100/H200: InfiniBand NDR, 400 Gb/s"

HARDWARE: Mapping[str, Hardware] = {
    h.name: h
    for h in (
        _gpu(
            "a100-40gb",
            tflops=_A100,
            share=271.2 / 312,
            tb_per_s=1.555,
            mib=40960,
            multiprocessors=108,
            mhz=1410,
            nvlink_gb_per_s=240,
            network_gb_per_s=25,
            sheet="NVIDIA A100 data sheet, SXM4 40GB",
            achieved="A100 SXM, 271.2 of 312 TFLOP/s",
            system=_DGX_A100,
        ),
        _gpu(
            "a100-80gb",
            tflops=_A100,
            share=271.2 / 312,
            tb_per_s=2.039,
            mib=81920,
            multiprocessors=108,
            mhz=1410,
            nvlink_gb_per_s=240,
            network_gb_per_s=25,
            sheet="NVIDIA A100 data sheet, SXM4 80GB",
            achieved="A100 SXM, 271.2 of 312 TFLOP/s",
            system=_DGX_A100,
        ),
        _gpu(
            "h100",
            tflops=_H100,
            share=794.5 / 989,
            tb_per_s=3.35,
            mib=81559,
            multiprocessors=132,
            mhz=1755,
            nvlink_gb_per_s=360,
            network_gb_per_s=50,
            sheet="NVIDIA H100 data sheet, SXM5 80GB",
            achieved="H100 SXM, 794.5 of 989 TFLOP/s",
            system=_DGX_H100,
        ),
        _gpu(
            "h200",
            tflops=_H100,
            share=794.5 / 989,
            tb_per_s=4.8,
            mib=143771,
            multiprocessors=132,
            mhz=1755,
            nvlink_gb_per_s=360,
            network_gb_per_s=50,
            sheet="NVIDIA H200 data sheet, SXM5 141GB",
            achieved="H100 SXM, 794.5 of 989 TFLOP/s (the H200 has the same cores)",
            system=_DGX_H100,
        ),
    )
}


def find_hardware(name: str | Hardware) -> Hardware:
    """The device of that name.

    Raises:
        InputError: the name is unknown; the message lists those known.
    """
    if isinstance(name, Hardware):
        return name
    if name not in HARDWARE:
        raise InputError(f"no hardware is named {name!r}; known: {', '.join(HARDWARE)}, cpu")
    return HARDWARE[name]
