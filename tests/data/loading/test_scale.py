"""Long stores and long runs: what has to stay small does. Processor time and memory, as the machine may be busy."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import zarr

from credit_like.data.loading.loader import Loader
from credit_like.data.loading.windows import Windows
from credit_like.data.store import open_store
from credit_like.schema.data import DataSection
from credit_like.variables import Variables

TIMES, LEVELS = 60_000, 18


def long_store(path):
    """41 years of 6-hourly 1° data of 76 channels, as metadata alone: absent chunks are fields of the fill value."""
    group = zarr.create_group(path)
    hours = np.arange(TIMES) * 6
    coordinates = {
        "time": (hours, {"units": "hours since 1979-01-01", "calendar": "standard"}),
        "level": (np.arange(1, LEVELS + 1), {}),
        "latitude": (np.linspace(90, -90, 181), {}),
        "longitude": (np.arange(360.0), {}),
    }
    for name, (values, attrs) in coordinates.items():
        group.create_array(name, data=values, dimension_names=[name]).attrs.update(attrs)
    for name in ("U", "V", "T", "Q", "SP", "t2m", "u10", "v10"):
        levels = (LEVELS,) if name.isupper() and len(name) == 1 else ()
        dims = ["time", *(["level"] if levels else []), "latitude", "longitude"]
        group.create_array(
            name, shape=(TIMES, *levels, 181, 360), chunks=(1, *levels, 181, 360), dtype="f4", fill_value=1.0,
            dimension_names=dims,
        )  # fmt: skip


FIRST_BATCH = """
    import resource, sys, time
    from tests.data.loading.test_scale import long_windows, private_megabytes
    from credit_like.data.loading.loader import Loader
    before, began = time.process_time(), time.monotonic()
    windows = long_windows(sys.argv[1])
    loader = Loader(windows, seed=0, micro_batch_size=1, global_batch_size=1, num_workers=2)
    batches = loader.batches(0)
    next(batches)
    seconds, wall = time.process_time() - before, time.monotonic() - began
    for _ in range(20):
        next(batches)
    pids = [worker.pid for worker in loader._loader._iterator._workers]
    print("RESULT", len(windows), seconds, wall, *[private_megabytes(pid) for pid in pids])
"""


def long_windows(path):
    data = DataSection.model_validate(
        {
            "source": {"type": "zarr", "path": str(path)},
            "timestep": "6h",
            "levels": list(range(1, LEVELS + 1)),
            "prognostic": {"level": ["U", "V", "T", "Q"], "surface": ["SP", "t2m", "u10", "v10"]},
            "dynamic_forcing": {"surface": [{"name": "sun", "compute": "solar"}]},
            "train": ["1979-01-01", "2015-12-31"],
            "valid": ["2016-01-01", "2016-12-31"],
            "test": ["2017-01-01", "2019-12-31"],
        }
    )
    variables = Variables(data)
    return Windows(open_store(data, variables), variables, data.train, history_len=1, forecast_len=1)


def private_megabytes(pid):
    """Memory that a process shares with no other."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(kb) for kb in re.findall(r"Private_\w+:\s+(\d+) kB", rollup)) / 1024


@pytest.mark.slow
def test_the_first_batch_of_forty_years_comes_soon_and_workers_are_small(tmp_path):
    long_store(tmp_path / "long.zarr")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FIRST_BATCH), str(tmp_path / "long.zarr")],
        capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    n, seconds, wall, *private = map(float, done.stdout.split("RESULT")[1].split())
    print(
        f"{n:.0f} windows, first batch after {wall:.2f} s ({seconds:.2f} s of the main process), workers {private} MB"
    )
    assert n > 54_000
    assert seconds < 3
    in_flight = 5 * 77 * 2 * 181 * 360 * 4 / 2**20  # two ahead, one in the making, two for who computes
    assert max(private) < 400 + in_flight


@pytest.mark.slow
def test_ten_thousand_samples_leave_nothing_behind(stored):
    _, data, variables, store = stored(prognostic={"surface": ["sp"]}, diagnostic={}, dynamic_forcing={}, static={})
    windows = Windows(store, variables, data.train, history_len=1, forecast_len=1)
    loader = Loader(windows, seed=0, micro_batch_size=1, global_batch_size=1, num_workers=1)
    read, sizes = 0, []
    for epoch in range(10_000 // len(windows) + 1):
        for _ in loader.batches(epoch):
            read += 1
        if not sizes and read > 2000:
            sizes.append(private_megabytes(loader._loader._iterator._workers[0].pid))
    sizes.append(private_megabytes(loader._loader._iterator._workers[0].pid))
    loader.close()
    assert read >= 10_000
    assert sizes[1] - sizes[0] < 4, sizes
