"""The plot of `credit-like plan --plot`: memory against ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from credit_like.errors import UserError
from credit_like.outputs import begins_with, check_own, replacing
from credit_like.plan.estimate import PlanReport

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
    """Plot the peak memory of every layout against the ranks, and the memory parts of the recommended layouts."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    every, parts = figure.subplots(1, 2)
    domains = sorted({row.layout.domain for report in reports for row in report.rows})
    for domain in domains:
        points = [(r.world, row.fullest.peak / 1e9) for r in reports for row in r.rows if row.layout.domain == domain]
        every.plot(*zip(*points, strict=True), "o", alpha=0.6, label=f"domain {domain}")
    every.axhline(reports[0].machine.usable / 1e9, color="black", linestyle="--", label="usable")
    every.set(xscale="log", yscale="log", xlabel="ranks", ylabel="peak memory of a rank, GB", title="every layout")
    every.set_xscale("log", base=2)
    every.legend()
    best = [(r.world, r.recommended or r.rows[0]) for r in reports if r.rows]
    names = sorted({name for _, row in best for name, size in row.fullest.parts.items() if size})
    foot = [0.0] * len(best)
    for name in names:
        sizes = [row.fullest.parts.get(name, 0) / 1e9 for _, row in best]
        parts.bar([str(world) for world, _ in best], sizes, bottom=foot, label=name)
        foot = [a + b for a, b in zip(foot, sizes, strict=True)]
    parts.set(xlabel="ranks", ylabel="GB", title="recommended layout")
    parts.legend(fontsize="small")
    with replacing(path) as draft:
        figure.savefig(draft, format=path.suffix[1:], metadata={_KEYS[path.suffix]: _MARK})
