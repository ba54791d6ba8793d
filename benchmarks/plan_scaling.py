"""Simulate the training of WXFormer at 0.25° and 0.1° on 128 to 8,192 H100: the tables and figures of docs/scaling.md.

    python -m benchmarks.plan_scaling [--traces FILE] [--processes 2] [--gpu h100] [--output FOLDER]

One rank of each layout is simulated, that with the fullest box, in a small run: 8 ranks (one node) or, if more share a sample,
all of these hold a copy of the model, and there are 4 copies. Further copies change only the ranks of the collectives that cross
copies, so the events are then replayed on any number of GPUs; the micro-batches that a replica adds up are repeated in the same
way. `--traces` keeps the simulated ranks, which take minutes; the rest takes seconds.
"""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.plan import MODELS, experiment
from credit_like.layout import domain_text
from credit_like.plan.estimate import Estimate
from credit_like.plan.events import Event, Sample, Simulated, Start, play
from credit_like.plan.layouts import Candidate
from credit_like.plan.machine import Machine, machine_of
from credit_like.plan.run import grid_of, simulate_all
from credit_like.plan.simulate import Rank

ROOT = Path(__file__).parents[1]
SHAPES = {
    "0.25°": ((1, 1), (2, 1), (4, 1), (4, 2), (4, 4), (4, 8)),
    "0.1°": ((2, 1), (4, 1), (4, 2), (4, 4), (8, 4), (8, 8), (8, 16)),
}
"""Ranks along rows and columns that divide powers of two and leave each rank a window at every stage."""
GPUS = (128, 256, 512, 1024, 2048, 4096, 8192)
BATCHES = (32, 64, 128, 256, 512, 1024)
COPIES, NODE = 4, 8
SCHEDULE = ((124_000, 1), (26_000, 8))
"""Updates and forecast steps of each: single-step training and the rollouts after it (Schreck et al. 2025)."""


def layout_of(shape: tuple[int, int]) -> Candidate:
    domain = shape[0] * shape[1]
    world = COPIES * max(NODE, domain)
    return Candidate(world // domain, domain=domain, columns=shape[1], replicate=COPIES)


def fullest(layout: Candidate) -> list[int]:
    """Return the rank with an interior box, which has no padding beyond a pole."""
    rows, columns = layout.shape
    return [(rows - 1) // 2 * columns + (columns - 1) // 2]


def traces(path: Path | None, processes: int) -> dict[tuple[str, tuple[int, int]], Rank]:
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path)
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    traces(given.traces, given.processes)
