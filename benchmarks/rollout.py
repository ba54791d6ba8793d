"""Measure the cost of writing forecasts, and whether memory grows with the lead; write benchmarks/results/rollout.md.

    python benchmarks/rollout.py [--pairs 5]

The benchmark uses the demonstration's model with random weights (which cost as much as trained ones) and its forecasts of five
days. The cost of output is the additional time, and additional processor time, of a rollout compared with one that writes no
field and is otherwise the same. The two alternate, and the fastest of each are compared, because other work on the machine can
only lengthen them: once with all cores computing, and once with one core left for the writer, as on a node with GPUs, which
has many cores. Waiting is the fraction of the time that the computing thread spends passing on fields and, at the end, on
the last of them. Memory is the peak of a process that makes one forecast of so many steps.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import torch

from credit_like import build
from credit_like.context import Context
from credit_like.inference import forecast as forecasts
from credit_like.inference.writers._base import Background
from credit_like.schema.load import load_experiment

LEADS = (20, 100, 500)
INITS = 32


def context_of(save_loc: Path, *overrides: str) -> Context:
    file = resources.files("credit_like").joinpath("demo.yml")
    experiment = load_experiment(Path(str(file)), [f"save_loc={save_loc}", *overrides])
    return build.build_context(experiment, build.start(experiment), train=False)


class Watched(Background):
    """Measures how long its caller has waited."""

    waited = 0.0

    def submit(self, action: Callable[[], None]) -> None:
        began = time.perf_counter()
        super().submit(action)
        Watched.waited += time.perf_counter() - began

    def close(self) -> None:
        began = time.perf_counter()
        super().close()
        Watched.waited += time.perf_counter() - began


def output(kind: str, flags: str, write: bool = True) -> tuple[float, float, float, float]:
    """Return (seconds, processor seconds, seconds of waiting, megabytes); without `write` nothing is written."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "forecasts"
        context = context_of(
            Path(folder),
            "inference.init=[2000-09-27, 2000-10-28T18, 24h]",
            f"inference.output={{type: {kind}, path: {path}{flags}}}",
        )
        inner = forecasts._write
        if not write:
            forecasts._write = lambda *_: None
        forecasts.Background, Watched.waited = Watched, 0.0
        wall, cpu = time.perf_counter(), time.process_time()
        outcome = forecasts.write_forecasts(context, "random")
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        forecasts._write = inner
        assert outcome.finished
        assert outcome.computed == INITS
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) / 1e6
        return wall, cpu, Watched.waited, size


def share(threads: int, kind: str, flags: str, pairs: int) -> str:
    """Return a row of the table."""
    torch.set_num_threads(threads)
    found: dict[bool, list[tuple[float, ...]]] = {False: [], True: []}
    for turn in range(pairs):
        for write in (False, True) if turn % 2 else (True, False):
            found[write].append(output(*((kind, flags) if write else ("zarr", "")), write))
    (bare, bare_cpu, *_), (wall, cpu, waited, size) = (min(found[write]) for write in (False, True))  # the fastest
    name = kind + flags.replace(",", "").replace(":", "")
    shares = (1 - bare / wall, waited / wall, 1 - bare_cpu / cpu)
    cells = [name, str(threads), *(f"{100 * x:.1f} %" for x in shares), f"{wall:.1f}", f"{size:.0f}"]
    return f"| {' | '.join(cells)} |"


def peak(leads: int) -> float:
    """Return the peak MiB of a process that makes one forecast of `leads` steps."""
    command = [sys.executable, __file__, "--one", str(leads)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def one(leads: int) -> None:
    Path("/proc/self/clear_refs").write_text("5")  # or the peak would be that of the parent, which exec inherits
    with tempfile.TemporaryDirectory() as folder:
        context = context_of(Path(folder), "inference.init=2000-01-01", f"inference.lead={leads}")
        forecasts.write_forecasts(context, "random")
    status = Path("/proc/self/status").read_text()
    print(int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        one(arguments.one)
        return
    output("zarr", "")  # warms up
    lines = [
        "# Rollouts",
        "",
        f"{dt.date.today()}, {platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, PyTorch "
        f"{torch.__version__}; the demonstration's model, {INITS} initial times, "
        f"20 leads; the fastest of {arguments.pairs}.",
        "",
        "| output | threads | additional time | waiting | additional processor time | seconds | MB |",
        "|---|---|---|---|---|---|---|",
    ]
    all_cores = torch.get_num_threads()
    kinds = [("zarr", ""), ("netcdf", ""), ("netcdf", ", compression: 1")]
    for threads in sorted({all_cores, max(1, all_cores - 1)}, reverse=True):
        lines += [share(threads, *kind, arguments.pairs) for kind in kinds]
    lines += ["", "| steps | peak memory (MiB) |", "|---|---|"]
    lines += [f"| {leads} | {peak(leads):.0f} |" for leads in LEADS]
    text = "\n".join(lines) + "\n"
    print(text)
    folder = Path(__file__).parent / "results"
    folder.mkdir(exist_ok=True)
    (folder / "rollout.md").write_text(text)


if __name__ == "__main__":
    main()
