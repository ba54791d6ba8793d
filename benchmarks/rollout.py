"""What writing forecasts costs, and whether memory grows with the lead; writes benchmarks/results/rollout.md.

    python benchmarks/rollout.py [--repeats 3]

The demonstration's model with random weights (which cost as much as trained ones) and its forecasts of five days.
Output is what a rollout takes more of the processor than one that writes no field, and what the computing thread waits
for it, as a share of the time that passes. Memory is the peak of a process that makes one forecast of so many steps.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import numpy as np
import torch

from credit_like import build
from credit_like.inference import forecast as forecasts
from credit_like.inference.writers._base import Background
from credit_like.schema.load import load_experiment

LEADS = (20, 100, 500)
INITS = 16


class Watched(Background):
    """Counts the time that passes while others wait for what is written."""

    waiting = 0.0

    def submit(self, action: Callable[[], None]) -> None:
        before = time.perf_counter()
        super().submit(action)
        Watched.waiting += time.perf_counter() - before

    def close(self) -> None:
        before = time.perf_counter()
        super().close()
        Watched.waiting += time.perf_counter() - before


def parts_of(save_loc: Path, *overrides: str) -> build.Parts:
    file = resources.files("credit_like").joinpath("demo.yml")
    experiment = load_experiment(Path(str(file)), [f"save_loc={save_loc}", *overrides])
    return build.assemble(experiment, build.start(experiment), train=False)


def output(kind: str, flags: str, write: bool = True) -> tuple[float, float, float, float]:
    """(seconds of the processor, waiting / time, seconds, megabytes); without `write` no field is handed on."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "forecasts"
        init = f"inference.init=[2000-09-27, 2000-10-{12 if INITS > 8 else 4}T18, 24h]"
        parts = parts_of(Path(folder), init, f"inference.output={{type: {kind}, path: {path}{flags}}}")
        forecasts.Background = Watched
        Watched.waiting = 0.0
        submit = forecasts._submit
        if not write:
            forecasts._submit = lambda *_: None
        wall, cpu = time.perf_counter(), time.process_time()
        outcome = forecasts.write_forecasts(
            parts.experiment, parts.stepper, parts.store, parts.variables, parts.statistics, "random"
        )
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        forecasts._submit = submit
        assert outcome.finished
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) / 1e6
        return cpu, Watched.waiting / wall, wall, size


def peak(leads: int) -> float:
    """MiB of a process that makes one forecast of `leads` steps."""
    command = [sys.executable, __file__, "--one", str(leads)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def one(leads: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        parts = parts_of(Path(folder), "inference.init=2000-01-01", f"inference.lead={leads}")
        forecasts.write_forecasts(
            parts.experiment, parts.stepper, parts.store, parts.variables, parts.statistics, "random"
        )
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        one(arguments.one)
        return
    lines = [
        "# Rollouts",
        "",
        f"{platform.machine()}, {os.cpu_count()} cores, PyTorch {torch.__version__}, {torch.get_num_threads()} thread(s); "
        f"the demonstration's model, {INITS} initial times, 20 leads; medians of {arguments.repeats}.",
        "",
        "| output | output / processor time | waiting / time | seconds | MB |",
        "|---|---|---|---|---|",
    ]
    for kind, flags in (("zarr", ""), ("netcdf", ""), ("netcdf", ", compression: 0")):
        pairs = [(output("zarr", "", write=False), output(kind, flags)) for _ in range(arguments.repeats)]
        runs = [(1 - without[0] / with_it[0], *with_it[1:]) for without, with_it in pairs]
        writing, waiting, seconds, size = np.median(runs, 0)
        name = kind + flags.replace(",", "").replace(":", "")
        lines.append(f"| {name} | {100 * writing:.1f} % | {100 * waiting:.1f} % | {seconds:.1f} | {size:.0f} |")
    lines += ["", "| steps | peak memory (MiB) |", "|---|---|"]
    lines += [f"| {leads} | {peak(leads):.0f} |" for leads in LEADS]
    text = "\n".join(lines) + "\n"
    print(text)
    folder = Path(__file__).parent / "results"
    folder.mkdir(exist_ok=True)
    (folder / "rollout.md").write_text(text)


if __name__ == "__main__":
    main()
