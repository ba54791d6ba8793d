"""Advice for a run that ran out of memory: the planned memory of a training step, and changes that save memory.

    python -m credit_like.plan.advice experiment.yml WORLD ROWSxCOLUMNS cpu|cuda

is a program of its own, because the process that ran out of memory may have a process group and a device.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from credit_like.errors import UserError
from credit_like.grid import Grid
from credit_like.layout import Degrees, divide
from credit_like.plan.estimate import PlanRow
from credit_like.plan.layouts import Candidate
from credit_like.plan.machine import machine_of
from credit_like.plan.replay import Key, Recipe
from credit_like.plan.run import grid_of, simulate_all
from credit_like.schema.experiment import Experiment
from credit_like.schema.load import load_experiment
from credit_like.schema.phases import hungry

_SHOWN = 3
"""Largest parts of the memory that are shown."""
_WORTH = 0.02
"""Smallest fraction of the memory that a change must save."""


def advice(experiment: Experiment, world: int, grid: Grid, gpu: bool = True) -> str:
    """Return one line: the memory of a step per rank, its largest parts, and the changes that need less."""
    known: dict[Key, Recipe] = {}
    planned = [
        (row, each) for each in hungry(experiment) if (row := _planned(each, world, grid, gpu, known)) is not None
    ]
    now, experiment = max(planned, key=lambda found: found[0].fullest.peak)
    peak, parts = now.fullest.peak, now.fullest.parts
    largest = sorted(parts.items(), key=lambda part: -part[1])[:_SHOWN]
    line = f"by `plan`, a step takes {_size(peak)} per rank ("
    line += ", ".join(f"{_size(size)} {name}" for name, size in largest) + ")"
    found = []
    for text, changed in changes(experiment):
        row = _planned(changed, world, grid, gpu, known)
        if row is not None and row.fullest.peak < (1 - _WORTH) * peak:
            found.append((row.fullest.peak, text))
    return line + "".join(f"; {_size(size)} with {text}" for size, text in sorted(found))


def changes(experiment: Experiment) -> Iterator[tuple[str, Experiment]]:
    """Yield changes of an experiment that save memory, as YAML, with the changed experiment."""
    trainer = experiment.trainer
    if trainer.micro_batch_size > 1:
        smaller = max(size for size in range(1, trainer.micro_batch_size) if trainer.micro_batch_size % size == 0)
        yield _changed(experiment, micro_batch_size=smaller)
    if not trainer.activation_checkpoint:
        yield _changed(experiment, activation_checkpoint=True)
    if experiment.data.forecast_len > 1 and trainer.backprop_steps is None:
        yield _changed(experiment, backprop_steps=1)
    if trainer.parallelism.data == "ddp":
        yield (
            "trainer.parallelism.data: fsdp2",
            _changed(experiment, parallelism=trainer.parallelism.model_copy(update={"data": "fsdp2"}))[1],
        )


def _changed(experiment: Experiment, **keys: Any) -> tuple[str, Experiment]:
    text = ", ".join(f"trainer.{key}: {str(value).lower()}" for key, value in keys.items())
    return text, experiment.model_copy(update={"trainer": experiment.trainer.model_copy(update=keys)})


def _planned(experiment: Experiment, world: int, grid: Grid, gpu: bool, known: dict[Key, Recipe]) -> PlanRow | None:
    """Return the plan of the experiment's own layout; None where the model refuses it."""
    chosen = experiment.trainer.parallelism
    at = divide(Degrees.parse(chosen.model_dump()), world)
    layout = Candidate(
        at.data, at.tensor, at.domain, chosen.replicate, chosen.data, columns=at.columns, ensemble=at.ensemble
    )
    machine = machine_of("a100-40gb", {"streams": gpu})  # only memory is reported, which depends on the kernels alone
    rows, _ = simulate_all(experiment, [layout], machine, grid, known=known)
    return rows[0] if rows else None


def _size(size: float) -> str:
    return f"{size / 1e9:.3g} GB" if size >= 1e8 else f"{size / 1e6:.3g} MB"


def main(arguments: list[str]) -> int:
    """Print the advice for an experiment file, a number of ranks, a grid and a type of device."""
    file, world, grid, device = arguments
    try:
        sys.stdout.write(advice(load_experiment(Path(file)), int(world), grid_of(grid), device == "cuda") + "\n")
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
