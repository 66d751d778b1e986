"""Lags and false alarms of the detectors as an SVG: one panel a noise level, one for the false alarms."""

from __future__ import annotations

import math
from html import escape
from typing import Any

COLOURS = ("#2563eb", "#d97706", "#6b7280", "#059669", "#be185d", "#7c3aed", "#0891b2")
WIDTH, HEIGHT, LEFT, TOP, GAP = 330, 230, 70, 110, 90
NEVER = 800.0  # where lags stand that fewer than 90% of the runs have
DASH = {"white": "", "ar1_0.8": "6 4"}

Row = dict[str, Any]


def plot(results: list[Row]) -> str:
    """Lag that 90% of the runs stay under, against the size of the shift, and false alarms per 1000 steps."""
    shown = [r for r in results if "PageHinkley" not in r["detector"] or "delta 0.5" in r["detector"]]
    sds = sorted({row["sd"] for r in shown for row in r["lags"]})
    panels = [_lags(shown, sd, *_corner(number)) for number, sd in enumerate(sds)]
    panels.append(_false_alarms(shown, *_corner(len(sds))))
    names = "\n".join(
        f'<rect x="{LEFT + (i % 3) * 270}" y="{14 + (i // 3) * 20}" width="12" height="12" fill="{COLOURS[i]}"/>'
        f'<text x="{LEFT + (i % 3) * 270 + 18}" y="{24 + (i // 3) * 20}">{escape(r["detector"])}</text>'
        for i, r in enumerate(shown)
    )
    wide, high = LEFT + 2 * WIDTH + GAP + 20, TOP + 2 * HEIGHT + GAP + 60
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" height="{high}" '
        f'font-family="system-ui, sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n'
        f"{names}\n"
        f'<text x="{LEFT}" y="{TOP - 28}">lags: solid white noise, dashed AR(1) with phi = 0.8</text>\n'
        + "\n".join(panels)
        + "\n</svg>\n"
    )


def _corner(number: int) -> tuple[int, int]:
    return LEFT + (number % 2) * (WIDTH + GAP), TOP + (number // 2) * (HEIGHT + GAP)


def _grid(x: int, y: int, title: str, marks: dict[str, float]) -> list[str]:
    """Title and horizontal lines; ``marks``: label -> height in [0, 1]."""
    parts = [f'<text x="{x}" y="{y - 8}" font-weight="600">{escape(title)}</text>']
    for label, share in marks.items():
        at = y + HEIGHT * (1 - share)
        parts.append(f'<line x1="{x}" x2="{x + WIDTH}" y1="{at:.1f}" y2="{at:.1f}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="{x - 6}" y="{at + 4:.1f}" text-anchor="end">{escape(label)}</text>')
    return parts


def _share(lag: float | None) -> float:
    return math.log10(1 + (NEVER if lag is None else lag)) / math.log10(1 + NEVER)


def _lags(results: list[Row], sd: float, x: int, y: int) -> str:
    marks = {str(lag): _share(lag) for lag in (0, 1, 3, 10, 30, 100)} | {"not found": 1.0}
    parts = _grid(x, y, f"90% lag in steps, noise sd {sd:g} (log)", marks)
    shifts = sorted({row["shift"] for r in results for row in r["lags"]})
    for i, shift in enumerate(shifts):
        across = x + (i + 0.5) * WIDTH / len(shifts)
        parts.append(f'<text x="{across:.1f}" y="{y + HEIGHT + 16}" text-anchor="middle">{shift:g}x</text>')
    for number, result in enumerate(results):
        for kind, dash in DASH.items():
            rows = {r["shift"]: r["p90"] for r in result["lags"] if r["sd"] == sd and r["noise"] == kind}
            points = " ".join(
                f"{x + (i + 0.5) * WIDTH / len(shifts) + 3 * number - 6:.1f},{y + HEIGHT * (1 - _share(rows[s])):.1f}"
                for i, s in enumerate(shifts)
            )
            parts.append(
                f'<polyline points="{points}" fill="none" stroke="{COLOURS[number]}" stroke-width="2" '
                f'stroke-dasharray="{dash}"/>'
            )
    return "\n".join(parts)


def _false_alarms(results: list[Row], x: int, y: int) -> str:
    kinds = list(results[0]["false_alarms"])
    top = max(1.0, *(rate["per_1000"] for r in results for rate in r["false_alarms"].values()))
    marks = {"0": 0.0, "0.1": _rate(0.1, top), "1": _rate(1, top), f"{top:.1f}": 1.0}
    parts = _grid(x, y, "False alarms per 1000 steps", marks)
    group, bar = WIDTH / len(kinds), WIDTH / len(kinds) / (len(results) + 1)
    for i, kind in enumerate(kinds):
        middle = x + (i + 0.5) * group
        parts.append(f'<text x="{middle:.1f}" y="{y + HEIGHT + 16}" text-anchor="middle">{escape(kind)}</text>')
        for number, result in enumerate(results):
            high = HEIGHT * _rate(result["false_alarms"][kind]["per_1000"], top)
            parts.append(
                f'<rect x="{x + i * group + (number + 0.5) * bar:.1f}" y="{y + HEIGHT - high:.1f}" '
                f'width="{bar:.1f}" height="{high:.1f}" fill="{COLOURS[number]}"/>'
            )
    return "\n".join(parts)


def _rate(rate: float, top: float) -> float:
    return math.log1p(100 * rate) / math.log1p(100 * top)
