"""Forecasts of an export from files, against the same forecasts of the run that it comes from."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest
import torch
import xarray as xr
import yaml
from typer.testing import CliRunner

from credit_like.checkpoint.export import find
from credit_like.checkpoint.files import digest
from credit_like.checkpoint.package import STATIC, _static, _write_fields, load_static, write_package
from credit_like.cli import app
from credit_like.data.files import netcdf_files
from credit_like.data.store import open_store
from credit_like.errors import UserError
from credit_like.inference.forecaster import Forecaster, load_forecaster
from credit_like.inference.from_files import forecast_from_files
from credit_like.naming import weights_text
from credit_like.schema.experiment import Experiment
from credit_like.variables import ROLES, Variables
from tests.inference.test_forecaster import INIT, run  # noqa: F401
from tests.inference.world import make_data, make_experiment


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


@pytest.mark.parametrize(
    ("override", "option"),
    [
        ("init=[2000-01-02, 2000-01-03]", "--init"),
        ("lead=3d", "--lead"),
        ("output.path=elsewhere", "--output"),
        ("output.type=zarr", "an --output with the suffix of the format"),
        ("output.format=zarr", "an --output with the suffix of the format"),
        ("output={type: netcdf}", "an --output with the suffix of the format"),
        ("checkpoint=best", "an export of that checkpoint"),
        ("weights=raw", "an export of those weights"),
    ],
)
def test_initial_time_and_lead_have_options_of_their_own(files, tmp_path, override, option):
    """A file holds one forecast: of several initial times it would hold one, and the others would be lost."""
    export, folder = files
    with pytest.raises(UserError, match=f"got inference.{override[:4]}.*give {option} instead"):
        forecast_from_files(
            export, [str(folder / "analysis.nc")], tmp_path / "o.nc", lead="6h", overrides=[f"inference.{override}"]
        )
    assert not list(tmp_path.iterdir())


def test_the_site_of_the_training_does_not_matter(files, tmp_path, monkeypatch):
    """Its setup, and that of `pbs`, has dollars, which are for the job."""
    export, folder = files
    forecaster = load_forecaster(export)
    launched = {"site": "polaris", "pbs": {"setup": ["echo ${NOWHERE:-} $$ $NOWHERE"]}}
    forecaster.experiment = Experiment.model_validate({**forecaster.experiment.to_dict(), **launched})
    monkeypatch.setattr("credit_like.inference.from_files.load_forecaster", lambda *_: forecaster)
    sources = [str(folder / "analysis.nc"), str(folder / "static.nc")]
    assert forecast_from_files(export, sources, tmp_path / "out.zarr", lead="6h", device="cpu").exists()
    assert forecaster.experiment.pbs.setup == ("echo ${NOWHERE:-} $$ $NOWHERE",)


@pytest.mark.parametrize("folder", ["~", "$HOME", "${NOWHERE}"])
def test_the_output_is_where_it_is_said_to_be(files, tmp_path, monkeypatch, folder):
    """The draft too, which is renamed: it may lie on no other file system."""
    export, analyses = files
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    sources = [str(analyses / "analysis.nc"), str(analyses / "static.nc")]
    made = forecast_from_files(export, sources, f"{folder}/out.zarr", lead="6h", device="cpu")
    assert (tmp_path / folder / made.name).is_dir()
    assert [path.name for path in tmp_path.iterdir()] == [folder]
    assert [path.name for path in (tmp_path / folder).iterdir()] == [made.name]


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
    with xr.open_dataset(analysis) as whole:
        whole.assign(column_water=whole["column_water"] * 1000 + 1e6).to_netcdf(folder / "units.nc")
        whole.assign(column_water=whole["column_water"] * np.nan).to_netcdf(folder / "empty.nc")
    for arguments, message in [
        (
            [export, "--from", folder / "units.nc", "--from", static, "-o", tmp_path / "out.zarr"],
            "is it in other units",
        ),
        (
            [export, "--from", folder / "empty.nc", "--from", static, "-o", tmp_path / "out.zarr"],
            "column_water at the initial",
        ),
        ([export, "--from", analysis, "-o", tmp_path / "out.zarr"], "orography"),
        ([export, "--from", analysis, "--from", static, "-o", tmp_path / "out.txt"], "ends in .zarr, .nc"),
        ([export, "--from", analysis, "--from", static, "-o", there], "where nothing is, got"),
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


def newest_step(folder):
    return max(int(path.name.partition("-")[2]) for path in (folder / "checkpoints").glob("step-*"))


def _record_scores(folder, name, weights="ema"):
    """Write scores of forecasts with the weights of a checkpoint, as far as their source goes."""
    source = f"{folder}/forecasts/forecast.zarr: forecasts of x, credit-like 1, wxformer, {weights_text(name, weights)}"
    xr.Dataset(attrs={"provenance": source}).to_netcdf(folder / "evaluation" / "model.nc")


@pytest.fixture(scope="module")
def package(run, tmp_path_factory):  # noqa: F811
    """A package of the run, with scores of an evaluation and a licence."""
    experiment, _, export = run
    scores = export.parent / "evaluation" / "scores.csv"
    scores.parent.mkdir(exist_ok=True)
    _record_scores(export.parent, find(export.parent).name)
    scores.write_text(
        "source,variable,level,metric,region,lead_hours,value,units\n"
        "model,u,1.0,rmse,global,24.0,1.25,m s-1\nmodel,u,1.0,rmse,tropics,24.0,9.75,m s-1\n"
        "persistence,u,1.0,rmse,global,24.0,8.75,m s-1\nmodel,precipitation,,rmse,global,24.0,0.5,kg m-2\n"
    )
    folder = tmp_path_factory.mktemp("package") / "model"
    arguments = ["export", experiment.save_loc, "--package", folder, "--licence", "cc-by-4.0"]
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == 0, (result.output, result.exception)
    assert result.output.split() == [str(folder)]
    return folder


def test_a_package_is_in_the_layout_of_model_hubs(run, package):  # noqa: F811
    experiment, _, export = run
    assert sorted(path.name for path in package.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
        "static.nc",
    ]
    assert (package / "model.safetensors").read_bytes() == export.read_bytes()
    _, head, card = (package / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(head) == {
        "license": "cc-by-4.0", "library_name": "credit-like", "tags": ["weather", "forecasting", experiment.model.type],
    }  # fmt: skip
    for line in (
        "| prognostic | u | 1, 2 |", "| static | orography |  |", "| u | 1 | m s-1 | 1.25 |", "| precipitation |  | kg m-2 | 0.5 |",
    ):  # fmt: skip
        assert line in card.splitlines()
    assert "9.75" not in card
    assert "8.75" not in card
    config = json.loads((package / "config.json").read_text())
    assert config["experiment"] == experiment.to_dict()
    assert config["files"]["model.safetensors"]["sha256"] == digest(export)


def test_a_forecast_from_a_package_needs_no_static_fields(files, package, tmp_path):
    export, folder = files
    analysis, static = str(folder / "analysis.nc"), str(folder / "static.nc")
    expected = forecast_from_files(export, [analysis, static], tmp_path / "one.nc", lead="12h", device="cpu")
    made = forecast_from_files(package, [analysis], tmp_path / "two.nc", lead="12h", device="cpu")
    with xr.open_dataset(expected) as one, xr.open_dataset(made) as two:
        xr.testing.assert_identical(one.drop_attrs(deep=False), two.drop_attrs(deep=False))
        assert two.attrs["checkpoint"] == one.attrs["checkpoint"] == f"export {digest(export)[:12]}"


@pytest.mark.parametrize(
    "static",
    [
        {"level": ["soil"], "surface": ["oro"]},
        {"level": ["soil", {"name": "deep", "levels": [850]}], "surface": ["oro"]},
        {"surface": [{"name": f"soil{level}", "var": "soil", "levels": [level]} for level in (500, 850)]},
    ],
    ids=["levels", "other levels", "levels of one variable"],
)
def test_static_fields_of_a_package_are_those_of_the_data(tmp_path, static):
    make_data(tmp_path / "data.nc")
    data = netcdf_files.load(tmp_path / "data.nc")
    numbers = np.random.default_rng(0).normal(size=(2, 2, *data["oro"].shape)).astype(np.float32)
    fields = {name: (("level", *data["oro"].dims), x) for name, x in zip(("soil", "deep"), numbers, strict=True)}
    netcdf_files.save(data.assign(fields), tmp_path / "all.nc")
    values = make_experiment(tmp_path / "all.nc", tmp_path / "run").to_dict()
    experiment = Experiment.model_validate({**values, "data": {**values["data"], "static": static}})
    variables = Variables(experiment.data)
    store = open_store(experiment.data, variables)
    netcdf_files.save(_static(store), tmp_path / "static.nc")
    names = {role: Variables.channel_names(variables.role(role)) for role in ROLES}
    moments = {
        role: {"channels": channels, "units": [""] * len(channels)} | dict.fromkeys(("mean", "std", "change_std"), ())
        for role, channels in names.items()
    }
    forecaster = Forecaster(torch.nn.Identity(), experiment, moments, store.grid, load_static(tmp_path / "static.nc"))
    there = forecaster.open(data.drop_vars("oro"))
    np.testing.assert_array_equal(there.static(), store.static())
    store.close()


@pytest.mark.parametrize(
    ("name", "further"),
    [("oro", {"path": "other.nc"}), ("sst", {"levels": [850], "units": "degC"})],
    ids=["two files", "two units"],
)
def test_static_fields_that_cannot_be_told_apart_are_left_out(tmp_path, name, further):
    data = netcdf_files.load(make_data(tmp_path / "data.nc"))
    netcdf_files.save(2 * data[["oro"]], tmp_path / "other.nc")
    netcdf_files.save(data.assign(sst=data["temperature"].isel(time=0, drop=True)), tmp_path / "all.nc")
    values = make_experiment(tmp_path / "all.nc", tmp_path / "run").to_dict()
    if "path" in further:
        further = {"path": str(tmp_path / further["path"])}
    first = {"name": name, **({"levels": [500]} if "levels" in further else {})}
    data = {
        **values["data"],
        "dynamic_forcing": {},
        "static": {"surface": [first, {"name": "other", "var": name, **further}]},
    }
    experiment = Experiment.model_validate({**values, "data": data})
    (told,) = _write_fields(experiment, tmp_path)
    assert not (tmp_path / STATIC).exists()
    assert told.startswith("no static fields: expected variables with different names in the files")
    assert f"got several {name}, change `var`" in told
    assert not (tmp_path / "static.nc").exists()


def test_a_package_has_only_the_scores_of_its_weights(run, package, tmp_path, monkeypatch):  # noqa: F811
    """Those of a checkpoint are those of its run, if the forecasts are its own."""
    folder = run[2].parent
    name = find(folder).name
    step, averaged = newest_step(folder), bool(find(folder).names("ema/"))
    monkeypatch.chdir(folder / "checkpoints")
    assert [text.split(":")[0] for text in write_package(f"step-{step}", tmp_path / "same")] == ["no licence"]
    others = [(f"step-{step + 1} {name.split()[1]}", "ema"), (f"step-{step} 0123456789ab", "ema"), (name, "raw")]
    try:
        for number, other in enumerate(others):
            _record_scores(folder, *other)
            missing = write_package(folder, tmp_path / str(number))
            if other == (name, "raw") and not averaged:  # the weights are the same
                assert [text.split(":")[0] for text in missing] == ["no licence"]
                continue
            assert re.match(
                rf"no scores on the card: expected those of {name}, .*, got scores of .*{other[0]}", missing[0]
            )
            assert "## Scores" not in (tmp_path / str(number) / "README.md").read_text()
        (folder / "evaluation" / "model.nc").write_bytes(b"{")
        assert "no scores on the card: expected scores" in write_package(folder, tmp_path / "unreadable")[0]
    finally:
        _record_scores(folder, name)


def test_what_a_package_lacks_is_said(run, package, tmp_path):  # noqa: F811
    experiment, _, _ = run
    scores = run[2].parent / "evaluation" / "scores.csv"
    scores.rename(scores.with_suffix(".kept"))
    missing = write_package(experiment.save_loc, tmp_path / "model")
    scores.with_suffix(".kept").rename(scores)
    assert [text.split(":")[0] for text in missing] == ["no scores on the card", "no licence"]
    assert "# license: not chosen yet" in (tmp_path / "model" / "README.md").read_text()
    with pytest.raises(UserError, match="--package: expected a path where nothing is"):
        write_package(experiment.save_loc, tmp_path / "model")
    with pytest.raises(UserError, match=r"expected a checkpoint in .* train first"):
        write_package(tmp_path, tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, "expected a model package with config.json"),
        ("config.json", b"{", "expected a model package with config.json"),
        ("config.json", b'{"architectures": ["Bert"]}', "expected a model package with config.json"),
        ("config.json", b'{"format": 2, "files": {}}', "expected a model package of format 1"),
        ("config.json", b'{"format": 1, "files": {"../x": {"sha256": ""}}}', "expected a model package of format 1"),
        ("model.safetensors", None, "expected model.safetensors, which config.json lists"),
        ("model.safetensors", b"other", "expected model.safetensors with SHA-256"),
        ("static.nc", None, "expected static.nc, which config.json lists"),
        ("static.nc", b"other", "expected static.nc with SHA-256"),
    ],
)
def test_a_damaged_package_is_one_message(files, package, tmp_path, name, content, message):
    copy = tmp_path / "model"
    shutil.copytree(package, copy)
    (copy / name).unlink()
    if content is not None:
        (copy / name).write_bytes(content)
    arguments = ["forecast", copy, "--from", files[1] / "analysis.nc", "-o", tmp_path / "out.zarr"]
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert isinstance(result.exception, UserError)
    assert message in str(result.exception)
    assert str(copy) in str(result.exception)
    assert not (tmp_path / "out.zarr").exists()
