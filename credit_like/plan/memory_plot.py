"""The plot of `credit-like plan --plot`: memory against ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from credit_like.errors import UserError
from credit_like.layout import domain_text
from credit_like.outputs import begins_with, check_own, replacing
from credit_like.plan.estimate import PlanReport, PlanRow

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MARK = "Drawn by credit-like plan"
_KEYS = {".png": "Software", ".svg": "Creator", ".pdf": "Creator"}
"""Ending of the file → key of its metadata that says who made it."""


def check_plot(path: Path) -> None:
    """Raise UserError where the plot cannot be written, or would replace anything but an earlier one."""
    if path.suffix not in _KEYS:
        raise UserError(f"--plot: expected a file that ends in {', '.join(_KEYS)}, got {path}; change its name")
    if not path.absolute().parent.is_dir():
        raise UserError(
            f"--plot: expected a file in an existing folder, got {path}; create the folder or change the path"
        )
    check_own("--plot", path, "an earlier plot of this command", begins_with(_MARK))


def plot_memory(reports: Sequence[PlanReport], path: Path) -> None:
    """Write `memory_figure` to a file."""
    with replacing(path) as draft:
        memory_figure(reports).savefig(draft, format=path.suffix[1:], metadata={_KEYS[path.suffix]: _MARK})


def memory_figure(reports: Sequence[PlanReport]) -> Figure:
    """Return a figure of the peak memory of every layout against the ranks, and of the parts of the recommended layouts."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    every, parts = figure.subplots(1, 2)
    usable, worlds = reports[0].machine.usable / 1e9, [report.world for report in reports]
    for domain in sorted({row.layout.shape for report in reports for row in report.rows}):
        points = [(r.world, row.fullest.peak / 1e9) for r in reports for row in r.rows if row.layout.shape == domain]
        every.plot(*zip(*points, strict=True), "o", alpha=0.6, label=f"domain {domain_text(domain)}")
    best = [(r.world, r.recommended or r.rows[0]) for r in reports if r.rows]
    every.plot(
        *_peaks(best), "o-", color="black", markerfacecolor="none", markersize=10, linewidth=0.8, label="recommended"
    )
    every.axhline(usable, color="black", linestyle="--")
    every.text(0.99, usable, "usable on a GPU", transform=every.get_yaxis_transform(), ha="right", va="bottom")
    every.set_xscale("log", base=2)
    every.set_yscale("log")
    every.set_xticks(worlds, [str(world) for world in worlds])
    every.minorticks_off()
    low, high = every.get_ylim()
    ticks = [step * 10.0**power for power in range(-3, 4) for step in (1, 2, 5) if low <= step * 10.0**power <= high]
    every.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    every.set(xlabel="ranks", ylabel="peak memory of a rank (GB)", title="Every layout")
    every.grid(alpha=0.3)
    every.legend(fontsize="small")
    sizes: dict[str, list[float]] = {}
    for at, (_, row) in enumerate(best):
        for name, size in row.fullest.parts.items():
            if size:
                sizes.setdefault(name, [0.0] * len(best))[at] = size / 1e9
    foot = [0.0] * len(best)
    for name in sorted(sizes, key=lambda name: -max(sizes[name])):
        parts.bar([str(world) for world, _ in best], sizes[name], 0.6, bottom=foot, label=name)
        foot = [a + b for a, b in zip(foot, sizes[name], strict=True)]
    parts.set(xlabel="ranks", ylabel="GB", title="Fullest rank of the recommended layout")
    parts.grid(axis="y", alpha=0.3)
    parts.set_axisbelow(True)
    parts.set_ylim(0, 1.3 * max(foot, default=1.0))  # room for the legend
    parts.legend(fontsize="small")
    return figure


def _peaks(rows: Sequence[tuple[int, PlanRow]]) -> tuple[list[int], list[float]]:
    return [world for world, _ in rows], [row.fullest.peak / 1e9 for _, row in rows]
