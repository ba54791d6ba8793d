"""Files as they come from archives and models are read without an edit; what cannot be read names file and cure."""

import netCDF4
import numpy as np
import pytest
import xarray as xr
import yaml
from typer.testing import CliRunner

from credit_like.cli import app
from credit_like.data.sources import netcdf
from credit_like.data.sources._conventions import own_name, same_circle
from credit_like.data.store import StoreError, open_store
from credit_like.data.times import to_text
from credit_like.schema.data import DataSection
from credit_like.variables import Variables
from tests.data.conventions import MAKERS, cds, coordinate, wrf
from tests.experiments import SMALL_MODEL


def opened(made, **changes):
    data = DataSection.model_validate({**made.data, **changes})
    variables = Variables(data)
    return variables, open_store(data, variables)


@pytest.mark.parametrize("kind", MAKERS)
def test_values_of_every_convention(tmp_path, kind):
    made = MAKERS[kind](tmp_path)
    variables, store = opened(made)
    assert len(store) == 40
    assert store.start == "2001-01-01T00:00:00"
    assert store.grid.height, store.grid.width == (9, 12)
    for name, expected in made.expected.items():
        variable = variables[name]
        if variable.role == "static":
            index = [v.name for v in variables.role("static")].index(name)
            np.testing.assert_array_equal(store.static(slice(2, 7))[index], expected[2:7])
            np.testing.assert_array_equal(store.read([variable], [3, 39])[:, 0], np.stack([expected] * 2))
        else:
            wanted = [5, 19, 20, 39]
            channel = list(variable.levels).index(made.data["levels"][0]) if variable.levels else 0
            np.testing.assert_array_equal(store.read([variable], wanted)[:, channel], expected[wanted])


def test_times_that_two_files_have(tmp_path):
    made = cds(tmp_path, overlap=2)
    with pytest.raises(
        StoreError,
        match=r"2001-01-05T12:00:00 in .*accum_02.nc a second time \(after .*accum_01.nc\); "
        r"set data.source.duplicates: first",
    ):
        opened(made)
    variables, store = opened(made, source={**made.data["source"], "duplicates": "first"})
    assert len(store) == 40
    np.testing.assert_array_equal(store.read([variables["tp"]], range(16, 24))[:, 0], made.expected["tp"][16:24])


@pytest.mark.parametrize(
    ("name", "is_dim", "attrs"),
    [("level", False, {}), ("number", True, {}), ("run", False, {"standard_name": "realization"}), ("step", False, {})],
)
def test_files_of_other_levels_and_members_are_no_duplicates(tmp_path, dataset, name, is_dim, attrs):
    ds = dataset(steps=8)[["sp"]]
    for value in (3, 5):
        made = ds.assign_coords({name: ((), value, attrs), "expver": ((), value)})
        (made.expand_dims(name) if is_dim else made).to_netcdf(tmp_path / f"a{value}.nc")
    with pytest.raises(
        ValueError, match=rf"after .*a3.nc\); their {name} differs: list .* each {name} .*`rename`"
    ) as caught:
        netcdf.open_dataset(netcdf.Config(path=f"{tmp_path}/a?.nc"))
    assert "duplicates" not in str(caught.value)
    for value in (3, 5):
        alone = netcdf.open_dataset(netcdf.Config(path=f"{tmp_path}/a{value}.nc", rename={"sp": f"sp{value}"}))
        assert f"sp{value}" in alone.data_vars


def test_a_time_that_a_file_has_twice(tmp_path, dataset):
    ds = dataset(steps=8)[["u", "sp"]]
    xr.concat([ds.isel(time=slice(0, 5)), ds.isel(time=slice(4, 8)) + 1], "time").to_netcdf(tmp_path / "a.nc")
    config = netcdf.Config(path=f"{tmp_path}/a.nc")
    with pytest.raises(ValueError, match=r"each time once in .*a.nc, got 2001-01-02T00:00:00 twice; set .*duplicates"):
        netcdf.open_dataset(config)
    got = netcdf.open_dataset(config.model_copy(update={"duplicates": "first"}))
    assert got.sizes["time"] == 8
    np.testing.assert_array_equal(got["sp"].values[:5], ds["sp"].values[:5])
    np.testing.assert_array_equal(got["sp"].values[5:], ds["sp"].values[5:] + 1)


@pytest.mark.parametrize(("values", "wanted"), [([0, 1, 2], 1), (["r1", "r2", "r3"], "r2"), (None, 1)])
def test_one_member_is_selected(tmp_path, dataset, values, wanted):
    ds = dataset(steps=8)
    members = xr.concat([ds + i for i in range(3)], "number", data_vars="all")
    if values:
        members = members.assign_coords(number=values)
    members.to_netcdf(tmp_path / "a.nc")
    base = {"type": "netcdf", "path": f"{tmp_path}/a.nc"}
    made = {
        "timestep": "6h", "levels": [500], "prognostic": {"level": ["u", "t"], "surface": ["sp"]},
        "train": ["2001-01-01", "2001-01-02"], "valid": ["2001-01-01", "2001-01-02"],
        "test": ["2001-01-01", "2001-01-02"],
    }  # fmt: skip
    first = "r1" if values and isinstance(values[0], str) else 0
    data = DataSection.model_validate({**made, "source": base})
    with pytest.raises(StoreError) as caught:
        open_store(data, Variables(data))
    ((place, message),) = caught.value.problems
    assert place == ("data", "source", 0)
    assert message.startswith("expected u, t, sp of")
    assert f"set data.source.select: {{number: {first}}}" in message
    data = DataSection.model_validate({**made, "source": {**base, "select": {"number": wanted}}})
    variables = Variables(data)
    np.testing.assert_array_equal(
        open_store(data, variables).read([variables["sp"]], [2, 5])[:, 0], (ds["sp"] + 1).values[[2, 5]]
    )


@pytest.mark.parametrize(
    ("select", "message"),
    [
        ({"number": 7}, r"expected number of .*a.nc \(0, 1, 2\), got 7; change data.source.select.number"),
        ({"nmber": 0}, r"expected data.source.select to name dimensions of the files, got 'nmber'"),
    ],
)
def test_a_member_that_is_not_there(tmp_path, dataset, select, message):
    xr.concat([dataset(steps=2)] * 3, "number").assign_coords(number=[0, 1, 2]).to_netcdf(tmp_path / "a.nc")
    with pytest.raises(ValueError, match=message):
        netcdf.open_dataset(netcdf.Config(path=f"{tmp_path}/a.nc", select=select))


def test_statics_of_another_calendar_and_time(tmp_path, dataset, data_section):
    ds = dataset(calendar="noleap")
    ds.drop_vars(["orography", "lsm"]).to_netcdf(tmp_path / "fields.nc")
    still = ds[["orography", "lsm"]].expand_dims(time=xr.date_range("1900-01-01", periods=1))
    still.to_netcdf(tmp_path / "still.nc", encoding={"time": {"units": "hours since 1900-01-01"}})
    source = [{"type": "netcdf", "path": f"{tmp_path}/{name}.nc"} for name in ("fields", "still")]
    data = data_section("", source=source)
    variables = Variables(data)
    store = open_store(data, variables)
    assert store.calendar == "noleap"
    np.testing.assert_array_equal(store.static(), np.stack([ds["orography"].values, ds["lsm"].values]))


def test_a_curvilinear_grid_is_refused_with_the_key_that_helps(tmp_path):
    made = wrf(tmp_path, curved=5.0)
    with pytest.raises(
        StoreError, match=r"one latitude for each row of .*got a curvilinear grid; set data.source.regrid"
    ):
        opened(made)


def test_of_time_and_step_the_one_that_varies_is_time(tmp_path):
    with netCDF4.Dataset(tmp_path / "a.nc", "w") as file:
        coordinate(file, "step", [0.0], units="hours", standard_name="forecast_period")
        coordinate(file, "time", [0, 6], "i8", units="hours since 2001-01-01", standard_name="forecast_reference_time")
        coordinate(file, "latitude", [10.0, 0.0], units="degrees_north")
        coordinate(file, "longitude", [0.0, 10.0], units="degrees_east")
        file.createVariable("t", "f4", ("time", "step", "latitude", "longitude"))[:] = 1
    got = netcdf.open_dataset(netcdf.Config(path=f"{tmp_path}/a.nc"))
    assert got["t"].dims == ("time", "latitude", "longitude")
    assert str(got["time"].values[1]) == "2001-01-01T06:00:00"


@pytest.mark.slow
@pytest.mark.parametrize("kind", MAKERS)
def test_check_and_train_take_the_files_as_they_come(tmp_path, kind):
    (tmp_path / "files").mkdir()
    made = MAKERS[kind](tmp_path / "files", height=32, width=64)
    trainer = {"epochs": 1, "global_batch_size": 2, "batches_per_epoch": 2, "loader": {"num_workers": 0}}
    model = yaml.safe_load(SMALL_MODEL.split("=", 1)[1])
    document = {"name": "made", "save_loc": f"{tmp_path}/run", "data": made.data, "model": model, "trainer": trainer}
    (tmp_path / "my.yml").write_text(yaml.safe_dump(document))
    for command in ("check", "train"):
        result = CliRunner().invoke(app, [command, str(tmp_path / "my.yml")])
        assert result.exit_code == 0, result.output
    assert list((tmp_path / "run" / "checkpoints").iterdir())


def test_messages_name_the_source_of_a_list(tmp_path, dataset, data_section):
    ds = dataset(steps=8)
    ds.drop_vars(["rain", "sst"]).to_netcdf(tmp_path / "a.nc")
    twice = xr.concat([ds[["rain"]], ds[["rain"]].isel(time=[-1])], "time")
    twice.expand_dims(run=[3, 5], axis=1).to_netcdf(tmp_path / "b.nc")
    twice.rename(rain="sst").to_netcdf(tmp_path / "c.nc")
    sources = [{"type": "netcdf", "path": f"{tmp_path}/{name}.nc"} for name in "ab"]
    forcing = {"surface": [{"name": "sst", "path": f"{tmp_path}/c.nc"}, {"name": "sea", "path": f"{tmp_path}/d.nc"}]}
    data = data_section("", source=sources, dynamic_forcing=forcing)
    with pytest.raises(StoreError) as caught:
        open_store(data, Variables(data))
    told = {".".join(map(str, place)): message for place, message in caught.value.problems}
    of_forcing = "data.dynamic_forcing.surface"
    assert [place for place, _ in caught.value.problems].count(("data", "source", 1)) == 2
    assert "set data.source.1.select: {run: 3} to read one, or name it in data.source.1.dims" in str(caught.value)
    assert "set data.source.1.duplicates: first" in str(caught.value)
    assert told[f"{of_forcing}.0.path"].endswith("set data.source.0.duplicates: first")
    assert "data.source.path" not in told[f"{of_forcing}.1.path"]


def written(path, start, units, calendar=None, value=0.0, **attrs):
    """Write four times of a field, `start` being their numbers."""
    with netCDF4.Dataset(path, "w") as file:
        given = {"units": units, "calendar": calendar, **attrs}
        kind = "i2" if "scale_factor" in attrs else "f8"
        file.createDimension("time", 4)
        time = file.createVariable("time", kind, ("time",))
        time.setncatts({key: text for key, text in given.items() if text is not None})
        time.set_auto_scale(False)
        time[:] = start + np.arange(4)
        coordinate(file, "latitude", [10.0, 0.0], units="degrees_north")
        coordinate(file, "longitude", [0.0, 10.0], units="degrees_east")
        file.createVariable("t", "f4", ("time", "latitude", "longitude"))[:] = value


def test_units_and_calendar_of_times_are_those_of_the_files_where_they_say(tmp_path):
    written(tmp_path / "a.nc", 0, "days since 2004-02-27", "noleap")
    written(tmp_path / "b.nc", 4, None)
    written(tmp_path / "c.nc", 8, "days", "")
    options = {"time_units": "days since 2004-02-27", "calendar": "noleap"}
    got = netcdf.open_dataset(netcdf.Config(path=f"{tmp_path}/?.nc", **options))
    assert [str(time)[:10] for time in got["time"].values[:4]] == [
        "2004-02-27",
        "2004-02-28",
        "2004-03-01",
        "2004-03-02",
    ]
    assert got.sizes["time"] == 12
    other = {"time_units": "hours since 1900-01-01", "calendar": "360_day"}
    alone = netcdf.open_dataset(netcdf.Config(path=f"{tmp_path}/a.nc", **other))
    assert list(alone["time"].values) == list(got["time"].values[:4])


def test_units_of_times_that_cannot_be_decoded_are_replaced(tmp_path):
    written(tmp_path / "a.nc", 0, "days since the beginning")
    with pytest.raises(ValueError, match=r"times that decode .*; set data.source.time_units"):
        netcdf.open_dataset(netcdf.Config(path=f"{tmp_path}/a.nc"))
    got = netcdf.open_dataset(netcdf.Config(path=f"{tmp_path}/a.nc", time_units="days since 2004-02-27"))
    assert str(got["time"].values[1])[:10] == "2004-02-28"
    with pytest.raises(ValueError, match=r"times that decode .*'days since the end'"):
        netcdf.open_dataset(netcdf.Config(path=f"{tmp_path}/a.nc", time_units="days since the end"))


def test_files_of_two_calendars_have_to_be_converted(tmp_path):
    written(tmp_path / "a.nc", 0, "days since 2004-02-27", "noleap")
    written(tmp_path / "b.nc", 9, "days since 2004-02-27", "standard")
    with pytest.raises(ValueError, match=r"got noleap in .*a.nc and standard in .*b.nc; convert one of them") as caught:
        netcdf.open_dataset(netcdf.Config(path=f"{tmp_path}/?.nc"))
    assert "data.source.calendar" not in str(caught.value)


@pytest.mark.parametrize("calendar", ["standard", "noleap"])
def test_packed_times_are_unpacked(tmp_path, calendar):
    written(tmp_path / "a.nc", 4, "days since 2001-01-01", calendar, scale_factor=0.25, add_offset=30.0)
    got = netcdf.open_dataset(netcdf.Config(path=f"{tmp_path}/a.nc"))
    assert [to_text(time) for time in got["time"].values] == [f"2001-02-01T{hour:02d}:00:00" for hour in (0, 6, 12, 18)]


@pytest.mark.parametrize("step", ["none", "scalar", "of size 1", "the forecast"])
def test_times_of_cfgrib_are_those_at_which_fields_are_valid(tmp_path, step):
    """`time` is when a forecast starts, `step` how long it lasts: of one step of several forecasts, or of one forecast."""
    lengths = [6.0, 12.0, 18.0] if step == "the forecast" else [6.0]
    starts = [0] if step == "the forecast" else [0, 12, 24]
    valid = (np.array(starts)[:, None] + np.array(lengths)).ravel()
    axes = {"none": ("time",), "scalar": ("time",), "of size 1": ("time", "step"), "the forecast": ("time", "step")}[
        step
    ]
    with netCDF4.Dataset(tmp_path / "a.nc", "w") as file:
        since = {"units": "hours since 2001-01-01", "calendar": "proleptic_gregorian"}
        coordinate(file, "time", starts, "i8", **since, standard_name="forecast_reference_time")
        about = {"units": "hours", "standard_name": "forecast_period"}
        if "step" in axes:
            coordinate(file, "step", lengths, **about)
        elif step == "scalar":
            made = file.createVariable("step", "f8", ())
            made.setncatts(about)
            made[:] = 6.0
        made = file.createVariable("valid_time", "i8", axes)
        made.setncatts({**since, "standard_name": "time"})
        made[:] = valid.reshape([len(file.dimensions[axis]) for axis in axes])
        coordinate(file, "latitude", [10.0, 0.0], units="degrees_north")
        coordinate(file, "longitude", [0.0, 10.0], units="degrees_east")
        field = file.createVariable("t", "f4", (*axes, "latitude", "longitude"), fill_value=np.float32(-1))
        field[:] = valid.reshape(*made.shape, 1, 1) + np.zeros((2, 2))
    got = netcdf.open_dataset(netcdf.Config(path=f"{tmp_path}/a.nc"))
    assert got["t"].dims == ("time", "latitude", "longitude")
    hours = (got["time"].values - np.datetime64("2001-01-01")) / np.timedelta64(1, "h")
    np.testing.assert_array_equal(hours, valid)
    np.testing.assert_array_equal(got["t"].values[:, 0, 0], valid)


def test_options_apply_to_the_files_that_have_what_they_name(tmp_path, dataset):
    """A file for each variable, of which one has another name of the levels, and one no members."""
    ds = dataset(steps=8)
    (ds[["u"]] + 1).rename(level="zlev").expand_dims(number=[0, 3]).to_netcdf(tmp_path / "r_u.nc")
    ds[["t"]].to_netcdf(tmp_path / "r_t.nc")
    options = {"rename": {"u": "U", "t": "T"}, "dims": {"level": "zlev"}, "select": {"number": 3}}
    got = netcdf.open_dataset(netcdf.Config(path=f"{tmp_path}/r_?.nc", **options))
    np.testing.assert_array_equal(got["U"].values, (ds["u"] + 1).values)
    np.testing.assert_array_equal(got["T"].values, ds["t"].values)
    for wrong, message in (
        ({"rename": {"v": "V"}}, r"r_\?.nc to have 'v' \(data.source.rename\), got .*u, "),
        ({"dims": {"level": "zleb"}}, r"the level dimension 'zleb' \(data.source.dims\), got .*zlev"),
        ({"select": {"nmber": 3}}, r"select to name dimensions of the files, got 'nmber'"),
    ):
        with pytest.raises(ValueError, match=message):
            netcdf.open_dataset(netcdf.Config(path=f"{tmp_path}/r_?.nc", **{**options, **wrong}))


def test_options_of_the_source_need_not_be_for_the_file_of_a_variable(tmp_path, dataset, data_section):
    ds = dataset()
    moving = ds.drop_vars(["orography", "lsm", "sst"]).rename(level="zlev", u="wind").expand_dims(number=[0, 3])
    moving.to_netcdf(tmp_path / "moving.nc")
    ds[["orography", "lsm"]].to_netcdf(tmp_path / "still.nc")
    source = {"type": "netcdf", "path": f"{tmp_path}/moving.nc", "rename": {"wind": "u"}, "dims": {"level": "zlev"}}
    still = [{"name": name, "path": f"{tmp_path}/still.nc"} for name in ("orography", "lsm")]
    data = data_section("", source={**source, "select": {"number": 3}}, static={"surface": still}, dynamic_forcing={})
    variables = Variables(data)
    store = open_store(data, variables)
    np.testing.assert_array_equal(store.static(), np.stack([ds["orography"].values, ds["lsm"].values]))
    np.testing.assert_array_equal(store.read([variables["u"]], [4])[0], ds["u"].sel(level=[500, 850]).values[4])


def test_a_missing_value_that_is_written_as_text(tmp_path):
    def make(dtype, value, **text):
        path = tmp_path / f"a{len(list(tmp_path.iterdir()))}.nc"
        with netCDF4.Dataset(path, "w") as file:
            coordinate(file, "time", [0, 6], "i8", units="hours since 2001-01-01")
            coordinate(file, "latitude", [10.0, 0.0], units="degrees_north")
            coordinate(file, "longitude", [0.0, 10.0], units="degrees_east")
            made = file.createVariable("t", dtype, ("time", "latitude", "longitude"))
            made.set_auto_maskandscale(False)
            made.setncatts(text)
            made[:] = 3
            made[1, 1, 1] = value
        return netcdf.open_dataset(netcdf.Config(path=str(path)))["t"].values

    for dtype, value, text, other in (
        ("f4", np.float32(1e20), {"missing_value": "1e20"}, 3.0),
        ("f8", -9999.0, {"missing_value": " -9999 "}, 3.0),
        ("i2", -9999, {"missing_value": "-9999", "scale_factor": "0.5", "add_offset": "1"}, 2.5),
        ("f4", np.nan, {"missing_value": " "}, 3.0),
    ):
        got = make(dtype, value, **text)
        assert np.isnan(got[1, 1, 1])
        assert (got.ravel()[:-1] == other).all()
    with pytest.raises(
        ValueError, match=r"a number as missing_value of t in .*a4.nc, got 'none'; correct the attribute"
    ):
        make("f4", 0, missing_value="none")


@pytest.mark.parametrize(("name", "own"), [("_level", "level"), ("nlevel", "nlevel"), ("_x", "_x"), ("level", "level")])
def test_a_dimension_has_its_own_name_in_messages(name, own):
    assert own_name(name) == own


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (np.arange(0, 360, 10.0), np.arange(-180, 180, 10.0), True),
        (np.arange(0, 360, 10.0), np.arange(5, 365, 10.0), False),
        (np.arange(-10, 11.0), np.r_[350:360.0, 0:11.0], False),  # to turn a part of a circle cuts it
    ],
)
def test_only_whole_circles_are_turned(one, other, same):
    assert same_circle(one, other) is same_circle(other, one) is same


def test_a_file_with_two_dimensions_of_level(tmp_path, dataset, data_section):
    """Of which one has the name of the role; the fields on `lev` are more."""
    ds = dataset(steps=40)
    soil = ds["u"].isel(level=slice(0, 2)).assign_coords(level=[7.0, 28.0]).rename("soil")
    made = ds.drop_vars(["orography", "lsm", "sst"]).rename(level="lev").assign(soil=soil)
    made.to_netcdf(tmp_path / "a.nc")
    source = {"type": "netcdf", "path": f"{tmp_path}/a.nc"}
    plain = data_section("", source=source, static={}, dynamic_forcing={})
    variables = Variables(plain)
    got = open_store(plain, variables).read([variables["t"]], [4])[0]
    np.testing.assert_array_equal(got, ds["t"].sel(level=[500, 850]).values[4])
    data = data_section("", source=source, prognostic={"surface": ["sp", "soil"]}, static={}, dynamic_forcing={})
    with pytest.raises(
        StoreError, match=r"got dimension 'level' \(7, 28\); set data.source.select: {level: 7.0} to read"
    ):
        open_store(data, Variables(data))
    for options, levels, expected in (({"select": {"level": 28}}, None, 1), ({"dims": {"level": "level"}}, [7.0], 0)):
        spec = {"name": "soil", "levels": levels} if levels else "soil"
        chosen = data_section(
            "", source={**source, **options}, prognostic={"surface": ["sp", spec]}, static={}, dynamic_forcing={}
        )
        variables = Variables(chosen)
        got = open_store(chosen, variables).read([variables["soil"]], [4])[0, 0]
        np.testing.assert_array_equal(got, soil.values[4, expected])
