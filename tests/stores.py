"""Stores in the layouts of public archives, at reduced size, and servers on this machine to read them from."""

from __future__ import annotations

import contextlib
import http.server
import re
import threading
import urllib.parse
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
import zarr

from credit_like.data.files import remote

LEVELS_37 = [
    1, 2, 3, 5, 7, 10, 20, 30, 50, 70, 100, 125, 150, 175, 200, 225, 250, 300, 350, 400, 450, 500, 550, 600, 650, 700, 750, 775,
    800, 825, 850, 875, 900, 925, 950, 975, 1000,
]  # fmt: skip
LEVELS_13 = [50, 100, 150, 200, 250, 300, 400, 500, 600, 700, 850, 925, 1000]
ON_LEVELS = {
    "geopotential": (5e4, 2e4, "m**2 s**-2"),
    "temperature": (250, 15, "K"),
    "u_component_of_wind": (5, 10, "m s**-1"),
    "v_component_of_wind": (0, 10, "m s**-1"),
    "specific_humidity": (2e-3, 5e-4, "kg kg**-1"),
    "vertical_velocity": (0, 0.1, "Pa s**-1"),
}
AT_SURFACE = {
    "2m_temperature": (285, 15, "K"),
    "10m_u_component_of_wind": (2, 5, "m s**-1"),
    "10m_v_component_of_wind": (0, 5, "m s**-1"),
    "mean_sea_level_pressure": (1e5, 900, "Pa"),
    "total_precipitation_6hr": (1e-3, 5e-4, "m"),
}
STATIC = {"geopotential_at_surface": (3000, 2000, "m**2 s**-2"), "land_sea_mask": (0.4, 0.2, "(0 - 1)")}


def _noise(random, shape, mean, spread):
    return (mean + spread * random.standard_normal(shape)).astype(np.float32)


def weatherbench2(path: Path, times: int = 40, chunk: int = 16) -> xr.Dataset:
    """Write a store as WeatherBench2's ERA5 at 64 × 32: longitude before latitude, south first, many times in a chunk, zarr 2."""
    random = np.random.default_rng(0)
    sizes = {"time": times, "level": 13, "longitude": 64, "latitude": 32}
    fields = {}
    for dims, names in (
        (("time", "level", "longitude", "latitude"), ON_LEVELS),
        (("time", "longitude", "latitude"), AT_SURFACE),
        (("longitude", "latitude"), STATIC),
    ):
        for name, (mean, spread, units) in names.items():
            fields[name] = (dims, _noise(random, [sizes[d] for d in dims], mean, spread), {"units": units})
    dataset = xr.Dataset(
        fields,
        {
            "time": xr.date_range("2020-01-01", periods=times, freq="6h"),
            "level": np.array(LEVELS_13, np.int32),
            "longitude": np.arange(64) * 5.625,
            "latitude": np.linspace(-87.1875, 87.1875, 32),
        },
    )
    chunks = {
        name: {"chunks": tuple(chunk if d == "time" else n for d, n in v.sizes.items())} for name, v in dataset.items()
    }
    times_since = {"time": {"units": "hours since 1959-01-01", "dtype": "int64", "chunks": (times,)}}
    dataset.to_zarr(path, zarr_format=2, consolidated=True, encoding={**chunks, **times_since})
    return dataset


def arco_era5(path: Path, hours: int = 72, height: int = 19, width: int = 36, static_times: bool = True) -> xr.Dataset:
    """Write a store as ARCO-ERA5: an hourly axis of 1900 to 2050, 37 levels, north first, zarr 2.

    It has every sixth hour of the first hours of 2020; all other chunks are absent. Returns these hours. The static fields
    have the axis too, or none.
    """
    random = np.random.default_rng(1)
    axis = np.arange((np.datetime64("2051-01-01") - np.datetime64("1900-01-01")).astype(int) * 24)
    start = int((np.datetime64("2020-01-01T00") - np.datetime64("1900-01-01T00")).astype(int))
    group = zarr.open_group(path, mode="w", zarr_format=2)

    def array(name, values, dims, chunks, units, fill=None):
        made = group.create_array(name, shape=values.shape, dtype=values.dtype, chunks=chunks, fill_value=fill)
        made.attrs.update({"_ARRAY_DIMENSIONS": list(dims), **({"units": units} if units else {})})
        made[...] = values

    array("time", axis, ("time",), (len(axis),), "hours since 1900-01-01")
    array("level", np.array(LEVELS_37), ("level",), (37,), "hPa")
    latitude, longitude = (
        np.linspace(90, -90, height, dtype=np.float32),
        np.arange(width, dtype=np.float32) * 360 / width,
    )
    array("latitude", latitude, ("latitude",), (height,), "degrees_north")
    array("longitude", longitude, ("longitude",), (width,), "degrees_east")
    written = {}
    for names, inner in ((ON_LEVELS, (37, height, width)), (AT_SURFACE, (height, width)), (STATIC, (height, width))):
        for name, (mean, spread, units) in names.items():
            dims = ("time", "level", "latitude", "longitude") if len(inner) == 3 else ("time", "latitude", "longitude")
            values = _noise(random, (hours, *inner), mean, spread)
            if names is STATIC and not static_times:
                array(name, values[0], dims[1:], inner, units, np.nan)
                written[name] = (dims[1:], values[0])
                continue
            made = group.create_array(
                name, shape=(len(axis), *inner), dtype="f4", chunks=(1, *inner), fill_value=np.nan
            )
            made.attrs.update({"_ARRAY_DIMENSIONS": list(dims), "units": units})
            if names is STATIC:
                values[:] = values[0]
                made[len(axis) // 2] = values[0]  # the archive has data from 1940 on
            for hour in range(0, hours, 6):
                made[start + hour] = values[hour]
            written[name] = (dims, values)
    zarr.consolidate_metadata(path, zarr_format=2)
    times = xr.date_range("2020-01-01", periods=hours, freq="1h")
    coordinates = {"time": times, "level": LEVELS_37, "latitude": latitude, "longitude": longitude}
    return xr.Dataset(written, coordinates).isel(time=slice(None, None, 6))


class Server(http.server.ThreadingHTTPServer):
    """Serves a folder over HTTP with ranges, and under the paths of Google's storage API. Can break connections, and go away."""

    daemon_threads = True
    request_queue_size = 128  # with fewer, connections at the same time wait a second for the system to repeat them

    def __init__(self, folder: Path, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.folder = folder
        self.asked: list[str] = []
        """Paths that were asked for."""
        self.broken: list[str] = []
        """Endings of paths; a request for such a path takes one away and is broken off half-way."""
        self.sent: list[tuple[str, int, int]] = []
        """Path, first byte and end of what was sent to requests for contents."""
        self.ranges = True
        """Whether requests for ranges are answered with ranges."""
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address):
        pass


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self._answer(body=False)

    def do_GET(self):
        self._answer()

    def _answer(self, body: bool = True):
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        path = re.sub(r"^/(download/)?storage/v1/b/[^/]+/o", "", path)
        self.server.asked.append(path)
        file = self.server.folder / path.strip("/")
        if not file.is_file():
            return self.send_error(404)
        data = file.read_bytes()
        wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", "")) if self.server.ranges else None
        total, status, start = len(data), 200, 0
        if wanted:
            first, last = wanted.groups()
            start = int(first) if first else max(0, total - int(last))
            data, status = data[start : int(last) + 1 if first and last else total], 206
        self.send_response(status)
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{start + len(data) - 1}/{total}")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{file.stat().st_mtime_ns}"')
        self.end_headers()
        if ending := next((ending for ending in self.server.broken if path.endswith(ending)), None):
            self.server.broken.remove(ending)
            data = data[: len(data) // 2]
        if body:
            self.server.sent.append((path, start, start + len(data)))
            self.wfile.write(data)


@contextlib.contextmanager
def serving(folder: Path, port: int = 0):
    """Serve a folder from a thread, to readers who wait for it however busy the machine is."""
    server = Server(folder, port)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(remote, "ANSWER", 900.0)
            yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
