"""`credit-like preprocess` and `credit-like bench-data` from the command line."""

import csv
import json

import numpy as np
import pytest
import xarray as xr

from credit_like.check import checked_experiment
from credit_like.data.statistics import Statistics
from credit_like.data.store import open_store
from credit_like.data.tools.prepare import times_read
from credit_like.lock import FileLock
from credit_like.schema.errors import ExperimentError
from credit_like.variables import Variables
from tests.experiments import call
from tests.faults.test_race import held_by_another


@pytest.fixture
def file(stored, dataset, tmp_path):
    """An experiment file on the made-up data, with one thing wrong in them."""
    ds = dataset()
    ds["u"][9] = np.nan
    _, data, _, _ = stored(ds)
    section = data.model_dump(mode="json", exclude_defaults=True)
    for period in ("train", "valid", "test"):
        section[period] = [[p["start"], p["end"]] for p in section[period]]
    section["timestep"] = "6h"
    experiment = {
        "name": "small", "save_loc": str(tmp_path / "run"), "data": section, "model": {"type": "persistence"},
        "trainer": {"global_batch_size": 2, "loader": {"num_workers": 1}},
    }  # fmt: skip
    path = tmp_path / "small.yml"
    path.write_text(json.dumps(experiment))
    return path


def test_preprocess_writes_what_it_says(file, tmp_path, capsys):
    assert not call("preprocess", file, "--climatology", "--rechunk", tmp_path / "train.zarr", "--band", "4")
    said = capsys.readouterr().out
    assert "missing fields" in said
    assert "u@500" in said
    assert "1 time with missing fields will be in no sample" in said
    made = sorted(p.name for p in (tmp_path / "run").iterdir())
    assert made == ["audit.csv", "audit.png", "climatology.zarr", "statistics.nc"]
    with open(tmp_path / "run" / "audit.csv") as written:
        assert {row["kind"] for row in csv.DictReader(written)} == {"missing fields"}
    assert Statistics.load(tmp_path / "run" / "statistics.nc").missing()[0][0] == "2001-01-03T06:00:00"
    with xr.open_zarr(tmp_path / "train.zarr", consolidated=False) as opened:
        assert opened["u"].shape == (40, 2, 9, 12)
    checked_experiment(file, [f"data.source.0.path={tmp_path / 'train.zarr'}"])


@pytest.mark.parametrize("what", ["pass", "store"])
def test_a_second_preprocess_of_one_run_or_store_is_refused(file, tmp_path, capsys, what):
    run, copy = tmp_path / "run", tmp_path / "train.zarr"
    run.mkdir()
    place = run / ".preprocess.lock" if what == "pass" else tmp_path / ".train.zarr.lock"
    other, over = held_by_another(FileLock(place, tmp_path, "wait", temporary=True))
    assert call("preprocess", file, "--rechunk", copy) == 2
    said = capsys.readouterr().err
    assert f"{run if what == 'pass' else copy} is in use by" in said
    assert str(other.pid) in said
    assert "Traceback" not in said
    over.set()
    other.join(900)
    assert not call("preprocess", file, "--rechunk", copy)
    assert not list(tmp_path.rglob("*.lock"))
    assert not call("preprocess", file, "--rechunk", tmp_path / "new" / "folder" / "train.zarr")


SPANS = {  # what is read, as ISO times of 6-hourly data from 2001-01-01 to 2001-01-10T18
    "the periods and forecasts from the test period": (
        [],
        [("01-02", "01-03T18"), ("01-05", "01-05T18"), ("01-06T18", "01-08T18")],
    ),
    "forecasts from named times": (
        ["inference.init=[2001-01-09]", "inference.lead=6h"],
        [("01-02", "01-03T18"), ("01-05", "01-05T18"), ("01-07", "01-07T18"), ("01-08T18", "01-09T06")],
    ),
    "the climatology": (
        ["evaluation.climatology_period=[2001-01-10, 2001-01-10T18]"],
        [("01-02", "01-03T18"), ("01-05", "01-05T18"), ("01-06T18", "01-08T18"), ("01-10", "01-10T18")],
    ),
    "lagged members": (
        [
            "inference.init=[2001-01-09]",
            "inference.lead=1",
            "inference.ensemble.members=3",
            "inference.ensemble.perturbations={type: lagged, lag: 12h}",
        ],
        [("01-02", "01-03T18"), ("01-05", "01-05T18"), ("01-07", "01-09T06")],
    ),
}


@pytest.mark.parametrize("what", SPANS)
def test_the_times_that_an_experiment_reads(file, what):
    changes, spans = SPANS[what]
    periods = [
        "train=[2001-01-02, 2001-01-03T18]",
        "valid=[2001-01-05, 2001-01-05T18]",
        "test=[2001-01-07, 2001-01-07T18]",
    ]
    keys = [f"data.{period}" for period in periods] + ["data.history_len=2", "inference.lead=1d", *changes]
    experiment = checked_experiment(file, keys)[0]
    store = open_store(experiment.data, Variables(experiment.data))
    axis = xr.date_range("2001-01-01", periods=40, freq="6h")
    expected = [
        time
        for time in axis
        if any(f"2001-{first}" <= time.isoformat() <= f"2001-{last}:00:00" for first, last in spans)
    ]
    assert list(store.times[times_read(experiment, store)]) == [np.datetime64(time, "s") for time in expected]


def test_statistics_go_where_the_experiment_names_them(file, tmp_path):
    where = tmp_path / "elsewhere.nc"
    with pytest.raises(ExperimentError, match=r"data\.statistics: expected a netCDF file"):
        checked_experiment(file, [f"data.statistics={where}"])
    assert not call("preprocess", file, "--set", f"data.statistics={where}")
    checked_experiment(file, [f"data.statistics={where}"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--band", "4"], "expected --band together with --rechunk"),
        (["--rechunk", "{folder}"], "--rechunk: expected a path where nothing is"),
        (["--set", "data.source.0.path=/nowhere/x.zarr"], "expected an existing file or folder"),
        (["--set", "data.levels=[501]"], "did you mean 500"),
    ],
)
def test_refusals_write_nothing(file, tmp_path, arguments, message, capsys):
    before = sorted(tmp_path.rglob("*"))
    assert call("preprocess", file, *[a.format(folder=tmp_path / "store.zarr") for a in arguments]) == 2
    assert message in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_without_dask_distributed_it_says_so(file, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert call("preprocess", file, "--dask", "tcp://127.0.0.1:1") == 2
    assert "pip install 'credit-like[hpc]'" in capsys.readouterr().err


def test_a_constant_prediction_is_refused_with_the_audit_written(file, tmp_path, capsys, dataset, stored):
    import shutil

    ds = dataset()
    ds["rain"][...] = 1.0
    shutil.rmtree(tmp_path / "store.zarr")
    stored(ds)
    assert call("preprocess", file) == 2
    assert "got rain constant" in capsys.readouterr().err
    assert "constant fields" in (tmp_path / "run" / "audit.csv").read_text()


def test_only_the_first_process_of_a_launch_works(file, tmp_path, monkeypatch):
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    assert not call("preprocess", file)
    assert not (tmp_path / "run").exists()


def test_bench_data_reports(file, capsys):
    assert not call("bench-data", file, "--samples", "4", "--repeats", "1", "--json")
    report = json.loads(capsys.readouterr().out)
    assert report["workers"] == 1
    assert 0 < report["share_of_limit"] < 100
    assert report["limited_by"] in report["shares"]


@pytest.mark.slow
def test_over_processes_from_the_command_line(file, tmp_path):
    assert not call("preprocess", file, "--workers", "2")
    assert (tmp_path / "run" / "statistics.nc").exists()


@pytest.mark.slow
def test_over_a_dask_cluster(file, tmp_path):
    distributed = pytest.importorskip("distributed", reason="the package distributed is not installed")
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        assert not call("preprocess", file, "--dask", cluster.scheduler_address)
    assert (tmp_path / "run" / "statistics.nc").exists()
