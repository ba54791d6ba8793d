"""Threads that read, make, load and drop netCDF files while garbage is collected: `python netcdf_stress.py FOLDER SECONDS`.

A thread that has not had its turn by then ends after its first.
Without one lock for all of it, this ends within seconds in a segmentation fault, a bus error or HDF5 errors.
"""

import faulthandler
import gc
import os
import random
import sys
import threading
import time
from pathlib import Path

import numpy as np
import numpy.testing  # now: a process that is forked during an import cannot import
import xarray as xr

from credit_like.data.files import netcdf_files

TIMES, HEIGHT, WIDTH = 20, 60, 120
FOLDER, SECONDS = Path(sys.argv[1]), float(sys.argv[2])
COUNTS: dict[str, int] = {}
ERRORS: list[BaseException] = []


def field(seed: int, time: int) -> np.ndarray:
    return np.random.default_rng([seed, time]).random((HEIGHT, WIDTH), np.float32)


def make(seed: int, path: Path) -> netcdf_files.File:
    """Return a file that is still open."""
    file = netcdf_files.File(path, "w")
    with file.opened() as opened:
        for name, size in (("time", TIMES), ("y", HEIGHT), ("x", WIDTH)):
            opened.createDimension(name, size)
        opened.createVariable("v", "f4", ("time", "y", "x"), zlib=True, complevel=1, chunksizes=(1, HEIGHT, WIDTH))
    for number in range(TIMES):  # one at a time, so that other threads run in between
        with file.opened() as opened:
            opened["v"][number] = field(seed, number)
    return file


def read(files: dict[int, xr.Dataset]) -> None:
    seed, time = random.choice(list(files)), random.randrange(TIMES)
    np.testing.assert_array_equal(files[seed]["v"].variable[time].values, field(seed, time))


def write(name: str) -> None:
    seed, path = random.randrange(1000), FOLDER / f"{name}.nc"
    make(seed, path).close()
    with netcdf_files.reading(path) as opened:
        np.testing.assert_array_equal(opened["v"][3], field(seed, 3))


def save(name: str) -> None:
    path, dataset = FOLDER / f"{name}.nc", xr.Dataset({"v": (("y", "x"), field(random.randrange(1000), 0))})
    netcdf_files.save(dataset, path, {"v": {"zlib": True}})
    xr.testing.assert_identical(netcdf_files.load(path), dataset)


def drop(paths: list[Path]) -> None:
    """Open files in reference cycles, which only the collector finds."""
    for path in paths:
        file = netcdf_files.File(path)
        with file.opened() as opened:
            opened["v"][0, 0]
        cycle = [file, opened]
        cycle.append(cycle)
    if random.random() < 0.1:
        path = FOLDER / f"dropped{random.random()}.nc"
        cycle = [make(0, path)]
        cycle.append(cycle)
        path.unlink()


def fork(files: dict[int, xr.Dataset]) -> None:
    """Fork a child while other threads run; it reads files that are open here."""
    if (child := os.fork()) == 0:
        status = 1
        try:
            gc.freeze()
            for _ in range(5):
                read(files)
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


def repeat(stop: float, what, *arguments) -> None:
    try:
        while not ERRORS and (time.monotonic() < stop or what.__name__ not in COUNTS):
            what(*arguments)
            COUNTS[what.__name__] = COUNTS.get(what.__name__, 0) + 1
    except BaseException as error:
        ERRORS.append(error)
        raise


def main() -> None:
    faulthandler.enable()
    netcdf_files._MOST_OPEN = 4  # fewer than the files, so that files are closed and reopened all the time
    files = {}
    for seed in range(6):
        make(seed, FOLDER / f"{seed}.nc").close()
        files[seed] = netcdf_files.open_lazily(FOLDER / f"{seed}.nc")
    paths = [FOLDER / f"{seed}.nc" for seed in files]
    jobs = [(read, files), (read, files), (write, "written"), (save, "saved"), (drop, paths), (fork, files)]
    stop = time.monotonic() + SECONDS
    threads = [threading.Thread(target=repeat, args=(stop, *job)) for job in jobs]
    for thread in threads:
        thread.start()
    repeat(stop, gc.collect)
    for thread in threads:
        thread.join()
    assert not ERRORS
    print(dict(sorted(COUNTS.items())))


if __name__ == "__main__":
    main()
