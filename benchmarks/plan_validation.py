"""Compare the estimates of `credit-like plan` with the time of real steps over gloo, on a quiet machine.

    python -m benchmarks.plan_validation [--ranks 2 4] [--steps 5] [--output FILE.md]

For each number of ranks the machine is first measured as by `credit-like bench`, with all ranks at once. A small WXFormer then
takes steps in each layout, on one thread a rank. A ratio is the estimate divided by the median of the measured steps; the first
step is left out. With fewer cores than ranks, or other work on the machine, the ratios say nothing.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from credit_like import build
from credit_like.data.store import FieldStore
from credit_like.parallel.environment import local_launch
from credit_like.parallel.runtime import Runtime
from credit_like.plan.calibrate import measure
from credit_like.plan.estimate import PlanRow
from credit_like.plan.layouts import Candidate, with_layout
from credit_like.plan.machine import Machine
from credit_like.plan.run import grid_of
from credit_like.plan.simulate import _NoData, _trainer, sample_of, simulate
from credit_like.schema.experiment import Experiment
from credit_like.schema.load import load_experiment
from credit_like.schema.trainer import Parallelism
from credit_like.variables import Variables

DEMO = Path(__file__).parents[1] / "config" / "demo.yml"
GRID = "64x128"
MODEL = (
    "model={type: wxformer, dim: [16, 32, 64, 128], depth: [1, 1, 2, 1], dim_head: 8, padding_conf: {activate: true, mode: earth, "
    "pad_lat: [16, 16], pad_lon: [16, 16]}}"
)


def experiment(world: int) -> Experiment:
    """Return the demonstration's data with a small model, one sample for each rank."""
    return load_experiment(
        DEMO, [MODEL, f"trainer.global_batch_size={world}", "trainer.micro_batch_size=1", "trainer.device=cpu"]
    )


def layouts(world: int) -> list[Candidate]:
    """Return one layout of each kind."""
    found = [Candidate(world), Candidate(world, data="ddp"), Candidate(world // 2, 2), Candidate(world // 2, 1, 2)]
    return [*found, Candidate(world, replicate=2)] if world > 2 else found


def bench(rank: int, world: int) -> Machine:
    """Measure the machine with all ranks at once."""
    return measure(Runtime.start(Parallelism(data="ddp"), torch.device("cpu")))


def steps(rank: int, world: int, layout: Candidate, count: int) -> float:
    """Return the median time of a step of real ranks, in seconds."""
    chosen, grid = with_layout(experiment(world), layout), grid_of(GRID)
    runtime = Runtime.start(layout.parallelism, torch.device("cpu"))
    variables = Variables(chosen.data)
    store = cast(FieldStore, _NoData(grid, variables))
    model = build.parallel_model(chosen, variables, store, runtime)
    trainer = _trainer(model, chosen, runtime, variables, store, grid)
    rows = trainer.context.rows
    samples = [sample_of(chosen, variables, grid, rows) for _ in range(trainer.schedule.accumulation)]
    for sample in samples:
        for fields in (sample.prognostic, sample.forcing, sample.target):
            fields.normal_()
    took = []
    for number in range(count + 1):
        runtime.barrier()
        began = time.perf_counter()
        trainer.train_step(iter(samples), len(samples), 1e-3, number + 1).ready()
        took.append(time.perf_counter() - began)
    return statistics.median(took[1:])


def planned(rank: int, world: int, layout: Candidate, machine: Machine) -> float:
    """Return the estimate of the same step, in seconds."""
    chosen = experiment(layout.world)
    simulated = simulate(chosen, layout, 0, grid_of(GRID), gpu=False)
    return PlanRow(layout, (simulated,), machine, chosen.trainer.global_batch_size).seconds


def _child(work: Any, rank: int, world: int, port: Any, arguments: tuple[Any, ...], pipe: Any) -> None:
    os.environ.update(local_launch(rank, world, port.recv()))
    torch.set_num_threads(1)
    pipe.send(work(rank, world, *arguments))
    pipe.close()
    os._exit(0)


def in_ranks(world: int, work: Any, *arguments: Any) -> Any:
    """Return what rank 0 returns of work(rank, world, …) in `world` processes."""
    context = multiprocessing.get_context("fork")
    pipes, ports, processes = [], [], []
    for rank in range(world):
        (receive, send), (port, tell) = context.Pipe(duplex=False), context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(work, rank, world, port, arguments, send))
        process.start()
        send.close()
        pipes.append(receive)
        ports.append(tell)
        processes.append(process)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for tell in ports:
        tell.send(store.port)
    results = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    return results[0]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    lines = ["| ranks | layout | step, s | estimate, s | ratio |", "|---|---|---|---|---|"]
    for world in options.ranks:
        machine = in_ranks(world, bench)
        for layout in layouts(world):
            real, guess = in_ranks(world, steps, layout, options.steps), in_ranks(1, planned, layout, machine)
            lines.append(f"| {world} | {layout.data}, {layout} | {real:.3g} | {guess:.3g} | {guess / real:.2f} |")
            print(lines[-1], flush=True)
    text = "\n".join(lines) + f"\n\nCores: {os.cpu_count()}; load before the end: {os.getloadavg()[0]:.1f}.\n"
    if options.output:
        options.output.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
