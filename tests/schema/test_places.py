"""Which folders `save_loc` may name."""

from __future__ import annotations

import os

import pytest

from credit_like.check import checked_experiment
from credit_like.schema import places
from credit_like.schema.errors import ExperimentError
from credit_like.schema.experiment import Experiment
from credit_like.schema.places import place_findings
from tests.experiments import DEMO, SHORT

FEW = ("inference.init=[2000-01-11T06, 2000-01-12, 6h]", "inference.lead=1d", "trainer.scheduler.warmup_steps=2")
"""Forecasts and a warm-up that fit into the short data."""


def found(save_loc, paths="/nowhere/x.nc", statistics=None, evaluation=None, **spec) -> str:
    experiment = Experiment.model_validate(
        {
            "name": "x",
            "save_loc": str(save_loc),
            "data": {
                "source": {"type": "netcdf", "path": paths},
                "timestep": "6h",
                "prognostic": {"surface": ["a", {"name": "b", **spec}]},
                "train": ["2000-01-01", "2000-01-31"],
                "valid": ["2000-02-01", "2000-02-28"],
                "test": ["2000-03-01", "2000-03-31"],
                "statistics": None if statistics is None else str(statistics),
            },
            "evaluation": evaluation or {},
            "model": {"type": "persistence"},
        }
    )
    findings = list(place_findings(experiment))
    assert all(where == ("save_loc",) for where, _ in findings)
    return "\n".join(message for _, message in findings)


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    (folder / "era5.zarr").mkdir(parents=True)
    return folder


def test_folders_of_everybody_are_refused(tmp_path, monkeypatch) -> None:
    here, home = tmp_path / "here", tmp_path / "users" / "me"
    here.mkdir()
    home.mkdir(parents=True)
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(home))
    (tmp_path / "link").symlink_to(home)
    for place in ("/", "//", "/..", ".", "./", "../here", tmp_path, here, home, home.parent, tmp_path / "link"):
        assert "expected a folder of the run's own" in found(place), place
    for place in ("run", "../run", home / "run", here / "run", tmp_path / "new"):
        assert not found(place), place


def test_a_run_may_be_continued_from_its_own_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiment.yml").touch()
    (tmp_path / ".lock").touch()
    assert not found(tmp_path)
    assert not found(".")


def test_the_data_are_no_place_for_a_run(data, tmp_path) -> None:
    store = data / "era5.zarr"
    (tmp_path / "link").symlink_to(store)
    bad = [
        (store, store, "is the place of"),
        (store / "run", store, "lies in"),
        (data, store, "holds"),
        (tmp_path, store, "holds"),
        (tmp_path / "link" / "run", store, "lies in"),
        (store, tmp_path / "link", "is the place of"),
        (data, data / "*.nc", "is the place of"),
        (data, [str(tmp_path / "other.nc"), str(data / "%Y.nc")], "is the place of"),
    ]
    for place, paths, relation in bad:
        message = found(place, paths if isinstance(paths, list) else str(paths))
        assert f"which {relation}" in message, (place, paths)
    for place, paths in ((data / "run", store), (data / "run", data / "*.nc"), (tmp_path / "dat", store)):
        assert not found(place, str(paths)), (place, paths)
    assert "holds" in found(data, path=str(store))
    assert "holds" in found(data, evaluation={"truth": {"type": "zarr", "path": str(store)}})
    assert not found(data, "s3://bucket/data")


def test_statistics_may_lie_in_the_run_and_not_around_it(data, tmp_path) -> None:
    assert not found(tmp_path / "run", statistics=tmp_path / "run" / "statistics.nc")
    assert "apart from data.statistics" in found(tmp_path / "statistics.nc", statistics=tmp_path / "statistics.nc")
    assert "apart from evaluation.baselines.other" in found(
        data / "era5.zarr" / "run", evaluation={"baselines": {"other": str(data / "era5.zarr")}}
    )


@pytest.mark.parametrize("name", ["experiment.yml", "status.json", "log.jsonl"])
def test_a_folder_under_the_name_of_a_file(tmp_path, name) -> None:
    (tmp_path / "run" / name).mkdir(parents=True)
    assert f"{name} is a folder" in found(tmp_path / "run")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["status.json", "log.jsonl", "experiment.yml"])
def test_a_pipe_under_the_name_of_a_file(tmp_path, name) -> None:
    os.mkfifo(tmp_path / name)
    assert "is a pipe or device and not a run's file" in found(tmp_path)


def test_a_file_under_the_name_of_a_folder_or_of_the_record(tmp_path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "experiment.yml").write_text("name: mine\n")
    assert "experiment.yml is not the record of a run" in found(run)
    (run / "status.json").touch()
    assert not found(run)
    (run / "checkpoints").touch()
    assert "checkpoints is a file" in found(run)


@pytest.mark.parametrize("text", ["a\0b", "x" * 300, "~/run", "/proc/run", "a\nb"])
def test_odd_names_are_no_fault_of_these_checks(text) -> None:
    assert not found(text)


@pytest.mark.parametrize("name", [".lock", "log.jsonl", "checkpoints"])
def test_what_a_training_cannot_write_is_found_before_it_begins(tmp_path, monkeypatch, name) -> None:
    """Forecasts of a run whose checkpoints are protected need no such permission."""
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    for file in (".lock", "log.jsonl"):
        (tmp_path / "run" / file).touch()
    overrides, path = [*SHORT, *FEW, f"save_loc={tmp_path / 'run'}"], tmp_path / "run" / name
    access = os.access  # root may write anywhere
    monkeypatch.setattr(os, "access", lambda at, how: str(at) != str(path) and access(at, how))
    checked_experiment(DEMO, overrides)
    with pytest.raises(
        ExperimentError, match=rf"save_loc: expected permission .* got none for .*run/{name}, change its"
    ):
        checked_experiment(DEMO, overrides, training=True)
    if name != ".lock":
        checked_experiment(DEMO, overrides, training=True, fresh=True)  # which removes the others


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "null", "[" * 100_000])
def test_a_state_that_cannot_be_read_is_none(tmp_path, text) -> None:
    assert places.state_of(tmp_path) is None
    (tmp_path / "status.json").write_text(text)
    assert places.state_of(tmp_path) is None


def test_the_state_is_that_of_the_status(tmp_path) -> None:
    (tmp_path / "status.json").write_text('{"state": "finished"}')
    assert places.state_of(tmp_path) == "finished"
