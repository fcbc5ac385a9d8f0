"""Masks drawn on the CPU against plain Python; masks of parts against the whole."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpar import ops
from graphpar.ops import host_mask as module
from graphpar.ops.host_mask import host_mask
from graphpar.types import Shard, cut
from tests.unit.test_mask_kernel import Layout, layouts

# Random123, tests/kat_vectors: counter and key, then the words of philox4x64 with 10 rounds.
KNOWN = (
    (
        "0000000000000000 " * 6,
        "16554d9eca36314c db20fe9d672d0fdc d7e772cee186176b 7e68b68aec7ba23b",
    ),
    (
        "ffffffffffffffff " * 6,
        "87b092c3013fe90b 438c3c67be8d0224 9cc7d7c69cd777b6 a09caebf594f0ba0",
    ),
)


def numbers(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def plain(counter: list[int], key: list[int]) -> list[int]:
    """The figure of the paper, word by word."""
    left0, right0, left1, right1 = counter
    for round_ in range(10):
        bumped0 = (key[0] + round_ * 0x9E3779B97F4A7C15) % 2**64
        bumped1 = (key[1] + round_ * 0xBB67AE8584CAA73B) % 2**64
        high0, low0 = divmod(left0 * 0xD2E7470EE14C6C93, 2**64)
        high1, low1 = divmod(left1 * 0xCA5A826395121157, 2**64)
        left0, right0 = high1 ^ right0 ^ bumped0, low1
        left1, right1 = high0 ^ right1 ^ bumped1, low0
    return [left0, right0, left1, right1]


def kept(index: int, keep: float, seed: int, stream: tuple[int, int]) -> bool:
    """What the docstring of ``host_mask`` says."""
    counter, place = divmod(index, 16)
    word = plain([counter, 0, *stream], [seed, 0])[place // 4]
    return (word >> 16 * (place % 4)) % 2**16 < round(keep * 2**16)


@pytest.mark.parametrize(("given", "words"), KNOWN)
def test_known_answers(given: str, words: str) -> None:
    *counter, k0, k1 = numbers(given)
    assert plain(counter, [k0, k1]) == numbers(words)


@pytest.mark.parametrize("chunk", [16, 32, 1 << 15])
@pytest.mark.parametrize(("seed", "stream"), [(0, (0, 0)), (2**62 + 12345, (3, 2**32 - 1))])
def test_the_mask_is_the_documented_function(
    chunk: int, seed: int, stream: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CHUNK", chunk)
    found = host_mask((5, 13), 0.7, seed, stream)
    assert found.dtype == torch.bool
    assert found.flatten().tolist() == [kept(i, 0.7, seed, stream) for i in range(65)]


@given(layouts(), st.sampled_from([16, 64, 1 << 15]))
@settings(max_examples=150)
def test_parts_are_those_of_the_whole(layout: Layout, chunk: int) -> None:
    shape, dim, blocks, rank, ranks, units = layout
    whole = host_mask((*shape[:dim], sum(blocks), *shape[dim + 1 :]), 0.5, 11, (1, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHUNK", chunk)
        part = host_mask(shape, 0.5, 11, (1, 2), dim, blocks, rank, ranks, units)
    assert part.equal(cut(whole, Shard(dim, blocks, units), rank, ranks))


def test_no_dimensions_and_no_elements() -> None:
    assert {bool(host_mask((), 0.5, seed, (0, 0))) for seed in range(20)} == {False, True}
    assert host_mask((3, 0), 0.5, 1, (0, 0)).shape == (3, 0)
    assert host_mask((3, 0, 2), 0.5, 1, (0, 0), 1, (1,), 1, 2, 1).shape == (3, 0, 2)


@pytest.mark.parametrize("keep", [0.0, 1e-6, 1 / 2**16, 0.5, 1 - 1 / 2**16, 1 - 1e-6, 1.0])
def test_rates_at_the_ends(keep: float) -> None:
    found = host_mask((400,), keep, 17, (0, 4)).tolist()
    assert found == [kept(i, keep, 17, (0, 4)) for i in range(400)]


def test_the_limit_is_exclusive() -> None:
    """Element 37 is dropped at the very rate that its number gives."""
    word = plain([2, 0, 3, 9], [5, 0])[1]
    half = (word >> 16) % 2**16
    assert not host_mask((40,), half / 2**16, 5, (3, 9))[37]
    assert host_mask((40,), (half + 1) / 2**16, 5, (3, 9))[37]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_dropout_is_the_product_with_the_mask(dtype: torch.dtype) -> None:
    """Bit by bit and in the memory's order: zeros keep a sign, and nan and inf are not dropped."""
    x = torch.randn(6, 33, dtype=dtype)
    x[0, :5] = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0])
    seed = torch.tensor([2**40 + 3, 1])
    for y in (x, x.t(), x.view(6, 3, 11).transpose(0, 2)):
        found = ops.seeded_dropout(y, seed, 0.3, 2)
        expected = (y * host_mask(y.shape, 1 - 0.3, 2**40 + 3, (2, 1))).mul_(1 / (1 - 0.3))
        assert found.stride() == expected.stride()
        assert found.signbit().equal(expected.signbit())
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.93])
def test_the_rate_and_its_independence(p: float) -> None:
    """Within five standard deviations; streams and neighbours are not correlated."""
    count = 1 << 18
    names = product((1, 2), product((0, 1), (0, 1)))
    streams = [host_mask((count,), 1 - p, seed, stream) for seed, stream in names]
    sigma = math.sqrt(p * (1 - p) / count)
    for mask in streams:
        assert abs(float(mask.double().mean()) - (1 - p)) < 5 * sigma
    both = math.sqrt((1 - p) ** 2 * (1 - (1 - p) ** 2) / count)
    pairs = [(a, b) for i, a in enumerate(streams) for b in streams[:i]]
    pairs += [(streams[0], streams[0].roll(lag)) for lag in (1, 2, 4, 8, 16, 1024)]
    for a, b in pairs:
        assert abs(float((a & b).double().mean()) - (1 - p) ** 2) < 5 * both
