"""Compare the loader with a bare loop over the same chunks, on common kinds of stores; write benchmarks/results/loader.md.

    python benchmarks/loader.py [--folder DIR] [--times 60] [--workers 2]

The stores are created in DIR (by default a temporary folder) and are in the page cache, so the benchmark compares decoding and
everything around it, not the disk.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
from pathlib import Path

import numpy as np
import xarray as xr
import zarr
from scipy.ndimage import zoom

from credit_like.data.files.netcdf_files import save
from credit_like.data.loading.windows import Windows
from credit_like.data.store import open_store
from credit_like.data.tools.bench import bench_data
from credit_like.schema.data import DataSection
from credit_like.variables import Variables

LEVELS = list(range(1, 20))


def weather(times: int, height: int, width: int, start: str = "2000-01-01") -> xr.Dataset:
    """Return 4 variables on 19 levels and 4 at the surface, smooth fields with a little noise, rounded to 12 bits."""
    random = np.random.default_rng(0)
    smooth = zoom(
        random.standard_normal((height // 10, width // 10)), (height / (height // 10), width / (width // 10)), order=1
    )

    def field(*lead: int) -> np.ndarray:
        shift = random.integers(0, width, lead[0])
        base = np.stack([np.roll(smooth, s, 1) for s in shift]).astype("f4")
        base = base.reshape(lead[0], *([1] * (len(lead) - 1)), height, width)
        values = np.broadcast_to(base, (*lead, height, width)) + 0.01 * random.standard_normal(
            (*lead[1:], height, width), "f4"
        )
        return (np.round(values * 512) / 512).astype("f4")

    data = {name: (("time", "level", "latitude", "longitude"), field(times, len(LEVELS))) for name in "utvq"}
    data |= {name: (("time", "latitude", "longitude"), field(times)) for name in ("sp", "t2m", "u10", "v10")}
    coordinates = {
        "time": np.datetime64(start, "ns") + np.arange(times) * np.timedelta64(6, "h"),
        "level": LEVELS,
        "latitude": np.linspace(90, -90, height),
        "longitude": np.arange(width) * 360.0 / width,
    }
    return xr.Dataset(data, coordinates)


def stores(folder: Path, times: int) -> dict[str, Path | str]:
    """Write the stores; return name → path or template."""
    ds = weather(times, 181, 360)
    one = {name: {"chunks": (1, *v.shape[1:])} for name, v in ds.items()}
    ds.to_zarr(folder / "one.zarr", encoding=one, consolidated=False, mode="w")
    banded = {
        name: {"chunks": (1, *v.shape[1:-2], 46, 360), "shards": (4, *v.shape[1:-2], 184, 360)}
        for name, v in ds.items()
    }
    for encoding in banded.values():
        encoding["compressors"] = zarr.codecs.BloscCodec(cname="zstd", clevel=3, shuffle="bitshuffle")
    ds.to_zarr(folder / "banded.zarr", encoding=banded, consolidated=False, mode="w")
    half = times // 2
    for i, part in enumerate((ds.isel(time=slice(0, half)), ds.isel(time=slice(half, None)))):
        packed = {name: {"zlib": True, "complevel": 1, "chunksizes": (1, *v.shape[1:])} for name, v in part.items()}
        save(part, folder / f"year_{2000 + i}.nc", packed)
    return {
        "zarr v3, one chunk per time, zstd": folder / "one.zarr",
        "zarr v3, one chunk per time and band of 46 rows, blosc, sharded by 4 times": folder / "banded.zarr",
        "two netCDF-4 files by template, one chunk per time, deflate": f"{folder}/year_%Y.nc",
    }


def windows(path: Path | str, rows: slice = slice(None)) -> Windows:
    kind = "netcdf" if str(path).endswith(".nc") else "zarr"
    period = ["2000-01-01", "2100-01-01"]
    data = DataSection.model_validate(
        {
            "source": {"type": kind, "path": str(path)},
            "timestep": "6h",
            "levels": LEVELS,
            "prognostic": {"level": list("utvq"), "surface": ["sp", "t2m", "u10", "v10"]},
            "train": period, "valid": period, "test": period,
        }
    )  # fmt: skip
    variables = Variables(data)
    return Windows(open_store(data, variables), variables, data.train, history_len=1, forecast_len=1, rows=rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--times", type=int, default=60)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    lines = [
        "# The loader compared with a bare loop", "",
        f"{time.strftime('%Y-%m-%d')}, {platform.processor() or platform.machine()}, {os.cpu_count()} cores, load "
        f"{os.getloadavg()[0]:.1f} at the start; 181 × 360, 80 channels, a sample = 2 times; files in the page cache; "
        f"medians of {arguments.repeats} repetitions, loader and bare loop alternating.", "",
        "| store | loader | bare loop | share | processor time per sample: loader, bare loop | where the time goes |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for name, path in stores(folder, arguments.times).items():
            report = bench_data(windows(path), arguments.batches, arguments.workers, arguments.repeats)
            rows = dict(report.rows())
            ours, limit = (value for key, value in rows.items() if "loader" in key or "bare loop (" in key)
            lines.append(
                f"| {name} | {ours} | {limit} ({report.limit_by}) | {report.share_of_limit:.0%} | "
                f"{report.cpu_seconds * 1e3:.0f} ms, {report.limit_cpu_seconds * 1e3:.0f} ms | {rows['where the time goes']} |"
            )
            print(lines[-1], flush=True)
    target = Path(__file__).parent / "results" / "loader.md"
    target.parent.mkdir(exist_ok=True)
    target.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
