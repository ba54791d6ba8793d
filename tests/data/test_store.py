"""What the store reads, against plain xarray indexing of the same files."""

import os
import pickle
import re
import shutil

import numpy as np
import pytest
import xarray as xr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from credit_like.data.files import netcdf_files
from credit_like.data.files.chunks import ChunkedArray
from credit_like.data.locate import OtherLevel
from credit_like.data.statistics import fit_statistics
from credit_like.data.store import ReadError, StoreError, open_store
from credit_like.schema.data import Period
from credit_like.variables import Variables


def naive(ds, variables, times, rows=slice(None), columns=slice(None)):
    """(T, C, H, W) by xarray."""
    fields = []
    for variable in variables:
        field = ds[variable.name].isel(latitude=rows, longitude=columns)
        if "time" in field.dims:
            field = field.isel(time=list(times))
        else:
            field = field.expand_dims(time=len(times))
        if variable.levels:
            field = field.sel(level=list(variable.levels))
        else:
            field = field.expand_dims("level", 1)
        fields.append(field.transpose("time", "level", "latitude", "longitude").values)
    return np.concatenate(fields, 1)


@pytest.fixture(scope="module")
def layouts(tmp_path_factory, dataset, data_section):
    """The same data in many layouts, each opened."""
    folder = tmp_path_factory.mktemp("layouts")
    result = []
    for name, ascending, calendar, order in (
        ("plain", False, "standard", ("time", "level", "latitude", "longitude")),
        ("flipped", True, "noleap", ("time", "level", "longitude", "latitude")),
        ("odd", False, "360_day", ("level", "latitude", "time", "longitude")),
    ):
        ds = dataset(ascending=ascending, calendar=calendar)
        stored = ds.transpose(*order)
        for kind, chunks in (("zarr", (1, 2)), ("zarr", (7, 4)), ("netcdf", None)):
            path = folder / f"{name}-{chunks}.{kind}"
            if kind == "netcdf":
                stored.to_netcdf(path)
            else:
                sizes = {"time": chunks[0], "level": chunks[1], "latitude": 4, "longitude": 12}
                encoding = {n: {"chunks": [min(sizes[d], v.sizes[d]) for d in v.dims]} for n, v in stored.items()}
                stored.to_zarr(path, encoding=encoding, consolidated=False)
            data = data_section(path, source={"type": kind, "path": str(path)}, levels=[850, 100, 1000])
            variables = Variables(data)
            result.append((ds, variables, open_store(data, variables)))
    return result


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_reads_are_those_of_xarray(layouts, data):
    ds, variables, store = data.draw(st.sampled_from(layouts))
    stored = [v for v in variables if not v.spec.compute]
    some = data.draw(st.lists(st.sampled_from(stored), min_size=1, max_size=4, unique=True))
    times = data.draw(st.lists(st.integers(0, 39), min_size=1, max_size=6))
    first, last = sorted((data.draw(st.integers(0, 8)), data.draw(st.integers(1, 9))))
    rows = slice(first, max(last, first + 1))
    columns = data.draw(st.sampled_from([slice(None), slice(0, 9), slice(9, 16), slice(3, 4)]))
    got = store.read(some, times, rows, columns=columns)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, naive(ds, some, times, rows, columns))
    into = np.empty_like(got)
    store.read(some, times, rows, out=list(into), columns=columns)
    np.testing.assert_array_equal(into, got)


def test_a_box_needs_no_chunk_beside_it(tmp_path, dataset, data_section):
    ds, path = dataset(), tmp_path / "a.zarr"
    sizes = {"time": 1, "level": 2, "latitude": 3, "longitude": 4}
    ds.to_zarr(
        path,
        encoding={n: {"chunks": [min(sizes[d], v.sizes[d]) for d in v.dims]} for n, v in ds.items()},
        consolidated=False,
        zarr_format=3,
    )
    data = data_section(path, source={"type": "zarr", "path": str(path)}, levels=[850, 100, 1000])
    variables = Variables(data)
    store = open_store(data, variables)
    stored = [v for v in variables if not v.spec.compute]
    for (
        variable
    ) in stored:  # rows 3 to 5 and columns 4 to 11 are the second row, and the second and third column of chunks
        for chunk in (path / variable.name / "c").rglob("*"):
            if chunk.is_file() and (chunk.parent.name != "1" or chunk.name not in ("1", "2")):
                chunk.write_bytes(b"broken")
    box = (slice(3, 6), slice(4, 12))
    got = store.read(stored, [5, 6, 9], box[0], columns=box[1])
    np.testing.assert_array_equal(got, naive(ds, stored, [5, 6, 9], *box))


def test_statics_grid_times_and_index(stored):
    ds, data, variables, store = stored()
    np.testing.assert_array_equal(store.static(slice(2, 5)), naive(ds, variables.role("static"), [0], slice(2, 5))[0])
    box = (slice(2, 5), slice(7, 12))
    np.testing.assert_array_equal(store.static(*box), naive(ds, variables.role("static"), [0], *box)[0])
    np.testing.assert_array_equal(store.grid.latitude, ds.latitude)
    assert store.index("2001-01-02T06:00:00") == 5
    with pytest.raises(ValueError, match=r"2001-01-02T06:00:00 and 2001-01-02T12:00:00 \(data.timestep: 6h\)"):
        store.index("2001-01-02T07:00:00")
    with pytest.raises(ValueError, match=r"2001-01-10T18:00:00"):
        store.index("2002-01-01T00:00:00")
    assert list(store.period(data.valid)) == list(range(24, 32))
    # Data of ten days from 2001-01-01 on reach over a period of which they lack no more than a quarter at either end.
    for first, last, reached in (
        ("2001-01-02", "2001-01-03", True),
        ("2000-12-31T18", "2001-01-10T18", True),
        ("2000-12-29", "2001-01-10T18", True),
        ("2000-12-01", "2001-01-10T18", False),
        ("2001-01-01", "2001-03-01", False),
        ("2002-01-01", "2002-01-02", False),
    ):
        assert store.reaches_over((Period(start=first, end=last),)) is reached, (first, last)


def test_times_that_change_after_the_start_are_not_read_as_others(stored):
    """A time more at the end does no harm; one before that gives every position another time."""
    ds, data, variables, store = stored()
    before = store.read(variables.outputs, [3])
    copy, path = pickle.loads(pickle.dumps(store)), data.source[0].path
    shutil.rmtree(path)
    ds.isel(time=slice(0, 39)).to_zarr(path, consolidated=False)
    with pytest.raises(ReadError, match=r"the times that .* had at the start, got others; start again"):
        copy.read(variables.outputs, [3])
    shutil.rmtree(path)
    later = ds.isel(time=[-1]).assign_coords(time=ds["time"][-1:] + np.timedelta64(6, "h"))
    xr.concat([ds, later], "time", data_vars="minimal").to_zarr(path, consolidated=False)
    np.testing.assert_array_equal(copy.read(variables.outputs, [3]), before)


def test_a_copy_in_another_process_and_after_pickling_reads_the_same(stored):
    _, _, variables, store = stored()
    before = store.read(variables.outputs, [3, 4])
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(store)).read(variables.outputs, [3, 4]), before)
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        same = np.array_equal(store.read(variables.outputs, [3, 4]), before)
        os.write(send, b"1" if same else b"0")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(receive, 1) == b"1"


def test_two_files_that_call_their_variable_the_same(tmp_path, dataset, data_section):
    ds = dataset()
    for name, factor in (("low", 1), ("high", 2)):
        (ds[["sp"]] * factor).rename(sp="u").to_netcdf(tmp_path / f"{name}.nc")
    surface = [{"name": name, "var": "u", "path": str(tmp_path / f"{name}.nc")} for name in ("low", "high")]
    data = data_section(
        "",
        source={"type": "netcdf"},
        prognostic={"surface": surface},
        diagnostic={},
        dynamic_forcing={},
        static={},
    )
    variables = Variables(data)
    got = open_store(data, variables).read(variables.outputs, [1, 7])
    np.testing.assert_array_equal(got[:, 0], ds["sp"].values[[1, 7]])
    np.testing.assert_array_equal(got[:, 1], ds["sp"].values[[1, 7]] * 2)


def test_longitudes_at_uneven_spacing_are_refused(tmp_path, dataset, data_section):
    """Means over an area weight rows, not columns, and the layers of a model take columns for equally far apart."""
    dataset().isel(longitude=[0, 1, 2, 3, 5, 7]).to_zarr(tmp_path / "a.zarr", consolidated=False)
    data = data_section(str(tmp_path / "a.zarr"))
    with pytest.raises(StoreError, match=r"longitudes at even spacing, got steps from 30 to 60 degrees; regrid"):
        open_store(data, Variables(data))


def test_sources_whose_columns_begin_at_other_meridians_are_turned(tmp_path, dataset, data_section):
    ds = dataset()
    ds.drop_vars("sst").to_zarr(tmp_path / "a.zarr", consolidated=False)
    turned = ds[["sst"]].assign_coords(longitude=(ds.longitude + 180) % 360 - 180).sortby("longitude")
    turned.to_zarr(tmp_path / "b.zarr", consolidated=False)
    sources = [{"type": "zarr", "path": str(tmp_path / name)} for name in ("a.zarr", "b.zarr")]
    data = data_section("", source=sources)
    with pytest.raises(StoreError, match=r"set region: {west: 0, east: 360} in both sources"):
        open_store(data, Variables(data))
    data = data_section("", source=[{**source, "region": {"west": 0, "east": 360}} for source in sources])
    variables = Variables(data)
    got = open_store(data, variables).read([variables["sst"]], [7])[0, 0]
    np.testing.assert_array_equal(got, ds["sst"].values[7])


@pytest.mark.parametrize("region", [{"west": 0, "east": 360}, {"west": -180, "east": 180}, {"west": -90, "east": 90}])
@pytest.mark.parametrize("first", [-180, 90])
def test_the_same_box_of_sources_that_count_longitudes_from_elsewhere(tmp_path, dataset, data_section, region, first):
    ds = dataset()
    ds.drop_vars("sst").to_zarr(tmp_path / "a.zarr", consolidated=False)
    counted = (ds.longitude - first) % 360 + first
    ds[["sst"]].assign_coords(longitude=counted).sortby("longitude").to_zarr(tmp_path / "b.zarr", consolidated=False)
    sources = [{"type": "zarr", "path": str(tmp_path / name), "region": region} for name in ("a.zarr", "b.zarr")]
    for several in (sources, sources[::-1]):
        data = data_section("", source=several)
        variables = Variables(data)
        store = open_store(data, variables)
        assert store.grid.longitude[0] < 360
        expected = ds["sst"].isel(time=7).sel(longitude=store.grid.longitude % 360)
        np.testing.assert_array_equal(store.read([variables["sst"]], [7])[0, 0], expected)
    joined = data_section("", source={"type": "zarr", "path": str(tmp_path / "[ab].zarr"), "region": region})
    variables = Variables(joined)
    store = open_store(joined, variables)
    expected = ds["sst"].isel(time=7).sel(longitude=store.grid.longitude % 360)
    np.testing.assert_array_equal(store.read([variables["sst"]], [7])[0, 0], expected)


def test_sources_merge_on_their_common_times(tmp_path, dataset, data_section):
    ds = dataset()
    ds.drop_vars(["sst", "rain"]).isel(time=slice(0, 35)).to_zarr(tmp_path / "a.zarr", consolidated=False)
    ds[["sst", "rain"]].isel(time=slice(4, None)).to_netcdf(tmp_path / "b.nc")
    sources = [{"type": "zarr", "path": str(tmp_path / "a.zarr")}, {"type": "netcdf", "path": str(tmp_path / "b.nc")}]
    data = data_section("", source=sources)
    variables = Variables(data)
    store = open_store(data, variables)
    assert len(store) == 31
    assert store.start == "2001-01-02T00:00:00"
    np.testing.assert_array_equal(store.read(variables.outputs, [0, 30]), naive(ds, variables.outputs, [4, 34]))


def test_units_are_converted_and_told(stored, dataset):
    ds = dataset()
    ds["t"].attrs["units"] = "degC"
    _, _, variables, store = stored(ds, prognostic={"level": ["u", {"name": "t", "units": "K"}]})
    got = store.read([variables["t"]], [3])
    np.testing.assert_allclose(got, naive(ds, [variables["t"]], [3]) + np.float64(273.15), rtol=1e-7)
    assert store.attrs(variables["t"])["units"] == "K"


def test_units_that_do_not_convert(stored, dataset):
    ds = dataset()
    ds["sp"].attrs["units"] = "Pa"
    with pytest.raises(StoreError, match=r"data.prognostic.surface.0: expected units that 'Pa' converts to, got 'K'"):
        stored(ds, prognostic={"surface": [{"name": "sp", "units": "K"}]})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"levels": [500, 925]},
            r"data.levels: expected levels of u, t in .* \(100, 500, 850, 1000\), got 925; .* 850",
        ),
        (
            {"levels": [1, 2]},
            r"data.levels: expected levels of u, t in .* \(100, 500, 850, 1000\), got 1, 2; change it$",
        ),
        ({"prognostic": {"surface": ["spp"]}}, r"data.prognostic.surface.0: .*, got 'spp'; did you mean 'sp'\?"),
        ({"prognostic": {"surface": ["u"]}}, r"without levels, got 4; move it to `level`"),
        ({"prognostic": {"level": ["sp"]}}, r"sp of .* on levels, got dimensions"),
        ({"static": {"surface": ["sst"]}, "dynamic_forcing": {}}, "expected a static field, got 40 times of sst"),
        ({"prognostic": {"surface": ["orography"]}, "static": {}}, "move it to static"),
        ({"timestep": "4h"}, "data.timestep: expected a multiple of 6 h, the spacing of the times in .*, got 4 h"),
    ],
)
def test_what_does_not_fit_is_told_with_what_does(stored, changes, message):
    with pytest.raises(StoreError, match=message):
        stored(**changes)


def test_all_problems_come_together(stored):
    with pytest.raises(StoreError) as caught:
        stored(levels=[501], diagnostic={"surface": ["rian"]})
    places = [".".join(map(str, place)) for place, _ in caught.value.problems]
    assert places == ["data.levels", "data.diagnostic.surface.0"]


def test_one_level_at_the_surfaces_place(stored):
    ds, _, variables, store = stored(
        prognostic={"surface": ["sp", {"name": "u500", "var": "u", "levels": [500]}]},
    )
    np.testing.assert_array_equal(store.read([variables["u500"]], [9])[0, 0], ds["u"].sel(level=500).values[9])


def test_aliases(stored, dataset):
    ds = dataset().rename(t="temperature", sp="surface_pressure", rain="total_precipitation")
    _, _, variables, store = stored(ds, diagnostic={"surface": ["tp"]}, prognostic={"level": ["T"], "surface": ["SP"]})
    np.testing.assert_array_equal(store.read([variables["tp"]], [2])[0, 0], ds["total_precipitation"].values[2])


def test_sub_sampling_keeps_one_step_one_position(stored, dataset):
    ds = dataset(steps=50, hours=3, start="2001-01-01T03:00:00")
    _, _, variables, store = stored(ds)
    assert set(np.diff(store.seconds)) == {6 * 3600}
    assert store.start == "2001-01-01T06:00:00"
    np.testing.assert_array_equal(store.read(variables.outputs, [0, 4]), naive(ds, variables.outputs, [1, 9]))


@pytest.mark.parametrize(
    ("attrs", "timestep", "told"),
    [
        (
            {"units": "J m**-2"},
            "12h",
            "sp over 6h in the files, which are not converted to sums over data.timestep (12h)",
        ),
        ({"cell_methods": "area: mean time: sum"}, "12h", "sp over 6h"),
        (
            {"GRIB_stepType": "accum"},
            "1d",
            "sp over 6h in the files, which are not converted to sums over data.timestep (1d)",
        ),
        ({"units": "J m**-2"}, "6h", ""),
        ({"units": "J m**-2", "cell_methods": "time: point"}, "12h", ""),
        ({"units": "J m**-2", "GRIB_stepType": "instant"}, "12h", ""),
        ({"units": "J m**-2", "long_name": "Vertical integral of total energy"}, "12h", ""),
        ({"units": "Pa"}, "12h", ""),
        ({"units": "m", "period_hours": "1"}, "6h", "sp over 1h in the files"),
        ({"units": "m", "period_hours": "6"}, "6h", ""),
    ],
)
def test_sums_over_another_time_than_the_step_are_told(stored, dataset, caplog, attrs, timestep, told):
    ds = dataset(steps=40)
    ds["sp"].attrs = attrs
    _, data, variables, store = stored(ds, timestep=timestep)
    assert store.told_other_sums().startswith(told)
    assert bool(store.told_other_sums()) == bool(told)
    fit_statistics(store, variables, data)
    assert ("sums: sp" in caplog.text) == bool(told)


def test_sums_over_several_periods_in_one_variable_are_refused(stored, dataset):
    ds = dataset()
    ds["sp"].attrs = {"period_hours": "6 12"}
    with pytest.raises(
        StoreError, match=r"expected sp of .* over one period, got 6, 12 h; .* data.source.select.period: 6"
    ):
        stored(ds)


def test_sub_sampling_off_the_hours(stored, dataset):
    _, _, _, store = stored(dataset(steps=20, hours=12, start="2001-01-01T05:00:00"), timestep="1d")
    assert store.start == "2001-01-01T05:00:00"
    assert len(store) == 10


def test_forcing_as_a_forecast_knows_it(stored):
    forcing = {"surface": [{"name": "sst", "fill": "persist"}, {"name": "sun", "compute": "solar"}]}
    ds, _, variables, store = stored(dynamic_forcing=forcing)
    got = store.forcing(range(36, 46), now=38)
    np.testing.assert_array_equal(got[:3, 0], ds["sst"].values[36:39])
    assert all(np.array_equal(field, got[2, 0]) for field in got[3:, 0])
    later = store.time_seconds([39, 45])
    assert later[1] - later[0] == 36 * 3600
    day = store.read([variables["sun"]], range(36, 46))[:, 0]
    np.testing.assert_array_equal(got[:, 1], day)
    np.testing.assert_allclose(day[:4].sum(0), day[4:8].sum(0), rtol=0.05, atol=1e6)
    with pytest.raises(IndexError, match=r"fill: persist"):
        store.read([variables["sp"]], [40])


@pytest.mark.parametrize("kinds", [("float32", "float16"), ("float16", "float32"), ("int16", "float32")])
def test_stores_of_different_precision_are_read_as_they_are(tmp_path, dataset, data_section, kinds):
    ds = dataset()
    parts = []
    for name, part, kind in zip("ab", (slice(0, 20), slice(20, 40)), kinds, strict=True):
        parts.append(ds.isel(time=part).assign(t=ds["t"].isel(time=part).astype(kind)))
        encoding = {n: {"chunks": (1, *v.shape[1:])} for n, v in parts[-1].items() if "time" in v.dims}
        parts[-1].to_zarr(tmp_path / f"{name}.zarr", encoding=encoding, consolidated=False)
    levels = ds["level"].values.tolist()
    data = data_section(tmp_path / "a.zarr", source={"type": "zarr", "path": str(tmp_path / "?.zarr")}, levels=levels)
    variables = Variables(data)
    got = open_store(data, variables).read([variables["t"]], range(18, 23))
    expected = np.concatenate([parts[0]["t"].values[18:].astype("f4"), parts[1]["t"].values[:3].astype("f4")])
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("kind", ["zarr", "netcdf"])
@pytest.mark.parametrize(
    "orders",
    [
        (("time", "level", "latitude", "longitude"), ("time", "level", "longitude", "latitude")),
        (("longitude", "latitude", "level", "time"), ("time", "level", "latitude", "longitude")),
    ],
)
def test_files_with_dimensions_in_other_orders_are_joined(tmp_path, dataset, data_section, kind, orders):
    """As many rows as columns, so that transposed fields would fit."""
    ds = dataset(height=12)
    for name, part, order in zip("ab", (slice(0, 20), slice(20, 40)), orders, strict=True):
        stored = ds.isel(time=part).transpose(*order)
        if kind == "zarr":
            stored.to_zarr(tmp_path / f"{name}.zarr", consolidated=False)
        else:
            stored.to_netcdf(tmp_path / f"{name}.netcdf")
    data = data_section(tmp_path / "a.zarr", source={"type": kind, "path": f"{tmp_path}/*.{kind}"}, levels=[1000, 500])
    variables = Variables(data)
    store = open_store(data, variables)
    some = [variables[name] for name in ("u", "t", "sp", "orography")]
    for times in ([19], [20], range(17, 23), [3, 30]):
        np.testing.assert_array_equal(store.read(some, times, slice(2, 7)), naive(ds, some, times, slice(2, 7)))


def test_a_field_with_other_dimensions_in_another_file_is_refused(tmp_path, dataset, data_section):
    ds = dataset()
    ds[["u", "sp"]].isel(time=slice(0, 20)).to_netcdf(tmp_path / "a.nc")
    ds[["u", "sp"]].isel(time=slice(20, 40)).assign(sp=ds["u"].isel(time=slice(20, 40))).to_netcdf(tmp_path / "b.nc")
    data = data_section(tmp_path / "a.nc", source={"type": "netcdf", "path": f"{tmp_path}/?.nc"})
    with pytest.raises(
        StoreError,
        match=r"expected sp on time latitude longitude in all files, as in .*a.nc, got it on time level latitude longitude in "
        r".*b.nc; list it as a source of its own",
    ):
        open_store(data, Variables(data))


@pytest.mark.parametrize(
    ("wanted", "there", "attrs"),
    [
        ("temperature", "T", {"description": "perturbation potential temperature (theta-t0)", "units": "K"}),
        ("temperature", "t", {"standard_name": "air_potential_temperature", "units": "K"}),
        ("vertical_velocity", "w", {"long_name": "Upward air velocity", "units": "m s-1"}),
        ("geopotential", "z", {"long_name": "Geopotential height", "units": "m"}),
    ],
)
def test_another_quantity_is_not_read_for_its_name(tmp_path, dataset, data_section, wanted, there, attrs):
    ds = dataset().rename(t=there)
    ds[there].attrs = attrs
    ds.to_netcdf(tmp_path / "a.nc")
    source = {"type": "netcdf", "path": f"{tmp_path}/a.nc"}

    def opened(*names, **more):
        section = data_section(tmp_path, source=source, prognostic={"level": list(names), "surface": ["sp"]}, **more)
        return Variables(section), open_store(section, Variables(section))

    told = next(value for key, value in attrs.items() if key != "units")
    with pytest.raises(
        StoreError, match=rf"expected {wanted}, got {there} of .*a.nc, which is '{re.escape(told)}'; write "
    ):
        opened(wanted)
    for names in (there, {"name": wanted, "var": there}):
        variables, store = opened(names)
        np.testing.assert_array_equal(store.read(variables.role("prognostic")[:1], [3])[0, 0], ds[there][3, 1])
    other = ds.rename({there: wanted})
    other[wanted].attrs = {}
    other.to_netcdf(tmp_path / "b.nc")
    source = [source, {"type": "netcdf", "path": f"{tmp_path}/b.nc"}]
    variables, store = opened(wanted)
    assert store.source_of(variables[wanted])[0].path.endswith("b.nc")


def test_total_water_is_not_read_for_specific_humidity(tmp_path, dataset, data_section):
    dataset().rename(t="Qtot").to_netcdf(tmp_path / "a.nc")
    section = data_section(
        tmp_path, source={"type": "netcdf", "path": f"{tmp_path}/a.nc"}, prognostic={"level": ["specific_humidity"]}
    )
    with pytest.raises(StoreError, match=r"expected a variable of .*a.nc .*got 'specific_humidity'"):
        open_store(section, Variables(section))


@pytest.mark.parametrize("per_chunk", [1, 2])
@pytest.mark.parametrize("levels", [[100, 1000], [850], [500, 850, 100]])
@pytest.mark.parametrize(
    ("kind", "dtype", "joined"),
    [
        ("zarr", "f4", False),
        ("zarr", "f8", False),
        ("netcdf", "f4", False),
        ("netcdf", "packed", False),
        ("netcdf", "packed", True),
    ],
)
def test_chunks_of_levels_that_nobody_wants_are_not_decoded(
    tmp_path, dataset, data_section, monkeypatch, kind, dtype, joined, levels, per_chunk
):
    """Every chunk with a wanted level is decoded once a time, and no other."""
    ds = dataset()[["u", "sp", "rain", "sst", "orography", "lsm"]]
    sizes = {"time": 1, "level": per_chunk, "latitude": 9, "longitude": 12}
    chunks = "chunks" if kind == "zarr" else "chunksizes"
    encoding = {"u": {chunks: [sizes[dim] for dim in ds["u"].dims]}}
    if dtype == "packed":
        encoding["u"] |= {"dtype": "int16", "scale_factor": 0.01, "add_offset": 5.0, "_FillValue": -32768}
    else:
        ds["u"] = ds["u"].astype(dtype)
    parts = {"a": ds.isel(time=slice(0, 20)), "b": ds.isel(time=slice(20, 40))} if joined else {"a": ds}
    for name, part in parts.items():
        path = tmp_path / f"{name}.{kind}"
        part.to_zarr(path, encoding=encoding, consolidated=False) if kind == "zarr" else part.to_netcdf(
            path, encoding=encoding
        )
    data = data_section(
        tmp_path,
        source={"type": kind, "path": f"{tmp_path}/*.{kind}"},
        levels=levels,
        prognostic={"level": ["u"], "surface": ["sp"]},
    )
    variables = Variables(data)
    store = open_store(data, variables)
    decoded = []

    def counted(self, chunk):
        decoded.append(chunk[1])
        return of_zarr(self, chunk)

    def noted(self, name, spans):
        decoded.extend(range(spans[1][0] // per_chunk, -(-spans[1][1] // per_chunk)))
        return of_netcdf(self, name, spans)

    of_zarr, of_netcdf = ChunkedArray._coded, netcdf_files.File.read
    monkeypatch.setattr(ChunkedArray, "_coded", counted)
    monkeypatch.setattr(netcdf_files.File, "read", noted)
    got = store.read([variables["u"]], [7], slice(2, 5))
    expected = naive(ds, [variables["u"]], [7], slice(2, 5))
    np.testing.assert_allclose(got, expected, atol=0.006 if dtype == "packed" else 0)
    positions = [[100, 500, 850, 1000].index(level) // per_chunk for level in levels]
    assert sorted(decoded) == sorted(set(positions))


def test_a_climatology_repeats(tmp_path, dataset, data_section):
    ds = dataset()
    ds.drop_vars("sst").to_zarr(tmp_path / "a.zarr", consolidated=False)
    year = xr.Dataset(
        {"sst": (("time", "latitude", "longitude"), np.arange(365.0)[:, None, None] + np.zeros((365, 9, 12)))},
        {"time": xr.date_range("1900-01-01", periods=365), "latitude": ds.latitude, "longitude": ds.longitude},
    )
    year.to_zarr(tmp_path / "year.zarr", consolidated=False)
    forcing = {"surface": [{"name": "sst", "path": str(tmp_path / "year.zarr"), "fill": "cyclic"}]}
    data = data_section(tmp_path / "a.zarr", dynamic_forcing=forcing)
    variables = Variables(data)
    store = open_store(data, variables)
    assert len(store) == 40
    got = store.read([variables["sst"]], [0, 1, 4, 12, 39, 39 + 4 * 356])[:, 0, 0, 0]
    np.testing.assert_array_equal(got, [0, 0, 1, 3, 9, 0])  # the day itself; 2002-01-01T18 is the last


@pytest.mark.parametrize("kind", ["zarr", "netcdf"])
def test_a_field_without_time_that_files_have_differently_is_refused_where_it_is_used(
    tmp_path, dataset, data_section, kind
):
    ds = dataset()
    for part in range(4):
        one = ds.isel(time=slice(10 * part, 10 * part + 10)).copy(deep=True)
        one["orography"] += part // 3
        one["lsm"][0, 0] = np.nan
        if part % 2:
            one = one.transpose(..., "longitude", "latitude")
        one.to_zarr(tmp_path / f"{part}.zarr", consolidated=False) if kind == "zarr" else one.to_netcdf(
            tmp_path / f"{part}.nc"
        )
    source = {"type": kind, "path": f"{tmp_path}/*.{'zarr' if kind == 'zarr' else 'nc'}"}
    data = data_section("", source=source)
    with pytest.raises(
        StoreError, match=r"expected orography, which has no time, .* fields in .*0\..* and .*3\."
    ) as caught:
        open_store(data, Variables(data))
    assert len(caught.value.problems) == 1
    data = data_section("", source=source, static={"surface": ["lsm"]})
    assert len(open_store(data, Variables(data))) == 40


@pytest.mark.parametrize("changed", [5, 17, 36])
def test_a_static_field_with_times_is_compared_at_many_of_them(dataset, changed):
    from credit_like.data.locate import _constant

    still = dataset(steps=1)["orography"].expand_dims(time=40).copy(deep=True)
    still[:3], still[38:] = np.nan, np.nan  # an archive whose axis is longer than its data
    assert 3 <= _constant(still, "orography") < 38
    still[changed:38, 4, 4] += 1
    with pytest.raises(ValueError, match="expected a static field, got 40 times of orography"):
        _constant(still, "orography")


MID_MONTHS = np.array([f"{y}-{m:02d}-16" for y, m in [(2000, 12), *((2001, m) for m in range(1, 13)), (2002, 1)]])


@pytest.mark.parametrize(
    ("times", "values", "message"),
    [
        (xr.date_range("2000-01-01", periods=366), np.arange(366), ""),
        (xr.date_range("2000-01-01", periods=731), np.arange(731), "got 2000-01-01T.* to 2001-12-31"),
        (xr.date_range("2001-01-01", periods=450), np.arange(450) % 365, ""),  # as in a copy beside fields of 450 days
        (xr.date_range("2001-01-01", periods=450), np.arange(450) % 366, "got 2001-01-01T.* to 2002-03-26"),
        (MID_MONTHS.astype("M8[ns]"), [12, *range(1, 13), 1], ""),  # continued at its ends
        (MID_MONTHS.astype("M8[ns]"), [0, *range(1, 13), 2], "got 2000-12-16T.* to 2002-01-16"),
        (np.array(["2000-01-01", "2001-06-01"], "M8[ns]"), [1, 1], "got 2000-01-01"),
    ],
)
def test_several_years_are_no_climatology_unless_they_repeat_one(
    tmp_path, dataset, data_section, times, values, message
):
    ds = dataset()
    ds.drop_vars("sst").to_zarr(tmp_path / "a.zarr", consolidated=False)
    field = np.asarray(values, float)[:, None, None] + np.full((9, 12), [np.nan] + 11 * [0.0])
    grid = {"latitude": ds.latitude, "longitude": ds.longitude}
    years = xr.Dataset({"sst": (("time", "latitude", "longitude"), field)}, {"time": times, **grid})
    years.to_zarr(tmp_path / "years.zarr", consolidated=False)
    forcing = {"surface": [{"name": "sst", "path": str(tmp_path / "years.zarr"), "fill": "cyclic"}]}
    data = data_section(tmp_path / "a.zarr", dynamic_forcing=forcing)
    if message:
        with pytest.raises(StoreError, match=f"one climatological year of sst .*, {message}"):
            open_store(data, Variables(data))
    else:
        assert len(open_store(data, Variables(data))) == 40


def test_a_store_that_disappears_is_one_clear_error(stored, tmp_path):
    _, _, variables, store = stored()
    store.read(variables.outputs, [0])
    shutil.rmtree(tmp_path / "store.zarr")
    with pytest.raises(ReadError, match=r"cannot read u at 2001-01-01T18:00:00 from .*store.zarr"):
        store.read(variables.outputs, [3])


def test_a_damaged_chunk_names_variable_time_and_store(stored, tmp_path):
    _, _, variables, store = stored()
    chunk = tmp_path / "store.zarr" / "rain" / "c" / "5" / "0" / "0"
    chunk.write_bytes(chunk.read_bytes()[:20])
    with pytest.raises(ReadError, match=r"cannot read rain at 2001-01-02T06:00:00 from .*store.zarr"):
        store.read(variables.outputs, [5])


def test_a_read_that_falters_is_repeated(stored, monkeypatch):
    ds, _, variables, store = stored()
    calls = []
    real = store._load_once

    def falter(*args):
        calls.append(args)
        if len(calls) < 3:
            raise OSError("connection lost")
        return real(*args)

    monkeypatch.setattr(store, "_load_once", falter)
    monkeypatch.setattr("credit_like.data.store._PAUSE", 0.0)
    np.testing.assert_array_equal(store.read([variables["sp"]], [3]), naive(ds, [variables["sp"]], [3]))
    assert len(calls) == 3


def test_times_out_of_order_or_twice(tmp_path, dataset, data_section):
    ds = dataset()
    xr.concat([ds, ds.isel(time=[39])], "time", data_vars="minimal").to_zarr(tmp_path / "a.zarr", consolidated=False)
    data = data_section(tmp_path / "a.zarr")
    with pytest.raises(StoreError, match=r"got 2001-01-10T18:00:00 twice"):
        open_store(data, Variables(data))


def test_opening_needs_no_torch():
    import subprocess
    import sys

    code = "import sys, credit_like.data.store, credit_like.data.statistics; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_level_of_zero_that_is_absent_is_no_division(recwarn):
    message = str(OtherLevel("u", "a.nc", np.array([1.0, 2.0]), [0.0]))
    assert message == "expected levels of u in a.nc (1, 2), got 0; change it"
    assert not recwarn.list
