"""Compare the statistics pass with a bare loop over the same chunks; write benchmarks/results/preprocess.md.

    python benchmarks/preprocess.py [--folder DIR] [--gigabytes 10] [--workers 2] [--turns 3]

The store (1°, 80 fields per time, one chunk per variable and time, zstd) is created in DIR, by default a temporary folder. The
bare loop reads and decodes every chunk with zarr-python in as many processes, and does nothing else; the two alternate. The
results of the pass are compared with NumPy's two-pass mean and standard deviation in float64.
"""

from __future__ import annotations

import argparse
import datetime as dt
import itertools
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import zarr
from loader import LEVELS, weather

from credit_like.data.statistics import Statistics
from credit_like.data.store import open_store
from credit_like.data.tools.preprocess import in_processes, preprocess
from credit_like.schema.data import DataSection
from credit_like.variables import Variables

HEIGHT, WIDTH, BLOCK = 181, 360, 24
LEVEL, SURFACE = list("utvq"), ["sp", "t2m", "u10", "v10"]
STEP = np.timedelta64(6, "h")
START = np.datetime64("2000-01-01", "ns")


def make(path: Path, gigabytes: float) -> int:
    """Write a store of about so many GB of uncompressed numbers; return its number of times."""
    part = weather(BLOCK, HEIGHT, WIDTH)
    blocks = max(1, round(gigabytes * 1e9 / part.nbytes))
    random = np.random.default_rng(1)
    for i in range(blocks):
        changed = part.roll(longitude=int(random.integers(WIDTH)), roll_coords=False) * np.float32(
            random.uniform(0.9, 1.1)
        )
        changed["time"] = START + (i * BLOCK + np.arange(BLOCK)) * STEP
        if i == 0:
            encoding = {name: {"chunks": (1, *v.shape[1:])} for name, v in changed.data_vars.items()}
            encoding |= {"time": {"units": "hours since 1970-01-01", "dtype": "int64", "chunks": (1 << 16,)}}
            changed.to_zarr(path, encoding=encoding, consolidated=False, mode="w")
        else:
            changed.to_zarr(path, append_dim="time", consolidated=False)
    return blocks * BLOCK


def read(path: Path, first: int, last: int) -> None:
    """Read every chunk of these times, one after the other."""
    group = zarr.open_group(path, mode="r")
    for t in range(first, last):
        for name in (*LEVEL, *SURFACE):
            group[name][t]


def bare(path: Path, times: int, processes: int) -> float:
    """Return the seconds of the bare loop."""
    began = time.perf_counter()
    edges = np.linspace(0, times, processes + 1).astype(int).tolist()
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for part in [pool.submit(read, path, a, b) for a, b in itertools.pairwise(edges)]:
            part.result()
    return time.perf_counter() - began


def ours(path: Path, times: int, workers: int) -> tuple[float, Statistics]:
    """Return (seconds, results), including the audit and its plots."""
    end = str(START + (times - 1) * STEP)[:13]
    data = DataSection.model_validate(
        {
            "source": {"type": "zarr", "path": str(path)},
            "timestep": "6h",
            "levels": LEVELS,
            "prognostic": {"level": LEVEL, "surface": SURFACE},
            "train": [str(START)[:10], end], "valid": [str(START)[:10], end], "test": [str(START)[:10], end],
        }
    )  # fmt: skip
    variables = Variables(data)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        found, _ = preprocess(open_store(data, variables), variables, data, Path(folder), mapper=in_processes(workers))
    return time.perf_counter() - began, found


def reference(path: Path, times: int) -> Iterator[tuple[str, float, float]]:
    """Return (channel, mean, standard deviation) by two passes in float64."""
    group = zarr.open_group(path, mode="r")
    for name in (*LEVEL, *SURFACE):
        array = group[name]
        fields = array.shape[1] if array.ndim == 4 else 1
        total, squares = np.zeros(fields), np.zeros(fields)
        for t in range(times):
            total += np.asarray(array[t], np.float64).reshape(fields, -1).sum(1)
        mean = total / (times * HEIGHT * WIDTH)
        for t in range(times):
            apart = np.asarray(array[t], np.float64).reshape(fields, -1) - mean[:, None]
            squares += (apart * apart).sum(1)
        std = np.sqrt(squares / (times * HEIGHT * WIDTH))
        for k in range(fields):
            yield f"{name}@{LEVELS[k]}" if array.ndim == 4 else name, float(mean[k]), float(std[k])


def worst(found: Statistics, expected: Iterator[tuple[str, float, float]]) -> float:
    """Return the largest difference of a mean or a deviation, in standard deviations."""
    table = found.dataset
    names = table["channel"].values.tolist()
    means, stds = (dict(zip(names, table[kind].values.tolist(), strict=True)) for kind in ("mean", "std"))
    return max(max(abs(means[c] - mean), abs(stds[c] - std)) / std for c, mean, std in expected)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=10.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        path = Path(folder) / "store.zarr"
        times = make(path, arguments.gigabytes)
        size = times * (len(LEVEL) * len(LEVELS) + len(SURFACE)) * HEIGHT * WIDTH * 4 / 1e9
        pairs = []
        for _ in range(arguments.turns):
            limit = bare(path, times, arguments.workers)
            took, found = ours(path, times, arguments.workers)
            pairs.append((limit, took))
        difference = worst(found, reference(path, times))
    limit, took = (statistics.median(pair[i] for pair in pairs) for i in (0, 1))
    share = statistics.median(a / b for a, b in pairs)
    text = "\n".join(
        [
            "# The statistics pass compared with a bare loop",
            "",
            f"{dt.date.today()}, {platform.machine()}, {os.cpu_count()} cores, load {load:.1f} at the start; {times} times, "
            f"{size:.1f} GB of uncompressed numbers at 1°; {arguments.workers} processes each; medians of "
            f"{arguments.turns} repetitions.",
            "",
            "| | seconds | MB/s |",
            "|---|---|---|",
            f"| bare loop: reading and decoding every chunk | {limit:.1f} | {1e3 * size / limit:.0f} |",
            f"| pass: statistics, audit and its plots | {took:.1f} | {1e3 * size / took:.0f} |",
            "",
            f"The pass reaches {100 * share:.0f} % of the read limit. The largest difference from NumPy's float64 mean or standard "
            f"deviation is {difference:.1e} standard deviations.",
            "",
        ]
    )
    print(text)
    target = Path(__file__).parent / "results" / "preprocess.md"
    target.write_text(text)


if __name__ == "__main__":
    main()
