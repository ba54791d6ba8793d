"""Conservative regridding against areas counted cell by cell, and against what must be conserved."""

import tracemalloc

import netCDF4
import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_like.data.files.regrid import conservative, read_weights, regular
from credit_like.data.sources import netcdf, zarr
from credit_like.errors import UserError
from credit_like.grid import Grid


def globe(rows, columns, poles=True, ascending=False, west=0.0):
    latitude = np.linspace(-90, 90, rows) if poles else (np.arange(rows) + 0.5) * 180 / rows - 90
    return Grid(latitude if ascending else latitude[::-1], west + np.arange(columns) * 360.0 / columns)


GRIDS = st.builds(
    globe, st.integers(3, 19), st.integers(4, 25), st.booleans(), st.booleans(), st.sampled_from([0.0, -180.0, 7.5])
)


def mean(field, grid):
    return (grid.latitude_weights()[:, None] * field).mean()


@settings(max_examples=50, deadline=None)
@given(GRIDS, GRIDS, st.integers(0, 99))
def test_means_and_constants_are_kept(source, target, seed):
    weights = conservative(source, target)
    field = np.random.default_rng(seed).standard_normal((1, source.height, source.width))
    everything = slice(0, target.height)
    assert weights.source_rows(everything) == slice(0, source.height)
    got = weights.apply(field, everything)[0]
    assert mean(got, target) == pytest.approx(mean(field[0], source), abs=1e-12)
    assert got.min() >= field.min() - 1e-12
    assert got.max() <= field.max() + 1e-12
    np.testing.assert_allclose(weights.apply(np.ones_like(field), everything), 1, rtol=1e-12)
    np.testing.assert_allclose(conservative(source, source).apply(field, slice(0, source.height)), field, rtol=1e-9)


def test_against_points_counted_in_cells():
    """A million points spread evenly over the sphere: each takes the source cell's value to the target cell's mean."""
    source, target = globe(10, 20, poles=False), globe(7, 9, west=-13.0, ascending=True)
    random = np.random.default_rng(0)
    field = random.standard_normal((10, 20))
    latitude = np.rad2deg(np.arcsin(random.uniform(-1, 1, 1_000_000)))
    longitude = random.uniform(0, 360, 1_000_000)
    value = field[np.floor((90 - latitude) / 18).astype(int), np.floor((longitude / 18 + 0.5) % 20).astype(int)]
    row = np.rint((latitude + 90) / 30).astype(int)
    column = np.floor(((longitude + 13) / 40 + 0.5) % 9).astype(int)
    total, count = np.zeros((7, 9)), np.zeros((7, 9))
    np.add.at(total, (row, column), value)
    np.add.at(count, (row, column), 1)
    got = conservative(source, target).apply(field[None], slice(0, 7))[0]
    error = np.ptp(field) / 2 / np.sqrt(count)  # at most, of a mean of so many points
    assert np.all(np.abs(got - total / count) < 3 * error)
    assert np.abs(got - total / count).mean() < error.mean()


def test_missing_points_do_not_count_and_what_lies_outside_is_missing():
    source, target = Grid(np.linspace(60, 20, 9), np.arange(9) * 5.0), regular(10)
    field = np.ones((1, 9, 9))
    field[0, 4, 4] = np.nan
    field[0, :3] = 3.0
    got = conservative(source, target).apply(field, slice(0, 19))[0]
    inside = (target.latitude[:, None] <= 60) & (target.latitude[:, None] >= 20) & (target.longitude[None] <= 40)
    np.testing.assert_array_equal(np.isfinite(got), inside)
    assert got[5, 2] == 1  # around the missing point


@pytest.mark.parametrize("order", [("latitude", "longitude"), ("longitude", "latitude")])
def test_a_source_on_another_grid(tmp_path, dataset, order):
    ds = dataset(height=18, width=36, steps=6)
    ds = ds.assign_coords(latitude=np.linspace(85, -85, 18))
    stored = ds.transpose("time", "level", *order)
    stored.to_zarr(tmp_path / "a.zarr", consolidated=False)
    stored.to_netcdf(tmp_path / "a.nc")
    xr.Dataset(coords={"lat": np.linspace(90, -90, 13), "lon": np.arange(24) * 15.0}).to_netcdf(tmp_path / "grid.nc")
    fields = ds["t"].values.reshape(-1, 18, 36)
    for module, file in ((zarr, "a.zarr"), (netcdf, "a.nc")):
        for asked, target in (({"degrees": 15}, regular(15)), ({"like": str(tmp_path / "grid.nc")}, regular(15))):
            got = module.open_dataset(module.Config(path=str(tmp_path / file), regrid=asked))
            assert not got["t"].variable._in_memory
            expected = conservative(globe(18, 36, poles=False), target).apply(fields, slice(0, 13))
            expected = expected.reshape(6, 4, 13, 24).astype("f4")
            np.testing.assert_array_equal(got["t"].values, expected)
            np.testing.assert_array_equal(got["t"][2, 1:3, 4:7].values, expected[2, 1:3, 4:7])
            np.testing.assert_array_equal(got["t"][[3, 1], 0, ::-2, 5].values, expected[[3, 1], 0, ::-2, 5])
            assert got["sp"].dims == ("time", "latitude", "longitude")
            assert got["orography"].shape == (13, 24)


def test_a_store_on_another_grid_and_a_region_of_it(tmp_path, dataset, data_section):
    from credit_like.data.store import open_store
    from credit_like.variables import Variables

    ds = dataset(height=18, width=36).assign_coords(latitude=np.linspace(85, -85, 18))
    ds.to_zarr(tmp_path / "a.zarr", consolidated=False)
    source = {"type": "zarr", "path": str(tmp_path / "a.zarr"), "regrid": {"degrees": 15}}
    region = {"south": 0, "north": 60, "west": 0, "east": 90}
    data = data_section("", source={**source, "region": region})
    variables = Variables(data)
    store = open_store(data, variables)
    assert (store.grid.height, store.grid.width) == (5, 7)
    whole = zarr.open_dataset(zarr.Config(**source))
    part = whole["sp"].sel(latitude=slice(60, 0), longitude=slice(0, 90)).values
    np.testing.assert_array_equal(store.read([variables["sp"]], range(40))[:, 0], part)
    np.testing.assert_array_equal(store.read([variables["sp"]], [3], slice(2, 4))[0, 0], part[3, 2:4])


def write_weights(path, source, target, **changes):
    weights = conservative(source, target)
    matrix = np.kron(weights.rows.toarray(), weights.columns.toarray())
    matrix /= matrix.sum(1, keepdims=True)
    row, col = np.nonzero(matrix)
    with netCDF4.Dataset(path, "w") as file:
        values = {
            "row": row + 1, "col": col + 1, "S": matrix[row, col],
            "yc_b": np.repeat(target.latitude, target.width), "xc_b": np.tile(target.longitude, target.height),
            "dst_grid_dims": np.array([target.width, target.height]), "src_grid_dims": np.array([source.width, source.height]),
            "yc_a": np.repeat(source.latitude, source.width), "xc_a": np.tile(source.longitude, source.height), **changes,
        }  # fmt: skip
        for name, array in values.items():
            file.createDimension(f"n_{name}", len(array))
            made = file.createVariable(name, array.dtype, (f"n_{name}",))
            made[:] = array
            made.units = "radians" if changes and np.abs(array).max() < 7 else "degrees"


def test_stored_weights(tmp_path, dataset):
    ds = dataset(height=18, width=36, steps=3).assign_coords(latitude=np.linspace(85, -85, 18))
    ds.to_netcdf(tmp_path / "a.nc")
    write_weights(tmp_path / "w.nc", globe(18, 36, poles=False), regular(30))
    stored = netcdf.open_dataset(netcdf.Config(path=str(tmp_path / "a.nc"), regrid={"weights": str(tmp_path / "w.nc")}))
    own = netcdf.open_dataset(netcdf.Config(path=str(tmp_path / "a.nc"), regrid={"degrees": 30}))
    np.testing.assert_allclose(stored["t"].values, own["t"].values, rtol=1e-6)
    np.testing.assert_array_equal(stored["t"][1, 2, 3:5].values, stored["t"].values[1, 2, 3:5])


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({}, "one of degrees, like and weights"),
        ({"degrees": 1, "like": "x"}, "one of degrees, like and weights"),
        ({"degrees": 7}, "divide 180"),
        ({"like": "/nowhere.nc"}, "data.source.regrid.like"),
        ({"weights": "/nowhere.nc"}, "a file of weights, got '/nowhere.nc'"),
        ({"weights": "{a}"}, "without row"),
        ({"weights": "{w}"}, r"on the grid of .*w.nc, \(18, 36\), got \(9, 12\)"),
    ],
)
def test_what_cannot_be(tmp_path, dataset, asked, message):
    dataset(steps=2).to_netcdf(tmp_path / "a.nc")
    write_weights(tmp_path / "w.nc", globe(18, 36, poles=False), regular(30))
    names = {name: tmp_path / f"{name}.nc" for name in "aw"}
    asked = {k: v.format(**names) if isinstance(v, str) else v for k, v in asked.items()}
    with pytest.raises(ValueError, match=message):
        netcdf.open_dataset(netcdf.Config(path=str(tmp_path / "a.nc"), regrid=asked))


@pytest.mark.parametrize("radians", [False, True])
def test_stored_weights_are_for_their_rows_and_columns_alone(tmp_path, dataset, radians):
    """From the south for files from the north; longitudes may be counted from another meridian, but not begin at one."""
    ds = dataset(height=18, width=36, steps=3).assign_coords(latitude=np.linspace(85, -85, 18))
    source = globe(18, 36, poles=False)
    centres = np.repeat(source.latitude, 36), np.tile(source.longitude - 360, 18)
    changes = (
        {name: np.deg2rad(values) for name, values in zip(("yc_a", "xc_a"), centres, strict=True)} if radians else {}
    )
    write_weights(tmp_path / "w.nc", source, regular(30), **changes)
    write_weights(tmp_path / "south.nc", globe(18, 36, poles=False, ascending=True), regular(30))
    write_weights(tmp_path / "west.nc", globe(18, 36, poles=False, west=-180.0), regular(30))
    ds.to_netcdf(tmp_path / "a.nc")

    def opened(weights):
        return netcdf.open_dataset(
            netcdf.Config(path=str(tmp_path / "a.nc"), regrid={"weights": str(tmp_path / weights)})
        )

    own = netcdf.open_dataset(netcdf.Config(path=str(tmp_path / "a.nc"), regrid={"degrees": 30}))
    np.testing.assert_allclose(opened("w.nc")["t"].values, own["t"].values, rtol=1e-6)
    with pytest.raises(ValueError, match=r"latitudes from -85 to 85 of .*south.nc in .*a.nc, got 85 to -85"):
        opened("south.nc")
    with pytest.raises(ValueError, match=r"longitudes from -180 to 170 of .*west.nc in .*a.nc, got 0 to 350"):
        opened("west.nc")


def test_stored_weights_are_not_compared_with_numbers_of_rows_and_columns(tmp_path, dataset):
    ds = dataset(height=18, width=36, steps=3).assign_coords(latitude=np.linspace(85, -85, 18))
    write_weights(tmp_path / "w.nc", globe(18, 36, poles=False), regular(30))
    plain = ds[["sp"]].rename(latitude="y", longitude="x").assign_coords(y=np.arange(18.0), x=np.arange(36.0))
    plain.to_netcdf(tmp_path / "a.nc")
    options = {"regrid": {"weights": str(tmp_path / "w.nc")}, "dims": {"latitude": "y", "longitude": "x"}}
    got = netcdf.open_dataset(netcdf.Config(path=str(tmp_path / "a.nc"), **options))
    assert got["sp"].shape == (3, 7, 12)


def test_a_source_with_a_column_twice_is_refused(tmp_path, dataset):
    """Its weight would count twice."""
    ds = dataset(steps=2)
    ds.pad(longitude=(0, 1), mode="wrap").assign_coords(longitude=np.arange(13) * 30.0).to_netcdf(tmp_path / "a.nc")
    with pytest.raises(ValueError, match="expected each longitude once, got 0 and 360, which are the same"):
        netcdf.open_dataset(netcdf.Config(path=str(tmp_path / "a.nc"), regrid={"degrees": 30}))


def test_missing_coordinates_are_not_those_of_stored_weights(tmp_path, dataset):
    """NaN is neither close to a value nor far from it, and must not count as close."""
    source, target = globe(18, 36, poles=False), regular(30)
    ds = dataset(height=18, width=36, steps=3).assign_coords(latitude=np.linspace(85, -85, 18))
    ds.assign_coords(latitude=ds["latitude"].where(ds["latitude"] != 45)).to_netcdf(tmp_path / "a.nc")
    write_weights(tmp_path / "w.nc", source, target)
    with pytest.raises(ValueError, match=r"latitudes from 85 to -85 of .*w.nc in .*a.nc, got some that are NaN"):
        netcdf.open_dataset(netcdf.Config(path=str(tmp_path / "a.nc"), regrid={"weights": str(tmp_path / "w.nc")}))
    rows = np.repeat(target.latitude, target.width)
    write_weights(tmp_path / "nan.nc", source, target, yc_b=np.where(np.arange(rows.size) == 17, np.nan, rows))
    with pytest.raises(UserError, match=r"latitude-longitude grid in .*nan.nc, got a curvilinear one, or NaN"):
        read_weights(str(tmp_path / "nan.nc"))


@pytest.mark.parametrize("name", ["dst_grid_dims", "src_grid_dims"])
def test_weights_of_points_without_rows_are_refused(tmp_path, name):
    write_weights(tmp_path / "w.nc", globe(6, 8), globe(3, 4), **{name: np.array([48])})
    with pytest.raises(ValueError, match=rf"rows and columns in .*w.nc, got {name} of length 1"):
        read_weights(str(tmp_path / "w.nc"))


def test_weights_are_made_once_for_many_files_and_fields_are_copied_one_by_one():
    source, target = globe(90, 180), regular(30)
    weights = conservative(source, target)
    assert conservative(globe(90, 180), regular(30)) is weights
    assert conservative(globe(90, 180, ascending=True), regular(30)) is not weights
    assert conservative(target, source) is not weights
    fields = np.random.default_rng(0).standard_normal((64, 90, 180)).astype(np.float32)
    fields[5, 10:20] = np.nan
    tracemalloc.start()
    try:
        got = weights.apply(fields, slice(0, 7))
        assert tracemalloc.get_traced_memory()[1] < fields.nbytes / 2
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(got[5], weights.apply(fields[5:6], slice(0, 7))[0])


def test_weights_of_a_file_are_read_once_while_it_is_the_same(tmp_path):
    path = tmp_path / "w.nc"
    write_weights(path, globe(6, 8), globe(3, 4))
    first = read_weights(str(path))
    assert read_weights(str(path)) is first
    write_weights(path, globe(6, 8), globe(5, 4))
    assert read_weights(str(path)).grid.height == 5
