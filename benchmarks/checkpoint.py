"""Measure the cost of a checkpoint: the stall of the training step, each rank's bytes, throughput and memory.

    python benchmarks/checkpoint.py [--folder DIR] [--megabytes 400] [--pairs 7] [--output FILE.md]

Every case runs in its own process, so that a peak of memory belongs to that case. Files are written to DIR (by default a
temporary folder); choose a folder on the disk to be measured.

- stall: rounds of training steps, alternately with an asynchronous save that starts after the first step and without one. A
  round is long enough for the save to end in it. The stall is the additional time of a round with a save, as the median over
  pairs.
- bytes: one replicated state saved by several gloo ranks on this machine.
- throughput: the same tensors saved and loaded by this package and by torch, alternately. This package flushes to the disk
  and writes checksums, which loading verifies; torch.save is timed as it is and with a flush. Files are read from the page
  cache.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from credit_like.checkpoint.format import Piece
from credit_like.checkpoint.manager import CheckpointManager
from credit_like.checkpoint.shards import beside, named_pieces
from credit_like.models import wxformer
from credit_like.nn import spectral_norm
from credit_like.nn.init import initialise
from credit_like.parallel.runtime import Runtime
from credit_like.schema.trainer import Parallelism

ROOT = Path(__file__).parents[1]
SAVE_EVERY = 100  # steps over which a stall is spread
MOST_ROUND = 60  # steps
CHANNELS = 16


def resident(field: str) -> float:
    """Return the resident MiB of this process (Linux); 0 elsewhere."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0.0
    return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(field)) / 1024


def added(work: Callable[[], object]) -> float:
    """Return the largest increase of the process during the work in MiB, including the pages of files that it maps."""
    clear = Path("/proc/self/clear_refs")
    if os.access(clear, os.W_OK):
        clear.write_text("5")  # reset the largest size so far
    before = resident("VmRSS")
    work()
    return resident("VmHWM") - before


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


# ---- cases, each in a process of its own -----------------------------------------------------------------------------


def training(height: int, width: int) -> tuple[Callable[[], None], dict[str, Piece]]:
    """Return a training step of the 1° architecture on a smaller grid, and everything that it changes."""
    config = wxformer.Config(
        dim=(32, 64, 128, 256),
        depth=(2, 2, 8, 2),
        dim_head=32,
        cross_embed_kernel_sizes=((4, 8, 16, 32), (2, 4), (2, 4), (2, 4)),
        global_window_size=(8, 4, 2, 1),
        local_window_size=4,
        use_spectral_norm=True,
    )
    sizes = {"in_channels": CHANNELS, "out_channels": CHANNELS, "frames": 1, "height": height, "width": width}
    model = initialise(wxformer.build(config, **sizes), 0).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    x = torch.randn(1, CHANNELS, 1, height, width)

    def step() -> None:
        spectral_norm.before_step(model)
        (model(x) - x).square().mean().backward()
        spectral_norm.correct_gradients(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    held = named_pieces(model)
    pieces = {f"model/{name}": piece for name, piece in held.items()}
    for name, parameter in model.named_parameters():
        for kind in ("exp_avg", "exp_avg_sq"):
            pieces[f"optimizer/{kind}/{name}"] = beside(held[name], optimizer.state[parameter][kind])
    return step, pieces


def stall(folder: Path, pairs: int, grid: tuple[int, int]) -> dict[str, Any]:
    """Time rounds of steps with and without a save, alternately."""
    step, pieces = training(*grid)
    manager = CheckpointManager(folder / "checkpoints", keep=2)
    bare = statistics.median(seconds(step) for _ in range(3))

    def save(number: int) -> None:
        manager.save(number, pieces, {})

    alone = seconds(lambda: (save(1), manager.wait()))
    count = min(MOST_ROUND, max(6, round(3 * alone / bare) + 3))
    blocked: list[float] = []
    unfinished = 0

    def turn(number: int | None) -> float:
        start = time.perf_counter()
        for i in range(count):
            step()
            if number is not None and i == 0:
                blocked.append(seconds(lambda: save(number)))
            manager.poll()
        return time.perf_counter() - start

    differences, steps = [], []
    for pair in range(pairs):
        order = (True, False) if pair % 2 else (False, True)
        took = {}
        for saving in order:
            took[saving] = turn(pair + 2 if saving else None)
            unfinished += manager.in_flight
            manager.wait()
        differences.append(took[True] - took[False])
        steps.append(took[False] / count)
    a_step, a_stall = statistics.median(steps), statistics.median(differences)
    return {
        "megabytes": total_bytes(pieces) / 1e6,
        "step": a_step,
        "stall": a_stall,
        "spread": (min(differences), max(differences)),
        "blocked": statistics.median(blocked),
        "alone": alone,
        "steps": count,
        "unfinished": unfinished,
        "grid": grid,
        "share": a_stall / SAVE_EVERY / a_step,
    }


def state(megabytes: float) -> dict[str, Tensor]:
    """Return tensors of many sizes, as for a model with its optimiser: a few large ones and many small ones."""
    result, left, i = {}, int(megabytes * 1e6) // 4, 0
    generator = torch.Generator().manual_seed(0)
    while left > 0:
        count = min(left, (4_000_000, 1_000_000, 250_000, 1_000, 64)[i % 5])
        result[f"model/{i:04d}"] = torch.randn(count, generator=generator)
        left, i = left - count, i + 1
    return result


def total_bytes(pieces: dict[str, Piece]) -> int:
    return sum(p.local.numel() * p.local.element_size() for p in pieces.values())


def ranks(folder: Path, megabytes: float) -> dict[str, Any]:
    """Save a replicated state as one of several ranks: bytes of its file, MiB that the save adds, seconds."""
    torch.set_num_threads(1)
    runtime = Runtime.start(Parallelism(data="ddp"), torch.device("cpu"))
    pieces = {name: Piece.whole(x) for name, x in state(megabytes).items()}
    manager = CheckpointManager(folder / "checkpoints", asynchronous=False, runtime=runtime)
    runtime.barrier()
    times: list[float] = []
    memory = added(lambda: times.append(seconds(lambda: manager.save(1, pieces, {}))))
    files = manager.folder / "step-1"
    size = (files / f"rank-{runtime.rank:05d}.safetensors").stat().st_size
    runtime.barrier()
    runtime.close()
    return {"bytes": size, "memory": memory, "seconds": times[0], "all": total_bytes(pieces)}


class Both:
    """Save and load the same state with this package and with torch."""

    def __init__(self, folder: Path, megabytes: float) -> None:
        self.state = state(megabytes)
        self.pieces = {name: Piece.whole(x) for name, x in self.state.items()}
        self.bytes = total_bytes(self.pieces)
        self.ours, self.plain = folder / "ours", folder / "plain.pt"
        self.step, self.manager = 0, CheckpointManager(self.ours, keep=1, asynchronous=False)

    def save_ours(self) -> None:
        self.step += 1
        self.manager.save(self.step, self.pieces, {})

    def save_plain(self) -> None:
        torch.save(self.state, self.plain)

    def save_flushed(self) -> None:
        with self.plain.open("wb") as file:
            torch.save(self.state, file)
            file.flush()
            os.fsync(file.fileno())

    def load_ours(self) -> None:
        checkpoint = CheckpointManager(self.ours).latest()
        assert checkpoint is not None
        checkpoint.load(self.pieces, ("model/",))

    def load_plain(self) -> None:
        loaded = torch.load(self.plain, weights_only=True)
        for name, x in self.state.items():
            x.copy_(loaded[name])


def throughput(folder: Path, megabytes: float, pairs: int) -> dict[str, Any]:
    """Return the seconds of every operation, measured alternately."""
    both = Both(folder, megabytes)
    operations = ("save_ours", "save_plain", "save_flushed", "load_ours", "load_plain")
    took: dict[str, list[float]] = {name: [] for name in operations}
    for pair in range(pairs + 1):
        for name in operations:
            if name.startswith("save"):
                os.sync()  # earlier writes are not timed
            time_taken = seconds(getattr(both, name))
            if pair:  # the first turn warms up
                took[name].append(time_taken)
    return {"bytes": both.bytes, "took": took}


def memory(folder: Path, megabytes: float, operation: str) -> dict[str, Any]:
    """Return the MiB that one operation adds."""
    both = Both(folder, megabytes)
    if operation.startswith("load"):
        getattr(both, operation.replace("load", "save"))()
    return {"memory": added(getattr(both, operation)), "bytes": both.bytes}


# ---- the table ---------------------------------------------------------------------------------------------------


def start(case: dict[str, Any], environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Start a process for a case; memory that is freed in it is returned to the system at once."""
    lean = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"} if case.pop("lean", False) else {}
    command = [sys.executable, __file__, "--case", json.dumps(case)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | lean | (environment or {}))


def result(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Return the results of a case."""
    out, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"a case ended with status {process.returncode}")
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def run_ranks(folder: Path, world: int, megabytes: float) -> list[dict[str, Any]]:
    """Run the case `ranks` on all ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_WORLD_SIZE": str(world)}
    case = {"name": "ranks", "folder": str(folder), "megabytes": megabytes}
    processes = [
        start({**case, "lean": True}, {**place, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(world)
    ]
    return [result(process) for process in processes]


def stall_lines(found: dict[str, Any]) -> list[str]:
    low, high = found["spread"]
    lines = [
        "## The training step", "",
        "| state MB | step s | save alone s | stall s (range) | blocked s | stall in steps "
        f"| share of a step at one save per {SAVE_EVERY} |",
        "|---|---|---|---|---|---|---|",
        f"| {found['megabytes']:.0f} | {found['step']:.3f} | {found['alone']:.3f} | {found['stall']:.3f} "
        f"({low:.3f} … {high:.3f}) | {found['blocked']:.3f} | {found['stall'] / found['step']:.2f} | {found['share']:.2%} |",
        "",
        f"The 1° architecture on {' × '.join(map(str, found['grid']))}; rounds of {found['steps']} steps; "
        f"saves that outlasted their round: {found['unfinished']}.", "",
    ]  # fmt: skip
    return lines


def rank_lines(found: dict[int, list[dict[str, Any]]]) -> list[str]:
    lines = [
        "## Bytes of each rank", "",
        "| ranks | MB of a rank, least … most | × ranks / state | seconds | MiB added by the save, least … most |",
        "|---|---|---|---|---|",
    ]  # fmt: skip
    for world, each in found.items():
        sizes, memories = [r["bytes"] for r in each], [r["memory"] for r in each]
        lines.append(
            f"| {world} | {min(sizes) / 1e6:.1f} … {max(sizes) / 1e6:.1f} | {max(sizes) * world / each[0]['all']:.3f} "
            f"| {max(r['seconds'] for r in each):.2f} | {min(memories):.0f} … {max(memories):.0f} |"
        )
    return [*lines, ""]


def throughput_lines(found: dict[str, Any], memories: dict[str, float]) -> list[str]:
    took, size = found["took"], found["bytes"]
    lines = [
        "## Throughput", "",
        "| operation | MB/s | seconds | ratio of times, ours / this | added MiB |",
        "|---|---|---|---|---|",
    ]  # fmt: skip
    labels = {
        "save_ours": "save: ours, flushed, with checksums",
        "save_flushed": "save: torch.save, flushed",
        "save_plain": "save: torch.save",
        "load_ours": "load: ours, checksums verified",
        "load_plain": "load: torch.load",
    }
    for name, label in labels.items():
        mine = took["save_ours" if name.startswith("save") else "load_ours"]
        ratio = statistics.median(a / b for a, b in zip(mine, took[name], strict=True))
        typical = statistics.median(took[name])
        shown = "" if name.endswith("ours") else f"{ratio:.2f}"
        lines.append(f"| {label} | {size / 1e6 / typical:.0f} | {typical:.3f} | {shown} | {memories[name]:.0f} |")
    return [*lines, ""]


def main() -> None:
    """Run all cases, print and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--megabytes", type=float, default=400.0)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--threads", type=int, default=1, help="of the training whose stall is measured")
    parser.add_argument("--grid", type=int, nargs=2, default=[128, 256], help="rows and columns of that training")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "checkpoint.md")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(run_case(json.loads(options.case))))
        return
    load = os.getloadavg()[0]
    lines = [
        "# Cost of a checkpoint", "",
        f"{dt.date.today()}, {platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, load of the machine at the "
        f"start {load:.1f}; medians of {options.pairs} repetitions.", "",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        folder = Path(temporary)

        def case(name: str, *, lean: bool = False, **about: object) -> dict[str, Any]:
            place = folder / name
            place.mkdir()
            found = result(start({"name": name, "lean": lean, "folder": str(place), **about}))
            shutil.rmtree(place)
            return found

        about = {"megabytes": options.megabytes}
        lines += stall_lines(case("stall", pairs=options.pairs, threads=options.threads, grid=options.grid))
        several = {}
        for world in options.ranks:
            several[world] = run_ranks(folder / f"ranks-{world}", world, options.megabytes)
            shutil.rmtree(folder / f"ranks-{world}")
        lines += rank_lines(several)
        found = case("throughput", pairs=options.pairs, **about)
        names = list(found["took"])
        memories = {name: case("memory", operation=name, lean=True, **about)["memory"] for name in names}
        lines += throughput_lines(found, memories)
    print("\n".join(lines))
    options.output.parent.mkdir(exist_ok=True)
    options.output.write_text("\n".join(lines))


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """Run the case with that name in this process."""
    name, folder = case.pop("name"), Path(case.pop("folder"))
    torch.set_num_threads(case.pop("threads", 1))
    cases: dict[str, Callable[..., dict[str, Any]]] = {
        "stall": stall, "ranks": ranks, "throughput": throughput, "memory": memory,
    }  # fmt: skip
    return cases[name](folder, **case)


if __name__ == "__main__":
    main()
