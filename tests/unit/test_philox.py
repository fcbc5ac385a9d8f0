"""Philox against published vectors and against plain Python; masks of parts against the whole."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from graphpar.ops import philox
from graphpar.ops.philox import keep_mask
from graphpar.types import Shard, cut, local_shape

CPU = torch.device("cpu")
PI = "243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0"
# Random123, tests/kat_vectors: counter and key, then the words of philox4x32 with 10 rounds.
KNOWN = (
    ("00000000 " * 6, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff " * 6, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (PI, "d16cfe09 94fdcceb 5001e420 24126ea1"),
)


def numbers(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def plain(counter: list[int], key: list[int]) -> list[int]:
    """The figure of the paper, word by word."""
    left0, right0, left1, right1 = counter
    for round_ in range(10):
        bumped = (key[0] + round_ * 2654435769) % 2**32, (key[1] + round_ * 3144134277) % 2**32
        high0, low0 = divmod(left0 * 3528531795, 2**32)
        high1, low1 = divmod(left1 * 3449720151, 2**32)
        left0, right0, left1, right1 = (
            high1 ^ right0 ^ bumped[0],
            low1,
            high0 ^ right1 ^ bumped[1],
            low0,
        )
    return [left0, right0, left1, right1]


@pytest.mark.parametrize(("given", "words"), KNOWN)
def test_known_answers(given: str, words: str) -> None:
    *counter, k0, k1 = numbers(given)
    assert plain(counter, [k0, k1]) == numbers(words)
    c0, c1, c2, c3 = counter
    assert list(philox.philox((c0, c1, c2, c3), (k0, k1))) == numbers(words)
    t0, t1, t2, t3 = (torch.tensor([c, 1]) for c in counter)
    found = philox.philox((t0, t1, t2, t3), (k0, k1))
    assert [int(word[0]) for word in found] == numbers(words)


def test_tensors_and_numbers_mix() -> None:
    place = torch.randint(2**32, (100,), generator=torch.Generator().manual_seed(0))
    found = torch.stack(philox.philox((place, 0, 7, 2**32 - 1), (5, 2**32 - 2)))
    for column, c in zip(found.T.tolist(), place.tolist(), strict=True):
        assert column == plain([c, 0, 7, 2**32 - 1], [5, 2**32 - 2])


def kept(index: int, keep: float, seed: int, stream: tuple[int, int]) -> bool:
    """What the docstring of ``keep_mask`` says."""
    call, place = divmod(index, 8)
    words = plain([call % 2**32, call // 2**32, *stream], [seed % 2**32, seed // 2**32])
    word = words[place // 2]
    half = word // 2**16 if place % 2 else word % 2**16
    return half < round(keep * 2**16)


def test_the_mask_is_the_documented_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(philox, "_CHUNK", 3)
    seed, stream = 2**62 + 12345, (3, 9)
    mask = keep_mask((5, 13), 0.7, seed, stream, CPU)
    assert mask.flatten().tolist() == [kept(i, 0.7, seed, stream) for i in range(65)]
    far = 2**36 + 5  # counters of more than 32 bits
    found = philox._kept(2, far, 21, 9, 0.7, seed, stream, CPU)
    wanted = [[kept(far + 21 * r + i, 0.7, seed, stream) for i in range(9)] for r in range(2)]
    assert found.tolist() == wanted


SHAPES = (((24,), (24,)), ((3, 48, 5), (48,)), ((2, 24, 7), (24,)), ((24, 3), (24,)),
          ((4, 72), (24, 48)), ((3, 72, 2), (24, 24, 24)), ((2, 3, 48), (48,)))  # fmt: skip


@pytest.mark.parametrize("units", [0, 12])
@pytest.mark.parametrize(("shape", "blocks"), SHAPES)
def test_parts_are_those_of_the_whole(
    shape: tuple[int, ...], blocks: tuple[int, ...], units: int
) -> None:
    dim = shape.index(sum(blocks))
    whole = keep_mask(shape, 0.5, 11, (1, 2), CPU)
    for ranks in (5, 7, 8) if units else (1, 2, 3, 4, 8):
        kind = Shard(dim, blocks, units)
        for rank in range(ranks):
            local = local_shape(shape, kind, rank, ranks)
            part = keep_mask(local, 0.5, 11, (1, 2), CPU, dim, blocks, rank, ranks, units)
            assert part.equal(cut(whole, kind, rank, ranks))


def test_no_dimensions_and_no_elements() -> None:
    values = {bool(keep_mask((), 0.5, seed, (0, 0), CPU)) for seed in range(20)}
    assert values == {False, True}
    assert keep_mask((3, 0), 0.5, 1, (0, 0), CPU).shape == (3, 0)


@pytest.mark.parametrize("keep", [0.0, 1e-6, 1 / 2**16, 0.5, 1 - 1 / 2**16, 1 - 1e-6, 1.0])
def test_rates_at_the_ends(keep: float) -> None:
    found = keep_mask((400,), keep, 17, (0, 4), CPU).tolist()
    assert found == [kept(i, keep, 17, (0, 4)) for i in range(400)]


@pytest.mark.parametrize("p", [0.1, 0.5, 0.93])
def test_the_rate_and_its_independence(p: float) -> None:
    """Within five standard deviations; streams and neighbours are not correlated."""
    count = 1 << 18
    names = product((1, 2), product((0, 1), (0, 1)))
    streams = [keep_mask((count,), 1 - p, seed, stream, CPU) for seed, stream in names]
    sigma = math.sqrt(p * (1 - p) / count)
    for mask in streams:
        assert abs(float(mask.double().mean()) - (1 - p)) < 5 * sigma
    both = math.sqrt((1 - p) ** 2 * (1 - (1 - p) ** 2) / count)
    pairs = [(a, b) for i, a in enumerate(streams) for b in streams[:i]]
    pairs += [(streams[0], streams[0].roll(lag)) for lag in (1, 2, 4, 7, 8, 1024)]
    for a, b in pairs:
        assert abs(float((a & b).double().mean()) - (1 - p) ** 2) < 5 * both
