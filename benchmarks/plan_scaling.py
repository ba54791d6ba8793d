"""Simulate the training of WXFormer at 0.25° and 0.1° on 128 to 8,192 H100: the tables and figures of docs/scaling.md.

    python benchmarks/plan_scaling.py [--traces FILE] [--processes 2] [--gpu h100] [--output FOLDER]

Files: plan-scaling.md (benchmarks/results) and plan-scaling.svg (docs/images).

One rank of each layout is simulated, that with the fullest box, in a small run: 8 ranks (one node) or, if more share a sample,
all of these hold a copy of the model, and there are 4 copies. Further copies change only the ranks of the collectives that cross
copies, so the events are then replayed on any number of GPUs; the micro-batches that a replica adds up are repeated in the same
way. `--traces` keeps the simulated ranks, which take minutes; the rest takes seconds.
"""

from __future__ import annotations

import argparse
import datetime as dt
import math
import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.plan import MODELS, experiment
from credit_like.layout import domain_text
from credit_like.plan.estimate import Estimate
from credit_like.plan.events import Event, Sample, Simulated, Start, Times, play
from credit_like.plan.layouts import Candidate
from credit_like.plan.machine import Machine, machine_of
from credit_like.plan.meter import _compact
from credit_like.plan.run import grid_of, simulate_all
from credit_like.plan.simulate import Rank

Shape = tuple[int, int, int]
"""Ranks along rows and columns, and tensor ranks of each box."""

SHAPES: dict[str, tuple[Shape, ...]] = {
    "0.25°": ((1, 1, 1), (2, 1, 1), (4, 1, 1), (4, 2, 1), (4, 4, 1), (4, 8, 1), (4, 8, 2), (4, 8, 4)),
    "0.1°": ((2, 1, 1), (4, 1, 1), (4, 2, 1), (4, 4, 1), (8, 4, 1), (8, 8, 1), (8, 16, 1), (8, 16, 2)),
}
"""Powers of two that leave each rank a window at every stage; tensor ranks where no smaller box does."""
GPUS = (128, 256, 512, 1024, 2048, 4096, 8192)
BATCHES = (32, 128, 1024)
COPIES, NODE, MORE = 4, 8, 4
HEAD = (
    "{}, made with `python benchmarks/plan_scaling.py --gpu {}`. Nothing is measured: the figures do not depend on the machine\n"
    "that simulates them."
)
SCHEDULE = ((124_000, 1), (26_000, 8))
"""Updates and forecast steps of each: single-step training and the rollouts after it (Schreck et al. 2025)."""


def layout_of(shape: Shape) -> Candidate:
    rows, columns, tensor = shape
    sharing = rows * columns * tensor
    world = COPIES * max(NODE, sharing)
    return Candidate(world // sharing, tensor, rows * columns, columns=columns, replicate=COPIES)


def fullest(layout: Candidate) -> list[int]:
    """Return the rank with an interior box, which has no padding beyond a pole."""
    rows, columns = layout.shape
    return [(rows - 1) // 2 * columns + (columns - 1) // 2]


def traces(path: Path | None, processes: int) -> dict[tuple[str, Shape], Rank]:
    """Return a simulated rank of each model and shape, with two micro-batches."""
    found: dict[Any, Rank] = pickle.loads(path.read_bytes()) if path and path.exists() else {}
    known: dict[Any, Any] = {}
    for model, shapes in SHAPES.items():
        missing = [shape for shape in shapes if (model, shape) not in found]
        for first in range(0, len(missing), processes):
            some = missing[first : first + processes]
            for shape in some:
                layout = layout_of(shape)
                chosen = experiment(model, global_batch_size=2 * layout.dp)
                rows, refused = simulate_all(
                    chosen, [layout], machine_of("h100", {}), grid_of(MODELS[model][1]), 1, places=fullest, known=known
                )
                if refused:
                    raise SystemExit(f"{model} {shape}: {refused[0].reason}")
                found[model, shape] = rows[0].ranks[0]
                print(model, shape, f"{rows[0].fullest.peak / 1e9:.1f} GB", flush=True)
                if path:
                    path.write_bytes(pickle.dumps(found))
    return found


@dataclass(frozen=True)
class Point:
    """The best layout of a model on some GPUs with some batch."""

    model: str
    gpus: int
    batch: int
    shape: Shape
    micro_batches: int
    peak: float
    estimate: Estimate
    ends: tuple[Times, Times]
    """What it does with every assumption at the fast and at the slow end of its range."""

    @property
    def seconds(self) -> float:
        return self.estimate.total

    @property
    def limit(self) -> str:
        """What takes the most of the step, and its share."""
        times = self.estimate.times
        names = {"compute": "computing", "launched": "launching", "waited": "exchanges", "exposed": "parameters"}
        _, field = max((getattr(times, field), field) for field in [*names, "read"])
        shares = [getattr(each, field) / each.total for each in (times, *self.ends)]
        return f"{(names | {'read': 'reading'})[field]} {percent(shares)}"

    @property
    def layout(self) -> str:
        """Return the degrees that share a sample."""
        *domain, tensor = self.shape
        return domain_text((domain[0], domain[1])) + (f", tensor {tensor}" if tensor > 1 else "")

    def speeds(self, base: Point) -> list[float]:
        """Return samples per GPU and second relative to those of `base`: as assumed, and at either end."""
        pairs = zip((base.estimate.times, *base.ends), (self.estimate.times, *self.ends), strict=True)
        per_sample = base.gpus / base.batch, self.gpus / self.batch
        return [per_sample[0] * one.total / (per_sample[1] * other.total) for one, other in pairs]

    def training(self, seconds: float) -> float:
        """Return the days of the published schedule, whose samples a larger batch takes in fewer updates."""
        forecasts = sum(updates * steps for updates, steps in SCHEDULE)
        return forecasts * BATCHES[0] / self.batch * seconds / 86400


def percent(shares: Sequence[float]) -> str:
    """Return a share and its range, if it has one."""
    found, low, high = (f"{share:.0%}" for share in (shares[0], min(shares), max(shares)))
    return found if low == high else f"{found} ({low[:-1]}–{high})"


def on(rank: Rank, shape: Shape, gpus: int, micro_batches: int) -> Simulated:
    """Return what the simulated rank does on more GPUs and with other micro-batches.

    Collectives that cross copies of the model have as many more ranks; the first of the two recorded micro-batches, which
    reduces no gradients, is repeated.
    """
    world = layout_of(shape).world
    shard = world // COPIES
    samples = [number for number, event in enumerate(rank.events) if isinstance(event, Sample)]
    first, last = samples
    events = rank.events[:first] + rank.events[first:last] * (micro_batches - 1) + rank.events[last:]

    def scaled(ranks: Sequence[int]) -> Sequence[int]:
        return ranks if max(ranks) - min(ranks) < shard else repeated(ranks, shard, gpus // shard)

    changed: list[Event] = [e._replace(ranks=scaled(e.ranks)) if isinstance(e, Start) else e for e in events]
    return replace(rank.simulated, events=changed)


@cache
def repeated(ranks: Sequence[int], shard: int, copies: int) -> Sequence[int]:
    """Return a group that crosses all copies of the model, of so many ranks each, with another number of copies."""
    first = [rank for rank in ranks if rank < shard]

    def of(copies: int) -> tuple[int, ...]:
        return tuple(copy * shard + rank for copy in range(copies) for rank in first)

    assert tuple(ranks) == of(COPIES), ranks
    return _compact(of(copies))


def best(found: dict[Any, Rank], machine: Machine, model: str, gpus: int, batch: int) -> Point | None:
    """Return the fastest layout that fits; None where the batch has too few samples for these GPUs.

    Layouts with more than `MORE` times as many micro-batches as the one with fewest are left out: each of these takes the same
    computation in smaller pieces, and exchanges besides.
    """
    fit = {
        shape: batch * math.prod(shape) // gpus
        for shape in SHAPES[model]
        if gpus >= (ranks := math.prod(shape))
        and batch * ranks % gpus == 0
        and not gpus % max(NODE, ranks)
        and found[model, shape].peak <= machine.usable
    }
    if not fit:
        return None
    few = {shape: n for shape, n in fit.items() if n <= MORE * min(fit.values())}
    simulated = {shape: on(found[model, shape], shape, gpus, n) for shape, n in few.items()}
    times = {shape: play(machine, [one], gpus) for shape, one in simulated.items()}
    shape = min(times, key=lambda shape: times[shape].total)
    fast, slow = (play(machine.bound(end), [simulated[shape]], gpus) for end in (True, False))
    estimate = Estimate(times[shape], fast.total, slow.total)
    return Point(model, gpus, batch, shape, few[shape], found[model, shape].peak, estimate, (fast, slow))


def row(point: Point, base: Point) -> str:
    """Return a row of a table; the efficiency is against `base`."""
    steps = point.seconds, point.estimate.low, point.estimate.high
    days = [point.training(seconds) for seconds in steps]

    def ranged(values: Sequence[float]) -> str:
        return f"{values[0]:.2g} ({values[1]:.2g}–{values[2]:.2g})"

    cells = [
        point.model, str(point.gpus), str(point.batch), point.layout, str(point.micro_batches),
        f"{point.peak / 1e9:.1f}", ranged(steps), percent(point.speeds(base)), point.limit, ranged(days),
        ranged([24 * point.gpus * day / 1e3 for day in days]),
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


HEAD = (
    "| model | GPUs | batch | ranks of a sample | micro-batches | peak GB | s/step | efficiency | most of it | days "
    "| thousand GPU-hours |\n|---|---|---|---|---|---|---|---|---|---|---|"
)


def tables(found: dict[Any, Rank], machine: Machine) -> tuple[str, dict[str, dict[str, list[Point]]]]:
    """Return the tables of strong and weak scaling, and the points of each curve."""
    lines: list[str] = []
    curves: dict[str, dict[str, list[Point]]] = {}
    known: dict[tuple[str, int, int], Point | None] = {}

    def point(model: str, gpus: int, batch: int) -> Point | None:
        key = model, gpus, batch
        if key not in known:
            known[key] = best(found, machine, *key)
        return known[key]

    for model in SHAPES:
        strong = {f"batch {batch}": [p for gpus in GPUS if (p := point(model, gpus, batch))] for batch in BATCHES}
        weak = {
            f"{gpus_per} GPUs a sample": [
                p for gpus in GPUS if 32 <= gpus // gpus_per <= 1024 and (p := point(model, gpus, gpus // gpus_per))
            ]
            for gpus_per in (1, 8, 32)
        }
        curves[model] = {"strong": strong, "weak": weak}
    for kind, title in (("strong", "Strong scaling"), ("weak", "Weak scaling: samples in proportion to GPUs")):
        lines += [f"## {title}", "", HEAD]
        lines += [row(p, points[0]) for of in curves.values() for points in of[kind].values() for p in points]
        lines.append("")
    return "\n".join(lines), curves


def draw(curves: dict[str, dict[str, list[Point]]], machine: Machine, path: Path) -> None:
    """Draw samples per second against GPUs, with their ranges."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True)
    for line, (model, of) in zip(axes, curves.items(), strict=True):
        for axis, (kind, lines) in zip(line, of.items(), strict=True):
            for name, points in lines.items():
                if not points:
                    continue
                gpus = [p.gpus for p in points]
                (drawn,) = axis.plot(
                    gpus, [p.batch / p.seconds for p in points], "o-", label=name.replace("1 GPUs", "1 GPU")
                )
                ends = [[p.batch / getattr(p.estimate, end) for p in points] for end in ("high", "low")]
                axis.fill_between(gpus, *ends, color=drawn.get_color(), alpha=0.12)
            axis.set(title=f"WXFormer {model}, {kind} scaling", ylabel="samples / s", yscale="log")
            axis.set_xscale("log", base=2)
            axis.legend(fontsize="small")
    for axis in axes[-1]:
        axis.set(xlabel=f"{machine.name} GPUs")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--output", type=Path, help="folder for plan-scaling.md and plan-scaling.svg")
    given = parser.parse_args()
    machine = machine_of(given.gpu, {})
    text, curves = tables(traces(given.traces, given.processes), machine)
    print(text)
    if given.output:
        (given.output / "plan-scaling.md").write_text(
            f"# WXFormer on many GPUs, simulated\n\n{HEAD.format(dt.date.today(), given.gpu)}\n\n{text}"
        )
        draw(curves, machine, given.output / "plan-scaling.svg")


if __name__ == "__main__":
    main()
