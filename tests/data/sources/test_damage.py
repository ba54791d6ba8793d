"""Damage and failure, for each source that they apply to: one message that says where, or the right values, and nothing lost.

GRIB's own cases (truncated files, grids that differ, headers that lie) are in `test_grib.py`.
"""

import errno
import json
import logging
import os

import numpy as np
import pytest

from credit_like import registry
from credit_like.data.files import object_cache, remote, remote_file
from credit_like.data.store import ReadError, open_store
from credit_like.errors import UserError
from credit_like.variables import Variables
from tests.data.sources.test_anemoi import NAMES, make, section
from tests.stores import serving

pytestmark = pytest.mark.filterwarnings("ignore:Consolidated metadata:zarr.errors.ZarrUserWarning")
ZARR = {"zarr2": 2, "zarr3": 3}
NETCDF = {"netcdf4": "NETCDF4", "netcdf3": "NETCDF3_64BIT"}
STORES = [*ZARR, *NETCDF, "anemoi"]


def written(form, path, dataset, **changes):
    """Write a dataset in a format; return the values of the surface pressure, or of the 2 m temperature."""
    if form == "anemoi":
        return make(path, dates=8, **changes)[:, NAMES.index("2t"), 0].reshape(8, 9, 12)
    data = dataset(steps=8, **changes)
    if form in ZARR:
        chunks = {name: {"chunks": (1, *v.shape[1:])} for name, v in data.items() if "time" in v.dims}
        data.to_zarr(path, encoding=chunks, zarr_format=ZARR[form], consolidated=True)
    else:
        data.to_netcdf(path, engine="netcdf4", format=NETCDF[form])
    return data["sp"].values


def source_of(kind, path, **more):
    return {"type": kind.rstrip("234"), "path": path if isinstance(path, list) else str(path), **more}


def dataset_of(kind, path, **more):
    keys = source_of(kind, path, **more)
    return registry.module("source", keys["type"]).open_dataset(
        registry.module("source", keys["type"]).Config.model_validate(keys)
    )


def reader_of(kind, path, data_section, **more):
    """Return a store and the variable whose values `written` returns."""
    source = source_of(kind, path, **more)
    data = section(path, source=source) if kind == "anemoi" else data_section("", source=source)
    variables = Variables(data)
    name = "2m_temperature" if kind == "anemoi" else "sp"
    return open_store(data, variables), [variables[name]]


def read_all(kind, path, data_section):
    reader, variable = reader_of(kind, path, data_section)
    for time in range(8):
        reader.read([*variable, *reader.variables.role("diagnostic")], [time])
    reader.static()


def one_line(caught):
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def last_chunk(kind, path):
    if kind == "anemoi":
        return path / "data" / "7.0.0.0"
    return path / "sp" / ("c/7/0/0" if kind == "zarr3" else "7.0.0")


@pytest.mark.parametrize("harm", ["cut off", "changed"])
@pytest.mark.parametrize("kind", [*ZARR, "anemoi"])
def test_a_damaged_chunk_is_one_message_and_the_others_are_read(kind, harm, tmp_path, dataset, data_section):
    expected = written(kind, tmp_path / "a.zarr", dataset)
    chunk = last_chunk(kind, tmp_path / "a.zarr")
    whole = chunk.read_bytes()
    chunk.write_bytes(whole[: len(whole) // 2] if harm == "cut off" else b"\xff" * len(whole))
    reader, variable = reader_of(kind, tmp_path / "a.zarr", data_section)
    with pytest.raises(ReadError) as caught:
        reader.read(variable, [6, 7])
    assert "2001-01-02T18:00:00" in one_line(caught)
    assert str(tmp_path / "a.zarr") in str(caught.value)
    np.testing.assert_array_equal(reader.read(variable, [5, 6])[:, 0], expected[5:7])
    chunk.write_bytes(whole)
    np.testing.assert_array_equal(reader.read(variable, [6, 7])[:, 0], expected[6:])


@pytest.mark.parametrize("kind", NETCDF)
def test_a_netcdf_file_that_is_cut_off_is_one_message(kind, tmp_path, dataset, data_section):
    written(kind, tmp_path / "a.nc", dataset)
    whole = (tmp_path / "a.nc").read_bytes()
    for share in (0.02, 0.5, 0.98):
        (tmp_path / "a.nc").write_bytes(whole[: int(share * len(whole))])
        with pytest.raises((UserError, ReadError), match=r"a\.nc") as caught:
            read_all(kind, tmp_path / "a.nc", data_section)
        one_line(caught)


@pytest.mark.parametrize("kind", STORES)
def test_files_on_different_grids_are_one_message(kind, tmp_path, dataset):
    suffix = ".nc" if kind in NETCDF else ".zarr"
    paths = [str(tmp_path / f"{name}{suffix}") for name in "ab"]
    written(kind, tmp_path / f"a{suffix}", dataset)
    if kind == "anemoi":
        make(tmp_path / "b.zarr", dates=8, kind="reduced", start="2001-01-03")
    else:
        written(kind, tmp_path / f"b{suffix}", dataset, start="2001-01-03", height=12, width=18)
    with pytest.raises(
        UserError, match=r"expected the same l\w+ in all files, got another in .*b\.\w+; list it as"
    ) as caught:
        dataset_of(kind, paths)
    one_line(caught)


@pytest.mark.parametrize("lie", [{"dtype": "<f8"}, {"chunks": [1, 5, 12]}, {"compressor": None}, {"shape": [9, 9, 12]}])
def test_metadata_of_zarr_that_lie_are_one_message(lie, tmp_path, dataset, data_section):
    written("zarr2", tmp_path / "a.zarr", dataset)
    for file, keys in ((".zmetadata", ("metadata", "sp/.zarray")), ("sp/.zarray", ())):
        path = tmp_path / "a.zarr" / file
        content = json.loads(path.read_text())
        described = content
        for key in keys:
            described = described[key]
        described.update(lie)
        path.write_text(json.dumps(content))
    with pytest.raises((UserError, ReadError), match=r"a\.zarr") as caught:
        read_all("zarr2", tmp_path / "a.zarr", data_section)
    one_line(caught)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(remote, "PAUSE", 0.01)
    monkeypatch.setattr(remote_file, "_failed", {})


def behind_a_url(kind):
    if kind == "netcdf4":
        pytest.importorskip("h5py", reason="the extra `cloud` (h5py) is not installed")
    return "a.nc" if kind in NETCDF else "a.zarr"


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("kind", [*ZARR, "netcdf4", "anemoi"])
def test_a_server_that_drops_connections_is_one_message_and_costs_nothing(
    kind, tmp_path, dataset, data_section, monkeypatch
):
    monkeypatch.setattr(remote_file, "BLOCK", 5000)
    name = behind_a_url(kind)
    (tmp_path / "served").mkdir()
    expected = written(kind, tmp_path / "served" / name, dataset)
    with serving(tmp_path / "served") as server:
        reader, variable = reader_of(kind, f"{server.url}/{name}", data_section)
        ending = name if kind == "netcdf4" else str(last_chunk(kind, tmp_path / "x")).rpartition("/x/")[2]
        server.broken += [ending] * 100
        with pytest.raises(ReadError, match=rf"{server.url}/{name}.* cannot be read \(4 attempts\)") as caught:
            reader.read(variable, [7])
        one_line(caught)
        server.broken.clear()
        np.testing.assert_array_equal(reader.read(variable, [7])[:, 0], expected[7:])
        reader.close()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("kind", [*ZARR, "netcdf4", "anemoi"])
def test_a_full_cache_disk_is_one_message_and_costs_no_data(kind, tmp_path, dataset, data_section, monkeypatch, caplog):
    name = behind_a_url(kind)
    (tmp_path / "served").mkdir()
    expected = written(kind, tmp_path / "served" / name, dataset)

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(object_cache, "_write", full)
    cache = {"size": "10MB", "folder": str(tmp_path / "cache")}
    with serving(tmp_path / "served") as server, caplog.at_level(logging.WARNING):
        reader, variable = reader_of(kind, f"{server.url}/{name}", data_section, cache=cache)
        for _ in range(2):
            np.testing.assert_array_equal(reader.read(variable, range(8))[:, 0], expected)
        reader.close()
    assert [record for record in caplog.records if "No space left on device" in record.getMessage()] == caplog.records
    assert len(caplog.records) == 1
