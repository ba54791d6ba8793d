"""Experiments proposed for data at hand: they pass `check` and train as they are."""

import os
from pathlib import Path

import cftime
import numpy as np
import pytest
import xarray as xr
import yaml

from credit_like import build
from credit_like.cli import main
from credit_like.data.store import open_store
from credit_like.errors import UserError
from credit_like.grid import Grid
from credit_like.new import fit_model, run, scan
from credit_like.schema.load import load_experiment
from credit_like.variables import Variables
from tests.experiments import representatives
from tests.stores import LEVELS_37

DATA = Path(os.environ.get("CREDIT_LIKE_DATA", "../../shared/data"))


class Maker:
    """Makes fields over given axes, under the names and with the attributes of an archive."""

    def __init__(self, names, sizes, times, levels=(500.0, 850.0), latitude=None, longitude=None):
        self.names, self.times, self.levels, self.sizes = names, times, list(levels), sizes
        self.rng = np.random.default_rng(0)
        self.latitude = np.linspace(90, -90, sizes[0]) if latitude is None else latitude
        self.longitude = np.arange(sizes[1]) * 360 / sizes[1] if longitude is None else longitude

    def field(self, *axes, scale=1.0):
        n = {"time": len(self.times), "level": len(self.levels), "latitude": self.sizes[0], "longitude": self.sizes[1]}
        dims = [self.names[axis] for axis in axes]
        values = 280 + scale * self.rng.standard_normal([n[axis] for axis in axes]).cumsum(0)
        return dims, values.astype(np.float32)

    def dataset(self, above=(), surface=(), constant=()):
        four, three, two = (
            ("time", "level", "latitude", "longitude"),
            ("time", "latitude", "longitude"),
            ("latitude", "longitude"),
        )
        fields = {}
        for axes, names in ((four, above), (three, surface), (two, constant)):
            for name in names:
                name, attrs = name if isinstance(name, tuple) else (name, {})
                fields[name] = (*self.field(*axes), attrs)
        coords = {
            self.names["time"]: self.times,
            self.names["latitude"]: self.latitude,
            self.names["longitude"]: self.longitude,
        }
        if above:
            coords[self.names["level"]] = self.levels
        return xr.Dataset(fields, coords)


def hours(n, step=6, start="2000-01-01"):
    return np.datetime64(start, "ns") + np.arange(n) * np.timedelta64(step, "h")


PLAIN = {"time": "time", "level": "level", "latitude": "latitude", "longitude": "longitude"}
SHORT = {"time": "time", "level": "lev", "latitude": "lat", "longitude": "lon"}


def weatherbench(folder):
    """WeatherBench2: long names, longitude before latitude, ascending latitudes, 6-hourly."""
    made = Maker(PLAIN, (17, 32), hours(80), (50.0, 500.0, 850.0), latitude=np.linspace(-90, 90, 17)).dataset(
        ["temperature", "geopotential", "u_component_of_wind"],
        ["2m_temperature", "total_precipitation_6hr", "sea_surface_temperature"],
        ["land_sea_mask"],
    )
    made["total_precipitation_6hr"].attrs["standard_name"] = "precipitation_amount"
    made.transpose("time", "level", "longitude", "latitude").to_zarr(folder / "era5.zarr", zarr_format=2)
    return [folder / "era5.zarr"], {
        "total_precipitation_6hr": "diagnostic",
        "sea_surface_temperature": "dynamic_forcing",
        "land_sea_mask": "static",
    }


def climate_data_store(folder):
    """ERA5 of the Climate Data Store: one file of levels, one of the surface, `valid_time`, hourly."""
    names = {"time": "valid_time", "level": "pressure_level", "latitude": "latitude", "longitude": "longitude"}
    maker = Maker(names, (16, 24), hours(60, 1), latitude=np.linspace(60, 30, 16), longitude=np.linspace(-20, 26, 24))
    maker.dataset(["t", "u", "v", "q", "z"]).to_netcdf(folder / "levels.nc")
    maker.dataset((), ["t2m", "sp", "tp", "tisr"]).to_netcdf(folder / "surface.nc")
    return [folder], {"tp": "diagnostic", "t": "prognostic", "sp": "prognostic"}


def cmip(folder):
    """CMIP: a file per variable with bounds, pressure in Pa, no leap years, two files along time."""
    times = xr.date_range("1999-02-20", periods=60, freq="6h", calendar="noleap", use_cftime=True)
    assert isinstance(times[0], cftime.DatetimeNoLeap)
    maker = Maker({**SHORT, "level": "plev"}, (20, 40), times, (85000.0, 50000.0))
    for name in ("ua", "va", "ta", "tas", "pr", "orog"):
        above, surface, constant = (
            [name] if name in group else [] for group in (("ua", "va", "ta"), ("tas", "pr"), ("orog",))
        )
        made = maker.dataset(above, surface, constant)
        made["lat_bnds"] = (("lat", "bnds"), np.zeros((20, 2)))
        if above:
            made["plev"].attrs = {"standard_name": "air_pressure", "units": "Pa", "axis": "Z"}
        if name == "pr":
            made["pr"].attrs = {"standard_name": "precipitation_flux", "cell_methods": "time: mean"}
        for half, part in enumerate((slice(0, 30), slice(30, 60))):
            if name != "orog":
                made.isel(time=part).to_netcdf(folder / f"{name}_6hr_{half}.nc")
        if name == "orog":
            made.drop_vars("time").to_netcdf(folder / "orog_fx.nc")
    return [folder], {"ua": "prognostic", "pr": "diagnostic", "orog": "static"}


def cam(folder):
    """CAM: interfaces and mid-levels, coefficients of hybrid levels, constants stored at every time."""
    made = Maker(SHORT, (24, 48), hours(40), (3.6, 500.1, 992.6)).dataset(
        ["T", "U", "V", "Q"], ["PS", "PRECT", "PHIS", "SOLIN", "ICEFRAC"]
    )
    made["lev"].attrs = {"standard_name": "atmosphere_hybrid_sigma_pressure_coordinate", "units": "hPa"}
    made["PHIS"] = (made["PHIS"].dims, np.repeat(made["PHIS"].values[:1], 40, 0))
    made["hyai"] = ("ilev", np.linspace(0, 1, 4))
    made["OMEGA_I"] = (("time", "ilev", "lat", "lon"), np.zeros((40, 4, 24, 48), np.float32))
    made.to_netcdf(folder / "cam.h1.nc")
    return [folder / "cam.h1.nc"], {
        "PHIS": "static",
        "PRECT": "diagnostic",
        "ICEFRAC": "dynamic_forcing",
        "T": "prognostic",
    }


def wrf(folder):
    """WRF on a latitude-longitude projection: two-dimensional coordinates, staggered winds, no coordinate of time."""
    names = {"time": "Time", "level": "bottom_top", "latitude": "south_north", "longitude": "west_east"}
    maker = Maker(
        names, (30, 40), hours(30, 1), (1, 2), latitude=np.linspace(30, 50, 30), longitude=np.linspace(-10, 30, 40)
    )
    made = maker.dataset(["QVAPOR", "PH"], ["T2", "U10", "V10", "PSFC", "RAINNC"]).drop_vars(list(names.values()))
    latitude, longitude = (np.broadcast_to(x, (30, 30, 40)) for x in (maker.latitude[:, None], maker.longitude))
    made["XLAT"] = (("Time", "south_north", "west_east"), latitude, {"units": "degree_north"})
    made["XLONG"] = (("Time", "south_north", "west_east"), longitude, {"units": "degree_east"})
    made["XTIME"] = ("Time", 60.0 * np.arange(30), {"units": "minutes since 2000-01-01 00:00:00"})
    made["HGT"] = maker.field("time", "latitude", "longitude")
    made["HGT"] = (made["HGT"].dims, np.repeat(made["HGT"].values[:1], 30, 0))
    made["U"] = (("Time", "bottom_top", "south_north", "west_east_stag"), np.zeros((30, 2, 30, 41), np.float32))
    made.to_netcdf(folder / "wrfout_d01.nc")
    return [folder / "wrfout_d01.nc"], {
        "T2": "prognostic",
        "HGT": "static",
        "QVAPOR": "prognostic",
    }


def days_of_360(folder):
    """Daily means of a model with months of thirty days, over four years: split by years."""
    times = xr.date_range("2000-01-01", periods=1440, freq="D", calendar="360_day", use_cftime=True)
    made = Maker(SHORT, (8, 16), times).dataset((), [("tas", {"cell_methods": "time: mean"}), "psl"])
    made.to_netcdf(folder / "daily.nc")
    return [folder / "daily.nc"], {"tas": "prognostic"}


def gaps(folder):
    """A region with a gap in time, an even odd width and a variable without values."""
    times = np.concatenate([hours(30), hours(40, start="2000-02-01")])
    made = Maker(
        PLAIN, (21, 33), times, latitude=np.linspace(20, 40, 21), longitude=np.linspace(350, 380, 33) % 360
    ).dataset((), ["msl", "empty", "flat"])
    made["empty"][:] = np.nan
    made["flat"][:] = 3
    made.to_netcdf(folder / "gap.nc")
    return [folder / "gap.nc"], {"msl": "prognostic"}


def odd_globe(folder):
    """A global grid of an odd number of longitudes, under names that YAML takes for something else."""
    made = Maker(PLAIN, (19, 45), hours(50)).dataset((), ["y", "no", "on"])
    made.to_netcdf(folder / "odd.nc")
    return [folder / "odd.nc"], {"no": "prognostic"}


def belt(folder):
    """The tropics all the way round, in a zarr store of a folder with dots."""
    made = Maker(SHORT, (15, 64), hours(40, 3), latitude=np.linspace(-28, 28, 15)).dataset(["ua"], ["rlut"])
    made.to_zarr(folder / "tropics.v1.zarr", zarr_format=3, consolidated=False)
    return [folder / "tropics.v1.zarr"], {"rlut": "diagnostic"}


def analyses(folder):
    """GRIB files of a weather service, one a day."""
    pytest.importorskip("eccodes", reason="the extra `grib` (ecCodes) is not installed")
    from tests.data.sources.test_grib import message, surface, write

    rng, paths = np.random.default_rng(0), []
    for day in range(1, 8):
        messages = []
        for hour in (0, 6, 12, 18):
            when = {"shape": (16, 32), "dataDate": 20200100 + day, "dataTime": 100 * hour}
            fields = 280 + rng.standard_normal((3, 16, 32))
            messages += [message(field, level=level, **when) for level, field in zip((500, 850), fields, strict=False)]
            messages.append(surface("2t", fields[2], **when))
        paths.append(write(folder / f"analysis-{day}.grib", *messages))
    return [folder], {"t": "prognostic", "2t": "prognostic"}


def anemoi(folder):
    """An Anemoi dataset: one array of all variables, on flattened cells."""
    from tests.data.sources.test_anemoi import make

    make(folder / "states.zarr", dates=40)
    return [folder / "states.zarr"], {"t": "prognostic", "sst": "dynamic_forcing", "z_surface": "static"}


def odd_names(folder):
    """Names of nobody else: axes are known by their units; two files along time, the orography at one old time."""
    names = {"time": "TIMESTAMP", "level": "p_levels", "latitude": "row", "longitude": "column"}
    made = Maker(names, (17, 32), hours(60)).dataset(["air", "uwnd"], ["slp", "rain"])
    made["p_levels"].attrs["units"] = "hPa"
    made["row"].attrs["units"], made["column"].attrs["units"] = "degrees_north", "degrees_east"
    (folder / "obs").mkdir()
    for half, part in enumerate((slice(0, 30), slice(30, 60))):
        made.isel(TIMESTAMP=part).to_netcdf(folder / "obs" / f"my_{half}.nc")
    fixed = made[["slp"]].rename(slp="HGT").isel(TIMESTAMP=[0]).rename(TIMESTAMP="time")
    fixed.assign_coords(time=hours(1, start="1979-01-01")).to_netcdf(folder / "obs" / "topo.nc")
    paths = [f"{folder}/obs/my_*.nc", f"{folder}/obs/topo.nc"]
    return paths, {"air": "prognostic", "slp": "prognostic", "rain": "diagnostic", "HGT": "static"}


STORES = [
    odd_names,
    weatherbench,
    climate_data_store,
    cmip,
    cam,
    wrf,
    days_of_360,
    gaps,
    odd_globe,
    belt,
    analyses,
    anemoi,
]


def proposed(make, folder):
    paths, roles = make(folder)
    lines = run([str(path) for path in paths], folder / "my.yml")
    variables = Variables(load_experiment(folder / "my.yml").data)
    for name, role in roles.items():
        assert variables[name].role == role, name
    return folder / "my.yml", lines


def trained(file, folder):
    sets = [f"save_loc={folder / 'run'}", "trainer.epochs=10", "trainer.batches_per_epoch=1", "trainer.valid_batches=1"]
    sets += ["trainer.scheduler.warmup_steps=1", "trainer.device=cpu"]
    experiment = load_experiment(file, sets)
    assert build.train(experiment) == 0
    assert (folder / "run" / "checkpoints" / "step-10").is_dir()


@pytest.mark.parametrize("make", STORES, ids=lambda make: make.__name__)
def test_made_stores_pass_check(make, tmp_path):
    _, lines = proposed(make, tmp_path)
    assert "training samples" in lines[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", representatives([make.__name__ for make in STORES], "cmip", "wrf"))
def test_made_stores_train(name, tmp_path):
    trained(proposed(globals()[name], tmp_path)[0], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", representatives(["gcm.zarr", "storm96", "grib/era5-2mt-2019-03-uk.grib"], "storm96"))
def test_real_stores_train(name, tmp_path):
    if name.endswith(".grib"):
        pytest.importorskip("eccodes", reason="the extra `grib` (ecCodes) is not installed")
    if not (DATA / name).exists():
        pytest.skip(f"{name} is not at {DATA}")
    run([str((DATA / name).absolute())], tmp_path / "my.yml")
    trained(tmp_path / "my.yml", tmp_path)


def test_a_glob_stays_one_in_the_experiment(tmp_path):
    file, _ = proposed(odd_names, tmp_path)
    sources = yaml.safe_load(file.read_text())["data"]["source"]
    assert [source["path"] for source in sources] == [f"{tmp_path}/obs/my_*.nc", f"{tmp_path}/obs/topo.nc"]


def parts(folder, *spans, of=None):
    """Write parts of a store in time, each of them `of` its own store."""
    for number, span in enumerate(spans):
        whole = Maker(PLAIN, (16, 32), hours(80)).dataset(surface=["t2m", "sp"])
        whole = whole + (of[number] if of else 0)
        whole.isel(time=slice(*span)).to_netcdf(folder / f"part_{'abc'[number]}.nc")


def test_files_that_overlap_are_read_once_where_they_are_the_same(tmp_path):
    (tmp_path / "data").mkdir()
    parts(tmp_path / "data", (0, 30), (25, 60), (60, 80))
    run([str(tmp_path / "data")], tmp_path / "my.yml")
    data = yaml.safe_load((tmp_path / "my.yml").read_text())["data"]
    assert data["source"]["duplicates"] == "first"
    assert [data[name][end].isoformat() for name, end in (("train", 0), ("test", 1))] == [
        "2000-01-01T00:00:00", "2000-01-20T18:00:00"
    ]  # fmt: skip


def test_files_that_differ_where_they_overlap_are_of_different_variables(tmp_path):
    (tmp_path / "data").mkdir()
    parts(tmp_path / "data", (0, 70), (10, 80), of=(0, 1))
    run([str(tmp_path / "data")], tmp_path / "my.yml")
    data = yaml.safe_load((tmp_path / "my.yml").read_text())["data"]
    assert [spec["name"] for spec in data["prognostic"]["surface"]] == ["a_t2m", "a_sp", "b_t2m", "b_sp"]
    assert [data[name][end].isoformat() for name, end in (("train", 0), ("test", 1))] == [
        "2000-01-03T12:00:00", "2000-01-18T06:00:00"
    ]  # fmt: skip


@pytest.mark.parametrize("owner", [0, 1])
def test_static_fields_in_one_of_several_files_of_the_same_fields_belong_to_all(owner, tmp_path):
    whole = Maker(PLAIN, (16, 32), hours(80)).dataset(surface=["t2m", "sp"], constant=["lsm"])
    for number, span in enumerate((slice(0, 40), slice(40, 80))):
        part = whole.isel(time=span)
        (part if number == owner else part.drop_vars("lsm")).to_netcdf(tmp_path / f"m_{number}.nc")
    run([str(tmp_path / "m_*.nc")], tmp_path / "my.yml")
    experiment = load_experiment(tmp_path / "my.yml")
    assert [source.path for source in experiment.data.source] == [f"{tmp_path}/m_*.nc"]
    store = open_store(experiment.data, Variables(experiment.data))
    assert len(store) == 80
    np.testing.assert_array_equal(store.static()[0], whole["lsm"].values)


@pytest.mark.parametrize("differs", [False, True])
def test_a_static_field_of_two_kinds_of_files_is_one_only_where_it_is_the_same(differs, tmp_path):
    whole = Maker(PLAIN, (16, 32), hours(80)).dataset(surface=["t2m", "sp"], constant=["lsm"])
    whole.drop_vars("sp").to_netcdf(tmp_path / "land.nc")
    whole.drop_vars("t2m").assign(lsm=whole["lsm"] + differs).to_netcdf(tmp_path / "ocean.nc")
    found = scan([str(tmp_path / name) for name in ("land.nc", "ocean.nc")])
    assert sorted(variable.name for variable in found.variables if variable.role == "static") == (
        ["land_lsm", "ocean_lsm"] if differs else ["lsm"]
    )


def test_a_file_without_usable_fields_lies_between_files_of_the_same_names(tmp_path):
    whole = Maker(PLAIN, (16, 32), hours(80)).dataset(surface=["t2m"])
    whole.to_netcdf(tmp_path / "a.nc")
    whole.rename(t2m="profile").expand_dims(station=2).to_netcdf(tmp_path / "b.nc")
    (whole + 1).to_netcdf(tmp_path / "c.nc")
    found = scan([str(tmp_path / f"{name}.nc") for name in "abc"])
    assert [(variable.name, Path(variable.path).name) for variable in found.variables] == [("a", "a.nc"), ("c", "c.nc")]
    assert found.left_out == {"profile": "which is on station too"}


def test_of_several_files_two_without_a_common_time_are_named(tmp_path):
    whole = Maker(PLAIN, (16, 32), hours(80)).dataset(surface=["t2m", "sp", "u10"])
    for name, span, var in (("a", (0, 80), "t2m"), ("b", (50, 80), "sp"), ("c", (0, 40), "u10")):
        whole[[var]].isel(time=slice(*span)).to_netcdf(tmp_path / f"{name}.nc")
    with pytest.raises(UserError, match=r"got none in \S*/b.nc \(.*\) and \S*/c.nc \("):
        scan([str(tmp_path / f"{name}.nc") for name in "abc"])


def test_fields_without_time_that_differ_between_files_are_left_out(tmp_path):
    whole = Maker(PLAIN, (16, 32), hours(80)).dataset(surface=["t2m"], constant=["lsm", "cover"])
    for number in range(2):
        part = whole.isel(time=slice(40 * number, 40 * number + 40))
        part.assign(cover=whole["cover"] + number).to_netcdf(tmp_path / f"m_{number}.nc")
    lines = run([str(tmp_path / "m_*.nc")], tmp_path / "my.yml")
    assert "left out: cover, which has no time and is not the same in all files" in lines
    assert [v.name for v in Variables(load_experiment(tmp_path / "my.yml").data).role("static")] == ["lsm"]


def test_a_mask_that_differs_between_variables_of_yearly_files_is_left_out(tmp_path):
    """The files of one variable for several years still belong together."""
    whole = Maker(PLAIN, (16, 32), hours(80)).dataset(surface=["t2m", "sp"], constant=["lsm"])
    for number in range(2):
        part = whole.isel(time=slice(40 * number, 40 * number + 40))
        part.drop_vars("sp").to_netcdf(tmp_path / f"air_{number}.nc")
        turned = part["lsm"].transpose("longitude", "latitude") + 1
        part.drop_vars("t2m").assign(lsm=turned).to_netcdf(tmp_path / f"pressure_{number}.nc")
    found = scan([str(tmp_path)])
    assert sorted(variable.name for variable in found.variables) == ["sp", "t2m"]
    assert found.left_out == {"lsm": "which has no time and is not the same in all files"}
    assert len(found.times) == 80


def test_names_that_are_static_elsewhere_are_predicted_where_they_change(tmp_path):
    """NCEP's heights on levels and on a single one, cloud cover and snow of CMIP6; the height of the surface is static."""
    maker = Maker(PLAIN, (16, 32), hours(40))
    snow = ("snw", {"standard_name": "surface_snow_amount", "units": "kg m-2"})
    fall = ("fall", {"standard_name": "snowfall_amount", "units": "kg m-2"})
    made = maker.dataset(["hgt", "cl"], ["orog", snow, fall])
    made["orog"][:] = made["orog"][0]
    made.to_netcdf(tmp_path / "a.nc")
    single = maker.dataset((), ["hgt", "t2m"])
    single.to_netcdf(tmp_path / "b.nc")
    found = {name: {v.name: v.role for v in scan([str(tmp_path / f"{name}.nc")]).variables} for name in "ab"}
    assert found["a"] == {
        "hgt": "prognostic",
        "cl": "prognostic",
        "orog": "static",
        "snw": "prognostic",
        "fall": "diagnostic",
    }
    assert found["b"] == {"hgt": "prognostic", "t2m": "prognostic"}


def test_one_file_for_each_hour_of_the_day(tmp_path):
    whole = Maker(PLAIN, (16, 32), hours(80)).dataset(surface=["t2m", "sp"])
    for hour in range(4):
        whole.isel(time=slice(hour, None, 4)).to_netcdf(tmp_path / f"at_{hour}.nc")
    run([str(tmp_path / "at_*.nc")], tmp_path / "my.yml")
    data = load_experiment(tmp_path / "my.yml").data
    assert {spec.name for spec in data.prognostic.surface} == {"t2m", "sp"}
    store = open_store(data, Variables(data))
    assert len(store) == 80
    np.testing.assert_array_equal(store.read([store.variables["t2m"]], [5])[0, 0], whole["t2m"].values[5])


def test_times_amid_the_hours_are_thinned_from_the_first(tmp_path):
    """As those of hourly means."""
    times = hours(1300, 1) + np.timedelta64(30, "m")
    Maker(PLAIN, (8, 16), times).dataset(surface=["t2m"]).to_netcdf(tmp_path / "means.nc")
    run([str(tmp_path / "means.nc")], tmp_path / "my.yml")
    data = load_experiment(tmp_path / "my.yml").data
    assert data.timestep.total_seconds() == 6 * 3600
    assert data.train[0].start == "2000-01-01T00:30:00"
    assert open_store(data, Variables(data)).start == "2000-01-01T00:30:00"


def test_levels_that_are_left_out_do_not_count_as_channels(tmp_path):
    """Seven variables on 37 levels, of which 13 are kept."""
    names = ["t", "u", "v", "q", "z", "w", "own_tracer"]
    Maker(PLAIN, (8, 16), hours(20), map(float, LEVELS_37)).dataset(names, ["sp"]).to_netcdf(tmp_path / "a.nc")
    lines = run([str(tmp_path / "a.nc")], tmp_path / "my.yml")
    assert not any("left out" in line for line in lines)
    assert len(Variables(load_experiment(tmp_path / "my.yml").data)["own_tracer"].levels) == 13


def test_files_without_a_common_time_are_named(tmp_path):
    (tmp_path / "data").mkdir()
    parts(tmp_path / "data", (0, 40), (40, 80))
    with xr.open_dataset(tmp_path / "data" / "part_b.nc") as second:
        second.drop_vars("sp").to_netcdf(tmp_path / "data" / "part_c.nc")
    (tmp_path / "data" / "part_b.nc").unlink()
    with pytest.raises(
        UserError, match=r"part_a.nc \(2000-01-01T00:00:00 to .*\) and .*part_c.nc \(2000-01-11T00:00:00"
    ):
        scan([str(tmp_path / "data")])


def test_a_message_about_the_proposal_names_the_output(tmp_path, monkeypatch):
    parts(tmp_path, (0, 80))
    monkeypatch.setattr("credit_like.new.propose", lambda *_: "data: 3\n")
    with pytest.raises(UserError) as refused:
        run([str(tmp_path / "part_a.nc")], tmp_path / "my.yml")
    assert str(refused.value).startswith(f"{tmp_path}/my.yml as proposed:")
    assert ".part" not in str(refused.value)


def test_whole_years_are_kept_together(tmp_path):
    file, _ = proposed(days_of_360, tmp_path)
    data = yaml.safe_load(file.read_text())["data"]
    assert data["timestep"] == "1d"
    assert [data[name][0].year for name in ("train", "valid", "test")] == [2000, 2002, 2003]
    assert data["train"][1].isoformat() == "2001-12-30T00:00:00"


def test_periods_leave_gaps_out_and_what_has_no_values_is_named(tmp_path):
    file, lines = proposed(gaps, tmp_path)
    assert len(yaml.safe_load(file.read_text())["data"]["train"]) == 2
    assert any("empty, which has no values" in line for line in lines)
    assert any("flat, which is 3 everywhere" in line for line in lines)
    assert "# left out: empty" in file.read_text()


def test_axes_of_wrf_are_those_of_its_fields_of_coordinates(tmp_path):
    (file,), _ = wrf(tmp_path)
    found = scan([str(file)])
    np.testing.assert_allclose(found.grid.latitude, np.linspace(30, 50, 30), rtol=1e-6)
    np.testing.assert_allclose(found.grid.longitude, np.linspace(-10, 30, 40), rtol=1e-6)
    assert (found.times == hours(30, 1)).all()
    assert not {"XLAT", "XLONG", "XTIME"} & {variable.name for variable in found.variables}


def test_a_slanting_grid_is_refused(tmp_path):
    (file,), _ = wrf(tmp_path)
    with xr.load_dataset(file, decode_times=False) as made:
        made["XLAT"] = made["XLAT"] + 0.1 * made["XLONG"]
    made.to_netcdf(tmp_path / "slanting.nc")
    with pytest.raises(UserError, match="curvilinear"):
        scan([str(tmp_path / "slanting.nc")])


def test_what_wrf_accumulates_from_its_start_is_no_diagnostic(tmp_path):
    file, lines = proposed(wrf, tmp_path)
    assert any(line.startswith("left out: RAINNC, which WRF accumulates") for line in lines)
    assert "RAINNC" not in [variable.name for variable in Variables(load_experiment(file).data)]


@pytest.mark.parametrize("name", ["2020", "1e3", "true", "null", "0x1F", "a b", "1_000", "-", ".inf", "2020-01-01"])
def test_every_name_of_the_output_is_text(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    maker = Maker(
        {"time": "time", "level": "level", "latitude": "latitude", "longitude": "longitude"}, (8, 16), hours(60)
    )
    maker.dataset([], ["t2m"]).to_netcdf(tmp_path / "data.nc")
    run(["data.nc"], Path(f"{name}.yml"))
    experiment = load_experiment(f"{name}.yml")
    assert experiment.name == {"a b": "a-b", "-": "experiment"}.get(name, name)
    assert experiment.save_loc == f"runs/{experiment.name}"


def test_accumulations_of_a_thinned_store_are_said_to_be_those_of_its_spacing(tmp_path):
    maker = Maker(
        {"time": "time", "level": "level", "latitude": "latitude", "longitude": "longitude"}, (8, 16), hours(1300, 1)
    )
    maker.dataset([], ["t2m", "tp"]).to_netcdf(tmp_path / "hourly.nc")
    run([str(tmp_path / "hourly.nc")], tmp_path / "my.yml")
    (line,) = [line for line in (tmp_path / "my.yml").read_text().splitlines() if "timestep" in line]
    assert line.startswith("  timestep: 6h  # thinned")
    assert line.endswith("accumulations are still those of 1h")


def test_staggered_fields_are_named(tmp_path):
    _, lines = proposed(wrf, tmp_path)
    assert any("U, which is on west_east_stag" in line for line in lines)


@pytest.mark.parametrize(
    "shape", [(8, 16), (32, 64), (33, 36), (64, 128), (181, 360), (721, 1440), (101, 257), (45, 90)]
)
@pytest.mark.parametrize("kind", ["globe", "belt", "region"])
def test_a_model_fits_every_grid(shape, kind):
    north, east = {"globe": (90, 360), "belt": (30, 360), "region": (60, 100)}[kind]
    grid = Grid(
        np.linspace(north, -north / 2 if kind == "region" else -north, shape[0]), np.arange(shape[1]) * east / shape[1]
    )
    for samples, gpu in ((50, 0.0), (50_000, 80.0)):
        model = fit_model(grid, samples, gpu)
        assert model.check(*shape) == []
        assert np.prod(model.padded(*shape)) < 3.5 * np.prod([max(32, n) for n in shape])


MONTHS = np.arange("2000-01", "2002-01", dtype="M8[M]").astype("M8[ns]")


@pytest.mark.parametrize(
    ("names", "times", "fields", "message"),
    [
        (PLAIN, hours(5), [(), ["t2m"]], "at least 12 times.*got 5"),
        (PLAIN, hours(40), [(), (), ["lsm"]], "to predict.*lsm .static"),
        ({**PLAIN, "latitude": "cell"}, hours(40), [(), ["t2m"]], "on latitude and longitude.*t2m, which is on cell"),
        (PLAIN, MONTHS, [(), ["t2m"]], "fixed step"),
        (PLAIN, hours(40), [(), ["sst", "tp"]], "to predict.*sst .dynamic_forcing"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_in_one_message(names, times, fields, message, tmp_path):
    Maker(names, (8, 16), times).dataset(*fields).to_netcdf(tmp_path / "data.nc")
    with pytest.raises(UserError, match=message):
        run([str(tmp_path / "data.nc")], tmp_path / "my.yml")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.nc"]


def test_a_single_state_is_refused():
    path = DATA / "era5_tl31_19590102T00.nc"
    if not path.exists():
        pytest.skip(f"it is not at {DATA}")
    with pytest.raises(UserError, match="at least 12 times"):
        scan([str(path)])


def test_nothing_is_overwritten_and_nothing_found_is_said(tmp_path, capsys):
    (tmp_path / "my.yml").write_text("mine")
    for data, message in ((tmp_path, "where nothing is"), (tmp_path / "none.nc", "where nothing is")):
        with pytest.raises(UserError, match=message):
            run([str(data)], tmp_path / "my.yml")
    with pytest.raises(SystemExit) as end:
        main(["new", str(tmp_path / "none.nc"), "-o", str(tmp_path / "other.yml")])
    assert end.value.code == 2
    assert "existing file or folder" in capsys.readouterr().err
    assert (tmp_path / "my.yml").read_text() == "mine"
