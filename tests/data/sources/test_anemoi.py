"""Anemoi datasets: variables by name and level, grids, missing dates, members, statistics; made in their layout."""

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
import zarr

from credit_like import build
from credit_like.check import checked_experiment
from credit_like.data.sources import anemoi as source
from credit_like.data.statistics import fit_statistics
from credit_like.data.store import StoreError, open_store
from credit_like.data.stored_statistics import stored_statistics
from credit_like.data.tools.prepare import prepare
from credit_like.errors import UserError
from credit_like.schema.data import DataSection
from credit_like.schema.errors import ExperimentError
from credit_like.schema.load import load_experiment
from credit_like.variables import Variables
from tests.experiments import SMALL_MODEL
from tests.stores import serving

NAMES = ["10u", "2t", "lsm", "msl", "sst", "t_500", "t_850", "t_925", "u_500", "u_850", "w_500", "z", "z_500", "z_850"]
CONSTANT = ("lsm", "z")
HEIGHT, WIDTH = 9, 12


def cells(kind="regular"):
    """Latitude and longitude of every cell."""
    latitude, longitude = np.linspace(80, -80, HEIGHT), np.arange(WIDTH) * 360.0 / WIDTH
    if kind == "transposed":
        return tuple(grid.T.ravel() for grid in np.meshgrid(latitude, longitude, indexing="ij"))
    if kind == "regular":
        return tuple(grid.ravel() for grid in np.meshgrid(latitude, longitude, indexing="ij"))
    if kind == "unstructured":
        return np.linspace(80, -80, HEIGHT * WIDTH), np.linspace(0, 300, HEIGHT * WIDTH) % 97
    per_row = [4, 8, 12, 12, 12, 12, 8, 4]
    rows = np.linspace(70, -70, len(per_row))
    return np.repeat(rows, per_row), np.concatenate([np.arange(n) * 360.0 / n for n in per_row])


def make(
    path,
    dates=24,
    members=1,
    kind="regular",
    chunk=1,
    missing=(),
    nans=(),
    tendencies="6h",
    version=2,
    start="2001-01-01",
    **attrs,
):
    """Write a dataset; return its states (dates, variables, ensemble, cells)."""
    latitude, longitude = cells(kind)
    random = np.random.default_rng(0)
    level = np.arange(len(NAMES))[:, None, None]
    data = (10 * level + (1 + level) * random.standard_normal((dates, len(NAMES), members, len(latitude)))).astype("f4")
    for name in CONSTANT:
        data[:, NAMES.index(name)] = data[0, NAMES.index(name)]
    for name in nans:
        data[:, NAMES.index(name), :, ::3] = np.nan
    group = zarr.open_group(path, mode="w", zarr_format=version)
    times = np.datetime64(start, "s") + np.arange(dates) * np.timedelta64(6, "h")
    arrays = {
        "dates": times, "latitudes": latitude, "longitudes": longitude,
        "mean": np.nanmean(data, (0, 2, 3), dtype="f8"), "stdev": np.nanstd(data, (0, 2, 3), dtype="f8"),
        "minimum": np.nanmin(data, (0, 2, 3)), "maximum": np.nanmax(data, (0, 2, 3)),
    }  # fmt: skip
    if tendencies:
        arrays[f"statistics_tendencies_{tendencies}_stdev"] = np.nanstd(np.diff(data.astype("f8"), axis=0), (0, 2, 3))
    for name, values in arrays.items():
        group.create_array(name, shape=values.shape, dtype=values.dtype)[...] = values
    for t in missing:
        data[t] = np.nan
    group.create_array("data", shape=data.shape, dtype="f4", chunks=(chunk, *data.shape[1:]))[...] = data
    group.attrs.update(
        {
            "variables": NAMES,
            "variables_metadata": {
                name: {
                    "mars": {"param": name.split("_")[0], "levtype": "pl", "levelist": int(name.split("_")[1])}
                    if "_" in name
                    else {"param": name, "levtype": "sfc"},
                    **({"constant_in_time": True} if name in CONSTANT else {}),
                }
                for name in NAMES
            },
            "constant_fields": list(CONSTANT),
            "missing_dates": [str(times[t]) for t in missing],
            "variables_with_nans": list(nans),
            "field_shape": [HEIGHT, WIDTH] if kind == "regular" else [len(latitude)],
            "resolution": "test",
            "frequency": "6h",
            **attrs,
        }
    )
    return data


def opened(path, **more):
    return source.open_dataset(source.Config(path=str(path), **more))


def column(data, name):
    """(dates, latitude, longitude) of a variable on a regular grid."""
    return data[:, NAMES.index(name), 0].reshape(-1, HEIGHT, WIDTH)


@pytest.mark.filterwarnings("ignore:The data type .* does not have a Zarr V3 specification")
def test_zarr_of_version_3_is_read_too(tmp_path):
    data = make(tmp_path / "a.zarr", version=3)
    got = opened(tmp_path / "a.zarr")
    assert str(got["time"].values[3]) == "2001-01-01T18:00:00"
    np.testing.assert_array_equal(got["2t"].values, column(data, "2t"))


@pytest.mark.parametrize("chunk", [1, 5])
def test_variables_of_several_levels_are_joined(tmp_path, chunk):
    data = make(tmp_path / "a.zarr", chunk=chunk)
    got = opened(tmp_path / "a.zarr")
    assert set(got.data_vars) == {"10u", "2t", "lsm", "msl", "sst", "t", "u", "z", "t_925", "w_500", "z_surface"}
    assert got["t"].dims == ("time", "level", "latitude", "longitude")
    assert got["level"].values.tolist() == [500, 850]
    assert got["level"].attrs["units"] == "hPa"
    assert not got["t"].variable._in_memory
    np.testing.assert_array_equal(got["t"].values, np.stack([column(data, "t_500"), column(data, "t_850")], 1))
    np.testing.assert_array_equal(got["z"][3, 1].values, column(data, "z_850")[3])
    np.testing.assert_array_equal(got["2t"][4:19:3, 2:5, ::2].values, column(data, "2t")[4:19:3, 2:5, ::2])
    np.testing.assert_array_equal(got["z_surface"].values, column(data, "z")[0])
    np.testing.assert_array_equal(got["w_500"].values, column(data, "w_500"))


def test_levels_follow_from_names_where_the_metadata_lack_them(tmp_path):
    make(tmp_path / "a.zarr", variables_metadata={"t_500": {"mars": {"param": "t_500"}}})
    assert opened(tmp_path / "a.zarr")["t"].dims == ("time", "level", "latitude", "longitude")


def test_a_variable_on_levels_has_its_own_units(tmp_path):
    metadata = {
        name: {"mars": {"param": name.split("_")[0]}, "units": "K" if "_" in name else "degC"} for name in NAMES
    }
    make(tmp_path / "a.zarr", variables_metadata=metadata)
    got = opened(tmp_path / "a.zarr")
    assert {got[name].attrs["units"] for name in got.data_vars if "level" in got[name].dims} == {"K"}
    assert got["2t"].attrs["units"] == "degC"


def test_columns_first_is_a_regular_grid_too(tmp_path):
    data = make(tmp_path / "a.zarr", kind="transposed")
    got = opened(tmp_path / "a.zarr")
    assert (got.sizes["latitude"], got.sizes["longitude"]) == (HEIGHT, WIDTH)
    expected = data[:, NAMES.index("2t"), 0].reshape(-1, WIDTH, HEIGHT).swapaxes(1, 2)
    np.testing.assert_array_equal(got["2t"].values, expected)


def test_a_reduced_grid_becomes_regular(tmp_path):
    data = make(tmp_path / "a.zarr", kind="reduced")
    got = opened(tmp_path / "a.zarr")
    assert got["2t"].shape == (24, 8, 12)
    own = data[:, NAMES.index("2t"), 0]
    np.testing.assert_array_equal(got["2t"][:, 2].values, own[:, 12:24])  # a row of the full length stays
    np.testing.assert_array_equal(got["2t"][:, 0, ::3].values, own[:, :4])
    np.testing.assert_allclose(got["2t"][:, 0, 1], own[:, 0] + (own[:, 1] - own[:, 0]) / 3, rtol=1e-5)


def test_missing_dates_are_left_out(tmp_path):
    data = make(tmp_path / "a.zarr", missing=(3, 4))
    got = opened(tmp_path / "a.zarr")
    assert got.sizes["time"] == 22
    np.testing.assert_array_equal(got["2t"].values, np.delete(column(data, "2t"), (3, 4), 0))
    assert str(got["time"].values[3]) == "2001-01-02T06:00:00"


def test_a_member_is_selected(tmp_path):
    data = make(tmp_path / "a.zarr", members=3)
    got = opened(tmp_path / "a.zarr", select={"ensemble": 2})
    np.testing.assert_array_equal(got["2t"].values, data[:, NAMES.index("2t"), 2].reshape(-1, HEIGHT, WIDTH))
    np.testing.assert_array_equal(got["t"][5, 1].values, data[5, NAMES.index("t_850"), 2].reshape(HEIGHT, WIDTH))


def section(path, **changes):
    return DataSection.model_validate(
        {
            "source": {"type": "anemoi", "path": str(path), **changes.pop("source", {})},
            "timestep": "6h",
            "levels": [850, 500],
            "prognostic": {"level": ["temperature", {"name": "u"}], "surface": ["2m_temperature", "msl"]},
            "dynamic_forcing": {"surface": ["10u", {"name": "sun", "compute": "solar"}]},
            "static": {"surface": ["geopotential_at_surface", "land_sea_mask"]},
            "train": ["2001-01-01", "2001-01-06T18"],
            "valid": ["2001-01-03", "2001-01-04"],
            "test": ["2001-01-04", "2001-01-06"],
            **changes,
        }
    )


def test_members_that_are_not_selected_are_one_message(tmp_path):
    make(tmp_path / "a.zarr", members=3)
    data = section(tmp_path / "a.zarr")
    with pytest.raises(StoreError, match=r"dimension 'ensemble' \(0, 1, 2\); set data.source.select"):
        open_store(data, Variables(data))


def test_a_chunk_is_decoded_once_for_all_variables(tmp_path, monkeypatch):
    data = make(tmp_path / "a.zarr")
    reads = []
    real = source._States._read
    monkeypatch.setattr(source._States, "_read", lambda self, *at: reads.append(at) or real(self, *at))
    experiment = section(tmp_path / "a.zarr")
    variables = Variables(experiment)
    reader = open_store(experiment, variables)
    reads.clear()
    got = reader.read(variables.role("prognostic"), [7, 8], slice(2, 6))
    assert sorted(reads) == [(7, 8), (8, 9)]
    expected = [column(data, name)[7:9, 2:6] for name in ("t_850", "t_500", "u_850", "u_500", "2t", "msl")]
    np.testing.assert_array_equal(got, np.stack(expected, 1))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("unstructured", r"expected a latitude-longitude or a Gaussian grid in .*, got 108 cells with resolution test"),
        ("no data", "expected an Anemoi dataset, got .*: it has no array 'data'"),
        ("no variables", "with the attribute `variables`"),
        ("other variables", r"expected data \(dates, 3 variables, ensemble, cells\) in .*, got \(24, 14, 1, 108\)"),
        ("other dates", "expected a date for each of 24 states"),
        ("other cells", "expected coordinates of 108 cells"),
        ("no store", "expected an existing file or folder"),
        ("plain zarr", "expected an Anemoi dataset"),
    ],
)
def test_what_is_no_dataset_on_a_grid_is_one_message(tmp_path, how, message, dataset):
    path = tmp_path / "a.zarr"
    if how == "plain zarr":
        dataset(steps=2).to_zarr(path, consolidated=False)
    elif how != "no store":
        make(path, kind="unstructured" if how == "unstructured" else "regular")
        group = zarr.open_group(path, mode="a")
        if how == "no data":
            del group["data"]
        elif how == "no variables":
            group.attrs.put({})
        elif how == "other variables":
            group.attrs.update({"variables": NAMES[:3]})
        elif how in ("other dates", "other cells"):
            name = "dates" if how == "other dates" else "latitudes"
            values = group[name][:-1]
            del group[name]
            group.create_array(name, shape=values.shape, dtype=values.dtype)[...] = values
    with pytest.raises(UserError, match=message) as caught:
        opened(path)
    assert len(str(caught.value).splitlines()) == 1


def test_behind_a_url_with_a_cache(tmp_path):
    data = make(tmp_path / "served" / "a.zarr")
    options = {"cache": {"size": "10MB", "folder": str(tmp_path / "cache")}}
    with serving(tmp_path / "served") as server:
        got = opened(f"{server.url}/a.zarr", **options)
        np.testing.assert_array_equal(got["2t"].values, column(data, "2t"))
        assert server.asked.count("/a.zarr/data/7.0.0.0") == 1
    again = opened(f"{server.url}/a.zarr", **options)
    np.testing.assert_array_equal(again["u"][:, 1].values, column(data, "u_850"))


def test_its_statistics_are_those_of_a_fit(tmp_path):
    """The dataset's own statistics are of all its dates, as is the training period here."""
    make(tmp_path / "a.zarr")
    data = section(tmp_path / "a.zarr", source={"statistics": True})
    variables = Variables(data)
    reader = open_store(data, variables)
    got, fitted = stored_statistics(reader, variables, data), fit_statistics(reader, variables, data)
    assert got.dataset["channel"].values.tolist() == fitted.dataset["channel"].values.tolist()
    read = [name for name in got.dataset["channel"].values if name not in ("sun", "10u")]
    for name in ("mean", "std", "change_std"):
        np.testing.assert_allclose(
            got.dataset[name].sel(channel=read), fitted.dataset[name].sel(channel=read), rtol=1e-5, err_msg=name
        )
    np.testing.assert_allclose(
        got.dataset["std"].sel(channel="sun"), fitted.dataset["std"].sel(channel="sun"), rtol=1e-6
    )
    assert stored_statistics(reader, variables, section(tmp_path / "a.zarr")) is None


@pytest.mark.parametrize(
    ("made", "changes", "message"),
    [
        ({"tendencies": ""}, {}, r"of the change of t\S* over 6 h \(statistics_tendencies_6h_stdev\), got nan"),
        ({"nans": ("sst",)}, {"dynamic_forcing": {"surface": ["sst"]}}, "values without missing ones for sst"),
        (
            {"nans": ("sst",), "missing": (0,), "variables_with_nans": None, "allow_nans": True},
            {"dynamic_forcing": {"surface": ["sst"]}},
            "values without missing ones for sst",
        ),
        ({}, {"diagnostic": {"surface": [{"name": "w_500", "transform": "sqrt"}]}}, "without transform, got w_500"),
        ({}, {"source": {"region": {"south": 0}}}, "the source's own grid, got region or regrid"),
        ({}, {"diagnostic": {"surface": [{"name": "w_500", "units": "K"}]}}, "in the source's units for w_500"),
    ],
)
def test_statistics_that_do_not_suit_are_one_message(tmp_path, made, changes, message):
    make(tmp_path / "a.zarr", **made)
    data = section(tmp_path / "a.zarr", **{**changes, "source": {"statistics": True, **changes.get("source", {})}})
    variables = Variables(data)
    with pytest.raises(UserError, match=message):
        stored_statistics(open_store(data, variables), variables, data)


RECIPE = """
dates: {{start: 2020-01-01T00:00:00, end: 2020-01-05T18:00:00, frequency: 6h, missing: [2020-01-02T18:00:00]}}
input:
  join:
    - grib: {{path: {folder}/a.grib}}
    - forcings: {{template: "${{input.join.0.grib}}", param: [cos_latitude, insolation]}}
statistics: {{end: 2020-01-04, tendencies: [6, 24]}}
build: {{allow_nans: true}}
"""
REFERENCE = """
import sys, numpy as np
from anemoi.datasets import open_dataset
made = open_dataset(sys.argv[1])
kept = [i for i in range(len(made)) if i not in made.missing]
tendencies = {f"change_{n}": made.statistics_tendencies(n)["stdev"] for n in (6, 24)}
values = np.stack([made[i] for i in kept])
arrays = {"mean": made.statistics["mean"], "stdev": made.statistics["stdev"], **tendencies}
np.savez(sys.argv[2], names=made.variables, dates=made.dates[kept], shape=made.field_shape, values=values, **arrays)
"""


def made_by_anemoi(folder):
    """Make a dataset of GRIB messages with the package itself; return what it reads of it."""
    command = shutil.which("anemoi-datasets")
    if command is None:
        pytest.skip(
            "the command `anemoi-datasets` (pip install anemoi-datasets, in any environment) is not on the path"
        )
    pytest.importorskip("eccodes", reason="the extra `grib` (ecCodes) is not installed")
    from tests.data.sources.test_grib import message, surface, write

    random, messages = np.random.default_rng(0), []
    for i in set(range(20)) - {7}:
        when = {"dataDate": 20200101 + i // 4, "dataTime": 600 * (i % 4)}
        for name, level in (("t", 500), ("t", 850), ("q", 500), ("q", 850), ("w", 500)):
            messages.append(message(250 + random.standard_normal(40), shortName=name, level=level, **when))
        messages.append(surface("2t", 280 + random.standard_normal(40), **when))
        messages.append(surface("sst", 290 + random.standard_normal(40), missing=[3, 4, 17], **when))
    write(folder / "a.grib", *messages)
    (folder / "recipe.yaml").write_text(RECIPE.format(folder=folder))
    python = Path(command).with_name("python")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    for call in (
        [command, "create", str(folder / "recipe.yaml"), str(folder / "a.zarr")],
        [str(python), "-c", REFERENCE, str(folder / "a.zarr"), str(folder / "read.npz")],
    ):
        done = subprocess.run(call, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
    return dict(np.load(folder / "read.npz"))


@pytest.mark.slow
def test_a_dataset_of_the_package_itself_is_read_as_the_package_reads_it(tmp_path):
    reference = made_by_anemoi(tmp_path)
    got = opened(tmp_path / "a.zarr")
    np.testing.assert_array_equal(got["time"].values, reference["dates"].astype("datetime64[s]"))
    assert len(got["time"]) == 19
    names = reference["names"].tolist()
    tables = [source.stored_statistics(source.Config(path=str(tmp_path / "a.zarr")), hours) for hours in (6, 24)]
    assert set(got.data_vars) == {"2t", "cos_latitude", "insolation", "q", "sst", "t", "w_500"}
    for column, name in enumerate(names):
        stem, level = (name[:1], float(name[2:])) if name[:2] in ("t_", "q_") else (name, None)
        field = got[stem] if level is None else got[stem].sel(level=level)
        expected = reference["values"][:, column, 0].reshape(19, *reference["shape"])
        np.testing.assert_array_equal(np.broadcast_to(field.values, expected.shape), expected, err_msg=name)
        for table, hours in zip(tables, (6, 24), strict=True):
            if name == "sst":
                assert ("sst", None) not in table
                continue
            wanted = [reference[key][column] for key in ("mean", "stdev", f"change_{hours}")]
            np.testing.assert_array_equal(table[stem, level], wanted, err_msg=name)


EXPERIMENT = """
name: anemoi
save_loc: {folder}/run
data:
  source: {{type: anemoi, path: {folder}/a.zarr, statistics: true}}
  timestep: 6h
  levels: [500, 850]
  prognostic: {{level: [t, u], surface: [2t]}}
  static: {{surface: [lsm]}}
  train: [2001-01-01, 2001-01-04]
  valid: [2001-01-04T06, 2001-01-05]
  test: [2001-01-05T06, 2001-01-06T18]
trainer: {{global_batch_size: 2, micro_batch_size: 2, epochs: 1, optimizer: {{type: adamw, learning_rate: 1.0e-3}}}}
inference: {{init: [2001-01-05T06, 2001-01-05T06, 12h], lead: 12h}}
"""


WINDOWS = "model={local_window_size: 1, global_window_size: [1, 1, 1, 1]}"
PADS = "model.padding_conf={activate: true, mode: earth, pad_lat: [3, 4], pad_lon: [2, 2]}"


@pytest.mark.parametrize(
    ("made", "override"),
    [
        ({"tendencies": ""}, "data={}"),
        ({"nans": ("sst",)}, "data.dynamic_forcing={surface: [sst]}"),
        ({}, "data.diagnostic={surface: [{name: w_500, transform: sqrt}]}"),
        ({}, "data.source.region={south: 0}"),
        ({}, "data.source.path=[{folder}/a.zarr, {folder}/b.zarr]"),
    ],
)
def test_check_refuses_the_statistics_that_training_refuses(tmp_path, made, override):
    make(tmp_path / "a.zarr", **made)
    make(tmp_path / "b.zarr", start="2001-01-07")
    (tmp_path / "a.yml").write_text(EXPERIMENT.format(folder=tmp_path))
    overrides = [SMALL_MODEL, WINDOWS, PADS, override.replace("{folder}", str(tmp_path))]
    with pytest.raises(ExperimentError, match=r"data\.source(\.statistics)?: ") as checked:
        checked_experiment(tmp_path / "a.yml", overrides)
    with pytest.raises(UserError) as trained:
        build.preprocess(load_experiment(tmp_path / "a.yml", overrides))
    assert str(trained.value).removeprefix("data.source.statistics: ") in str(checked.value)
    assert not (tmp_path / "run").exists()


def test_preprocessing_keeps_the_statistics_that_training_would_take(tmp_path):
    make(tmp_path / "a.zarr")
    (tmp_path / "a.yml").write_text(EXPERIMENT.format(folder=tmp_path))
    kept = []
    for command in (build.preprocess, prepare):
        experiment = load_experiment(tmp_path / "a.yml", [SMALL_MODEL, f"save_loc={tmp_path}/{command.__module__}"])
        command(experiment)
        kept.append(xr.load_dataset(experiment.statistics_file))
    assert kept[0].attrs["title"] == "Statistics that the data hold"
    for each in kept:
        del each.attrs["history"]  # has the second in which it was written
    xr.testing.assert_identical(*kept)


@pytest.mark.slow
def test_it_trains_and_forecasts(tmp_path):
    make(tmp_path / "a.zarr")
    (tmp_path / "a.yml").write_text(EXPERIMENT.format(folder=tmp_path))
    experiment = checked_experiment(tmp_path / "a.yml", [SMALL_MODEL, WINDOWS, PADS])[0]
    assert build.train(experiment) == 0
    assert build.rollout(experiment) == 0
    with xr.open_dataset(tmp_path / "run" / "statistics.nc") as statistics:
        assert statistics.attrs["title"] == "Statistics that the data hold"
