"""Time and memory against N and V as an SVG, both axes logarithmic: linear growth is a straight line of slope one."""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape
from typing import Any

COLOURS = ("#2563eb", "#d97706", "#6b7280", "#059669", "#be185d")
WIDTH, HEIGHT, LEFT, TOP, GAP_X, GAP_Y = 360, 250, 70, 70, 90, 80

Row = dict[str, Any]


def scaling_plot(results: list[Row]) -> str:
    """Four panels from the results of ``driftscope bench --scaling``: trained heads solid, frozen ones dashed."""
    names = list(dict.fromkeys(p["name"] for r in results for p in r["paths"]))
    over_n, over_v = _series(results, "rows"), _series(results, "vocabulary")
    panels = [
        ("Time against N", over_n, "rows", "N, tokens", lambda p: p["sustained_ms"], "ms"),
        ("Peak memory against N", over_n, "rows", "N, tokens", lambda p: _gigabytes(p), "GB"),
        ("Time against V", over_v, "vocabulary", "V, vocabulary", lambda p: p["sustained_ms"], "ms"),
        ("Peak memory against V", over_v, "vocabulary", "V, vocabulary", lambda p: _gigabytes(p), "GB"),
    ]
    body = []
    for i, (title, rows, key, axis, value, unit) in enumerate(panels):
        x = LEFT + (i % 2) * (WIDTH + GAP_X)
        y = TOP + (i // 2) * (HEIGHT + GAP_Y)
        body.append(_panel(x, y, f"{title} ({_fixed(rows, key)})", rows, key, axis, value, unit, names))
    total_x, total_y = LEFT + 2 * WIDTH + GAP_X + 20, TOP + 2 * HEIGHT + GAP_Y + 60
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total_x} {total_y}" width="{total_x}" '
        f'height="{total_y}" font-family="system-ui, sans-serif" font-size="12">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{_legend(names)}\n' + "\n".join(body) + "\n</svg>\n"
    )


def _gigabytes(path: Row) -> float | None:
    return None if path["peak_bytes"] is None else float(path["peak_bytes"]) / 1e9


def _series(results: list[Row], key: str) -> list[Row]:
    """The results in which only ``key`` varies: those that share the most common value of the other size."""
    other = "vocabulary" if key == "rows" else "rows"
    values = [r[other] for r in results]
    common = max(set(values), key=values.count)
    return sorted((r for r in results if r[other] == common), key=lambda r: float(r[key]))


def _fixed(rows: list[Row], key: str) -> str:
    other = "V" if key == "rows" else "N"
    return f"{other} = {rows[0]['vocabulary' if key == 'rows' else 'rows']}, D = {rows[0]['hidden_size']}"


def _panel(
    x: int,
    y: int,
    title: str,
    rows: list[Row],
    key: str,
    axis: str,
    value: Callable[[Row], float | None],
    unit: str,
    names: list[str],
) -> str:
    lines = []
    for number, name in enumerate(names):
        for trainable in (True, False):
            points = [
                (float(r[key]), v)
                for r in rows
                if r["trainable"] is trainable
                for p in r["paths"]
                if p["name"] == name and not p["failed"] and (v := value(p)) is not None
            ]
            lines.append((COLOURS[number % len(COLOURS)], "" if trainable else "6 4", points))
    xs = [px for _, _, points in lines for px, _ in points]
    ys = [py for _, _, points in lines for _, py in points]
    x0, x1 = math.log2(min(xs)), math.log2(max(xs))
    y0, y1 = math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys)))

    def at(px: float, py: float) -> tuple[float, float]:
        across = (math.log2(px) - x0) / ((x1 - x0) or 1) * WIDTH
        up = (math.log10(py) - y0) / ((y1 - y0) or 1) * HEIGHT
        return x + across, y + HEIGHT - up

    parts = [f'<text x="{x}" y="{y - 10}" font-weight="600">{escape(title)}</text>']
    for power in range(y0, y1 + 1):
        _, gy = at(min(xs), 10.0**power)
        parts.append(f'<line x1="{x}" x2="{x + WIDTH}" y1="{gy:.1f}" y2="{gy:.1f}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="{x - 6}" y="{gy + 4:.1f}" text-anchor="end">{10.0**power:g} {unit}</text>')
    for tick in sorted(set(xs)):
        gx, _ = at(tick, 10.0**y0)
        parts.append(f'<text x="{gx:.1f}" y="{y + HEIGHT + 16}" text-anchor="middle">{tick:.0f}</text>')
    parts.append(f'<text x="{x + WIDTH / 2}" y="{y + HEIGHT + 34}" text-anchor="middle">{escape(axis)}</text>')
    for colour, dash, points in lines:
        placed = [at(px, py) for px, py in points]
        joined = " ".join(f"{px:.1f},{py:.1f}" for px, py in placed)
        parts.append(
            f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>'
        )
        parts += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{colour}"/>' for px, py in placed]
    return "\n".join(parts)


def _legend(names: list[str]) -> str:
    parts = []
    for number, name in enumerate(names):
        x = LEFT + number * 170
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f'<rect x="{x}" y="16" width="14" height="14" fill="{colour}"/>')
        parts.append(f'<text x="{x + 20}" y="28">{escape(name)}</text>')
    x = LEFT + len(names) * 170
    parts.append(f'<text x="{x}" y="28">solid: trained head, dashed: frozen</text>')
    return "\n".join(parts)
