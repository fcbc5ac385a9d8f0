"""Memory over time as a picture: stacked areas by kind, as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from graphpar.passes.choose_recompute.budget import BINARY, format_bytes
from graphpar.plan.curve import by_kind, memory_curve
from graphpar.plan.step import StepPlan

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 1000, 420, 80, 190, 40, 44
COLOURS = ("#4c78a8", "#72b7b2", "#54a24b", "#9d755d", "#f58518", "#e45756")
COLUMNS = 2000


def memory_svg(step: StepPlan, device: int, title: str) -> str:
    """The memory of one stage through a step; a dashed line is the budget.

    Of several samples in a column of the picture the highest is drawn.
    """
    samples = memory_curve(step, device)
    rows = by_kind(step, device)
    end_us = samples[-1].start_us or 1.0
    columns = _columns([s.start_us / end_us for s in samples], [row for _, row in rows])
    budget = step.setup.budget_bytes or 0
    top = max(max(map(sum, zip(*(row for _, row in rows), strict=True))), budget, 1) * 1.05

    def x(part: float) -> float:
        return LEFT + part * (WIDTH - LEFT - RIGHT)

    def y(nbytes: float) -> float:
        return HEIGHT - BOTTOM - nbytes / top * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="14">{escape(title)}</text>',
    ]
    below = [0] * len(columns)
    legend = TOP + 20 * sum(any(row) for _, row in rows)
    for number, (kind, _) in enumerate(rows):
        values = [column[1][number] for column in columns]
        above = [b + v for b, v in zip(below, values, strict=True)]
        if not any(values):
            continue
        upper = _steps([c[0] for c in columns], above)
        lower = _steps([c[0] for c in columns], below)
        outline = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in (*upper, *reversed(lower)))
        parts.append(
            f'<polygon points="{outline}" fill="{COLOURS[number]}"><title>{kind}</title></polygon>'
            f'<rect x="{WIDTH - RIGHT + 10}" y="{legend - 10}" width="10" height="10" '
            f'fill="{COLOURS[number]}"/>'
            f'<text x="{WIDTH - RIGHT + 25}" y="{legend}">{kind} {format_bytes(max(values))}</text>'
        )
        legend -= 20
        below = above
    power = min(int(math.log(top, 1024)), len(BINARY) - 1)
    unit = 1024**power
    for many in _ticks(top / unit):
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(many * unit):.1f}" '
            f'y2="{y(many * unit):.1f}" stroke="#00000022"/><text x="{LEFT - 6}" '
            f'y="{y(many * unit) + 4:.1f}" text-anchor="end">{many:g} {BINARY[power]}</text>'
        )
    second_us, word = (1e6, "s") if end_us >= 1e7 else (1e3, "ms")
    for many in _ticks(end_us / second_us):
        parts.append(
            f'<text x="{x(many * second_us / end_us):.1f}" y="{HEIGHT - BOTTOM + 18}" '
            f'text-anchor="middle">{many:g}</text>'
        )
    if budget:
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(budget):.1f}" y2="{y(budget):.1f}" '
            f'stroke="black" stroke-dasharray="6 4"><title>budget</title></line>'
            f'<text x="{WIDTH - RIGHT - 4}" '
            f'y="{y(budget) - 4:.1f}" text-anchor="end">budget {format_bytes(budget)}</text>'
        )
    parts.append(
        f'<text x="{x(0.5):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{word}</text></svg>'
    )
    return "\n".join(parts) + "\n"


def _ticks(most: float) -> list[float]:
    """Round numbers from 0 to ``most``, four to eight of them."""
    power = 10.0 ** math.floor(math.log10(most / 3))
    step = next(step for step in (5 * power, 2 * power, power) if most / step >= 3)
    return [step * i for i in range(int(most / step) + 1)]


def _columns(
    places: Sequence[float], rows: Sequence[Sequence[int]]
) -> list[tuple[float, tuple[int, ...]]]:
    """At most ``COLUMNS`` (place, values), of each column of the picture the highest sum."""
    found: dict[int, tuple[float, tuple[int, ...]]] = {}
    for place, values in zip(places, zip(*rows, strict=True), strict=True):
        column = int(place * COLUMNS)
        if column not in found or sum(values) > sum(found[column][1]):
            found[column] = place, tuple(values)
    return list(found.values())


def _steps(places: Sequence[float], values: Sequence[int]) -> list[tuple[float, int]]:
    """The corners of a line that keeps each value up to the next place."""
    corners: list[tuple[float, int]] = []
    for place, value in zip(places, values, strict=True):
        if not corners or value != corners[-1][1]:
            corners += [(place, corners[-1][1])] if corners else []
            corners.append((place, value))
    return [*corners, (1.0, values[-1])]
