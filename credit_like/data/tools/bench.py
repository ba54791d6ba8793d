"""Benchmark of data loading: its speed, the limit that reading the same files sets, and where the time goes.

The bare loop reads and decodes the very chunks that the samples need with the files' own library (zarr-python,
netCDF4), in one thread, in several, and in several processes. The fastest of these is the limit. It assembles no
samples.
"""

from __future__ import annotations

import cProfile
import itertools
import multiprocessing
import os
import pstats
import resource
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from credit_like import registry
from credit_like.data.files.find import find_files, is_url
from credit_like.data.files.netcdf_files import File
from credit_like.data.loading.loader import Loader
from credit_like.data.loading.windows import Windows
from credit_like.data.store import open_store
from credit_like.data.times import seconds
from credit_like.errors import UserError
from credit_like.processes import signals_held, work_for
from credit_like.schema.experiment import Experiment
from credit_like.variables import Variables

_READ = ("zarr", "netcdf")  # types of sources that the bare loop reads
_KINDS = {
    "disk": ("posix.pread", "posix.read", "io.open", "'read' of", "readall", "posix.stat", "_io.FileIO"),
    "decompression": ("decode", "decompress"),
    "copies": ("copyto", "'astype'", "where", "'reduce'", "concatenate", "empty", "share_memory"),
    "waiting for the library": ("'acquire'", "getitem", "_toindex"),
}


@dataclass(frozen=True)
class LoaderReport:
    """Medians over repeats. Loader and bare loop are measured alternately in one run."""

    sample_bytes: int
    samples_per_second: float
    limit_per_second: float
    limit_by: str
    workers: int
    first_batch_seconds: float
    cpu_seconds: float
    """Processor time of all processes per sample, which does not depend on other load of the machine."""
    limit_cpu_seconds: float
    shares: dict[str, float]
    """Shares of the time to make a sample in one process; they sum to 1."""

    @property
    def share_of_limit(self) -> float:
        return self.samples_per_second / self.limit_per_second

    @property
    def limited_by(self) -> str:
        """Return the part that takes most of the time."""
        return max(self.shares, key=lambda kind: self.shares[kind])

    def rows(self) -> list[tuple[str, str]]:
        """Return (quantity, value) pairs, for a table."""
        megabytes = self.sample_bytes / 1e6
        shares = ", ".join(f"{kind} {share:.0%}" for kind, share in sorted(self.shares.items(), key=lambda x: -x[1]))
        return [
            ("a sample", f"{megabytes:.1f} MB"),
            (f"loader, {self.workers} workers", _rate(self.samples_per_second, megabytes)),
            (f"bare loop ({self.limit_by})", _rate(self.limit_per_second, megabytes)),
            ("share of the bare loop", f"{self.share_of_limit:.0%}"),
            (
                "processor time of a sample",
                f"{self.cpu_seconds * 1e3:.0f} ms; bare loop {self.limit_cpu_seconds * 1e3:.0f} ms",
            ),
            ("first batch after", f"{self.first_batch_seconds:.2f} s"),
            ("where the time goes", shares),
            ("limited by", self.limited_by),
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        more = {"share_of_limit": self.share_of_limit, "limited_by": self.limited_by}
        return {**asdict(self), **more}


def bench_experiment(
    experiment: Experiment, batches: int = 50, num_workers: int | None = None, repeats: int = 3
) -> LoaderReport:
    """Measure how fast an experiment's training windows load, reading them as training would."""
    data = experiment.data
    variables = Variables(data)
    store = open_store(data, variables)
    windows = Windows(store, variables, data.train, history_len=data.history_len, forecast_len=data.forecast_len)
    workers = experiment.trainer.loader.num_workers if num_workers is None else num_workers
    return bench_data(windows, batches, workers, repeats)


def print_report(report: LoaderReport) -> None:
    """Print a table to the terminal."""
    from credit_like.terminal import folding_table, plain_console

    table = folding_table("", "", title="How fast the data load", show_header=False)
    for row in report.rows():
        table.add_row(*row)
    plain_console().print(table)


def _rate(per_second: float, megabytes: float) -> str:
    return f"{per_second:.1f} samples/s, {per_second * megabytes:.0f} MB/s"


def bench_data(windows: Windows, batches: int = 50, num_workers: int = 2, repeats: int = 3) -> LoaderReport:
    """Measure `batches` samples per turn in the loader's shuffled order, `repeats` turns of loader and bare loop."""
    batches = min(batches, len(windows))
    loader = Loader(windows, seed=0, micro_batch_size=1, global_batch_size=1, num_workers=num_workers)
    began = time.perf_counter()
    stream = iter(loader.batches(0))
    first = next(stream)
    first_batch = time.perf_counter() - began
    sample_bytes = sum(4 * x.numel() for x in (first.prognostic, first.forcing, first.target))
    order = [int(index[0]) for index in loader.indices(0)]
    stream.close()  # type: ignore[attr-defined]
    loader.close()
    ways = _ways(windows, num_workers)
    ours: list[tuple[float, float]] = []
    limits: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for turn in range(repeats):
        chosen = [order[(turn * batches + i) % len(order)] for i in range(batches)]
        ours.append(_throughput(loader, turn + 1, batches))
        for name, way in ways.items():
            limits[name].append(_clocked(way, chosen))
    medians = {name: float(np.median([rate for rate, _ in values])) for name, values in limits.items()}
    best = max(medians, key=lambda name: medians[name])
    return LoaderReport(
        sample_bytes,
        float(np.median([rate for rate, _ in ours])),
        medians[best],
        best,
        num_workers,
        first_batch,
        float(np.median([cpu for _, cpu in ours])),
        min(float(np.median([cpu for _, cpu in values])) for values in limits.values()),
        _shares(windows, order[: min(batches, 20)]),
    )


def _cpu() -> float:
    """Return the processor time in seconds of this process and of its ended children."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


_Way = Callable[[Sequence[int]], tuple[float, int]]
"""Reads samples; returns the seconds that this took once files are open, and the number of samples read in all."""


def _clocked(way: _Way, chosen: Sequence[int]) -> tuple[float, float]:
    """Return (samples per second, processor seconds per sample)."""
    cpu = _cpu()
    seconds, read = way(chosen)
    return len(chosen) / seconds, (_cpu() - cpu) / read


def _throughput(loader: Loader, epoch: int, batches: int) -> tuple[float, float]:
    """Return (samples per second after the first few, which fill the pipeline; processor seconds per sample)."""
    cpu, warm = _cpu(), min(4, batches // 4)
    began, read = time.perf_counter(), 0
    for read, _ in enumerate(itertools.islice(loader.batches(epoch), batches + warm), 1):
        if read == warm:
            began = time.perf_counter()
    rate = (read - warm) / (time.perf_counter() - began)
    loader.close()
    ahead = loader.windows_ahead  # the workers have read these, but they have not been consumed
    return rate, (_cpu() - cpu) / min(read + ahead, len(loader))


def _ways(windows: Windows, processes: int) -> dict[str, _Way]:
    """Return the ways of reading without assembling samples, by name."""
    tasks = _Tasks(windows)
    ways: dict[str, _Way] = {"one thread": lambda chosen: _in_threads(tasks, chosen, 1)}
    if not tasks.netcdf:
        for threads in (2, 4):
            ways[f"{threads} threads"] = lambda chosen, threads=threads: _in_threads(tasks, chosen, threads)  # type: ignore[misc]
    if processes > 1:
        ways[f"{processes} processes"] = lambda chosen: _in_processes(tasks, chosen, processes)
    return ways


@dataclass(frozen=True)
class _Part:
    """One variable of one local file, with the times in it."""

    path: str
    var: str
    seconds: NDArray[np.int64]
    target_only: bool


class _Tasks:
    """The reads that windows require of local files, through the files' own library.

    Time must be the leading dimension."""

    def __init__(self, windows: Windows) -> None:
        self.windows = windows
        self._open: dict[tuple[str, str], Any] = {}
        self._files: dict[str, File] = {}
        self.parts: list[_Part] = []
        axes: dict[str, NDArray[np.int64]] = {}
        for role in ("prognostic", "diagnostic", "dynamic_forcing"):
            for variable in windows.variables.role(role):
                found = windows.store.source_of(variable)
                if found is None or getattr(found[0], "type", None) not in _READ:
                    continue
                if not isinstance(found[0].path, str) or is_url(found[0].path):
                    continue
                config, var = found
                module = registry.of("source", config)
                for path in find_files(config.path, {}):
                    if path not in axes:
                        dataset = module.open_dataset(config.model_copy(update={"path": path}))
                        axes[path] = seconds(dataset["time"].values)
                        dataset.close()
                    self.parts.append(_Part(path, var, axes[path], role == "diagnostic"))
        if not self.parts:
            raise UserError("expected zarr or netCDF files on a local disk to compare with, got none")
        self.netcdf = any(not Path(part.path).is_dir() for part in self.parts)

    def read(self, chosen: Sequence[int]) -> None:
        windows = self.windows
        since = windows.store.seconds
        for now in windows.starts[list(chosen)]:
            last = since[now + windows.forecast_len]
            for part in self.parts:
                first = since[now + 1] if part.target_only else since[now - windows.history_len + 1]
                a, b = np.searchsorted(part.seconds, first), np.searchsorted(part.seconds, last, "right")
                if b > a:
                    self._read(part, slice(int(a), int(b)))

    def _read(self, part: _Part, times: slice) -> None:
        if not Path(part.path).is_dir():
            if part.path not in self._files:
                self._files[part.path] = File(part.path, chunk_cache=False)
            with self._files[part.path].opened() as opened:
                variable = opened[part.var]
                variable.set_auto_maskandscale(False)
                variable[times]
            return
        key = (part.path, part.var)
        if key not in self._open:
            self._open[key] = zarr.open_group(part.path, mode="r")[part.var]
        self._open[key][times]

    def read_afresh(self, parent: int, chosen: Sequence[int], together: Barrier) -> None:
        """Read in a process that was forked from `parent`, with files opened anew by a first sample before all begin."""
        work_for(parent)
        self._open = {}
        with ExitStack() as failing:
            failing.callback(together.abort)
            self.read(chosen[:1])
            failing.pop_all()
        together.wait(_PATIENCE)
        self.read(chosen)


_PATIENCE = 600.0  # seconds in which a process opens its files


def _in_threads(tasks: _Tasks, chosen: Sequence[int], threads: int) -> tuple[float, int]:
    tasks.read(chosen[:1])
    with ThreadPoolExecutor(threads) as pool:
        began = time.perf_counter()
        list(pool.map(lambda i: tasks.read([i]), chosen))
        return time.perf_counter() - began, len(chosen) + 1


def _in_processes(tasks: _Tasks, chosen: Sequence[int], processes: int) -> tuple[float, int]:
    context = multiprocessing.get_context("fork")
    together = context.Barrier(processes + 1)
    parts = [
        context.Process(target=tasks.read_afresh, args=(os.getpid(), chosen[k::processes], together), daemon=True)
        for k in range(processes)
    ]
    with signals_held():
        for part in parts:
            part.start()
    with suppress(BrokenBarrierError):  # a process that ends before it reaches the barrier is reported below
        together.wait(_PATIENCE)
    began = time.perf_counter()
    for part in parts:
        part.join()
        if part.exitcode:
            raise RuntimeError(f"a reading process ended with status {part.exitcode}")
    return time.perf_counter() - began, len(chosen) + processes


def _shares(windows: Windows, chosen: Sequence[int]) -> dict[str, float]:
    """Profile one process and return where the time of making samples goes."""
    windows.batch([chosen[0]])
    profile = cProfile.Profile()
    profile.enable()
    for i in chosen:
        windows.batch([i])
    profile.disable()
    times = dict.fromkeys([*_KINDS, "Python"], 0.0)
    statistics: dict[tuple[str, int, str], tuple[Any, ...]] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    for (_, _, function), numbers in statistics.items():
        kind = next((k for k, marks in _KINDS.items() if any(mark in function for mark in marks)), "Python")
        times[kind] += numbers[2]
    total = sum(times.values()) or 1.0
    return {kind: spent / total for kind, spent in times.items()}
