"""GRIB files of forecasts, decoded by ecCodes itself and read back as a data source."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from credit_like import registry
from credit_like.data.times import from_seconds
from credit_like.grid import Grid
from credit_like.inference.layout import ForecastLayout, choose
from credit_like.inference.writers import _grib
from credit_like.schema.data import DataSection
from credit_like.variables import Variables

eccodes = pytest.importorskip("eccodes")

REGULAR = Grid(np.linspace(90, -90, 7), np.arange(12) * 30.0)
GAUSSIAN = Grid(np.rad2deg(np.arcsin(np.polynomial.legendre.leggauss(8)[0]))[::-1].copy(), np.arange(16) * 22.5)
UNITS = {
    "temperature": {"units": "degC"},
    "2m_temperature": {"units": "K"},
    "total_precipitation": {"units": "mm"},
    "sea_surface_temperature": {"units": "K"},
    "level_temperature": {"units": "hPa", "standard_name": "air_pressure"},
}
WRITER = registry.module("writer", "grib")


def layout_of(grid=REGULAR, members=1, levels=(500, 850), surface=(), attrs=UNITS, calendar="standard"):
    names = surface or ("2m_temperature", "sea_surface_temperature")
    variables = Variables(
        DataSection.model_validate(
            {
                "source": {"type": "synthetic"},
                "timestep": "6h",
                "levels": list(levels),
                "prognostic": {"level": ["temperature"], "surface": list(names)},
                "diagnostic": {"surface": ["total_precipitation"]},
                "train": ["2000-01-01", "2000-02-01"],
                "valid": ["2000-03-01", "2000-03-02"],
                "test": ["2000-04-01", "2000-04-02"],
            }
        )
    )
    return ForecastLayout(
        init=from_seconds(np.array([1582956000, 1583020800]), calendar),
        leads=(1, 4),
        timestep=21600,
        members=members,
        grid=grid,
        variables=tuple(variables.outputs),
        chosen=choose(variables.outputs),
        variable_attrs=attrs,
        attrs={},
    )


def write(layout, folder, **options):
    """Write random fields; return them as {(init, member, lead): (C, H, W)}, and the folder of the files."""
    generator = np.random.default_rng(0)
    config = WRITER.Config(**options)
    writer = WRITER.open_writer(config, layout, folder)
    writer.open()
    shape = (sum(map(len, layout.variables)), layout.grid.height, layout.grid.width)
    there = {}
    for member in range(layout.members):
        for lead, steps in enumerate(layout.leads):
            fields = generator.normal(280, 10, (2, *shape)).astype(np.float32)
            fields[:, 3, :2, 1] = np.nan
            writer.write([(0, member), (1, member)], lead, layout.select(fields))
            there.update({(i, member, steps): fields[i] for i in range(2)})
    for init in range(2):
        assert not writer.is_complete(init)
        writer.complete(init)
    assert writer.finish()
    return there, WRITER.finished_path(folder)


def messages(path):
    """Yield the keys and values of every message, as ecCodes decodes them."""
    with path.open("rb") as file:
        while (handle := eccodes.codes_grib_new_from_file(file)) is not None:
            eccodes.codes_set(handle, "missingValue", 1e30)
            keys = ("shortName", "dataDate", "dataTime", "stepRange", "typeOfLevel", "level", "gridType", "units")
            found = {key: eccodes.codes_get(handle, key, str) for key in keys}
            found["number"] = eccodes.codes_get(handle, "number") if eccodes.codes_is_defined(handle, "number") else 0
            values = eccodes.codes_get_values(handle).reshape(-1, eccodes.codes_get(handle, "Ni"))
            yield found, np.where(values == 1e30, np.nan, values)
            eccodes.codes_release(handle)


def test_rows_of_a_fine_gaussian_grid_are_no_regular_ones():
    """Their spacing varies by less than a thousandth of a degree."""
    latitude = np.rad2deg(np.arcsin(np.polynomial.legendre.leggauss(1600)[0]))
    assert np.ptp(np.diff(latitude)) < 1e-3
    keys = {
        kind: _grib._grid_keys(Grid(rows, np.arange(4) * 90.0))
        for kind, rows in (
            ("regular_gg", latitude[::-1].astype(np.float32)),
            ("regular_ll", np.linspace(90, -90, 1600).round(4)),
        )
    }
    assert {kind: found["gridType"] for kind, found in keys.items()} == {kind: kind for kind in keys}
    assert keys["regular_gg"]["N"] == 800


@pytest.mark.parametrize(("grid", "kind"), [(REGULAR, "regular_ll"), (GAUSSIAN, "regular_gg")])
@pytest.mark.parametrize(("members", "bits"), [(1, 16), (3, 32)])
def test_every_field_is_what_eccodes_decodes(tmp_path, grid, kind, members, bits, capfd):
    layout = layout_of(grid, members)
    there, folder = write(layout, tmp_path, bits_per_value=bits)
    assert "ECCODES" not in capfd.readouterr().err
    assert sorted(path.name for path in folder.iterdir()) == ["20200229T060000.grib", "20200301T000000.grib"]
    channels = {("t", "500"): 0, ("t", "850"): 1, ("2t", "2"): 2, ("sst", "0"): 3, ("tp", "0"): 4}
    seen = set()
    for init, path in enumerate(sorted(folder.iterdir())):
        for keys, values in messages(path):
            assert (keys["dataDate"], keys["dataTime"]) == [("20200229", "0600"), ("20200301", "0000")][init]
            assert keys["gridType"] == kind
            channel = channels[keys["shortName"], keys["level"]]
            steps = int(keys["stepRange"].split("-")[-1]) // 6
            if channel == 4:
                assert keys["stepRange"] == f"{6 * steps - 6}-{6 * steps}"
            assert (
                keys["typeOfLevel"]
                == ["isobaricInhPa", "isobaricInhPa", "heightAboveGround", "surface", "surface"][channel]
            )
            field = there[init, keys["number"], steps][channel].astype(np.float64)
            expected = field + 273.15 if channel < 2 else field / 1000 if channel == 4 else field
            error = 2.0**-bits * np.ptp(expected[np.isfinite(expected)]) if bits == 16 else 1e-7 * np.nanmax(expected)
            np.testing.assert_allclose(values, expected, rtol=0, atol=1.01 * error)
            seen.add((init, keys["number"], steps, channel))
    assert len(seen) == 2 * members * 2 * 5


def test_the_source_reads_what_was_written(tmp_path):
    there, folder = write(layout_of(), tmp_path, bits_per_value=32)
    source = registry.module("source", "grib")
    found = source.open_dataset(source.Config(path=str(folder / "20200301T000000.grib")))
    np.testing.assert_allclose(found["latitude"], REGULAR.latitude)
    np.testing.assert_allclose(found["longitude"], REGULAR.longitude)
    assert [str(t)[:13] for t in found["time"].values] == ["2020-03-01T06", "2020-03-02T00"]
    np.testing.assert_allclose(found["2t"].values[1], there[1, 0, 4][2], rtol=1e-6)
    np.testing.assert_allclose(found["t"].sel(level=850).values[0], there[1, 0, 1][1] + 273.15, rtol=1e-6)


@pytest.mark.parametrize(
    ("levels", "units", "expected"),
    [
        ((50000, 85000), "Pa", {("isobaricInhPa", "500"), ("isobaricInhPa", "850")}),
        ((0.5, 850), "hPa", {("isobaricInPa", "50"), ("isobaricInhPa", "850")}),
        ((500, 850), "mb", {("isobaricInhPa", "500"), ("isobaricInhPa", "850")}),
        ((50, 85), "kPa", {("isobaricInhPa", "500"), ("isobaricInhPa", "850")}),
        ((54, 137), "1", {("hybrid", "54"), ("hybrid", "137")}),
        ((54, 137), "", {("hybrid", "54"), ("hybrid", "137")}),
    ],
)
def test_levels_in_other_units_are_where_they_were(tmp_path, levels, units, expected):
    kind = "air_pressure" if levels[1] != 137 else "model_level_number"
    attrs = {"units": units, "standard_name": kind}
    there, folder = write(layout_of(levels=levels, attrs={**UNITS, "level_temperature": attrs}), tmp_path)
    first = min(folder.iterdir())
    found = {
        (k["typeOfLevel"], k["level"]): v for k, v in messages(first) if k["shortName"] == "t" and k["stepRange"] == "6"
    }
    assert set(found) == expected
    (place,) = (key for key in found if key in {("isobaricInhPa", "850"), ("hybrid", "137")})
    np.testing.assert_allclose(found[place], there[0, 0, 1][1] + 273.15, atol=0.01)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"surface": ("soil_colour",)},
            r"parameter table for grib, got 'soil_colour'; choose others .*, or use netcdf \(in .*: -o FILE.nc\)",
        ),
        (
            {"attrs": {**UNITS, "total_precipitation": {}}},
            r"expected units of total_precipitation for grib, got none; give the variable `units: m` .*, or use netcdf",
        ),
        ({"attrs": {**UNITS, "temperature": {"units": "m"}}}, "expected temperature in K for grib, got m"),
        (
            {"grid": Grid(np.array([80.0, 50.0, 0.0, -60.0]), np.arange(12) * 30.0)},
            "expected a regular or Gaussian grid",
        ),
        (
            {"levels": (3.64, 3.9), "attrs": {**UNITS, "level_temperature": {}}},
            "expected levels of whole Pa .* got 3.64 without units",
        ),
        (
            {"attrs": {**UNITS, "level_temperature": {}}},
            r"got 500 without units of temperature; give the levels of the files `units` \(hPa, or 1 .*, or use netcdf",
        ),
        (
            {"attrs": {**UNITS, "total_precipitation": {"units": "mm", "period_hours": "12"}}},
            r"total_precipitation as sums over whole hours, at most the first lead \(6 h\), for grib, got sums over 12 h",
        ),
        ({"members": 256}, r"expected at most 255 members for grib, got 256; use netcdf"),
        ({"calendar": "noleap"}, r"the standard calendar for grib, got noleap; use netcdf \(in .*: -o FILE.nc\)"),
        ({"levels": (0.0005, 1), "attrs": UNITS}, "expected levels of whole Pa .* got 0.0005 hPa"),
        (
            {"levels": (10, 100), "attrs": {**UNITS, "level_temperature": {"units": "m"}}},
            "expected levels of whole Pa .* got 10 m",
        ),
        (
            {"attrs": {**UNITS, "level_temperature": {"units": "torr", "standard_name": "air_pressure"}}},
            "expected levels of whole Pa .* got 500 torr",
        ),
    ],
)
def test_what_grib_does_not_have_is_refused_before_anything_is_written(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        WRITER.open_writer(WRITER.Config(), layout_of(**change), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("columns", "rows"), [(330 - np.arange(12) * 30.0, REGULAR.latitude), ([345, 350, 355, 0, 5], [10, 20, 30])]
)
def test_columns_may_go_westward_and_across_the_meridian(tmp_path, columns, rows):
    grid = Grid(np.array(rows, float), np.array(columns, float))
    there, folder = write(layout_of(grid), tmp_path)
    first = min(folder.iterdir())
    source = registry.module("source", "grib")
    found = source.open_dataset(source.Config(path=str(first)))["2t"]
    found = found.assign_coords(longitude=found["longitude"].values % 360).sel(longitude=grid.longitude % 360)
    np.testing.assert_allclose(found.sel(latitude=grid.latitude).values[0], there[0, 0, 1][2], atol=0.01)
    values = next(values for keys, values in messages(first) if keys["shortName"] == "2t")
    np.testing.assert_allclose(values, there[0, 0, 1][2], atol=0.01)


def test_derived_fields_on_pressure_levels_have_the_parameter_of_the_variable(tmp_path):
    from credit_like.inference.writers._grib import _parameter

    assert _parameter("temperature_pl") == _parameter("t") == 130
    assert _parameter("wind_speed") == 10
    layout = layout_of()
    pl = dataclasses.replace(layout.variables[0], name="temperature_pl", levels=(250.0, 500.0))
    layout = dataclasses.replace(
        layout,
        variables=(*layout.variables, pl),
        chosen={**layout.chosen, "temperature_pl": pl.levels},
        variable_attrs={**UNITS, "temperature_pl": {"units": "K"}, "level_temperature_pl": UNITS["level_temperature"]},
    )
    fields, folder = write(layout, tmp_path)
    first, *_ = sorted(folder.iterdir())
    found = [(keys["shortName"], keys["typeOfLevel"], keys["level"]) for keys, _ in messages(first)]
    assert found.count(("t", "isobaricInhPa", "250")) == len(layout.leads)
    assert len(fields) == 2 * len(layout.leads)


def test_sums_are_over_the_time_that_the_data_declare(tmp_path):
    rain = {"units": "mm", "period_hours": "1"}
    _, folder = write(layout_of(attrs={**UNITS, "total_precipitation": rain}), tmp_path)
    ranges = {keys["stepRange"] for keys, _ in messages(min(folder.iterdir())) if keys["shortName"] == "tp"}
    assert ranges == {"5-6", "23-24"}


def test_a_fraction_needs_no_units(tmp_path):
    attrs = {**UNITS, "sea_ice_cover": {}, "2m_temperature": {"units": "K"}}
    writer = WRITER.open_writer(
        WRITER.Config(), layout_of(surface=("2m_temperature", "sea_ice_cover"), attrs=attrs), tmp_path
    )
    assert writer.kinds["sea_ice_cover"] == (31, 1.0, 0.0)


@pytest.mark.parametrize("members", [1, 2])
def test_every_parameter_is_the_one_that_was_asked_for(tmp_path, members):
    from credit_like.inference.writers._grib import _PARAMETERS, _SUMS

    writer = WRITER.open_writer(WRITER.Config(), layout_of(members=members), tmp_path)
    for name, parameter in _PARAMETERS.items():
        handle = writer._message(parameter, on_levels=name in ("temperature", "vorticity"))
        assert eccodes.codes_get(handle, "paramId") == parameter, name
        assert (eccodes.codes_get(handle, "stepType") == "accum") == (parameter in _SUMS), name
        eccodes.codes_release(handle)
