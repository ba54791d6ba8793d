"""Files of scores: what belongs to one evaluation, and published results beside it."""

from __future__ import annotations

import logging
import re
import shutil

import netCDF4
import numpy as np
import pytest
import xarray as xr

from credit_like.errors import UserError
from credit_like.evaluation.results import load_results, read_results, save_results
from tests.test_terminal import scores


def evaluated(sources, number=21):
    results = scores(levels=(50000.0, 85000.0), sources=sources).assign_coords(
        provenance=("source", [f"of {name}" for name in sources])
    )
    results["initial_times"] = number
    return results


def test_scores_of_an_earlier_evaluation_do_not_mix_with_the_newest(tmp_path):
    save_results(evaluated(["model", "persistence", "before"], 35), tmp_path)
    newest = evaluated(["model", "persistence"], 4).isel(lead_time=[0])
    save_results(newest, tmp_path)
    found = load_results(tmp_path)
    assert found["source"].values.tolist() == ["model", "persistence"]
    assert int(found["initial_times"]) == 4
    np.testing.assert_array_equal(found["u"].values, newest["u"].values)
    assert (tmp_path / "before.nc").exists()


def test_scores_of_two_evaluations_of_the_same_shape_do_not_mix(tmp_path):
    """The second was killed between its files; repeated, it writes what a single one does."""
    first, second = evaluated(["model", "persistence"]), evaluated(["model", "persistence"])
    second["u"] = second["u"] * 2
    save_results(first, tmp_path / "one")
    save_results(second, tmp_path / "two")
    shutil.copy(tmp_path / "two" / "model.nc", tmp_path / "one" / "model.nc")
    with pytest.raises(
        UserError, match=r"of one evaluation in .*, got model\.nc and persistence\.nc of different ones; run"
    ):
        load_results(tmp_path / "one")
    save_results(second, tmp_path / "one")
    for file in ("model.nc", "persistence.nc"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    xr.testing.assert_identical(load_results(tmp_path / "one"), load_results(tmp_path / "two"))


def test_scores_of_which_a_file_is_missing_are_not_taken_for_all(tmp_path, caplog):
    save_results(evaluated(["model", "persistence", "climatology"]), tmp_path)
    (tmp_path / "climatology.nc").unlink()
    assert load_results(tmp_path)["source"].values.tolist() == ["model", "persistence"]
    assert re.search(r"the scores of climatology are not beside .*model\.nc; run", caplog.text)


def test_scores_of_an_earlier_release_are_read(tmp_path):
    for path in save_results(evaluated(["model", "persistence"]), tmp_path):
        with netCDF4.Dataset(path, "a") as file:
            file.delncattr("evaluation")
    assert load_results(tmp_path)["source"].values.tolist() == ["model", "persistence"]


def published(path, levels, units, name="u"):
    theirs = evaluated(["model"]).isel(source=0, drop=True)[["u"]].rename(u=name)
    theirs = theirs.assign_coords(level=("level", levels, {"units": units}))
    theirs.to_netcdf(path)
    return theirs


def test_levels_of_published_results_are_converted(tmp_path, caplog):
    like = evaluated(["model"])
    theirs = published(tmp_path / "wb.nc", [500.0, 850.0], "hPa")
    found = read_results(tmp_path / "wb.nc", "wb", like)
    np.testing.assert_array_equal(found["u"].squeeze("source").values, theirs["u"].values)
    with caplog.at_level(logging.WARNING):
        published(tmp_path / "other.nc", [10.0, 20.0], "hPa")
        found = read_results(tmp_path / "other.nc", "other", like)
    assert "its levels are not those of the truth" in caplog.text
    assert isinstance(found, xr.Dataset)
    assert found["u"].isnull().all()
