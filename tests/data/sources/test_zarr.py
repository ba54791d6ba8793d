"""Zarr stores as users have them; tests of what all sources of files share are here too."""

import functools
import http.server
import sys
import threading

import numpy as np
import pytest
import xarray as xr

from credit_like.data.locate import Source
from credit_like.data.sources import netcdf
from credit_like.data.sources import zarr as source
from credit_like.data.store import FieldStore
from credit_like.errors import UserError


def config(path, **more):
    return source.Config(path=path if isinstance(path, tuple) else str(path), **more)


def test_lazy_and_canonical(tmp_path, dataset):
    ds = dataset()
    ds.rename(latitude="lat", longitude="lon", time="valid_time", level="isobaricInhPa").to_zarr(
        tmp_path / "a.zarr", consolidated=False
    )
    got = source.open_dataset(config(tmp_path / "a.zarr"))
    assert not any(variable._in_memory for variable in (got[n].variable for n in got.data_vars))
    xr.testing.assert_equal(got.load(), ds.assign_coords(time=ds.time.astype("datetime64[s]")))


def test_dimensions_by_standard_name_axis_and_configuration(tmp_path, dataset):
    ds = dataset().rename(latitude="rlat", longitude="rlon", level="zlev")
    ds["rlat"].attrs["units"] = "degrees_north"
    ds["rlon"].attrs["axis"] = "X"
    ds.to_zarr(tmp_path / "a.zarr", consolidated=False)
    got = source.open_dataset(config(tmp_path / "a.zarr", dims={"level": "zlev"}))
    assert got["u"].dims == ("time", "level", "latitude", "longitude")
    with pytest.raises(ValueError, match=r"level dimension 'zlevel'.*zlev"):
        source.open_dataset(config(tmp_path / "a.zarr", dims={"level": "zlevel"}))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("how", ["glob", "template", "list"])
def test_many_files_are_one_lazy_dataset(tmp_path, dataset, how, packed):
    ds = dataset(steps=40, start="2001-12-28")
    encoding = {}
    for year, part in ds.groupby("time.year"):
        if packed:  # every file its own scale, as packed archives have it
            encoding = {
                "t": {
                    "dtype": "int16",
                    "scale_factor": 0.001 * (year - 1990),
                    "add_offset": 250.0,
                    "_FillValue": -32768,
                }
            }
        part.to_zarr(tmp_path / f"era_{year}.zarr", encoding=encoding, consolidated=False)
    path = {
        "glob": tmp_path / "era_*.zarr",
        "template": tmp_path / "era_%Y.zarr",
        "list": tuple(str(tmp_path / f"era_{year}.zarr") for year in (2002, 2001)),
    }[how]
    got = source.open_dataset(config(path))
    assert not got["t"].variable._in_memory
    np.testing.assert_array_equal(got.time.values, ds.time.values.astype("datetime64[s]"))
    np.testing.assert_allclose(got["t"].values, ds["t"].values, atol=0.01 if packed else 0)
    for times in (slice(14, 19), [3, 15, 16, 30], 16):
        np.testing.assert_allclose(
            got["u"].isel(time=times, level=[2, 0], latitude=slice(1, 4)).values,
            ds["u"].isel(time=times, level=[2, 0], latitude=slice(1, 4)).values,
        )


def test_files_of_different_variables_merge(tmp_path, dataset):
    ds = dataset()
    for name in ("u", "t", "sp"):
        ds[[name]].isel(time=slice(0, 20)).to_zarr(tmp_path / f"{name}_1.zarr", consolidated=False)
        ds[[name]].isel(time=slice(20, None)).to_zarr(tmp_path / f"{name}_2.zarr", consolidated=False)
    got = source.open_dataset(config(tmp_path / "*.zarr"))
    for name in ("u", "t", "sp"):
        np.testing.assert_array_equal(got[name].values, ds[name].values)


def test_overlap_and_unequal_coordinates_are_errors(tmp_path, dataset):
    ds = dataset()
    ds.isel(time=slice(0, 21)).to_zarr(tmp_path / "a.zarr", consolidated=False)
    ds.isel(time=slice(20, None)).to_zarr(tmp_path / "b.zarr", consolidated=False)
    with pytest.raises(ValueError, match=r"2001-01-06T00:00:00 in .*b.zarr a second time"):
        source.open_dataset(config(tmp_path / "?.zarr"))
    ds.isel(time=slice(21, None), latitude=slice(0, 5)).to_zarr(tmp_path / "c.zarr", consolidated=False)
    with pytest.raises(ValueError, match=r"same latitude in all files, got another in .*c.zarr"):
        source.open_dataset(config(tmp_path / "[ac].zarr"))


def test_rounded_axes_are_the_same_and_those_from_another_meridian_are_turned(tmp_path, dataset):
    ds = dataset()
    ds.isel(time=slice(0, 20)).to_zarr(tmp_path / "a.zarr", consolidated=False)
    later = ds.isel(time=slice(20, 40))
    rounded = later.assign_coords(latitude=ds.latitude + 1.2e-6, longitude=ds.longitude + 1.2e-6)
    rounded.to_zarr(tmp_path / "b.zarr", consolidated=False)
    np.testing.assert_array_equal(source.open_dataset(config(tmp_path / "[ab].zarr"))["u"].values, ds["u"].values)
    turned = later.assign_coords(longitude=(ds.longitude + 180) % 360 - 180).sortby("longitude")
    turned.to_zarr(tmp_path / "c.zarr", consolidated=False)
    with pytest.raises(ValueError, match=r"longitude .* in .*c.zarr; .* set data.source.region: {west: 0, east: 360}"):
        source.open_dataset(config(tmp_path / "[ac].zarr"))
    got = source.open_dataset(config(tmp_path / "[ac].zarr", region={"west": 0, "east": 360}))
    np.testing.assert_array_equal(got.longitude.values, ds.longitude.values)
    np.testing.assert_array_equal(got["u"].values, ds["u"].values)
    moved = later.assign_coords(longitude=ds.longitude + 1)
    moved.to_zarr(tmp_path / "d.zarr", consolidated=False)
    with pytest.raises(ValueError, match=r"longitude .* in .*d.zarr; list it as a source of its own"):
        source.open_dataset(config(tmp_path / "[ad].zarr"))


@pytest.mark.parametrize("kind", ["zarr", "netcdf"])
def test_files_of_other_hours_are_interleaved(tmp_path, dataset, kind):
    """One file has 00 and 06 UTC of all days, another one 12 UTC, another one 18 UTC of some days."""
    ds = dataset()
    hours = np.arange(40) % 4
    parts = {"a": hours < 2, "b": hours == 2, "c": (hours == 3) & (np.arange(40) > 10)}
    for name, chosen in parts.items():
        part = ds.isel(time=np.flatnonzero(chosen))
        part.to_zarr(tmp_path / f"{name}.zarr", consolidated=False) if kind == "zarr" else part.to_netcdf(
            tmp_path / f"{name}.nc"
        )
    module = source if kind == "zarr" else netcdf
    there = np.flatnonzero(np.any(list(parts.values()), 0))
    expected = ds.isel(time=there)
    got = module.open_dataset(module.Config(path=f"{tmp_path}/*.{'zarr' if kind == 'zarr' else 'nc'}"))
    np.testing.assert_array_equal(got.time.values, expected.time.values.astype("datetime64[s]"))
    for times in (slice(None), slice(5, 17), [7, 3, 20], 9):
        np.testing.assert_array_equal(got["u"].isel(time=times).values, expected["u"].isel(time=times).values)


def test_of_repeated_times_alone_later_files_lose_any(tmp_path, dataset):
    """A file that fills a gap of an earlier one, and has some times of it too."""
    ds = dataset()
    missing = [4, 5, 20]
    ds.isel(time=[i for i in range(40) if i not in missing]).to_zarr(tmp_path / "a.zarr", consolidated=False)
    (ds.isel(time=[3, 4, 5, 19, 20, 21]) + 1000).to_zarr(tmp_path / "b.zarr", consolidated=False)
    with pytest.raises(ValueError, match=r"2001-01-01T18:00:00 in .*b.zarr a second time \(after .*a.zarr\)"):
        source.open_dataset(config(tmp_path / "?.zarr"))
    got = source.open_dataset(config(tmp_path / "?.zarr", duplicates="first"))
    expected = ds["u"].values.copy()
    expected[missing] += 1000
    np.testing.assert_array_equal(got["u"].values, expected)
    np.testing.assert_array_equal(got["u"].isel(time=slice(3, 7), level=2).values, expected[3:7, 2])


def test_the_file_that_is_listed_first_has_the_repeated_times(tmp_path, dataset):
    """Final data beside preliminary ones that begin earlier."""
    ds = dataset()
    ds.isel(time=slice(5, 20)).to_zarr(tmp_path / "final.zarr", consolidated=False)
    (ds.isel(time=slice(0, 12)) + 1000).to_zarr(tmp_path / "preliminary.zarr", consolidated=False)
    paths = [str(tmp_path / f"{name}.zarr") for name in ("final", "preliminary")]
    for order, first in ((paths, 5), (paths[::-1], 12)):
        got = source.open_dataset(source.Config(path=tuple(order), duplicates="first"))
        expected = ds["u"].values[:20].copy()
        expected[:first] += 1000
        np.testing.assert_array_equal(got["u"].values, expected)
        for box in (slice(3, 8), slice(10, 14), slice(5, 7)):
            np.testing.assert_array_equal(got["u"][box].values, expected[box])


def test_files_in_other_units_are_refused(tmp_path, dataset):
    ds = dataset()
    for name, unit, part in (("a", "degC", slice(0, 20)), ("b", "K", slice(20, 40))):
        made = ds.isel(time=part).copy()
        made["u"].attrs["units"] = unit
        made.to_zarr(tmp_path / f"{name}.zarr", consolidated=False)
    with pytest.raises(
        ValueError, match=r"expected u in 'degC' in all files, as in .*a.zarr, got it in 'K' in .*b.zarr"
    ):
        source.open_dataset(config(tmp_path / "?.zarr"))
    made["u"].attrs["units"] = "celsius"  # the same by another name
    made.to_zarr(tmp_path / "b.zarr", mode="w", consolidated=False)
    assert source.open_dataset(config(tmp_path / "?.zarr")).sizes["time"] == 40


@pytest.mark.parametrize(
    ("one", "other", "differ"),
    [
        ("K", "degree_Celsius", True),
        ("K", "furlong", True),  # nobody knows it, but it is another text
        ("furlong", "fathom", True),
        ("furlong s-1", "furlong  s**-1", False),
        ("K", "", False),
        ("furlong", " ", False),
        ("degrees celsius", "°C", False),
        ("m s-1", "m/s", False),
        ("1", "-", False),
        ("none", "~", False),
        ("Degrees", "degrees", False),
    ],
)
def test_units_of_files_that_are_joined(one, other, differ):
    from credit_like.data.sources._files import _differ

    assert _differ(one, other) is _differ(other, one) is differ


def test_nothing_there(tmp_path, dataset):
    dataset().to_zarr(tmp_path / "era5_2001.zarr", consolidated=False)
    with pytest.raises(ValueError, match=r"era5_2001.zarr"):
        source.open_dataset(config(tmp_path / "era_2001.zarr"))
    with pytest.raises(ValueError, match=r"files that match"):
        source.open_dataset(config(tmp_path / "era_%Y.zarr"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.zarr").write_text("x")
    for name in ("empty", "text.zarr"):
        with pytest.raises(ValueError, match=r"expected a zarr store, got .* does not open"):
            source.open_dataset(config(tmp_path / name))


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"west": 40}, "both west and east, or neither, got only west; give east too, or remove west"),
        ({"east": 40}, "both west and east, or neither, got only east; give west too, or remove east"),
        ({"south": 30, "north": -30}, "south below north, got south 30 and north -30"),
    ],
)
def test_a_region_has_both_of_its_sides(limits, message):
    with pytest.raises(ValueError, match=message):
        config("a.zarr", region=limits)


@pytest.mark.parametrize("calendar", ["noleap", "360_day"])
def test_calendars(tmp_path, dataset, calendar):
    ds = dataset(start="2000-02-27", calendar=calendar)
    ds.to_zarr(tmp_path / "a.zarr", consolidated=False)
    got = source.open_dataset(config(tmp_path / "a.zarr"))
    assert list(got.time.values) == list(ds.time.values)
    ds.isel(time=slice(0, 9)).to_zarr(tmp_path / "b1.zarr", consolidated=False)
    ds.isel(time=slice(9, None)).to_zarr(tmp_path / "b2.zarr", consolidated=False)
    got = source.open_dataset(config(tmp_path / "b?.zarr"))
    assert list(got.time.values) == list(ds.time.values)
    np.testing.assert_array_equal(got["t"].values, ds["t"].values)


@pytest.mark.parametrize("ascending", [True, False])
@pytest.mark.parametrize(("west", "east"), [(30, 150), (300, 60), (-60, 60), (350, 10), (0, 360)])
def test_region(tmp_path, dataset, west, east, ascending):
    ds = dataset(width=36, ascending=ascending)
    ds.to_zarr(tmp_path / "a.zarr", consolidated=False)
    got = source.open_dataset(
        config(tmp_path / "a.zarr", region={"south": -40, "north": 60, "west": west, "east": east})
    )
    latitude = [lat for lat in ds.latitude.values if -40 <= lat <= 60]
    assert list(got.latitude.values) == latitude
    inside = [lon for lon in ds.longitude.values if (lon - west) % 360 <= ((east - west) % 360 or 360)]
    assert sorted(got.longitude.values % 360) == sorted(inside)
    assert np.all(np.diff(got.longitude.values) == 10)
    expected = ds["t"].sel(latitude=latitude, longitude=got.longitude.values % 360)
    np.testing.assert_array_equal(got["t"].values, expected.values)


def test_points_on_the_edges_of_a_region_are_inside_whatever_their_rounding(tmp_path, dataset):
    ds = dataset(width=3600)
    rows = np.linspace(20.1, 20.7, ds.sizes["latitude"])
    single = {"longitude": np.arange(3600) * 0.1, "latitude": rows}
    ds = ds.assign_coords({name: x.astype("f4").astype("f8") for name, x in single.items()})
    ds.isel(time=[0]).to_zarr(tmp_path / "a.zarr", consolidated=False)
    region = {"south": 20.1, "north": 20.7, "west": 359.2, "east": 359.6}
    got = source.open_dataset(config(tmp_path / "a.zarr", region=region))
    assert (got.sizes["latitude"], got.sizes["longitude"]) == (ds.sizes["latitude"], 5)


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture
def served(tmp_path):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(tmp_path)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("version", [2, 3])
def test_a_store_behind_a_url_in_weatherbench_layout(tmp_path, served, dataset, version):
    """Longitude before latitude, long names, latitude ascending."""
    ds = dataset(ascending=True, steps=6).rename(u="u_component_of_wind", t="temperature")
    ds = ds.transpose("time", "level", "longitude", "latitude")
    ds.to_zarr(tmp_path / "wb.zarr", zarr_format=version, consolidated=version == 2)
    got = source.open_dataset(config(f"{served}/wb.zarr"))
    np.testing.assert_array_equal(got["temperature"].values, ds["temperature"].values)


@pytest.mark.parametrize("path", ["gs://bucket/era5.zarr", "gs://bucket/era5-*.zarr"])
def test_a_package_for_a_url_that_is_missing_is_named_with_its_cure(monkeypatch, path):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(UserError, match=r"gcsfs.*pip install 'credit-like\[cloud\]'"):
        source.open_dataset(source.Config(path=path))


def test_so_is_that_for_netcdf_behind_a_url(monkeypatch, tmp_path, served, dataset):
    monkeypatch.setitem(sys.modules, "h5netcdf", None)
    dataset().to_netcdf(tmp_path / "a.nc", engine="netcdf4")
    with pytest.raises(UserError, match=r"h5netcdf.*pip install 'credit-like\[cloud\]'"):
        netcdf.open_dataset(netcdf.Config(path=f"{served}/a.nc"))


@pytest.mark.parametrize(
    ("path", "behind_urls"),
    [("a.zarr", False), ("http://x/a.zarr", True), (["a.zarr", "b.zarr"], False), (["http://x/a", "http://x/b"], True)],
)
def test_variables_behind_urls_are_read_together(path, behind_urls):
    store = FieldStore.__new__(FieldStore)
    store._sources = [Source(source.Config(path=path), ("data", "source", 0), "data.source")]
    assert store._concurrent() is behind_urls


@pytest.mark.parametrize(
    "path",
    [
        "http://127.0.0.1:9/era5_%Y.zarr",
        "nosuch://bucket/*.zarr",
        pytest.param("s3://bucket/era5_*.zarr", marks=pytest.mark.slow),  # its library tries again for seconds
    ],
)
def test_a_server_that_lists_nothing_is_one_message(path, monkeypatch):
    pytest.importorskip("s3fs")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    # An endpoint that refuses connections, wherever credentials come from.
    options = {"client_kwargs": {"endpoint_url": "http://127.0.0.1:9"}, "anon": True} if path.startswith("s3") else {}
    with pytest.raises(
        UserError, match=r"expected files that match .*none that can be listed: .*change data.source.path"
    ):
        source.open_dataset(config(path, storage_options=options))
