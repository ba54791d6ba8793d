"""The experiments on public stores, with stores of the same layouts at reduced size on servers of this machine."""

import json
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from credit_like import build
from credit_like.check import checked_experiment
from credit_like.data.files.object_cache import ObjectCache
from credit_like.data.files.remote import RemoteError
from credit_like.data.files.remote_file import RemoteFile
from credit_like.data.sources import zarr as source
from credit_like.data.store import open_store
from credit_like.schema.load import load_experiment
from credit_like.variables import Variables
from tests.experiments import SMALL_MODEL, representatives
from tests.stores import arco_era5, serving, weatherbench2

CONFIG = Path(__file__).parents[2] / "config"
WEATHERBENCH2 = (
    "data.train=[2020-01-01, 2020-01-06T18]",
    "data.valid=[2020-01-07, 2020-01-08T18]",
    "data.test=[2020-01-09, 2020-01-10T18]",
    "inference.init=[2020-01-09, 2020-01-09, 12h]",
)
ARCO = (
    "data.train=[2020-01-01, 2020-01-02]",
    "data.valid=[2020-01-02T06, 2020-01-02T18]",
    "data.test=[2020-01-03, 2020-01-03T18]",
    "inference.init=[2020-01-03, 2020-01-03, 12h]",
    "trainer.parallelism={data: none}",
    "model={local_window_size: 2, global_window_size: [2, 2, 2, 1], padding_conf: {pad_lat: [6, 7], pad_lon: [14, 14]}}",
    "trainer.amp=false",
)
SHORT = (
    SMALL_MODEL,
    "trainer.global_batch_size=2",
    "trainer.micro_batch_size=2",
    "trainer.epochs=1",
    "trainer.scheduler.warmup_steps=1",
    "trainer.loader.num_workers=1",
    "inference.lead=12h",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The stores, as they were written, below the paths that the servers have."""
    folder = tmp_path_factory.mktemp("public")
    written = {"wb2.zarr": weatherbench2(folder / "wb2.zarr"), "arco.zarr": arco_era5(folder / "arco.zarr")}
    return folder, written


@pytest.fixture(scope="module")
def public(folder):
    with serving(folder[0]) as server:
        yield server


@pytest.fixture(scope="module")
def bucket(folder):
    """The stores in a bucket of an S3 server: options to read it with."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    boto3, _ = pytest.importorskip("boto3"), pytest.importorskip("s3fs")
    server.start()
    _, port = server.get_host_and_port()
    endpoint = f"http://127.0.0.1:{port}"
    access = {"aws_access_key_id": "x", "aws_secret_access_key": "x", "region_name": "us-east-1"}
    client = boto3.client("s3", endpoint_url=endpoint, **access)
    client.create_bucket(Bucket="public", ACL="public-read")
    for file in folder[0].rglob("*"):
        if file.is_file():
            client.put_object(
                Bucket="public", Key=str(file.relative_to(folder[0])), Body=file.read_bytes(), ACL="public-read"
            )
    client.close()
    yield {"anon": True, "endpoint_url": endpoint}
    server.stop()


def settings(path, options, tmp_path, extra):
    """Return overrides of an experiment: the reduced store in place of the public one, and where to write."""
    cache = {"size": "1GB", "folder": str(tmp_path / "cache")}
    return [
        f"data.source={json.dumps([{'type': 'zarr', 'path': path, 'storage_options': options, 'cache': cache}])}",
        f"save_loc={tmp_path / 'run'}",
        *SHORT,
        *extra,
    ]


def runs(name, path, options, tmp_path, extra):
    """Check an experiment, fit its statistics, train, forecast and score."""
    experiment = checked_experiment(CONFIG / name, settings(path, options, tmp_path, extra))[0]
    assert build.train(experiment) == 0
    assert build.rollout(experiment) == 0
    assert build.evaluate(experiment) == 0
    assert (tmp_path / "run" / "statistics.nc").is_file()
    return experiment


@pytest.mark.parametrize(("name", "extra"), [("weatherbench2-64x32", WEATHERBENCH2), ("arco-era5", ARCO)])
def test_the_fields_are_those_of_the_store(monkeypatch, tmp_path, folder, public, name, extra):
    """By variable, level, time and row, whatever the order of dimensions and the direction of latitude."""
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    path = {"weatherbench2-64x32": "wb2.zarr", "arco-era5": "arco.zarr"}[name]
    options = settings(f"{public.url}/{path}", {}, tmp_path, extra)
    data = load_experiment(CONFIG / f"{name}.yml", options).data
    variables = Variables(data)
    reader, written = open_store(data, variables), folder[1][path]
    assert reader.grid.latitude[0] == pytest.approx(-87.1875 if path == "wb2.zarr" else 90)
    times = [reader.index(f"2020-01-0{day}T{hour:02d}:00:00") for day, hour in ((1, 0), (1, 6), (3, 18))]
    at = written.sel(time=["2020-01-01T00", "2020-01-01T06", "2020-01-03T18"])
    order = ("time", "level", "latitude", "longitude")
    got = reader.read(variables.role("prognostic"), times)
    for i, variable in enumerate(data.prognostic.level):
        expected = at[variable.name].sel(level=list(data.levels)).transpose(*order).values
        np.testing.assert_array_equal(got[:, 13 * i : 13 * i + 13], expected)
    statics = [written[spec.name] for spec in data.static.surface]
    expected = [(field.isel(time=0) if "time" in field.dims else field).transpose(*order[2:]) for field in statics]
    np.testing.assert_array_equal(reader.static(), np.stack(expected))
    if path == "arco.zarr":
        days = np.datetime64("2051-01-01") - np.datetime64("1900-01-01")
        assert len(reader) == 4 * days.astype(int)  # every sixth hour of the whole axis
        assert np.isnan(reader.read(variables.role("prognostic"), [0])).all()


def test_static_fields_without_the_time_axis(tmp_path):
    arco_era5(tmp_path / "a.zarr", hours=2, height=5, width=8, static_times=False)
    dataset = source.open_dataset(source.Config(path=str(tmp_path / "a.zarr")))
    assert dataset["land_sea_mask"].dims == ("latitude", "longitude")


@pytest.mark.slow
@pytest.mark.parametrize("scheme", representatives(["http", "gs", "s3"], "s3"))
def test_weatherbench2_trains_and_forecasts_by_url(request, monkeypatch, tmp_path, public, scheme):
    if scheme == "s3":
        url, options = "s3://public", request.getfixturevalue("bucket")
    elif scheme == "gs":
        monkeypatch.setenv(
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false"
        )  # else it asks Google what kind of bucket it is
        pytest.importorskip("gcsfs")
        url, options = "gs://public", {"token": "anon", "endpoint_url": public.url}
    else:
        url, options = public.url, {}
    public.asked.clear()
    runs("weatherbench2-64x32.yml", f"{url}/wb2.zarr", options, tmp_path, WEATHERBENCH2)
    if scheme != "s3":
        chunks = [path for path in public.asked if path.startswith("/wb2.zarr/temperature/") and "/." not in path]
        assert sorted(chunks) == [f"/wb2.zarr/temperature/{i}.0.0.0" for i in range(3)]  # each once, by all processes


@pytest.mark.long
def test_arco_era5_trains_and_forecasts_by_url(monkeypatch, tmp_path, public):
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    runs("arco-era5.yml", f"{public.url}/arco.zarr", {}, tmp_path, ARCO)


@pytest.mark.slow
def test_a_glob_in_a_bucket_finds_its_stores(bucket):
    config = source.Config(path="s3://public/wb*.zarr", storage_options=bucket)
    got = source.open_dataset(config)
    assert isinstance(got, xr.Dataset)
    assert got["temperature"].shape == (40, 13, 64, 32)


@pytest.mark.slow
def test_parts_of_a_file_in_a_bucket_are_those_of_the_file(folder, bucket, tmp_path):
    content = (folder[0] / "wb2.zarr" / "temperature" / "0.0.0.0").read_bytes()
    for _ in range(2):
        cache = ObjectCache(tmp_path, 10**9)
        file = RemoteFile("s3://public/wb2.zarr/temperature/0.0.0.0", bucket, cache)
        assert file.seek(-len(content) // 2, 2) == len(content) // 2
        assert file.read() == content[len(content) // 2 :]
        file.seek(0)
        assert file.read() == content
    with pytest.raises(RemoteError, match=r"s3://public/absent.nc cannot be read"):
        RemoteFile("s3://public/absent.nc", bucket, cache)
