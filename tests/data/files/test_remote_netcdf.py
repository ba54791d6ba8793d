"""netCDF files behind a URL: the values of the file, each part of it fetched once, and one message where the server fails."""

import os
import pickle
from collections import Counter

import numpy as np
import pytest
import xarray as xr

from credit_like.data.files import remote, remote_file
from credit_like.data.sources import netcdf as source
from credit_like.data.store import ReadError, open_store
from credit_like.errors import UserError
from credit_like.variables import Variables
from tests.stores import serving

pytest.importorskip("h5py", reason="the extra `cloud` (h5py) is not installed")


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "PAUSE", 0.01)
    monkeypatch.setattr(remote_file, "BLOCK", 10_000)
    monkeypatch.setattr(remote_file, "_failed", {})
    (tmp_path / "served").mkdir()
    with serving(tmp_path / "served") as server:
        yield server


@pytest.fixture
def stored(tmp_path, server, dataset):
    data = dataset(steps=8)
    data.to_netcdf(tmp_path / "served" / "a.nc", engine="netcdf4", unlimited_dims=["time"])
    return data


def config(server, tmp_path):
    cache = {"size": "10MB", "folder": str(tmp_path / "cache")}
    return {"type": "netcdf", "path": f"{server.url}/a.nc", "cache": cache}


def test_netcdf_is_read_through_the_cache(tmp_path, server, stored):
    for _ in range(2):
        got = source.open_dataset(source.Config(**config(server, tmp_path)))
        assert not got["t"].variable._in_memory
        xr.testing.assert_equal(got.load(), stored.assign_coords(time=stored.time.astype("datetime64[s]")))
        got.close()
    sent = Counter(start // 10_000 for _, start, _ in server.sent)
    assert max(sent.values()) == 1


def test_a_server_that_breaks_off_netcdf_is_one_message_and_costs_nothing(tmp_path, server, stored, data_section):
    data = data_section(server.url, source=config(server, tmp_path))
    variables = Variables(data)
    reader = open_store(data, variables)
    server.broken += ["a.nc"] * 100
    names = variables.role("prognostic")
    with pytest.raises(ReadError) as caught:
        reader.read(names, [5, 6])
    message = str(caught.value)
    assert "cannot read" in message
    assert f"{server.url}/a.nc cannot be read (4 attempts)" in message
    assert len(message.splitlines()) == 1
    with pytest.raises(UserError, match=r"expected a netCDF file, got .*b.nc, which does not open: .* 404") as absent:
        source.open_dataset(source.Config(path=f"{server.url}/b.nc"))
    assert len(str(absent.value).splitlines()) == 1
    server.broken.clear()
    expected = stored["t"].sel(level=[500, 850])[5:7].values
    np.testing.assert_array_equal(reader.read(names, [5, 6])[:, 2:4], expected)
    again = pickle.loads(pickle.dumps(reader))
    np.testing.assert_array_equal(again.read(names, [5]), reader.read(names, [5]))


def test_a_closed_file_is_opened_again_and_a_forked_process_opens_its_own(tmp_path, server, stored):
    got = source.open_dataset(source.Config(**config(server, tmp_path)))
    expected = stored["t"].values
    np.testing.assert_array_equal(got["t"][2].values, expected[2])
    child = os.fork()
    if not child:
        os._exit(0 if np.array_equal(got["t"][3:].values, expected[3:]) else 1)
    assert os.waitpid(child, 0)[1] == 0
    got.close()
    np.testing.assert_array_equal(got["t"][4].values, expected[4])


def test_files_of_different_times_and_packing_join(tmp_path, server, dataset):
    data = dataset(steps=8)
    for i in range(2):
        packing = {"dtype": "int16", "scale_factor": 0.01, "add_offset": 240.0 + i, "_FillValue": -32767}
        part = data.isel(time=slice(4 * i, 4 * i + 4))
        part.to_netcdf(tmp_path / "served" / f"{i}.nc", engine="netcdf4", encoding={"t": packing})
    got = source.open_dataset(source.Config(path=tuple(f"{server.url}/{i}.nc" for i in range(2))))
    local = source.open_dataset(source.Config(path=str(tmp_path / "served" / "?.nc")))
    for name in data:
        np.testing.assert_array_equal(got[name].values, local[name].values, err_msg=name)
    local.close()
