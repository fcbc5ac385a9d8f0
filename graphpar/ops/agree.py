"""Ranks compare what they are about to run, so that a difference is an error and not a hang."""

from __future__ import annotations

import hashlib
from datetime import timedelta
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_object_coll_device

from graphpar.errors import RankMismatchError
from graphpar.ops.collectives import process_group


def check_agreement(digest: str, group: str, what: str, detail: str = "") -> None:
    """Raise :class:`RankMismatchError` on every rank of ``group`` unless all digests are equal.

    ``what`` names the thing compared ("the program"). ``detail`` is its text: it is exchanged
    only if the digests differ, and the first line that differs is shown.
    """
    found = process_group(group)
    device = torch.device(_get_object_coll_device(found))
    mine = torch.tensor(list(hashlib.sha256(digest.encode()).digest()), dtype=torch.uint8)
    gathered = torch.ops._c10d_functional.all_gather_into_tensor.default(
        mine.to(device), found.size(), group
    )
    rows = torch.ops._c10d_functional.wait_tensor.default(gathered).view(found.size(), -1)
    holders: dict[bytes, list[int]] = {}
    for rank, row in enumerate(rows.tolist()):
        holders.setdefault(bytes(row), []).append(rank)
    if len(holders) == 1:
        return
    details: list[str] = [""] * found.size()
    dist.all_gather_object(details, detail, group=found)
    kinds = list(holders.values())
    first = f"{_ranks(kinds[0])} ha{'s' if len(kinds[0]) == 1 else 've'} one version"
    others = "".join(f", {_ranks(kind)} another" for kind in kinds[1:])
    error = RankMismatchError(f"ranks differ in {what}: {first}{others}")
    for kind in kinds[1:]:
        for note in _first_difference(kinds[0][0], kind[0], details):
            error.add_note(note)
    raise error


_MEETINGS: dict[tuple[str, str], int] = {}


def meet(group: str, what: str, *, timeout_s: float = 30.0) -> None:
    """Wait until all ranks of ``group`` are about to do ``what``, which is collective.

    Raises:
        RankMismatchError: a rank has not come after ``timeout_s`` seconds; it names the rank.
    """
    number = _MEETINGS[group, what] = _MEETINGS.get((group, what), 0) + 1
    ranks = dist.get_process_group_ranks(process_group(group))
    store = dist.distributed_c10d._get_default_store()
    keys = {rank: f"graphpar/{group}/{what}/{number}/{rank}" for rank in ranks}
    store.set(keys[dist.get_rank()], "here")
    try:
        store.wait(list(keys.values()), timedelta(seconds=timeout_s))
    except RuntimeError as error:
        absent = [rank for rank, key in keys.items() if not store.check([key])]
        others = f"{_ranks(absent)} ha{'s' if len(absent) == 1 else 've'} not"
        raise RankMismatchError(
            f"{what} must be called by all {len(ranks)} ranks: after {timeout_s:g} s {others}"
        ) from error


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _first_difference(first: int, other: int, details: list[str]) -> list[str]:
    lines = zip_longest(details[first].splitlines(), details[other].splitlines(), fillvalue="–")
    for number, (a, b) in enumerate(lines, 1):
        if a != b:
            at = f"line {number} of {max(len(d.splitlines()) for d in details)}"
            return [f"first difference, {at}:", f"  rank {first}: {a}", f"  rank {other}: {b}"]
    return []
