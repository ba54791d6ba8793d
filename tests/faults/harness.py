"""Run the tiny training in real processes, end them at random instants, and check that nothing was lost."""

from __future__ import annotations

import gc
import itertools
import json
import logging
import multiprocessing
import os
import random
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch._dynamo  # loaded once here, not in every fork
from torch.utils import tensorboard  # noqa: F401

from credit_like import cli
from credit_like.checkpoint.manager import Checkpoint, steps
from credit_like.parallel.environment import local_launch
from tests.faults import tiny

HANG = 850.0
"""Seconds after which processes hang: they compute for a few, but on a busy machine take as long as pytest lets them."""


@dataclass
class Counts:
    """The events of a run."""

    kills: int = 0
    in_save: int = 0
    starts: int = 0
    outcomes: list = field(default_factory=list)


def shard(runtime):
    """Apply FSDP2 over all ranks, with the rest of the model as one unit."""
    from torch.distributed.fsdp import fully_shard

    from credit_like.parallel.mesh import gradient_mesh

    def wrap(model):
        mesh = gradient_mesh(runtime.mesh)
        for part in (model.conv, model.head):
            fully_shard(part, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    return wrap


def replicate(runtime):
    from torch.nn.parallel import DistributedDataParallel

    return lambda model: DistributedDataParallel(model, find_unused_parameters=True)


def hold_at(number: int, save_loc: str | Path) -> None:
    """Have this process wait in optimiser step `number` until `release(save_loc)`.

    What a test does until then happens in the midst of the training, however busy the machine is.
    """
    from credit_like.training.step import TrainStep

    inner = TrainStep.__call__

    def step(self, micro_batches, count, learning_rate, step):
        while step == number and not _released(save_loc).exists():
            time.sleep(0.005)
        return inner(self, micro_batches, count, learning_rate, step)

    TrainStep.__call__ = step


def release(save_loc: str | Path) -> None:
    """Let the processes go on that wait in `hold_at`, and those to come."""
    _released(save_loc).touch()


def _released(save_loc: str | Path) -> Path:
    return Path(save_loc).with_suffix(".released")


def _train(rank, world, port, save_loc, section):
    """Run one rank to its end."""
    import datetime as dt

    from credit_like.parallel.runtime import Runtime
    from credit_like.schema.trainer import Parallelism

    runtime, wrap = Runtime(), None
    section = dict(section)
    if number := section.pop("hold_at", None):
        hold_at(number, save_loc)
    if world > 1:
        layout = section.setdefault("parallelism", {"data": "ddp"})
        patience = dt.timedelta(seconds=section.pop("patience", 120))  # a busy machine may stall for a while
        runtime = Runtime.start(Parallelism.model_validate(layout), torch.device("cpu"), patience)
        wrap = {"ddp": replicate, "fsdp2": shard}[layout["data"]](runtime)
    outcome = tiny.trainer(Path(save_loc), runtime, wrap=wrap, **section).fit()
    if world > 1:
        runtime.close()
    return outcome.exit_status


def _child(rank, world, port, save_loc, section, body):
    port = port.recv()
    gc.freeze()  # this process must not finalise objects of the parent, such as a store with a thread
    with Path(save_loc).with_suffix(f".{rank}.out").open("ab", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    logging.basicConfig(level=logging.INFO, force=True, stream=sys.stderr)
    os.environ.update(local_launch(rank, world, port))
    torch.set_num_threads(1)
    status = 1
    try:
        status = body(rank, world, port, save_loc, section)
    except BaseException:  # noqa: BLE001 (a rank reports every failure before it ends)
        traceback.print_exc()
    finally:
        os._exit(status)


def called(arguments: list[str]) -> int:
    """Run a command in this process; return its exit status."""
    try:
        cli.main(arguments)
    except SystemExit as end:
        return end.code or 0
    return 0


class Job:
    """The processes of one start of a run."""

    def __init__(self, save_loc: Path, section: dict, world: int = 1, body: Callable = _train) -> None:
        context = multiprocessing.get_context("fork")
        pipes = [context.Pipe(duplex=False) for _ in range(world)]
        self.processes = [
            context.Process(target=_child, args=(rank, world, pipes[rank][0], str(save_loc), section, body))
            for rank in range(world)
        ]
        for process in self.processes:
            process.start()
        port = 0
        if world > 1:
            import torch.distributed as dist

            # After the forks: a lock held by its thread during a fork would never be released in that rank.
            self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            port = self.store.port
        for _, tell in pipes:
            tell.send(port)

    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def signal(self, number: int, rank: int | None = None) -> None:
        for process in self.processes if rank is None else [self.processes[rank]]:
            if process.exitcode is None:  # a process that has ended may be reaped already, and its id reused
                os.kill(process.pid, number)

    def wait(self, seconds: float = HANG) -> bool:
        """Return whether all processes ended in time."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return all(process.exitcode is not None for process in self.processes)

    def end(self, grace: float = 0.0) -> list[int]:
        """Return the exit codes; kill after `grace` seconds whatever still runs, as a launcher would."""
        self.wait(grace)
        for process in self.processes:
            if process.exitcode is None:
                process.kill()
            process.join()
        return [process.exitcode for process in self.processes]


LIMIT = 20.0
"""Seconds that all ranks may wait, in all, after the error of one until they have ended."""


class Waiting:
    """How long processes wait for anything but a processor; a limit on it holds however busy the machine is.

    A thread adds up the time on a processor and in the queue for one of each of their threads (`/proc/PID/task/*/schedstat`).
    """

    def __init__(self, pids: Callable[[], Iterable[int]]) -> None:
        self._pids = pids
        self._busy: dict[tuple[int, str], float] = {}
        self._samples: list[tuple[float, float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Waiting:
        self._sample()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._sample()

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            self._sample()

    def _sample(self) -> None:
        for pid in self._pids():
            for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
                with suppress(OSError, ValueError):  # a thread that has just ended
                    computing, queueing, _ = file.read_text().split()
                    self._busy[pid, file.parent.name] = (int(computing) + int(queueing)) / 1e9
        self._samples.append((time.time(), sum(self._busy.values())))

    def since(self, moment: float) -> float:
        """Return the seconds from `moment` (`time.time()`) to the end in which all of the processes did nothing but wait."""
        waited = 0.0
        for (begin, before), (end, busy) in itertools.pairwise(self._samples):
            if end > moment:
                waited += max(0.0, end - max(begin, moment) - (busy - before))
        return waited


def reference(save_loc: Path, section: dict, world: int = 1) -> None:
    """Train without interruption."""
    job = Job(save_loc, section, world)
    assert job.wait(), Path(save_loc).with_suffix(".0.out").read_text()
    assert job.end() == [0] * world, Path(save_loc).with_suffix(".0.out").read_text()


def torment(
    save_loc: Path, section: dict, world: int, rng: random.Random, kills: int, within: float, one: bool = False
) -> Counts:
    """Kill the run at random instants up to `kills` times, then let it finish. `one`: kill only one rank.

    Some of the instants are counted from the start, most from when its log goes on, and some are in a save, however slow the
    machine is.
    """
    counts = Counts()
    while True:
        job = Job(save_loc, section, world)
        rows = _Growth(save_loc / "log.jsonl")
        counts.starts += 1
        if counts.kills >= kills:
            assert job.wait(), "the last start did not end"
            codes = job.end()
            assert codes == [0] * world, (codes, Path(save_loc).with_suffix(".0.out").read_text()[-4000:])
            return counts
        kind = rng.random()
        ended = kind > 0.3 and not _reached(job, rows.seen)
        ended = ended or job.wait(rng.uniform(0, within if kind <= 0.3 else 0.2))
        if not ended and kind > 0.7:
            ended = not _reached(job, lambda: any((save_loc / "checkpoints").glob(".step-*")))
        if ended:
            codes = job.end()
            assert codes == [0] * world, (codes, Path(save_loc).with_suffix(".0.out").read_text()[-4000:])
            return counts
        job.signal(signal.SIGKILL, rng.randrange(world) if one else None)
        counts.kills += 1
        counts.in_save += any((save_loc / "checkpoints").glob(".step-*"))
        job.end(grace=5.0)


class _Growth:
    """Whether a log has grown, after a start that may have cut it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.least = self._size()

    def seen(self) -> bool:
        size = self._size()
        self.least = min(self.least, size)
        return size > self.least

    def _size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0


def _reached(job: Job, there: Callable[[], bool], patience: float = 300.0) -> bool:
    """Return True once a running job is `there`, or False once it has ended."""
    deadline = time.monotonic() + patience
    while not there():
        assert time.monotonic() < deadline, "the job neither went on nor ended"
        if job.wait(0):
            return False
        time.sleep(0.0005)
    return True


def tensors(save_loc: Path) -> dict[str, torch.Tensor]:
    """Return everything in the newest checkpoint, by name."""
    checkpoint = Checkpoint.open(save_loc / "checkpoints" / f"step-{steps(save_loc / 'checkpoints')[-1]}")
    checkpoint.verify()
    return {name: checkpoint.read(name) for name in checkpoint.names()}


def rows(save_loc: Path) -> list[dict]:
    return [json.loads(line) for line in (save_loc / "log.jsonl").read_text().splitlines()]


_TIMING = {"samples_per_second", "data_wait", "memory_mib", "seconds"}


def _untimed(value):
    """Return what a log holds, without how long it took."""
    if isinstance(value, dict):
        return {key: _untimed(inner) for key, inner in value.items() if key not in _TIMING}
    return [_untimed(inner) for inner in value] if isinstance(value, list) else value


def assert_same(run: Path, other: Path) -> None:
    """Assert bitwise equal tensors, equal logs apart from timings, and no temporary files."""
    a, b = tensors(run), tensors(other)
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert torch.equal(
            a[name].view(torch.uint8) if a[name].ndim else a[name],
            b[name].view(torch.uint8) if b[name].ndim else b[name],
        ), name
    assert _untimed(rows(run)) == _untimed(rows(other))
    for folder in (run, other):
        hidden = [path for path in folder.rglob(".*") if path.name != ".lock"]
        assert not hidden, hidden
        status = json.loads((folder / "status.json").read_text())
        assert status["state"] == "finished"


def at(folder: Path, step: int) -> Checkpoint:
    """The checkpoint of a step."""
    return Checkpoint.open(folder / "checkpoints" / f"step-{step}")


def begun(whole: Path, folder: Path, step: int) -> Path:
    """Copy a run as it was when its newest checkpoint was that of `step`; its log may be longer."""
    shutil.copytree(whole, folder, ignore=lambda _, names: [name for name in names if name.startswith("step-")])
    shutil.copytree(whole / "checkpoints" / f"step-{step}", folder / "checkpoints" / f"step-{step}")
    return folder


def last_steps(folder: Path) -> list[int]:
    """The last step of every phase."""
    last = {row["phase"]: row["step"] for row in rows(folder) if "loss" in row}
    return [last[phase] for phase in sorted(last)]
