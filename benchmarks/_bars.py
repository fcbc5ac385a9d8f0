"""Groups of bars as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

COLOURS = ("#4c78a8", "#72b7b2", "#54a24b", "#f58518", "#e45756", "#9d755d")
WIDTH, ROW, LEFT, TOP = 960, 16, 260, 60


def bars(title: str, groups: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """A group of horizontal bars for each name; all have one scale."""
    names = list(dict.fromkeys(name for _, values in groups for name in values))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    longest = max((v for _, values in groups for v in values.values()), default=1.0) or 1.0
    rows = sum(len(values) + 1 for _, values in groups)
    height = TOP + ROW * rows + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="10" y="22" font-size="14">{escape(title)}</text>',
    ]
    for place, name in enumerate(names):
        x = 10 + 150 * place
        parts.append(f'<rect x="{x}" y="34" width="12" height="12" fill="{colours[name]}"/>')
        parts.append(f'<text x="{x + 18}" y="44">{escape(name)}</text>')
    y = TOP
    for group, values in groups:
        parts.append(f'<text x="10" y="{y + 12}">{escape(group)}</text>')
        for name, value in values.items():
            width = max(value, 0.0) / longest * (WIDTH - LEFT - 80)
            parts.append(
                f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{ROW - 3}" '
                f'fill="{colours[name]}"/>'
            )
            parts.append(f'<text x="{LEFT + width + 6:.1f}" y="{y + 11}">{value:.2f}</text>')
            y += ROW
        y += ROW
    return "\n".join([*parts, "</svg>\n"])
