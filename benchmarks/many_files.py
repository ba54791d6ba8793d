"""Measure opening and reading a source of very many small netCDF files, with its index and without.

    python benchmarks/many_files.py [--files 20000] [--reads 200] [--folder DIR] [--output FILE.md]

Makes the files (one time each, two variables on 8 × 16 points) in a temporary folder of DIR. Every row is a process of its own.
`without index` opens every file, as is done below the number of files from which an index is made. Memory is what the work
adds to the process (its largest resident size, without the interpreter and the packages). Reads are of single times in random
order, of both variables.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import netCDF4
import numpy as np

from credit_like.data.sources import _files
from credit_like.data.sources.netcdf import Config, open_dataset

ROOT = Path(__file__).parents[1]
HEIGHT, WIDTH = 8, 16
_MARK = 1234.5678  # hours, in the first file


def template(path: Path) -> None:
    """Write the first file."""
    with netCDF4.Dataset(path, "w") as file:
        for name, size in (("time", 1), ("latitude", HEIGHT), ("longitude", WIDTH)):
            file.createDimension(name, size)
            variable = file.createVariable(name, "f8", (name,))
            variable.units = {"time": "hours since 2000-01-01", "latitude": "degrees_north"}.get(name, "degrees_east")
        file["time"][:] = _MARK
        file["latitude"][:] = np.linspace(80, -80, HEIGHT)
        file["longitude"][:] = np.arange(WIDTH) * 360 / WIDTH
        for name in ("t", "q"):
            variable = file.createVariable(name, "f4", ("time", "latitude", "longitude"))
            variable.units = "K"
            variable[:] = field(0)


def field(number: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the values of one time."""
    return number + np.arange(HEIGHT * WIDTH, dtype=np.float32).reshape(1, HEIGHT, WIDTH)


def make(folder: Path, count: int) -> None:
    """Make all files from the first one, by replacing its time and values: the library takes much longer."""
    template(folder / "first")
    content = (folder / "first").read_bytes()
    (folder / "first").unlink()
    for number in range(count):
        changed = content.replace(np.float64(_MARK).tobytes(), np.float64(6.0 * number).tobytes())
        path = folder / f"{number:06d}.nc"
        path.write_bytes(changed.replace(field(0).tobytes(), field(number).tobytes()))


def status(field: str) -> float:
    """Return a size of this process in MB (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1e3


def case(folder: str, index: bool, reads: int) -> dict[str, Any]:
    """Open the source, and read some times."""
    if not index:
        _files.INDEXED = 10**9
    before, start, cpu = status("VmRSS"), time.perf_counter(), time.process_time()
    dataset = open_dataset(Config(path=f"{folder}/*.nc"))
    result = {"open": time.perf_counter() - start, "cpu": time.process_time() - cpu, "times": dataset.sizes["time"]}
    result["memory after opening"] = status("VmHWM") - before
    wanted = random.Random(0).sample(range(dataset.sizes["time"]), reads)
    start = time.perf_counter()
    for number in wanted:
        for name in ("t", "q"):
            values = dataset[name].isel(time=number).values
            assert np.array_equal(values, field(number)[0]), number
    result["read"] = (time.perf_counter() - start) / reads
    result["memory"] = status("VmHWM") - before
    dataset.close()
    return result


def in_process(*arguments: Any) -> dict[str, Any]:
    """Run a case in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--case", json.dumps(arguments)], check=True, stdout=subprocess.PIPE, text=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Make the files, run all cases, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=20000)
    parser.add_argument("--reads", type=int, default=200)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "many-files.md")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(case(*json.loads(options.case))))
        return
    lines = [
        f"# A source of {options.files:,} files", "",
        f"{dt.date.today()}, {platform.machine()}, load of the machine at the start {os.getloadavg()[0]:.1f}; written by "
        f"`benchmarks/many_files.py`, {options.reads} reads.", "",
        "| | open, s | of it CPU, s | memory after opening, MB | read a time, ms | memory after reading, MB |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        folder = Path(temporary) / "files"
        folder.mkdir()
        os.environ["CREDIT_LIKE_CACHE"] = str(Path(temporary) / "cache")
        make(folder, options.files)

        def line(name: str, index: bool, reads: int = options.reads) -> None:
            found = in_process(str(folder), index, reads)
            assert found["times"] == len(list(folder.iterdir()))
            lines.append(
                f"| {name} | {found['open']:.2f} | {found['cpu']:.2f} | {found['memory after opening']:.0f} "
                f"| {1e3 * found['read']:.1f} | {found['memory']:.0f} |"
            )
            print(lines[-1], flush=True)

        line("making the index", True)
        line("with the index", True)
        line(f"with the index, {10 * options.reads:,} reads", True, min(10 * options.reads, options.files))
        for number in range(options.files - 10, options.files):
            shutil.copy(folder / f"{number:06d}.nc", folder / "again")
            os.replace(folder / "again", folder / f"{number:06d}.nc")
        line("with the index, 10 files changed", True)
        line("without index", False)
    lines.append("")
    print("\n".join(lines))
    options.output.parent.mkdir(exist_ok=True)
    options.output.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
