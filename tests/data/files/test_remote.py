"""Stores behind a URL: servers that fail, go away or change, and the local copies of what was read."""

import functools
import logging
import multiprocessing
import os
import socket

import numpy as np
import pytest
import xarray as xr

from credit_like.data.files import remote
from credit_like.data.sources import zarr as source
from credit_like.data.store import ReadError, open_store
from credit_like.errors import UserError
from credit_like.variables import Variables
from tests.stores import serving


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(remote, "PAUSE", 0.01)


@pytest.fixture
def stored(tmp_path, dataset):
    """A small store of one time a chunk in a folder that can be served."""
    data = dataset(steps=8)
    encoding = {name: {"chunks": (1, *v.shape[1:])} for name, v in data.items() if "time" in v.dims}
    data.to_zarr(tmp_path / "served" / "a.zarr", encoding=encoding, zarr_format=2, consolidated=True)
    return data


@pytest.fixture
def served(tmp_path, stored):
    with serving(tmp_path / "served") as server:
        yield server


def opened(server, tmp_path, **more):
    more = {"cache": {"size": "10MB", "folder": str(tmp_path / "cache")}, **more}
    return source.open_dataset(source.Config(path=f"{server.url}/a.zarr", **more))


def test_a_cache_may_be_its_size_alone(monkeypatch, tmp_path, served, stored):
    monkeypatch.setenv("CREDIT_LIKE_CACHE", str(tmp_path / "home"))
    got = opened(served, tmp_path, cache="1MB")
    np.testing.assert_array_equal(got["t"].values, stored["t"].values)
    assert len(list((tmp_path / "home" / "stores" / "objects").rglob("??*/*"))) > 8


def test_a_chunk_is_fetched_once_by_all_processes(tmp_path, served, stored):
    for _ in range(2):  # the second is another process: it shares nothing but the folder
        np.testing.assert_array_equal(opened(served, tmp_path)["t"].values, stored["t"].values)
    assert [served.asked.count(f"/a.zarr/t/{time}.0.0.0") for time in range(8)] == [1] * 8
    assert served.asked.count("/a.zarr/.zmetadata") > 1  # metadata are asked for each time: a store may have grown


def _read_all(server, folder, seed, expected):
    got = opened(server, folder)
    for time in np.random.default_rng(seed).permutation(8):
        if not np.array_equal(got["t"][time].values, expected[time]):
            os._exit(1)
    os._exit(0)


def test_processes_that_read_at_the_same_time_fetch_a_chunk_once(tmp_path, served, stored):
    expected = stored["t"].values
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=_read_all, args=(served, tmp_path, seed, expected)) for seed in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert [served.asked.count(f"/a.zarr/t/{time}.0.0.0") for time in range(8)] == [1] * 8


def test_without_a_cache_everything_is_fetched(tmp_path, served, stored):
    for _ in range(2):
        np.testing.assert_array_equal(opened(served, tmp_path, cache=None)["t"][0].values, stored["t"][0].values)
    assert served.asked.count("/a.zarr/t/0.0.0.0") == 2


def test_a_restart_without_the_server_reads_the_copies(tmp_path, stored, caplog):
    with serving(tmp_path / "served") as server:
        opened(server, tmp_path)["t"][:4].values  # noqa: B018
    with caplog.at_level(logging.WARNING):
        got = opened(server, tmp_path)
        np.testing.assert_array_equal(got["t"][:4].values, stored["t"][:4].values)
    assert len(caplog.records) == 1
    assert "its copies in" in caplog.text
    with pytest.raises(remote.RemoteError, match=rf"{server.url}/a.zarr/t/5.0.0.0 cannot be read"):
        got["t"][5].values  # noqa: B018


def test_a_store_that_has_grown_is_seen(tmp_path, dataset, served):
    longer = dataset(steps=12)
    assert opened(served, tmp_path).sizes["time"] == 8
    longer.isel(time=slice(8, None)).drop_vars(["orography", "lsm"]).to_zarr(
        tmp_path / "served" / "a.zarr", append_dim="time", consolidated=True
    )
    got = opened(served, tmp_path)
    np.testing.assert_array_equal(got["time"].values, longer.time.values.astype("datetime64[s]"))
    np.testing.assert_array_equal(got["t"][8:].values, longer["t"][8:].values)


@pytest.mark.parametrize("cached", [True, False])
def test_a_read_that_breaks_off_is_repeated(tmp_path, served, stored, cached):
    got = opened(served, tmp_path, **({} if cached else {"cache": None}))
    served.broken += ["/t/3.0.0.0"] * (remote.TRIES - 1) + ["/t/4.0.0.0"]
    np.testing.assert_array_equal(got["t"].values, stored["t"].values)
    assert not served.broken


def test_an_opening_that_breaks_off_is_repeated(tmp_path, served, stored):
    served.broken += [".zmetadata", ".zmetadata", "time/0"]
    np.testing.assert_array_equal(opened(served, tmp_path, cache=None)["t"].values, stored["t"].values)


@pytest.mark.parametrize("cached", [True, False])
def test_a_server_that_stays_broken_is_one_message_and_costs_nothing(tmp_path, served, stored, data_section, cached):
    """The message names variable, time and URL; when the server is back, the same reader goes on."""
    cache = {"cache": {"size": "10MB", "folder": str(tmp_path / "cache")}} if cached else {}
    data = data_section(served.url, source={"type": "zarr", "path": f"{served.url}/a.zarr", **cache})
    variables = Variables(data)
    reader = open_store(data, variables)
    served.broken += ["/t/2.0.0.0"] * 100
    names = variables.role("prognostic")
    with pytest.raises(ReadError) as caught:
        reader.read(names, [1, 2])
    message = str(caught.value)
    assert "cannot read t at 2001-01-01T12:00:00" in message
    assert f"{served.url}/a.zarr/t/2.0.0.0 cannot be read (4 attempts)" in message
    assert len(message.splitlines()) == 1
    served.broken.clear()
    expected = stored["t"].sel(level=[500, 850])[1:3].values
    np.testing.assert_array_equal(reader.read(names, [1, 2])[:, 2:4], expected)


def test_a_server_that_is_not_there_is_one_message(tmp_path, stored):
    with serving(tmp_path / "served") as server:
        pass
    with pytest.raises(
        UserError, match=rf"expected a zarr store, got {server.url}/a.zarr, which does not open: .*cannot be"
    ):
        opened(server, tmp_path)


def test_an_absent_chunk_is_missing_values_but_an_absent_store_is_an_error(tmp_path, served, stored, monkeypatch):
    (tmp_path / "served" / "a.zarr" / "t" / "6.0.0.0").unlink()
    got = opened(served, tmp_path)
    assert np.isnan(got["t"][6].values).all()
    for file in (tmp_path / "served" / "a.zarr").rglob("*"):
        if file.is_file():
            file.unlink()
    monkeypatch.setattr(remote, "_GONE", 0.0)
    with pytest.raises(remote.RemoteError, match=r"a.zarr is gone: it has none of .zmetadata"):
        got["t"][3].values  # noqa: B018


@pytest.mark.filterwarnings("ignore:Consolidated metadata:zarr.errors.ZarrUserWarning")
def test_parts_of_a_sharded_store_are_copied(tmp_path, dataset):
    data = dataset(steps=8)
    encoding = {"t": {"chunks": (1, 4, 9, 12), "shards": (4, 4, 9, 12)}}
    data[["t"]].to_zarr(tmp_path / "served" / "a.zarr", encoding=encoding, zarr_format=3, consolidated=True)
    with serving(tmp_path / "served") as server:
        for _ in range(2):
            np.testing.assert_array_equal(opened(server, tmp_path)["t"][5].values, data["t"][5].values)
        asked = [path for path in server.asked if path.endswith("/c/1/0/0/0")]
    assert len(asked) == 2  # the index at the end of the shard, and one chunk
    np.testing.assert_array_equal(opened(server, tmp_path)["t"][5].values, data["t"][5].values)


def test_two_endpoints_do_not_share_copies(tmp_path):
    stores = [remote.RemoteStore.of("http://x/a.zarr", {"headers": {"a": value}}) for value in "12"]
    assert stores[0].options != stores[1].options


def test_files_behind_urls_join(tmp_path, dataset):
    data = dataset(steps=8)
    for i in range(2):
        data.isel(time=slice(4 * i, 4 * i + 4)).to_zarr(
            tmp_path / "served" / f"{i}.zarr", consolidated=True, zarr_format=2
        )
    with serving(tmp_path / "served") as server:
        config = source.Config(path=tuple(f"{server.url}/{i}.zarr" for i in range(2)), cache="1GB")
        config = config.model_copy(update={"cache": source.Cache(size="1MB", folder=str(tmp_path / "cache"))})
        got = source.open_dataset(config)
        xr.testing.assert_equal(got[["t"]].load(), data[["t"]].assign_coords(time=data.time.astype("datetime64[s]")))


def test_the_failures_of_packages_are_known_when_they_are_loaded(monkeypatch):
    class BotoCoreError(Exception):
        pass

    module = functools.partial(object)
    module.BotoCoreError = module.ClientError = BotoCoreError
    monkeypatch.setitem(remote.sys.modules, "botocore.exceptions", module)
    assert BotoCoreError in remote.failures()


def test_a_server_that_does_not_answer_is_one_message(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "ANSWER", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/a.zarr"
        with pytest.raises(UserError, match=r"does not open: .* \(1 attempts\): no answer within 0.2 s"):
            source.open_dataset(source.Config(path=url))
