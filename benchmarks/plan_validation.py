"""Compare the estimates of `credit-like plan` with real steps over gloo.

    python benchmarks/plan_validation.py [--ranks 2 4 8] [--rounds 5] [--clocks processor elapsed] [--layouts 0 2]
        [--width 16] [--depth 1 1 2 1] [--output FILE.md]

A small WXFormer takes steps in each layout, on one thread a rank. In every round the ranks take steps, measure their machine,
as `credit-like bench` does and all at once, and take steps again, so that other work on the machine disturbs both. This is
done on two clocks. Processor time, that of rank 0 and all its threads, does not wait for what else runs; against it stands
what the simulation says of computing and sending, of a machine measured in processor time. Elapsed time includes waiting, for
other ranks and, where there are more ranks than cores or the machine is busy, for a processor. A ratio is the median, over
the rounds, of estimate by measurement. A second model, by `--width` and `--depth`, shows whether the estimates are right for
more than one.
"""

from __future__ import annotations

import argparse
import datetime as dt
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from credit_like import build
from credit_like.data.store import FieldStore
from credit_like.parallel.environment import local_launch
from credit_like.parallel.runtime import Runtime
from credit_like.plan import calibrate
from credit_like.plan.estimate import estimate
from credit_like.plan.layouts import Candidate, with_layout
from credit_like.plan.machine import Machine
from credit_like.plan.run import grid_of
from credit_like.plan.simulate import Rank, _NoData, _trainer, places, sample_of, simulate
from credit_like.schema.experiment import Experiment
from credit_like.schema.load import load_experiment
from credit_like.variables import Variables

DEMO = Path(__file__).parents[1] / "config" / "demo.yml"
GRID = "64x128"
MODEL = (
    "model={{type: wxformer, dim: {dim}, depth: {depth}, dim_head: 8, padding_conf: {{activate: true, mode: earth, "
    "pad_lat: [16, 16], pad_lon: [16, 16]}}{noise}}}"
)
SIZE: dict[str, Any] = {"width": 16, "depth": [1, 1, 2, 1]}
STEPS = 3  # before and after the machine is measured
calibrate._TURNS = 3  # the rounds repeat it
CLOCKS = {"processor": time.process_time, "elapsed": time.perf_counter}


def experiment(layout: Candidate) -> Experiment:
    """Return the demonstration's data with a small model, one sample for each replica."""
    members = 2 * layout.ensemble if layout.ensemble > 1 else 1
    changes = [
        MODEL.format(
            dim=[SIZE["width"] * times for times in (1, 2, 4, 8)],
            depth=SIZE["depth"],
            noise=", noise: {channels: 3}" if members > 1 else "",
        ),
        f"trainer.global_batch_size={layout.dp}",
        "trainer.micro_batch_size=1",
        "trainer.device=cpu",
    ]
    return load_experiment(DEMO, changes + [f"trainer.members={members}", "loss={type: crps}"] * (members > 1))


def layouts(world: int) -> list[Candidate]:
    """Return one layout of each kind."""
    half, quarter = world // 2, world // 4
    found = [Candidate(world), Candidate(world, data="ddp"), Candidate(half, 2), Candidate(half, domain=2)]
    found += [Candidate(half, domain=2, columns=2), Candidate(half, ensemble=2)]
    if quarter:
        found += [Candidate(world, replicate=2), Candidate(quarter, domain=4, columns=2), Candidate(quarter, 2, 2)]
    return found


def rounds(
    rank: int, world: int, layout: Candidate, count: int, clocks: list[str]
) -> list[dict[str, tuple[Machine, float]]]:
    """Return, of every round and clock, the machine as measured and the seconds of a step of real ranks."""
    chosen, grid = with_layout(experiment(layout), layout), grid_of(GRID)
    runtime = Runtime.start(layout.parallelism, torch.device("cpu"))
    variables = Variables(chosen.data)
    store = cast(FieldStore, _NoData(grid, variables))
    model = build.parallel_model(chosen, variables, store, runtime)
    trainer = _trainer(model, chosen, runtime, variables, store, grid)
    part = trainer.context.rows, trainer.context.columns
    samples = [sample_of(chosen, variables, grid, *part) for _ in range(trainer.schedule.accumulation)]
    for sample in samples:
        for fields in (sample.prognostic, sample.forcing, sample.target):
            fields.normal_()

    def steps(clock: Callable[[], float]) -> list[float]:
        times = []
        for _ in range(STEPS):
            runtime.barrier()
            began = clock()
            trainer.train_step(iter(samples), len(samples), 1e-3, 1).ready()
            times.append(clock() - began)
        return times

    steps(time.process_time)
    found = []
    for _ in range(count):
        one = {}
        for name in clocks:
            before = steps(CLOCKS[name])
            machine = replace(calibrate.measure(runtime, CLOCKS[name]), reading=1e9)  # the samples are in memory
            one[name] = machine, statistics.median(before + steps(CLOCKS[name]))
        found.append(one)
    return found


def simulated(rank: int, world: int, layout: Candidate, which: int) -> Rank:
    """Return a simulated rank of the same step."""
    return simulate(experiment(layout), layout, which, grid_of(GRID), gpu=False)


def compared(layout: Candidate, count: int, clocks: list[str]) -> str:
    """Return a row of the table."""
    ranks = [in_ranks(1, simulated, layout, which) for which in places(layout)]
    seen, guessed = {name: [] for name in clocks}, {name: [] for name in clocks}  # type: ignore[var-annotated]
    for one in in_ranks(layout.world, rounds, layout, count, clocks):
        for name, (machine, took) in one.items():
            times = estimate(machine, ranks[:1] if name == "processor" else ranks, layout.world).times
            seen[name].append(took)
            guessed[name].append(times.compute + times.sent if name == "processor" else times.total)
    cells = [str(layout.world), f"{layout.data}, {layout}"]
    for name in clocks:
        ratio = statistics.median(g / s for g, s in zip(guessed[name], seen[name], strict=True))
        cells += [f"{statistics.median(seen[name]):.3f}", f"{statistics.median(guessed[name]):.3f}", f"{ratio:.2f}"]
    return "| " + " | ".join(cells) + " |"


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
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clocks", nargs="+", choices=list(CLOCKS), default=list(CLOCKS))
    parser.add_argument("--layouts", type=int, nargs="+", help="which of the layouts of a number of ranks, from 0")
    parser.add_argument("--width", type=int, default=SIZE["width"])
    parser.add_argument("--depth", type=int, nargs=4, default=SIZE["depth"])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    SIZE.update(width=options.width, depth=options.depth)
    lines = [
        "# Estimates against real steps over gloo",
        "",
        f"{dt.date.today()}, {platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.0f} at the start, "
        f"{options.rounds} rounds, width {options.width}, depth {options.depth}; see `benchmarks/plan_validation.py`.",
        "",
        "| ranks | layout | " + " | ".join(f"{name} s | estimate | ratio" for name in options.clocks) + " |",
        "|---" * (2 + 3 * len(options.clocks)) + "|",
    ]
    for world in options.ranks:
        for number, layout in enumerate(layouts(world)):
            if options.layouts and number not in options.layouts:
                continue
            lines.append(compared(layout, options.rounds, options.clocks))
            print(lines[-1], flush=True)
    if options.output:
        options.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
