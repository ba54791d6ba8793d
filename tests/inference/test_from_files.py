"""Forecasts of an export from files, against the same forecasts of the run that it comes from."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr
from typer.testing import CliRunner

from credit_like.cli import app
from credit_like.inference.forecaster import load_forecaster
from credit_like.inference.from_files import forecast_from_files
from tests.inference.test_forecaster import INIT, run  # noqa: F401


@pytest.fixture(scope="module")
def files(run, tmp_path_factory):  # noqa: F811
    """(export, file of one time without the diagnostic field, file of static fields)."""
    _, dataset, export = run
    folder = tmp_path_factory.mktemp("analysis")
    static = ["orography", "land_sea_mask"]
    dataset[static].to_netcdf(folder / "static.nc")
    one = dataset.drop_vars([*static, "precipitation"]).sel(time=[INIT[0]])
    one.to_netcdf(folder / "analysis.nc")
    one.chunk().to_zarr(folder / "analysis.zarr", zarr_format=2)
    return export, folder


@pytest.mark.parametrize("source", ["analysis.nc", "analysis.zarr", "analys*.nc"])
@pytest.mark.parametrize("suffix", [".zarr", ".nc"])
def test_a_forecast_is_that_of_the_run(run, files, tmp_path, source, suffix):  # noqa: F811
    export, folder = files
    sources = [str(folder / source), str(folder / "static.nc")]
    made = forecast_from_files(export, sources, tmp_path / f"out{suffix}", lead="18h", device="cpu")
    assert [path.name for path in tmp_path.iterdir()] == [f"out{suffix}"]
    whole = list(load_forecaster(export)(run[1], INIT[0], 3))
    with xr.open_dataset(made, engine="zarr" if suffix == ".zarr" else "netcdf4", decode_timedelta=True) as found:
        assert found.sizes["prediction_timedelta"] == 3
        for lead, expected in enumerate(whole):
            np.testing.assert_array_equal(found["time"], expected["time"])
            for name in expected.data_vars:
                np.testing.assert_array_equal(found[name][:, lead], expected[name][:, 0], err_msg=str(name))


def test_members_are_an_option(files, tmp_path):
    export, folder = files
    more = ["inference.ensemble={members: 2, amplitude: {u: 0.5}}"]
    sources = [str(folder / "analysis.nc"), str(folder / "static.nc")]
    made = forecast_from_files(export, sources, tmp_path / "out.zarr", lead="6h", overrides=more, device="cpu")
    with xr.open_zarr(made, decode_timedelta=True) as found:
        assert found.sizes["number"] == 2
        assert float(abs(found["u"].diff("number")).max()) > 0


def test_what_does_not_work_is_one_message_and_leaves_nothing(files, tmp_path):
    export, folder = files
    analysis, static = str(folder / "analysis.nc"), str(folder / "static.nc")
    text = folder / "text.nc"
    text.write_text("no data")
    there = tmp_path / "there.zarr"
    there.mkdir()
    for arguments, message in [
        ([export, "--from", analysis, "-o", tmp_path / "out.zarr"], "orography"),
        ([export, "--from", analysis, "--from", static, "-o", tmp_path / "out.txt"], "ends in .zarr, .nc"),
        ([export, "--from", analysis, "--from", static, "-o", there], "does not exist, got"),
        ([export, "--from", folder / "none.nc", "-o", tmp_path / "out.zarr"], "none.nc"),
        ([export, "--from", text, "-o", tmp_path / "out.zarr"], "expected netCDF, GRIB or zarr"),
        (
            [export, "--from", analysis, "--from", static, "--lead", "5h", "-o", tmp_path / "out.zarr"],
            "whole number of steps",
        ),
        (
            [export, "--from", analysis, "--from", static, "--init", "1999-01-01", "-o", tmp_path / "out.zarr"],
            "1999-01-01",
        ),
        ([analysis, "--from", analysis, "-o", tmp_path / "out.zarr"], "analysis.nc"),
    ]:
        result = CliRunner().invoke(app, ["forecast", *map(str, arguments)])
        assert result.exit_code != 0
        assert message in str(result.exception) + result.output, (arguments, result.exception, result.output)
        assert [path.name for path in tmp_path.iterdir()] == ["there.zarr"]
