"""Figures of made data, as small pictures: `python -m tests.evaluation.pictures` draws those that tests compare with anew."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import xarray as xr
from matplotlib.figure import Figure
from PIL import Image

from credit_like.data.tools.audit import Audit
from credit_like.evaluation import plots
from credit_like.evaluation.charts import Row, Style, chart
from credit_like.evaluation.coasts import natural_earth
from credit_like.evaluation.scorecard import channels
from credit_like.grid import Grid
from credit_like.plan.estimate import PlanReport, in_order
from credit_like.plan.layouts import Candidate
from credit_like.plan.memory_plot import memory_figure
from tests.plan.test_estimate import MACHINE, rank, row
from tests.test_docs import script

STORED = Path(__file__).parent / "stored"
DPI = 45
LABELS = {"rmse": "RMSE", "acc": "ACC", "bias": "bias"}


def grid(height: int = 61) -> Grid:
    return Grid(np.linspace(90, -90, height), np.arange(2 * (height - 1)) * 180 / (height - 1))


def fields(kind: str, on: Grid, lead: int, error: float = 0.0) -> np.ndarray:
    """Return temperature, wind or rain of travelling waves, with an error of phase that grows with the lead (hours)."""
    north, east = np.deg2rad(np.meshgrid(on.latitude, on.longitude, indexing="ij"))
    shift = (0.6 + error) * lead / 72
    waves = sum(
        np.cos(north) ** m * np.sin(north * (1 + m % 3)) * np.cos(m * (east - shift * (1 + m / 7)) + m**2)
        for m in range(2, 10)
    )
    if kind == "temperature":
        return 300 - 45 * np.sin(north) ** 2 + 6 * waves
    if kind == "wind":
        return 30 * np.exp(-(((np.abs(north) - 0.7) / 0.3) ** 2)) - 8 * np.cos(north) ** 8 + 14 * waves
    return np.maximum(
        0.0, 2e-3 * waves * np.cos(north) + 1.5e-3 * np.exp(-((north / 0.15) ** 2)) * (1 + np.sin(5 * east))
    )


def rows(kind: str, on: Grid, leads: tuple[int, ...]) -> list[Row]:
    start = np.datetime64("2020-01-01T00")
    return [
        Row(
            fields(kind, on, lead),
            fields(kind, on, lead, 0.15),
            str(start + lead).replace("T", " ") + " UTC",
            f"{lead} h",
        )
        for lead in leads
    ]


def chart_of(kind: str, name: str, units: str, leads: tuple[int, ...], style: Style, on: Grid | None = None) -> Figure:
    on = on or grid()
    return chart(name, units, "2020-01-01 00 UTC", rows(kind, on, leads), on, natural_earth(), style)


def region() -> Grid:
    return Grid(np.arange(75.0, 29.9, -1.5), np.arange(-25.0, 45.1, 1.5))


def scores() -> xr.Dataset:
    """Return scores that grow with the lead, of two sources and climatology, on two levels."""
    sources, metrics = (
        ["model", "persistence", "climatology"],
        ["rmse", "acc", "bias", "spread", "rmse_low", "rmse_high"],
    )
    hours = np.arange(6, 121, 6)
    error = np.stack([1 - np.exp(-hours / 90), 1 - np.exp(-hours / 40), np.full(len(hours), 0.95)])
    values = np.stack([8 * error, 1 - error, 0.3 * error - 0.1, 6 * error, 7.5 * error, 8.5 * error], 1)
    values[2, 1] = np.nan  # climatology has no anomaly
    values = values[:, :, None, :, None] * np.array([1.0, 0.7])
    dims = ("source", "metric", "region", "lead_time", "level")
    one = values[..., 0] * np.where(np.array(metrics) == "acc", 1, 2.5e-4)[:, None, None]
    coords = {
        "source": sources,
        "metric": metrics,
        "region": ["global"],
        "level": ("level", [25000.0, 85000.0], {"units": "Pa"}),
    }
    coords["lead_time"] = hours.astype("timedelta64[h]").astype("timedelta64[ns]")
    dataset = xr.Dataset({"u": (dims, values, {"units": "m s**-1"}), "rain": (dims[:-1], one, {"units": "m"})}, coords)
    dataset["u"][:, 1] = dataset["u"][:, 1].clip(0, 1)
    rank = np.repeat((1.5 - np.sin(np.pi * np.arange(11) / 10))[None], len(hours), 0)
    rank = rank / rank.sum(1, keepdims=True)
    dataset["rain_rank_histogram"] = (
        ("region", "source", "lead_time", "rank"),
        np.stack([rank, rank * np.nan, rank * np.nan])[None],
    )
    p = np.arange(11) / 10
    parts = np.stack([np.exp(-3 * p) / np.exp(-3 * p).sum(), p, np.clip(0.1 + 0.75 * p, 0, 1)], 1)
    parts = np.broadcast_to(parts, (1, 3, len(hours), 1, 11, 3))
    dims = ("region", "source", "lead_time", "threshold", "probability_bin", "reliability_part")
    dataset["rain_reliability"] = (dims, parts)
    dataset = dataset.assign_coords(
        threshold=["above quantile 0.9"], reliability_part=["fraction", "probability", "frequency"]
    )
    dataset["initial_times"] = 40
    return dataset


def curves(metric: str) -> Figure:
    panels = [(name, one) for name, one in channels(scores()) if np.isfinite(one.sel(metric=metric)).any()]
    return plots._scores_figure(scores(), panels, metric, LABELS[metric])


def audit() -> Figure:
    days = np.arange(800)
    times = [f"{np.datetime64('2019-01-01') + day}T00:00:00" for day in days]
    mean = np.stack(
        [280 + 12 * np.sin(days / 58), 2.4e-6 + 1e-6 * np.cos(days / 58), 1e7 * (1 + 0.3 * np.sin(days / 58))], 1
    )
    looks = np.stack([mean, mean * 0, mean * 0.9, mean * 1.08], -1)
    share = np.zeros((800, 3))
    share[300:340, 1] = 0.4
    named = [("t 850 hPa", "K"), ("q 200 hPa", "kg kg**-1"), ("insolation", "J m**-2")]
    return Audit([], ["t@85000", "q@20000", "insolation"], times, looks, share, named).figure()


def healthy() -> Figure:
    """The curves of the page on healthy runs, of a made-up log."""
    steps = np.arange(1, 301)
    noise = 1 + 0.1 * np.sin(steps * 1.7)
    rows = {
        "step": steps, "loss": noise * (0.2 + np.exp(-steps / 40)), "grad_norm": noise * (0.5 + 3 * np.exp(-steps / 20)),
        "learning_rate": 1e-3 * np.minimum(steps / 30, np.cos(steps / 200)), "data_wait": 0.01 * noise,
    }  # fmt: skip
    validations = {"step": steps[59::60], "valid_loss": 0.25 + np.exp(-steps[59::60] / 40)}
    return script("showcase").curves(pd.concat([pd.DataFrame(rows), pd.DataFrame(validations)]))


def memory() -> Figure:
    """The plot of `plan`, of made-up layouts that hold less the more ranks there are."""
    parts = {
        "activations": 0.55,
        "parameters": 0.1,
        "optimiser state": 0.2,
        "gathered parameters": 0.1,
        "gradients": 0.05,
    }
    reports = []
    for world in (4, 8, 16):
        rows = []
        for layout, gigabytes in (
            (Candidate(world), 20.0),
            (Candidate(world // 2, domain=2), 11.0),
            (Candidate(world // 4, domain=4, columns=2), 6.0),
        ):
            peak = gigabytes * 1e9 / (1 + world / 16)
            held = {name: int(peak * part) for name, part in parts.items()}
            rows.append(row(layout, replace(rank(int(peak)), parts=held)))
        reports.append(PlanReport("made up", world, MACHINE, in_order(rows), ()))
    return memory_figure(reports)


FIGURES = {
    "robinson": lambda: chart_of("temperature", "t 850 hPa", "K", (6, 72), Style()),
    "plate-carree": lambda: chart_of("wind", "u 250 hPa", "m s**-1", (72,), Style("plate-carree", (0, 180))),
    "region": lambda: chart_of("temperature", "t 850 hPa", "K", (72,), Style(), region()),
    "orthographic": lambda: chart_of("wind", "u 250 hPa", "m s**-1", (72,), Style("orthographic", (40, -60))),
    "polar": lambda: chart_of("rain", "precipitation", "m", (6, 72), Style("north-polar", error_scale="common")),
    "rmse": lambda: curves("rmse"),
    "acc": lambda: curves("acc"),
    "bias": lambda: curves("bias"),
    "spread": lambda: plots._spread_figure(scores()),
    "rank-histogram": lambda: plots._rank_figure(scores()),
    "reliability": lambda: plots._reliability_figure(scores()),
    "audit": audit,
    "healthy": healthy,
    "memory": memory,
}


def draw(name: str, path: Path, dpi: int = DPI) -> Path:
    """Draw a figure with the fonts and the settings that matplotlib ships."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        FIGURES[name]().savefig(path, dpi=dpi, metadata={"Software": None})
    with Image.open(path) as picture:  # with few colours the files are small
        picture.convert("RGB").quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)
    return path


def main() -> None:
    STORED.mkdir(exist_ok=True)
    for name in FIGURES:
        path = draw(name, STORED / f"{name}.png")
        print(f"{path} {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
