"""Simulate all layouts of a number of ranks, each rank in a separate process."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess

import numpy as np

from credit_like.errors import UserError
from credit_like.grid import Grid
from credit_like.plan.estimate import PlanReport, PlanRow, in_order
from credit_like.plan.layouts import Candidate, Illegal, layouts
from credit_like.plan.machine import Machine
from credit_like.plan.replay import Key, Recipe, Recipes
from credit_like.plan.simulate import Rank, places, simulate, within
from credit_like.processes import signals_held, work_for
from credit_like.schema.experiment import Experiment
from credit_like.schema.phases import hungry

Task = tuple[Candidate, int, int]
"""A layout, the number of an experiment, and a rank."""
Progress = Callable[[int, int, str], None]


def plan(
    experiment: Experiment,
    world: int,
    machine: Machine,
    grid: Grid,
    processes: int | None = None,
    progress: Progress = lambda *_: None,
) -> PlanReport:
    """Simulate every legal layout of `world` ranks, `processes` at a time (default: the number of cores)."""
    legal, illegal = layouts(experiment, world, grid.height, grid.width)
    rows, refused = simulate_all(experiment, legal, machine, grid, processes, progress, within)
    return PlanReport(experiment.name, world, machine, in_order(rows), (*illegal, *refused))


def plan_one(
    experiment: Experiment, layout: Candidate, machine: Machine, grid: Grid, processes: int | None = None
) -> PlanRow:
    """Simulate one layout.

    Raises UserError where the model refuses it.
    """
    rows, refused = simulate_all(experiment, [layout], machine, grid, processes)
    if refused:
        raise UserError(refused[0].reason)
    return rows[0]


def simulate_all(
    experiment: Experiment,
    chosen: Iterable[Candidate],
    machine: Machine,
    grid: Grid,
    processes: int | None = None,
    progress: Progress = lambda *_: None,
    places: Callable[[Candidate], list[int]] = places,
    known: dict[Key, Recipe] | None = None,
) -> tuple[list[PlanRow], list[Illegal]]:
    """Simulate these layouts; return their rows, and the layouts that the model refuses.

    Of a training in phases, the row of a layout is that of the phase that takes the most memory there.
    They are simulated with the kernels of a GPU, or of a CPU where the machine is one. `places` returns the ranks of a
    layout to simulate. `known` holds the cached operations of earlier simulations and
    is updated.
    """
    found = hungry(experiment)
    chosen, known = list(chosen), {} if known is None else known
    tasks = [(layout, number, rank) for layout in chosen for number in range(len(found)) for rank in places(layout)]
    most = processes or os.cpu_count() or 1
    answers = _in_processes(found, grid, machine.streams, tasks, most, progress, known)
    rows, refused = [], []
    for layout in chosen:
        reasons = [answer for task, answer in answers.items() if task[0] == layout and isinstance(answer, str)]
        if reasons:
            refused.append(Illegal("layout", str(layout), reasons[0]))
            continue
        of_phases = []
        for number, each in enumerate(found):
            ranks = [answers[layout, number, rank] for rank in places(layout)]
            done = tuple(rank for rank in ranks if isinstance(rank, Rank))
            of_phases.append(PlanRow(layout, done, machine, each.trainer.global_batch_size))
        rows.append(max(of_phases, key=lambda row: row.fullest.peak))
    return rows, refused


def _in_processes(
    experiments: Sequence[Experiment],
    grid: Grid,
    gpu: bool,
    tasks: list[Task],
    most: int,
    progress: Progress,
    known: dict[Key, Recipe],
) -> dict[Task, Rank | str]:
    """Return the simulated rank of each task, or the reason why the model refuses it.

    Processes are forked: with torch loaded this takes hundredths of a second, and the child shares the cached
    operations of all simulations that have finished.
    """
    import torch._dynamo  # noqa: F401  the first step needs it: the processes have it from here instead of importing it each

    context = multiprocessing.get_context("fork")
    waiting, answers, left = deque(tasks), {}, Counter(layout for layout, *_ in tasks)
    running: dict[Connection, tuple[Task, ForkProcess]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < most:
                task = waiting.popleft()
                receive, send = context.Pipe(duplex=False)
                layout, number, rank = task
                given = (os.getpid(), experiments[number], grid, gpu, layout, rank, known, send)
                process = context.Process(target=_answer, args=given)
                with signals_held():
                    process.start()
                send.close()
                running[receive] = task, process
            for pipe in wait(list(running)):
                assert isinstance(pipe, Connection)
                task, process = running.pop(pipe)
                try:
                    answers[task], learnt = pipe.recv()
                    known.update(learnt)
                except EOFError:
                    process.join()
                    raise RuntimeError(
                        f"the simulation of {task[0]}, rank {task[2]} ended with {process.exitcode}"
                    ) from None
                process.join()
                left[task[0]] -= 1
                if not left[task[0]]:
                    done = len(left) - sum(map(bool, left.values()))
                    progress(
                        done, len(left), _line([answers[other] for other in tasks if other[0] == task[0]], task[0])
                    )
    finally:
        for _, process in running.values():
            process.terminate()
            process.join()
    return answers


def _line(ranks: Sequence[Rank | str], layout: Candidate) -> str:
    """Return one line on a simulated layout."""
    refused = [rank for rank in ranks if isinstance(rank, str)]
    peak = max((rank.peak for rank in ranks if not isinstance(rank, str)), default=0.0)
    return f"{layout}: " + (f"not possible, {refused[0]}" if refused else f"{peak / 1e9:.2f} GB")


def _answer(
    parent: int,
    experiment: Experiment,
    grid: Grid,
    gpu: bool,
    layout: Candidate,
    rank: int,
    known: dict[Key, Recipe],
    pipe: Connection,
) -> None:
    work_for(parent)
    gc.freeze()  # exclude the parent's objects from garbage collection
    recipes = Recipes(known)
    try:
        pipe.send((simulate(experiment, layout, rank, grid, gpu, recipes), recipes.learnt))
    except UserError as error:
        pipe.send((str(error), {}))
    pipe.close()
    os._exit(0)  # skip the finalisers of the parent process


def grid_of(text: str) -> Grid:
    """Return the global grid of `ROWSxCOLUMNS`, such as `721x1440`; an odd number of rows includes the poles.

    Raises UserError for other text.
    """
    rows, _, columns = text.lower().replace("×", "x").partition("x")
    if not (
        rows.isdecimal()
        and columns.isdecimal()
        and max(len(rows), len(columns)) < 10
        and int(rows) > 1
        and int(columns) > 1
    ):
        raise UserError(f"expected --grid ROWSxCOLUMNS, such as 721x1440, got {text!r}")
    height, width = int(rows), int(columns)
    latitude = np.linspace(90, -90, height) if height % 2 else 90 - (np.arange(height) + 0.5) * 180 / height
    return Grid(latitude, np.arange(width) * 360 / width)
