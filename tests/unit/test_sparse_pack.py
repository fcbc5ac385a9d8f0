"""Packing of sparse recurrent matrices, and the model of bank conflicts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from graphpar.codegen.sparse_rnn.banks import wavefronts_per_load
from graphpar.codegen.sparse_rnn.pack import MAX_COLUMNS, Packed, pack, repack
from graphpar.errors import CapacityError, InputError


def sparse(rows: int, columns: int, density: float, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(rows, columns, generator=generator) < density
    values = torch.randn(rows, columns, generator=generator).to(dtype)
    return torch.where(values == 0, torch.ones_like(values), values) * kept


def packed(weight: Tensor, gates: int, dtype: torch.dtype, **options: int) -> Packed:
    sizes = {"programs": 5, "threads": 256} | options
    return pack(weight, gates=gates, value_type=dtype, **sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("gates", "size"), [(1, 33), (3, 64), (4, 33), (1, 257)])
@pytest.mark.parametrize("density", [0.0, 0.2, 1.0])
def test_the_dense_matrix_comes_back(
    dtype: torch.dtype, gates: int, size: int, density: float
) -> None:
    weight = sparse(gates * size, size, density, dtype)
    assert torch.equal(packed(weight, gates, dtype).dense(), weight)


def test_an_empty_and_a_full_row() -> None:
    weight = sparse(64, 64, 0.1, torch.float32)
    weight[3] = 0
    weight[5] = 1
    found = packed(weight, 1, torch.float32)
    assert torch.equal(found.dense(), weight)


def test_a_word_holds_value_and_column() -> None:
    weight = sparse(33, 40000, 0.01, torch.bfloat16)
    found = packed(weight, 1, torch.bfloat16)
    words = found.words
    assert words.dtype == torch.int32
    assert torch.equal(words & 0xFFFF, found.columns)
    assert torch.equal((words >> 16).short().view(torch.bfloat16), found.values)
    assert found.columns.max() > 1 << 15  # the index has no sign


def test_each_slot_holds_one_row_and_the_last_none() -> None:
    gates, size = 3, 64
    found = packed(sparse(gates * size, size, 0.3, torch.float32), gates, torch.float32)
    layout, columns = found.layout, found.shape[1]
    rows = (found.source // columns).numpy()
    assert bool(found.padding[:, :, -1].all())
    for program in range(len(layout.units)):
        for row in range(layout.slots.shape[1]):
            gate, unit = divmod(row, layout.units.shape[1])
            used = layout.slots[program, row, : layout.counts[program, row]]
            kept = ~found.padding[program][:, used].numpy()
            assert set(rows[program][:, used][kept]) <= {gate * size + layout.units[program, unit]}


def test_programs_are_balanced() -> None:
    """Also where the units are not: half of them have nine times the non-zeros."""
    weight = torch.cat([sparse(64, 128, 0.9, torch.float32), sparse(64, 128, 0.1, torch.float32)])
    found = packed(weight, 1, torch.float32, programs=4)
    nonzeros = (~found.padding).sum(dim=(1, 2))
    assert int(nonzeros.max()) < 1.05 * int(nonzeros.min())


def test_repack_in_place() -> None:
    weight = sparse(66, 33, 0.3, torch.float32)
    found = packed(weight, 2, torch.float32)
    memory = found.values.data_ptr()
    changed = weight * 3
    changed[0] = 0  # fewer non-zeros: the pattern stands
    assert repack(found, changed)
    assert torch.equal(found.dense(), changed)
    assert found.values.data_ptr() == memory
    grown = torch.where(weight == 0, torch.ones_like(weight), weight)
    assert not repack(found, grown)
    assert torch.equal(found.dense(), changed)


def test_values_are_rounded_once() -> None:
    weight = sparse(33, 33, 0.3, torch.float64)
    found = packed(weight, 1, torch.bfloat16)
    assert torch.equal(found.dense(), weight.bfloat16())


def test_wavefronts_of_known_loads() -> None:
    lanes = np.arange(32)
    for index, wanted in [
        (lanes, 2.0),  # each half in one
        (lanes * 0, 2.0),  # one word for all
        (lanes * 16, 32.0),  # one bank: each lane alone
        (lanes // 2 * 16, 16.0),  # pairs of lanes read the same word
        (lanes % 8, 2.0),
        (lanes * 2, 4.0),
    ]:
        assert wavefronts_per_load(index[None, None], load_bytes=8) == wanted
    assert wavefronts_per_load(lanes[None, None], load_bytes=4) == 1.0
    assert wavefronts_per_load((lanes * 32)[None, None], load_bytes=4) == 32.0


@pytest.mark.parametrize(
    ("density", "threads", "load_bytes", "limit"),
    [(0.3, 512, 8, 2.4), (0.3, 256, 8, 2.4), (0.1, 512, 8, 3.0), (0.1, 512, 4, 1.5)],
)
def test_banks_of_a_large_matrix(
    density: float, threads: int, load_bytes: int, limit: float
) -> None:
    weight = sparse(2304, 2304, density, torch.bfloat16)
    ordered = pack(
        weight,
        gates=1,
        programs=132,
        threads=threads,
        value_type=torch.bfloat16,
        load_bytes=load_bytes,
    )
    assert ordered.wavefronts(load_bytes=load_bytes) <= limit
    assert torch.equal(ordered.dense(), weight)


def test_the_order_is_what_helps() -> None:
    weight = sparse(512, 512, 0.2, torch.bfloat16)
    plain, ordered = (
        pack(
            weight,
            gates=1,
            programs=16,
            threads=256,
            value_type=torch.bfloat16,
            bank_aware=bank_aware,
        )
        for bank_aware in (False, True)
    )
    assert torch.equal(plain.dense(), weight)
    assert plain.wavefronts() > 4.5
    assert ordered.wavefronts() < 2.5
    # the model sees the order of the columns alone
    mixed = plain.columns.flatten()[torch.randperm(plain.columns.numel())].view_as(plain.columns)
    assert replace(plain, columns=mixed).wavefronts() > 4.5


def test_padding_costs_no_wavefront() -> None:
    weight = torch.zeros(64, 64)
    weight[:, 0] = 1
    found = packed(weight, 1, torch.float32, programs=2)
    assert found.wavefronts() == 2.0


@pytest.mark.parametrize(
    ("weight", "error", "message"),
    [
        (torch.ones(4, MAX_COLUMNS + 1), CapacityError, "16-bit index"),
        (torch.full((4, 4), torch.inf), InputError, "not finite"),
        (torch.ones(4, 4, device="meta"), InputError, "meta device"),
        (torch.ones(4), InputError, "no floating matrix"),
        (torch.ones(4, 4, dtype=torch.int32), InputError, "no floating matrix"),
        (torch.ones(3000, 4), CapacityError, "use more programs"),
    ],
)
def test_bad_matrices(weight: Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        packed(weight, 1, torch.bfloat16)


def test_bad_options() -> None:
    weight = torch.ones(64, 64)
    with pytest.raises(InputError, match=r"torch\.float64 cannot be packed"):
        packed(weight, 1, torch.float64)
    with pytest.raises(CapacityError, match="slots of 2 non-zeros do not hold the rows"):
        packed(weight, 1, torch.bfloat16, depth=2)
    with pytest.raises(InputError, match="do not fit 16 bits"):
        _ = packed(weight, 1, torch.float32).words
