"""Audit of the data: gaps, missing points, constant or repeated fields, outliers, and implausible units.

The audit works on the summaries (mean, standard deviation, minimum, maximum of every field) that the pass over the data
collects, so that nothing is read twice.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from credit_like.data import units
from credit_like.data.aliases import ALIASES
from credit_like.data.statistics import Scan, varying
from credit_like.data.store import FieldStore
from credit_like.data.times import to_text
from credit_like.naming import channel_text, exponent_of, with_units
from credit_like.outputs import begins_with, check_figure, check_own, replacing, save_figure
from credit_like.variables import Variables

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_OUTLIER = 10.0  # robust z-score: a Gaussian exceeds 6 once in 5e8 fields; slow seasonal changes stay well below 10
_ROUNDING = 1e-6  # of a limit: values are in single precision
_SHOWN = 5
_COLUMNS = ("kind", "channel", "count", "detail")
_POINTS = 600  # points of a curve, which is drawn 400 pixels wide
_PLAUSIBLE: dict[str, tuple[str, float, float]] = {
    # name in WeatherBench2: (units, lowest, highest mean of a field on Earth, at any level in use)
    "temperature": ("K", 150, 330),
    "2m_temperature": ("K", 180, 320),
    "sea_surface_temperature": ("K", 268, 310),
    "u_component_of_wind": ("m s-1", -80, 120),
    "v_component_of_wind": ("m s-1", -60, 60),
    "10m_u_component_of_wind": ("m s-1", -30, 30),
    "10m_v_component_of_wind": ("m s-1", -30, 30),
    "specific_humidity": ("kg kg-1", 0, 0.03),
    "geopotential": ("m2 s-2", -5e3, 6e5),
    "surface_pressure": ("Pa", 5e4, 1.1e5),
    "mean_sea_level_pressure": ("Pa", 9.3e4, 1.07e5),
    "total_precipitation": ("m", 0, 0.1),
}


@dataclass(frozen=True)
class AuditFinding:
    """An anomaly of the data: its kind, its channel, how often and where it first occurs, and details."""

    kind: str
    channel: str
    count: int
    detail: str


@dataclass
class Audit:
    """The findings of an audit and the summaries behind them.

    `positions` (T,), `looks` (T, C, 4) and `share` (T, C), the fraction of missing points."""

    findings: list[AuditFinding]
    channels: list[str]
    times: list[str]
    looks: NDArray[np.float64]
    share: NDArray[np.float64]
    named: list[tuple[str, str]]
    """Name in words and units of every channel."""

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Return (kind, channel, count, detail) of every finding, for a table."""
        return [(f.kind, f.channel, str(f.count), f.detail) for f in self.findings]

    @staticmethod
    def check(folder: Path) -> None:
        """Raise UserError if `save` would replace anything but an earlier audit."""
        check_own("save_loc", folder / "audit.csv", "an audit of this command", begins_with(",".join(_COLUMNS)))
        check_figure(folder / "audit.png")

    def save(self, folder: Path) -> None:
        """Write `audit.csv`, one line per finding, and `audit.png`, a page of plots."""
        with replacing(folder / "audit.csv") as draft, draft.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(_COLUMNS)
            writer.writerows(self.rows())
        self.plot(folder / "audit.png")

    def plot(self, path: Path) -> None:
        """Plot mean, range and missing share of every field over time, one panel per channel."""
        save_figure(self.figure(), path, dpi=100)

    def figure(self) -> Figure:
        """Return the figure of `plot`: levels and units in the titles, dates below the lowest panels."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        columns = min(4, len(self.channels))
        rows = -(-len(self.channels) // columns)
        height = 1.9 * rows + 0.8
        # Margins, ticks and titles are set by hand, because automatic layout draws the text of every panel several
        # times.
        figure = Figure(figsize=(4 * columns, height))
        FigureCanvasAgg(figure)
        axes = figure.subplots(rows, columns, squeeze=False, gridspec_kw={"wspace": 0.3, "hspace": 0.25}).ravel()
        figure.subplots_adjust(0.15 / columns, 0.3 / height, 1 - 0.1 / columns, 1 - 0.6 / height)
        # Draw no more points than pixels: fields that share one are reduced to mean, minimum, maximum and largest
        # missing share.
        first_P = np.unique(np.linspace(0, len(self.times), _POINTS + 1)[:-1].astype(int))
        mean_PC, low_PC, high_PC = (
            reduce.reduceat(self.looks[..., i], first_P) for reduce, i in ((np.add, 0), (np.fmin, 2), (np.fmax, 3))
        )
        mean_PC = mean_PC / np.diff(first_P, append=len(self.times))[:, None]
        share_PC = np.maximum.reduceat(self.share, first_P)
        for c, (ax, (name, declared)) in enumerate(zip(axes, self.named, strict=False)):
            exponent = exponent_of(np.array([low_PC[:, c], high_PC[:, c]]))
            low, mean, high = (values[:, c] / 10.0**exponent for values in (low_PC, mean_PC, high_PC))
            ax.fill_between(first_P, low, high, color="tab:blue", alpha=0.2, linewidth=0)
            ax.plot(first_P, mean, color="tab:blue", linewidth=0.8)
            ax.set_title(with_units(name, declared, exponent), fontsize=8, y=1.0, pad=3, loc="left")
            ax.ticklabel_format(axis="y", useOffset=False, style="plain")
            ax.set_xlim(0, len(self.times))
            if c + columns < len(self.channels):
                ax.set_xticks([])
            else:
                some = np.unique(np.linspace(0, len(self.times) - 1, 5).round().astype(int)[:-1])
                ax.set_xticks(some, [self.times[t][:10] for t in some], ha="left")
            ax.tick_params(labelsize=6)
            ax.locator_params("y", nbins=3)
            if self.share[:, c].max() > 0:
                missing = ax.twinx()
                missing.plot(first_P, share_PC[:, c], color="tab:red", linewidth=0.8)
                missing.set_ylim(0, 1)
                missing.tick_params(labelsize=6, colors="tab:red")
        for ax in axes[len(self.channels) :]:
            ax.set_visible(False)
        first, last = (time[:16].replace("T", " ") for time in (self.times[0], self.times[-1]))
        what = f"mean, range and (red) missing share by field, {first} to {last}"
        figure.suptitle(what, fontsize=9, y=1 - 0.15 / height)
        return figure


def audit(store: FieldStore, variables: Variables, whole: Scan) -> Audit:
    """Return all findings of a scan with summaries, most serious kinds first."""
    channels = Variables.channel_names(varying(variables))
    positions = np.array(sorted(whole.looks), np.int64)
    looks = np.stack([whole.looks[int(position)] for position in positions])
    none = np.zeros(len(channels), np.int64)
    points = store.grid.height * store.grid.width
    share = np.stack([whole.lacking.get(int(position), none) for position in positions]) / points
    times = [to_text(time) for time in store.times[positions]]
    fixed = (~whole.valid).mean((1, 2))
    findings = [*_gaps(store), *_units(store, variables, looks), *_invalid(store, variables, looks, times)]
    for c, channel in enumerate(channels):
        findings += _of_channel(channel, looks[:, c], share[:, c], float(fixed[c]), times, points)
    named = []
    for variable in varying(variables):
        declared = str(store.attrs(variable).get("units", ""))
        named += [(channel_text(name, store.level_units(variable)), declared) for name in variable.channels]
    return Audit(findings, channels, times, looks, share, named)


def _gaps(store: FieldStore) -> Iterator[AuditFinding]:
    steps = np.diff(store.seconds) // store.step_seconds
    at = np.flatnonzero(steps > 1)
    if len(at):
        first = ", ".join(f"{int(steps[i]) - 1} after {to_text(store.times[i])}" for i in at[:_SHOWN])
        yield AuditFinding("missing times", "all", int((steps[at] - 1).sum()), first)


def _of_channel(
    channel: str, looks: NDArray[np.float64], share: NDArray[np.float64], fixed: float, times: list[str], points: int
) -> Iterator[AuditFinding]:
    mean, std, low, high = looks.T

    def finding(kind: str, where: NDArray[np.bool_], detail: str = "") -> Iterator[AuditFinding]:
        at = np.flatnonzero(where)
        if len(at):
            shown = ", ".join(times[i] for i in at[:_SHOWN]) + (", …" if len(at) > _SHOWN else "")
            yield AuditFinding(kind, channel, len(at), f"{shown}{detail}")

    yield from finding("missing fields", share == 1)
    more = (share < 1) & (share > fixed + 1e-12)
    yield from finding(
        "missing points that are there at other times", more, f"; up to {share[more].max(initial=0):.2%}"
    )
    if 0 < fixed < 1:
        yield AuditFinding(
            "points that never have data", channel, round(fixed * points), f"{fixed:.2%} of the grid's points"
        )
    there = share < 1
    yield from finding("constant fields", there & (std == 0))
    same = np.zeros(len(times), bool)
    same[1:] = np.all(looks[1:] == looks[:-1], axis=1) & (std[1:] > 0)
    yield from finding("fields like the one before", same)
    for name, values in (("mean", mean), ("minimum", low), ("maximum", high)):
        score = robust_score(values)
        yield from finding(
            f"outliers of the {name}", score > _OUTLIER, f"; up to {np.nanmax(score, initial=0):.0f} sigma"
        )


def robust_score(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return |x − median| / (1.4826 · median |x − median|), a Gaussian's z-score; 0 where that is undefined.

    The scale is at least a quarter of the range of the middle 90 %, because more than half of the values may be next to equal,
    as those of a sea-surface temperature are whose maximum is the same for most of the year.
    """
    if not np.isfinite(values).any():
        return np.zeros_like(values)
    apart = np.abs(values - np.nanmedian(values))
    scale = max(1.4826 * np.nanmedian(apart), np.ptp(np.nanquantile(values, (0.05, 0.95))) / 4)
    return np.nan_to_num(apart / scale) if scale > 0 else np.zeros_like(values)


def _units(store: FieldStore, variables: Variables, looks: NDArray[np.float64]) -> Iterator[AuditFinding]:
    """Find means of known variables that are implausible on Earth in the units that the files declare."""
    slices = Variables.slices(varying(variables))
    for variable in varying(variables):
        long = next((name for group in ALIASES if variable.name in group for name in group if name in _PLAUSIBLE), None)
        if long is None:
            continue
        expected, lowest, highest = _PLAUSIBLE[long]
        declared = store.attrs(variable).get("units", expected)
        try:
            factor, offset = units.conversion(declared, expected)
        except ValueError:
            yield AuditFinding("suspicious units", variable.name, 1, f"{declared!r} for {long}, expected {expected!r}")
            continue
        mean = factor * looks[:, slices[variable.name], 0] + offset
        middle = float(np.nanmedian(mean))
        if not lowest <= middle <= highest:
            told = f"median {middle:.4g} {expected} as {declared!r}, expected {lowest:g} to {highest:g}"
            yield AuditFinding("suspicious units", variable.name, 1, told)


def _invalid(
    store: FieldStore, variables: Variables, looks: NDArray[np.float64], times: list[str]
) -> Iterator[AuditFinding]:
    """Find fields with values outside the range that the files call valid."""
    slices = Variables.slices(varying(variables))
    for variable in varying(variables):
        lowest, highest = store.valid_range(variable)
        rounding = _ROUNDING * max((abs(limit) for limit in (lowest, highest) if np.isfinite(limit)), default=0)
        for channel, low, high in zip(variable.channels, *looks[:, slices[variable.name], 2:].T, strict=True):
            at = np.flatnonzero((low < lowest - rounding) | (high > highest + rounding))
            if len(at):
                told = (
                    f"{np.nanmin(low):.4g} to {np.nanmax(high):.4g}, valid in the files {lowest:.4g} to {highest:.4g}"
                )
                yield AuditFinding("values outside the valid range", channel, len(at), f"{times[at[0]]}; {told}")
