import netCDF4
import numpy as np
import pytest
import xarray as xr

from credit_like.data.sources import netcdf as source


def config(path, **more):
    return source.Config(path=str(path), **more)


@pytest.mark.parametrize("version", ["NETCDF4", "NETCDF3_CLASSIC"])
def test_yearly_files_packed_each_in_its_own_way(tmp_path, dataset, version):
    ds = dataset(start="2001-12-28")
    ds["t"] = ds["t"].where(ds["t"] > 240)
    for year, part in ds.groupby("time.year"):
        packing = {"dtype": "int16", "scale_factor": 0.01, "add_offset": 240.0 + year - 2000, "_FillValue": -32767}
        part.to_netcdf(tmp_path / f"a_{year}.nc", engine="netcdf4", format=version, encoding={"t": packing})
    got = source.open_dataset(config(tmp_path / "a_%Y.nc"))
    assert not got["t"].variable._in_memory
    np.testing.assert_allclose(got["t"].values, ds["t"].values, atol=0.0051)
    np.testing.assert_array_equal(got["sp"].values, ds["sp"].values)


def test_a_variable_that_holds_the_start_and_a_missing_value(tmp_path):
    with netCDF4.Dataset(tmp_path / "a.cdf", "w", format="NETCDF3_CLASSIC") as file:
        for name, size in (("timestep", 3), ("lat", 4), ("lon", 5), ("timelen", 20)):
            file.createDimension(name, size)
        file.createVariable("timestep", "i4", ("timestep",))[:] = [0, 6, 12]
        file.createVariable("lat", "f4", ("lat",))[:] = [20, 30, 40, 50]
        file.createVariable("lon", "f4", ("lon",))[:] = np.arange(-140, -90, 10)
        start = file.createVariable("reftime", "S1", ("timelen",))
        start[:] = np.array(list("1996 01 05 00:00".ljust(20, "\0")), "S1")
        values = file.createVariable("t", "f4", ("timestep", "lat", "lon"))
        values.missing_value = np.float32(-9999)
        field = np.arange(60, dtype="f4").reshape(3, 4, 5)
        field[1] = -9999
        values[:] = field
    got = source.open_dataset(config(tmp_path / "a.cdf", time_units="hours since reftime"))
    assert list(got.time.values.astype(str)) == ["1996-01-05T00:00:00", "1996-01-05T06:00:00", "1996-01-05T12:00:00"]
    assert got["t"].dims == ("time", "latitude", "longitude")
    assert np.isnan(got["t"].values).sum() == 20
    with pytest.raises(ValueError, match=r"time units such as .*a.cdf, got None; set data.source.time_units"):
        source.open_dataset(config(tmp_path / "a.cdf"))


def test_files_with_one_variable_under_two_names(tmp_path, dataset):
    ds = dataset(start="2001-12-28")
    for year, part in ds.groupby("time.year"):
        (part.rename(sp="ps") if year == 2002 else part).to_netcdf(tmp_path / f"a_{year}.nc")
    with pytest.raises(
        ValueError, match=r"a_2001.nc in .*a_2002.nc too, or none .* without sp and with ps in addition"
    ):
        source.open_dataset(config(tmp_path / "a_%Y.nc"))


@pytest.mark.parametrize("of_pressure", ["hPa", "kPa"])
def test_axes_known_by_their_units(tmp_path, dataset, of_pressure):
    ds = dataset()
    odd = ds.rename(time="when", level="p_levels", latitude="row", longitude="column")
    for name, units in (("p_levels", of_pressure), ("row", "degrees_north"), ("column", "degrees_east")):
        odd[name].attrs = {"units": units}
    odd.to_netcdf(tmp_path / "odd.nc")
    got = source.open_dataset(config(tmp_path / "odd.nc"))
    assert got["t"].dims == ds["t"].dims
    np.testing.assert_array_equal(got["t"].values, ds["t"].values)


@pytest.mark.parametrize(
    ("given", "expected"), [(np.array([0, 200], "i2"), [270, 290]), (np.array([0.0, 200]), [0, 200]), ("any", "any")]
)
def test_the_valid_range_of_packed_values_is_unpacked_where_it_has_their_type(tmp_path, dataset, given, expected):
    ds = dataset()[["t"]]
    ds["t"].attrs["valid_range"] = given
    packing = {"dtype": "i2", "scale_factor": 0.1, "add_offset": 270.0, "_FillValue": -32768}
    ds.to_netcdf(tmp_path / "packed.nc", encoding={"t": packing})
    with source.open_dataset(config(tmp_path / "packed.nc")) as found:
        assert np.asarray(found["t"].attrs["valid_range"]).tolist() == expected


def test_not_netcdf(tmp_path):
    (tmp_path / "a.nc").write_text("text")
    with pytest.raises(ValueError, match=r"expected a netCDF file, got .*a.nc, which does not open"):
        source.open_dataset(config(tmp_path / "a.nc"))


def test_a_static_file(tmp_path, dataset):
    ds = dataset()[["orography"]]
    ds.to_netcdf(tmp_path / "static.nc")
    xr.testing.assert_equal(source.open_dataset(config(tmp_path / "static.nc")).load(), ds)


@pytest.mark.parametrize("calendar", ["standard", "proleptic_gregorian", "noleap"])
@pytest.mark.parametrize("since", ["0001-01-01", "1850-01-01", "1990-01-01"])
def test_hours_as_parts_of_a_day_in_floating_point_are_whole(since, calendar):
    from credit_like.data.sources._files import _decode_time
    from credit_like.data.times import seconds

    first = (2000 - int(since[:4])) * 365.25 // 1
    stored = xr.Variable("time", first + np.arange(2000) / 24, {"units": f"days since {since}", "calendar": calendar})
    assert set(np.diff(seconds(_decode_time(stored, None, None, "here.nc")))) == {3600}


def test_paths_that_exist_are_found(tmp_path, dataset):
    """Names of WRF, with minutes and seconds, and names with the characters of a glob."""
    ds = dataset(steps=6)
    (tmp_path / "run[1]").mkdir()
    for path, part in (
        ("wrfout_d01_2001-01-01_00:00:00", slice(0, 3)),
        ("wrfout_d01_2001-01-01_18:00:00", slice(3, 6)),
    ):
        ds.isel(time=part).to_netcdf(tmp_path / path)
    got = source.open_dataset(config(tmp_path / "wrfout_d01_%Y-%m-%d_%H:%M:%S"))
    np.testing.assert_array_equal(got["t"].values, ds["t"].values)
    ds.to_netcdf(tmp_path / "run[1]" / "a?.nc")
    assert source.open_dataset(config(tmp_path / "run[1]" / "a?.nc")).sizes["time"] == 6


def test_a_link_to_nothing_is_named(tmp_path, dataset):
    dataset(steps=3).to_netcdf(tmp_path / "a1.nc")
    (tmp_path / "a2.nc").symlink_to(tmp_path / "gone.nc")
    with pytest.raises(ValueError, match=r"files that match .*a\*.nc, got .*a2.nc, a link to a file that is not there"):
        source.open_dataset(config(tmp_path / "a*.nc"))
