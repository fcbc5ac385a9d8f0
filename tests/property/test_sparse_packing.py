"""Random sparse matrices, packed for random devices."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from graphpar.codegen.sparse_rnn.pack import pack, repack


@given(
    gates=st.sampled_from([1, 3, 4]),
    units=st.integers(1, 40),
    columns=st.integers(1, 70),
    programs=st.integers(1, 7),
    load_bytes=st.sampled_from([4, 8, 16]),
    density=st.floats(0, 1),
    seed=st.integers(0, 1000),
)
def test_every_non_zero_is_packed_once(
    gates: int,
    units: int,
    columns: int,
    programs: int,
    load_bytes: int,
    density: float,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(gates * units, columns, generator=generator)
    weight *= torch.rand(weight.shape, generator=generator) < density
    weight[torch.rand(len(weight), generator=generator) < 0.2] = 0
    found = pack(
        weight,
        gates=gates,
        programs=programs,
        threads=256,
        value_type=torch.float32,
        load_bytes=load_bytes,
    )
    kept = ~found.padding
    places = found.source[kept]
    assert len(places.unique()) == len(places) == int(weight.count_nonzero())
    assert torch.equal(found.dense(), weight)
    assert torch.equal(found.columns, (found.source % columns).int())
    assert bool((found.values[found.padding] == 0).all())
    assert bool(found.padding[:, :, -1].all())
    owned = sorted(found.layout.units[found.layout.units >= 0].tolist())
    assert owned == list(range(units))
    assert repack(found, 2 * weight)
    assert torch.equal(found.dense(), 2 * weight)
