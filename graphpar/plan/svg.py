"""Memory over time as a picture: stacked areas by kind, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from graphpar.passes.choose_recompute.budget import format_bytes
from graphpar.plan.curve import by_kind, memory_curve
from graphpar.plan.step import StepPlan

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 960, 420, 80, 150, 40, 44
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
    for number, (kind, _) in enumerate(rows):
        values = [column[1][number] for column in columns]
        above = [b + v for b, v in zip(below, values, strict=True)]
        if any(values):
            upper = _steps([c[0] for c in columns], above)
            lower = _steps([c[0] for c in columns], below)
            outline = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in (*upper, *reversed(lower)))
            parts.append(
                f'<polygon points="{outline}" fill="{COLOURS[number]}">'
                f"<title>{kind}</title></polygon>"
            )
        legend = TOP + 20 * (len(rows) - number)
        most = format_bytes(max(values))
        parts.append(
            f'<rect x="{WIDTH - RIGHT + 10}" y="{legend - 10}" width="10" height="10" '
            f'fill="{COLOURS[number]}"/>'
            f'<text x="{WIDTH - RIGHT + 25}" y="{legend}">{kind} {most}</text>'
        )
        below = above
    for tick in range(5):
        nbytes = top / 1.05 * tick / 4
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(nbytes):.1f}" y2="{y(nbytes):.1f}" '
            f'stroke="#00000022"/><text x="{LEFT - 6}" y="{y(nbytes) + 4:.1f}" '
            f'text-anchor="end">{format_bytes(int(nbytes))}</text>'
            f'<text x="{x(tick / 4):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">'
            f"{end_us * tick / 4 / 1000:.4g}</text>"
        )
    if budget:
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(budget):.1f}" y2="{y(budget):.1f}" '
            f'stroke="black" stroke-dasharray="6 4"><title>budget</title></line>'
        )
    parts.append(f'<text x="{x(0.5):.1f}" y="{HEIGHT - 8}" text-anchor="middle">ms</text></svg>')
    return "\n".join(parts) + "\n"


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
