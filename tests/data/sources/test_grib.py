"""GRIB: every value at its point as ecCodes itself decodes it, from messages that the tests make with ecCodes."""

import os
import pickle
import struct
import threading
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from credit_like import cli
from credit_like.data.files.direct import direct
from credit_like.data.sources import _grib_files
from credit_like.data.sources._spectral import Synthesis, gaussian_grid
from credit_like.data.sources.grib import Config, open_dataset
from credit_like.errors import UserError
from tests.data.sources.test_spectral import summed

eccodes = pytest.importorskip("eccodes", reason="the extra `grib` (ecCodes) is not installed")

FOLDER = Path(os.environ.get("CREDIT_LIKE_DATA", "absent")) / "grib"
shared = pytest.mark.skipif(not FOLDER.is_dir(), reason="CREDIT_LIKE_DATA is not set, or has no grib")
with_ducc = pytest.mark.skipif(find_spec("ducc0") is None, reason="the extra `grib` (ducc0) is not installed")
SCANNING = ("iScansNegatively", "jScansPositively", "jPointsAreConsecutive", "alternativeRowScanning")


def message(values=None, *, edition=2, shape=(5, 8), scanning=(), missing=None, area=None, **keys):
    """Return a message of a regular latitude-longitude grid; `values` are in the order in which they are stored."""
    handle = eccodes.codes_grib_new_from_samples(f"regular_ll_pl_grib{edition}")
    rows, columns = shape
    north, west, south, east = area or (80, 0, -80, 360 - 360 / columns)
    south_first, east_first = "jScansPositively" in scanning, "iScansNegatively" in scanning
    grid = {
        "Ni": columns, "Nj": rows,
        "latitudeOfFirstGridPointInDegrees": south if south_first else north,
        "latitudeOfLastGridPointInDegrees": north if south_first else south,
        "longitudeOfFirstGridPointInDegrees": east if east_first else west,
        "longitudeOfLastGridPointInDegrees": west if east_first else east,
        "iDirectionIncrementInDegrees": abs(east - west) / (columns - 1),
        "jDirectionIncrementInDegrees": (north - south) / (rows - 1),
        **dict.fromkeys(scanning, 1),
    }  # fmt: skip
    field = {"dataDate": 20200101, "dataTime": 0, "shortName": "t", "typeOfLevel": "isobaricInhPa", "level": 500}
    for key, value in {**grid, **field, **keys}.items():
        eccodes.codes_set(handle, key, value)
    values = np.arange(rows * columns, dtype=float) if values is None else np.asarray(values, float).ravel()
    if missing is not None:
        eccodes.codes_set(handle, "bitmapPresent", 1)
        eccodes.codes_set(handle, "missingValue", 9999)
        values = np.where(np.isin(np.arange(values.size), missing), 9999, values)
    eccodes.codes_set(handle, "bitsPerValue", 24)
    eccodes.codes_set_values(handle, values)
    content = eccodes.codes_get_message(handle)
    eccodes.codes_release(handle)
    return content


def surface(name, values=None, **keys):
    where = {"typeOfLevel": "heightAboveGround", "level": 2} if name == "2t" else {"typeOfLevel": "surface", "level": 0}
    return message(values, shortName=name, **where, **keys)


def accumulated(start, end, **keys):
    """Return total precipitation over hours `start` to `end` of a forecast."""
    return surface("tp", stepType="accum", stepRange=f"{start}-{end}", **keys)


def write(path, *messages):
    path.write_bytes(b"".join(messages))
    return str(path)


def opened(path, **options):
    return open_dataset(Config(path=str(path), **options))


def decoded(path, alternate=False):
    """Yield (latitude, longitude → value) of each message, by ecCodes alone, whose iterator ignores alternating rows."""
    with open(path, "rb") as file:
        while (handle := eccodes.codes_grib_new_from_file(file)) is not None:
            if alternate:
                eccodes.codes_set(handle, "swapScanningAlternativeRows", 1)
            eccodes.codes_set(handle, "missingValue", 1e300)
            points = eccodes.codes_grib_get_data(handle)
            eccodes.codes_release(handle)
            yield {
                (round(p.lat, 4), round(p.lon % 360, 4) % 360): p.value if p.value < 1e299 else np.nan for p in points
            }


def compared(field, points):
    """Compare a field (latitude, longitude) with ecCodes' values at all points, bit for bit in float32."""
    assert field.size == len(points)
    latitude, longitude = field["latitude"].values, field["longitude"].values
    there = [[points[round(float(a), 4), round(float(o) % 360, 4) % 360] for o in longitude] for a in latitude]
    np.testing.assert_array_equal(field.transpose("latitude", "longitude").values, np.float32(there))


@pytest.mark.parametrize("edition", [1, 2])
@pytest.mark.parametrize("bits", range(16))
def test_every_scanning_mode(tmp_path, edition, bits):
    scanning = [key for i, key in enumerate(SCANNING) if bits >> i & 1]
    if edition == 1 and "alternativeRowScanning" in scanning:
        pytest.skip("edition 1 has no alternating rows")
    path = write(tmp_path / "a.grib", message(edition=edition, scanning=scanning, missing=[3, 17]))
    dataset = opened(path)
    assert np.all(np.diff(dataset["longitude"]) > 0)
    field = dataset["t"].isel(time=0, level=0).load()
    assert np.isnan(field.values).sum() == 2
    alternate = "alternativeRowScanning" in scanning
    if (
        alternate and "jPointsAreConsecutive" in scanning
    ):  # ecCodes swaps rows only: give it columns that do not alternate
        order = [5 * c + (4 - r if c % 2 else r) for c in range(8) for r in range(5)]
        gone = [i for i, k in enumerate(order) if k in (3, 17)]
        write(tmp_path / "a.grib", message(order, scanning=[k for k in scanning if k != SCANNING[3]], missing=gone))
        alternate = False
    (points,) = decoded(path, alternate)
    compared(field, points)


@pytest.mark.parametrize("area", [(60, -10, 50, 4), (60, 170, 50, 184), (60, 350, 50, 364)])
def test_a_region_that_crosses_greenwich_or_the_date_line(tmp_path, area):
    path = write(tmp_path / "a.grib", message(area=area, edition=1))
    field = opened(path)["t"].isel(time=0, level=0)
    assert np.allclose(np.diff(field["longitude"]), 2)
    (points,) = decoded(path)
    compared(field, points)


def test_levels_members_times_and_constants_of_several_files(tmp_path):
    rng = np.random.default_rng(0)
    values = {}
    for hour in (0, 6):
        contents = []
        for member in (0, 3):
            for level in (850, 500):
                field = values[hour, member, level] = rng.normal(size=40)
                ensemble = {"productDefinitionTemplateNumber": 1, "perturbationNumber": member}
                contents.append(message(field, dataTime=100 * hour, **ensemble, level=level))
        write(tmp_path / f"{hour}.grib", *reversed(contents))
    write(tmp_path / "static.grib", surface("lsm", edition=1), surface("z", edition=1))
    with pytest.raises(UserError, match=r"got absent; change data\.source\.select\.typeOfLevel"):
        opened(tmp_path / "*.grib", select={"typeOfLevel": "absent"})
    with pytest.raises(UserError, match=r"expected number of .* \(0, 3\), got 1"):
        opened(tmp_path / "*.grib", select={"number": 1})
    with pytest.raises(UserError, match="'nonsense'; remove it or use one of number, step"):
        opened(tmp_path / "*.grib", select={"nonsense": 1})
    dataset = opened(tmp_path / "?.grib")
    assert dataset["t"].dims == ("time", "number", "level", "latitude", "longitude")
    assert dataset["level"].values.tolist() == [500, 850]
    assert dataset["t"].attrs == {"units": "K", "long_name": "Temperature", "standard_name": "air_temperature"}
    for i, hour in enumerate((0, 6)):
        for j, member in enumerate((0, 3)):
            for k, level in enumerate((500, 850)):
                np.testing.assert_allclose(dataset["t"][i, j, k].values.ravel(), values[hour, member, level], atol=1e-5)
    one = opened(tmp_path / "?.grib", select={"number": 3})
    np.testing.assert_array_equal(one["t"].values, dataset["t"].sel(number=3).values)
    array, offsets = direct(one["t"].variable[:, :, 1:4])
    box = array.box([(0, 2), (1, 2), (offsets[2] + 1, offsets[2] + 3), (2, 7)])
    np.testing.assert_array_equal(box, one["t"].values[:, 1:2, 2:4, 2:7])
    with_static = opened(tmp_path / "*.grib", select={"number": 0})
    assert with_static["lsm"].dims == with_static["z_surface"].dims == ("latitude", "longitude")


def test_forecasts_are_at_the_end_of_their_steps(tmp_path):
    contents = [surface("2t", np.full(40, step), step=step) for step in (0, 6, 12)]
    contents += [accumulated(0, step, values=np.full(40, step)) for step in (6, 12)]
    path = write(tmp_path / "a.grib", *contents)
    dataset = opened(path)
    assert np.array_equal(
        dataset["time"], np.datetime64("2020-01-01T00") + np.array([0, 6, 12]).astype("timedelta64[h]")
    )
    np.testing.assert_array_equal(dataset["2t"][:, 0, 0], [0, 6, 12])
    np.testing.assert_array_equal(dataset["tp"][:, 0, 0], [np.nan, 6, 12])
    write(tmp_path / "b.grib", *contents, accumulated(6, 12, values=np.full(40, 99)))
    with pytest.raises(UserError, match=r"period 12\.0 and 6\.0; set data\.source\.select\.period to one of them"):
        opened(tmp_path / "b.grib")
    assert dataset["tp"].attrs["period_hours"] == "6 12"
    only = opened(tmp_path / "b.grib", select={"period": 6})
    np.testing.assert_array_equal(only["tp"][:, 0, 0], [6, 99])
    assert only["tp"].attrs["period_hours"] == "6"
    assert "period_hours" not in dataset["2t"].attrs
    write(tmp_path / "c.grib", *contents, surface("2t", np.full(40, 77), dataTime=600))
    with pytest.raises(UserError, match=r"both valid at 2020-01-01T06:00:00, with step 6\.0 and 0\.0"):
        opened(tmp_path / "c.grib")
    np.testing.assert_array_equal(opened(tmp_path / "c.grib", select={"step": 0})["2t"][:, 0, 0], [0, 77])


def test_a_message_twice_is_refused_or_read_first(tmp_path):
    path = write(tmp_path / "a.grib", message(np.full(40, 1)), message(np.full(40, 2)))
    with pytest.raises(UserError, match=r"message 1 \(t\) of .* and message 2 .*duplicates: first"):
        opened(path)
    assert opened(path, duplicates="first")["t"][0, 0, 0, 0] == 1


def test_temperature_at_2_m_and_wind_at_10_m_share_a_file(tmp_path):
    """Both are at heights above ground, which are no levels of either; wind at several heights has them."""
    made = []
    for hour in (0, 600):
        made.append(surface("2t", np.full(40, 280 + hour), dataTime=hour))
        for name, value in (("10u", 5), ("10v", -3)):
            made.append(
                message(
                    np.full(40, value + hour), shortName=name, typeOfLevel="heightAboveGround", level=10, dataTime=hour
                )
            )
        made.append(message(np.full(40, 500 + hour), dataTime=hour))
    dataset = opened(write(tmp_path / "a.grib", *made))
    for name, value in (("2t", 280), ("10u", 5), ("10v", -3)):
        assert dataset[name].dims == ("time", "latitude", "longitude")
        np.testing.assert_array_equal(dataset[name][:, 2, 3], [value, value + 600])
    assert dataset["t"].dims == ("time", "level", "latitude", "longitude")
    made += [
        message(np.full(40, level), shortName="u", typeOfLevel="heightAboveGround", level=level) for level in (80, 120)
    ]
    dataset = opened(write(tmp_path / "b.grib", *made))
    assert dataset["2t"].dims == ("time", "latitude", "longitude")
    np.testing.assert_array_equal(dataset["heightAboveGround"], [80, 120])


def test_pressure_in_pa_and_hpa_is_one_axis(tmp_path):
    path = write(tmp_path / "a.grib", message(), message(typeOfLevel="isobaricInPa", level=50))
    assert opened(path)["level"].values.tolist() == [0.5, 500]


def test_fields_that_share_a_message_with_a_common_bitmap(tmp_path):
    """GRIB 2 may repeat sections 4 to 7 for several fields, as NCEP does for wind."""
    multi = eccodes.codes_grib_multi_new()
    rng = np.random.default_rng(1)
    single = [message(rng.normal(size=40), shortName=name, missing=[5]) for name in ("u", "v", "t")]
    for content in single:
        handle = eccodes.codes_new_from_message(content)
        eccodes.codes_grib_multi_append(handle, 4, multi)
        eccodes.codes_release(handle)
    with open(tmp_path / "multi.grib", "wb") as file:
        eccodes.codes_grib_multi_write(multi, file)
    eccodes.codes_grib_multi_release(multi)
    assert (tmp_path / "multi.grib").read_bytes().count(b"7777") == 1
    dataset, apart = opened(tmp_path / "multi.grib"), opened(write(tmp_path / "apart.grib", *single))
    assert sorted(dataset.data_vars) == ["t", "u", "v"]
    for name in dataset.data_vars:
        np.testing.assert_array_equal(dataset[name], apart[name])


def test_bytes_between_messages_and_a_parameter_without_name(tmp_path):
    unknown = message(discipline=0, parameterCategory=4, parameterNumber=200)
    path = write(tmp_path / "a.grib", b"\x01\r\r\nGRI", message(), b"\0" * 70_000, unknown, b"\n\n")
    assert sorted(opened(path).data_vars) == ["param_0_4_200", "t"]


def reduced_gaussian(values=None, **keys):
    handle = eccodes.codes_grib_new_from_samples("reduced_gg_pl_32_grib2")
    for key, value in {"dataDate": 20200101, "dataTime": 0, "shortName": "t", "level": 500, **keys}.items():
        eccodes.codes_set(handle, key, value)
    if values is not None:
        eccodes.codes_set(handle, "bitsPerValue", 24)
        eccodes.codes_set_values(
            handle, values(*(eccodes.codes_get_array(handle, k) for k in ("latitudes", "longitudes")))
        )
    content = eccodes.codes_get_message(handle)
    eccodes.codes_release(handle)
    return content


def compared_by_row(field, path):
    """Compare the rows of a reduced grid with a linear interpolation of ecCodes' values, and where points coincide exactly."""
    longitude, rows, same = field["longitude"].values, {}, 0
    with open(path, "rb") as file:
        handle = eccodes.codes_grib_new_from_file(file)
        points = [eccodes.codes_get_array(handle, key) for key in ("latitudes", "longitudes", "values")]
        eccodes.codes_release(handle)
    for lat, lon, value in zip(*points, strict=True):
        rows.setdefault(lat, []).append((lon, value))
    np.testing.assert_allclose(field["latitude"], sorted(rows, reverse=True), atol=1e-4)
    for row, (lat, line) in zip(field.values, sorted(rows.items(), reverse=True), strict=True):
        there, values = np.array(sorted(line)).T
        expected = np.interp(longitude, there, values, period=360)
        np.testing.assert_allclose(row, expected, atol=2e-5, err_msg=str(lat))
        coincide = np.abs(longitude[:, None] - there).min(1) < 1e-3
        same += coincide.sum()
        np.testing.assert_array_equal(
            row[coincide], np.float32(values[np.abs(longitude[:, None] - there).argmin(1)][coincide])
        )
    return same


def test_reduced_gaussian_rows_keep_their_values_and_are_linear_between(tmp_path):
    path = write(tmp_path / "a.grib", reduced_gaussian(lambda lat, lon: lat + np.cos(np.deg2rad(lon))))
    field = opened(path)["t"].isel(time=0, level=0)
    assert field.shape == (64, 128)
    assert compared_by_row(field, path) > 3000


def spectral(name, seed=0, **keys):
    """Return a message of random coefficients of truncation 63; those of order 0 are real."""
    handle = eccodes.codes_grib_new_from_samples("sh_pl_grib1")
    values = np.random.default_rng(seed).standard_normal(len(eccodes.codes_get_values(handle)))
    values[1:128:2] = 0
    when = {"dataDate": 20200101, "dataTime": 0, "typeOfLevel": "isobaricInhPa", "level": 500}
    for key, value in {**when, "shortName": name, **keys}.items():
        eccodes.codes_set(handle, key, value)
    eccodes.codes_set_values(handle, values)
    content = eccodes.codes_get_message(handle)
    eccodes.codes_release(handle)
    return content


def coefficients(path):
    """Return short name → values of each message, as ecCodes decodes them."""
    found = {}
    with open(path, "rb") as file:
        while (handle := eccodes.codes_grib_new_from_file(file)) is not None:
            found[eccodes.codes_get(handle, "shortName")] = eccodes.codes_get_values(handle)
            eccodes.codes_release(handle)
    return found


@with_ducc
def test_spectral_fields_are_on_the_grid_of_the_others(tmp_path):
    path = write(tmp_path / "mixed.grib", spectral("z"), message(), spectral("z", 1, level=850), message(level=850))
    found = opened(path)
    assert found["z"].shape == found["t"].shape == (1, 2, 5, 8)
    np.testing.assert_array_equal(found["t"].sel(level=500)[0], np.arange(40.0).reshape(5, 8))
    last = coefficients(path)["z"]
    expected = summed(last, 63, found["latitude"].values, found["longitude"].values)
    np.testing.assert_allclose(found["z"].sel(level=850)[0], expected, rtol=0, atol=1e-6 * np.abs(expected).max())
    part = found["z"].isel(latitude=slice(1, 3)).sel(level=850)[0]
    np.testing.assert_array_equal(part, found["z"].sel(level=850)[0, 1:3])


@with_ducc
def test_spectral_vorticity_and_divergence_give_the_wind(tmp_path):
    path = write(tmp_path / "wind.grib", spectral("vo"), spectral("d", 1), spectral("vo", 2, level=850))
    found = opened(path)
    assert found["u"].shape == (1, 2, 64, 128)
    assert found["v"].attrs["units"] == "m s**-1"
    values = coefficients(write(tmp_path / "one.grib", spectral("vo"), spectral("d", 1)))
    synthesis = Synthesis(63, *gaussian_grid(63))
    for name, expected in zip("uv", synthesis.wind(values["vo"], values["d"]), strict=True):
        np.testing.assert_array_equal(found[name].sel(level=500)[0], np.float32(expected))
        assert np.isnan(found[name].sel(level=850)).all()  # without divergence
    expected = summed(values["vo"], 63, found["latitude"].values[:3], found["longitude"].values)
    np.testing.assert_allclose(found["vo"].sel(level=500)[0, :3], expected, rtol=0, atol=1e-6 * np.abs(expected).max())
    with pytest.raises(UserError, match=r"got spectral coefficients in message 1 \(u\) of .*; convert"):
        opened(write(tmp_path / "u.grib", spectral("u"), spectral("v")))


@with_ducc
@shared
def test_the_spectral_file_of_a_centre():
    found = opened(FOLDER / "spherical_harmonics.grib")["z"][0, 0]
    assert found.shape == (64, 128)
    (values,) = coefficients(FOLDER / "spherical_harmonics.grib").values()
    rows = found["latitude"].values[[0, 20, 31, 63]]
    expected = summed(values, 63, rows, found["longitude"].values)
    np.testing.assert_allclose(found[[0, 20, 31, 63]], expected, rtol=1e-6)
    # Typhoon Lan of 2017-10-18 12 UTC, near 14N 132E, is the deepest point of the northern tropics.
    tropics = found.where((found["latitude"] > 5) & (found["latitude"] < 20), drop=True)
    deepest = tropics.where(tropics == tropics.min(), drop=True)
    assert abs(float(deepest["latitude"][0]) - 14) < 3
    assert abs(float(deepest["longitude"][0]) - 132) < 3


def test_what_is_no_grid_is_refused_in_one_message(tmp_path):
    rotated = message(gridType="rotated_ll", angleOfRotation=0, latitudeOfSouthernPoleInDegrees=-30)
    with pytest.raises(
        UserError, match=r"expected fields on rows and columns, got message 1 .* on grid rotated_ll; regrid"
    ):
        opened(write(tmp_path / "rotated.grib", rotated))
    write(tmp_path / "mixed.grib", message(), message(shape=(9, 16), shortName="q"))
    with pytest.raises(UserError, match=r"one grid, got message 1 \(t\) of .* 5 × 8 .* message 2 \(q\) .* 9 × 16"):
        opened(tmp_path / "mixed.grib")
    write(tmp_path / "levels.grib", message(), message(typeOfLevel="hybrid", level=3))
    with pytest.raises(UserError, match=r"expected t on one type of level, got hybrid, isobaricInhPa"):
        opened(tmp_path / "levels.grib")


@pytest.mark.parametrize("edition", [1, 2])
def test_damaged_files_are_refused_by_message_and_byte(tmp_path, edition, capfd):
    one = message(edition=edition)
    for cut in (1, 10, len(one) // 2, len(one) - 5):
        path = write(tmp_path / "a.grib", one, one[:-cut])
        with pytest.raises(UserError, match=rf"message 2 at byte {len(one)} is truncated or damaged"):
            opened(path)
    with pytest.raises(UserError, match="without any message"):
        opened(write(tmp_path / "text.grib", b"no messages here"))
    with pytest.raises(UserError, match="without any message"):
        opened(write(tmp_path / "empty.grib"))
    for long in (len(one) + 1, 2**63 + 1) if edition == 2 else (len(one) + 1,):
        length = long.to_bytes(8, "big") if edition == 2 else long.to_bytes(3, "big") + one[7:8]
        with pytest.raises(UserError, match="message 2 at byte"):
            opened(
                write(
                    tmp_path / "long.grib",
                    one,
                    one[: 8 if edition == 2 else 4] + length + one[16 if edition == 2 else 8 :],
                )
            )
    without_length = one[:4] + b"\0\0\0\1" + one[8:] if edition == 1 else one[:8] + bytes(8) + one[16:]
    with pytest.raises(UserError, match=rf"message 2 at byte {len(one)} is truncated or damaged"):
        opened(write(tmp_path / "zero.grib", one, without_length))
    with pytest.raises(UserError, match="got edition 3 in message 1"):
        opened(write(tmp_path / "new.grib", one[:7] + b"\3" + one[8:]))
    with pytest.raises(UserError, match="on disk"):
        opened("https://example.org/a.grib")


def test_a_date_that_does_not_exist_is_refused(tmp_path):
    content = bytearray(message(edition=2))
    at = content.index((2020).to_bytes(2, "big") + b"\1\1")
    content[at + 2 : at + 4] = b"\2\36"  # 30 February
    with pytest.raises(UserError, match=r"a date in message 1 \(t\) of .* dataDate 20200230|truncated or damaged"):
        opened(write(tmp_path / "a.grib", bytes(content)))


@pytest.mark.parametrize("edition", [1, 2])
def test_changed_bytes_give_fields_or_one_message(tmp_path, edition):
    """Whatever a header says, neither another exception nor a crash of the library follows."""
    content, rng = message(edition=edition), np.random.default_rng(edition)
    lengths = {1: [8, 8 + content[10]], 2: [16, 37, 109]}[edition]  # where a section's length is coded
    places = [*lengths, *rng.integers(8, 150 if edition == 2 else 80, 40)]
    for place in places:
        changed = bytearray(content)
        changed[place] = 127 if place in lengths else rng.integers(256)
        try:
            opened(write(tmp_path / "a.grib", bytes(changed))).load()
        except (UserError, OSError):
            continue
        assert place not in lengths


def test_a_file_that_changed_since_it_was_indexed_is_an_error_of_reading(tmp_path):
    path = write(tmp_path / "a.grib", message())
    dataset = opened(path)
    write(tmp_path / "a.grib", b"x" * 100)
    with pytest.raises(OSError, match="no longer where it was"):
        dataset["t"].load()


def test_threads_processes_and_the_index(tmp_path, monkeypatch):
    """Fields are read at once from several threads and a forked child; the file is indexed once."""
    values = np.random.default_rng(2).normal(size=(6, 40))
    path = write(tmp_path / "a.grib", *(message(v, dataTime=100 * i) for i, v in enumerate(values)))
    dataset = opened(path)
    calls = []
    inner = _grib_files._described
    monkeypatch.setattr(_grib_files, "_described", lambda *args: calls.append(1) or inner(*args))
    again = opened(path)
    assert not calls
    wrong = []

    def read():
        for i in np.random.default_rng().permutation(6):
            if not np.allclose(dataset["t"][i].values.ravel(), values[i], atol=1e-5):
                wrong.append(i)  # noqa: PERF401

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    child = os.fork()
    if not child:
        same = np.allclose(again["t"].values.reshape(6, 40), values, atol=1e-5)
        os._exit(0 if same else 1)
    for thread in threads:
        thread.join()
    assert not wrong
    assert os.waitpid(child, 0)[1] == 0
    assert pickle.loads(pickle.dumps(_grib_files.index(path))) == _grib_files.index(path)


@shared
@pytest.mark.parametrize(
    "name",
    [
        "era5-2mt-2019-03-uk", "fields_with_missing_values", "regular_gg_ml", "regular_gg_pl", "regular_gg_sfc",
        "regular_ll_sfc", "scanning_mode_64",
    ],
)  # fmt: skip
def test_files_of_centres(name):
    path = FOLDER / f"{name}.grib"
    dataset = opened(path)
    (field,) = dataset.data_vars.values()
    for i, points in zip(range(min(3, field.sizes["time"])), decoded(path), strict=False):
        compared(field.isel(time=i).squeeze("level") if "level" in field.dims else field.isel(time=i), points)


@shared
def test_levels_and_members_of_era5():
    path = FOLDER / "era5-levels-members.grib"
    dataset = opened(path)
    assert dict(dataset.sizes) == {"time": 4, "number": 10, "level": 2, "latitude": 61, "longitude": 120}
    with open(path, "rb") as file:
        for _ in range(160):
            handle = eccodes.codes_grib_new_from_file(file)
            names = ("shortName", "number", "level", "validityDate", "validityTime")
            name, number, level, date, time = (eccodes.codes_get(handle, key) for key in names)
            values = np.float32(eccodes.codes_get_values(handle)).reshape(61, 120)
            eccodes.codes_release(handle)
            if (number, level) in ((0, 500), (7, 850)):
                when = f"{date // 10000}-{date // 100 % 100:02d}-{date % 100:02d}T{time // 100:02d}"
                np.testing.assert_array_equal(dataset[name].sel(time=when, number=number, level=level), values)


@shared
def test_the_reduced_grid():
    field = opened(FOLDER / "reduced_gg.grib")["10u"][0]
    assert field.shape == (96, 192)
    assert compared_by_row(field, FOLDER / "reduced_gg.grib") > 7000


@shared
@pytest.mark.parametrize(
    "name", sorted({path.stem for path in FOLDER.glob("*.grib")} - {"spherical_harmonics", "reduced_gg"})
)
def test_every_message_of_every_file(name):
    """Each has ecCodes' values; the tests above compare them point by point where the grids differ."""
    path = FOLDER / f"{name}.grib"
    dataset, count = opened(path), 0
    keys = ("shortName", "typeOfLevel", "number", "level", "validityDate", "validityTime")
    with open(path, "rb") as file:
        while (handle := eccodes.codes_grib_new_from_file(file)) is not None:
            found = {key: eccodes.codes_get(handle, key) for key in keys if eccodes.codes_is_defined(handle, key)}
            eccodes.codes_set(handle, "missingValue", 1e300)
            values = eccodes.codes_get_values(handle)
            eccodes.codes_release(handle)
            date, time = str(found["validityDate"]), found["validityTime"]
            at = {"time": np.datetime64(f"{date[:4]}-{date[4:6]}-{date[6:]}T{time // 100:02d}:{time % 100:02d}")}
            names = [found["shortName"], f"{found['shortName']}_{found['typeOfLevel']}"]
            field = dataset[next(one for one in names if one in dataset)]
            at |= {key: found[key] for key in ("number", "level") if key in field.dims}
            field = field.sel({key: value for key, value in at.items() if key in field.dims})
            expected = np.sort(np.where(values > 1e299, np.nan, values).astype(np.float32))
            np.testing.assert_array_equal(np.sort(field.values.ravel()), expected)
            count += 1
    assert count == sum(np.prod(one.shape[:-2], dtype=int) for one in dataset.data_vars.values())


def test_without_the_library_the_message_names_the_extra(tmp_path, monkeypatch):
    path = write(tmp_path / "a.grib", message())
    monkeypatch.setitem(__import__("sys").modules, "eccodes", None)
    with pytest.raises(UserError, match=r"install 'credit-like\[grib\]'"):
        opened(path)


@pytest.mark.slow
def test_check_and_train(tmp_path, capsys):
    """An experiment on GRIB files passes `check` and trains, with variables under WeatherBench2's names."""
    rng = np.random.default_rng(3)
    contents = []
    for i in range(16):
        keys = {
            "shape": (32, 64),
            "area": (87.1875, 0, -87.1875, 354.375),
            "dataDate": 20200101 + i // 4,
            "dataTime": 600 * (i % 4),
        }
        contents += [message(280 + rng.normal(size=2048), level=level, **keys) for level in (500, 850)]
        contents.append(surface("2t", 290 + rng.normal(size=2048), **keys))
    keys.update(dataDate=20200101, dataTime=0)
    write(tmp_path / "a.grib", *contents, surface("z", 1000 * rng.normal(size=2048), **keys))
    (tmp_path / "a.yml").write_text(
        f"""
name: grib
save_loc: {tmp_path}/run
data:
  source: {{type: grib, path: {tmp_path}/a.grib}}
  timestep: 6h
  levels: [500, 850]
  prognostic: {{level: [temperature], surface: [2m_temperature]}}
  static: {{surface: [geopotential_at_surface]}}
  train: [2020-01-01, 2020-01-02T18]
  valid: [2020-01-03, 2020-01-03T18]
  test: [2020-01-04, 2020-01-04T18]
model:
  type: wxformer
  dim: [8, 16, 32, 64]
  depth: [1, 1, 1, 1]
  dim_head: 8
  padding_conf: {{activate: true, mode: earth, pad_lat: [16, 16], pad_lon: [0, 0]}}
loss: {{type: mse}}
trainer: {{global_batch_size: 2, micro_batch_size: 2, epochs: 1, loader: {{num_workers: 1}}}}
inference: {{init: 2020-01-04, lead: 6h}}
"""
    )
    for command in ("check", "train"):
        with pytest.raises(SystemExit) as ended:
            cli.main([command, str(tmp_path / "a.yml")])
        assert ended.value.code == 0, capsys.readouterr()
    assert (tmp_path / "run" / "checkpoints" / "step-3").is_dir()
    with xr.open_dataset(tmp_path / "run" / "statistics.nc") as statistics:
        mean = dict(zip(statistics["channel"].values.tolist(), statistics["mean"].values, strict=True))
    assert mean["2m_temperature"] == pytest.approx(290, abs=0.05)
    assert mean["temperature@850"] == pytest.approx(280, abs=0.05)


def test_missing_points_within_complex_packing_are_missing(tmp_path):
    """Template 5.2 with missing value management 1, as NCEP writes it: all bits of a value are set, and no bitmap tells."""
    ordinary = message(range(40))
    sections, at = {}, 16
    while ordinary[at : at + 4] != b"7777":
        size = int.from_bytes(ordinary[at : at + 4], "big")
        sections[ordinary[at + 4]] = ordinary[at : at + size]
        at += size
    values = np.arange(40, dtype=np.uint8)
    values[[3, 17]] = 255
    described = struct.pack(">BIH", 5, 40, 2) + struct.pack(">fHH", 280.0, 0, 0) + bytes([8, 0, 1, 1])
    described += struct.pack(">f", 9.999e20) + b"\xff\xff\xff\xff" + struct.pack(">I", 1) + bytes([0, 8])
    described += struct.pack(">IBIB", 0, 1, 40, 8)
    sections[5] = struct.pack(">I", len(described) + 4) + described
    sections[6] = struct.pack(">IBB", 6, 6, 255)
    packed = bytes([0, 8, 40]) + values.tobytes()
    sections[7] = struct.pack(">IB", 5 + len(packed), 7) + packed
    body = b"".join(sections[number] for number in sorted(sections)) + b"7777"
    (tmp_path / "a.grib").write_bytes(ordinary[:8] + struct.pack(">Q", 16 + len(body)) + body)
    field = opened(tmp_path / "a.grib")["t"].isel(time=0, level=0).transpose("latitude", "longitude").values.ravel()
    expected = 280.0 + np.arange(40)
    expected[[3, 17]] = np.nan
    np.testing.assert_array_equal(field, expected)


def test_messages_of_a_name_in_other_units_are_refused(tmp_path):
    """Total precipitation is in m as parameter 228, and in kg m**-2 as 228228."""
    first = message(typeOfLevel="surface", level=0, edition=1, paramId=228, stepRange="0-6")
    second = message(typeOfLevel="surface", level=0, paramId=228228, stepRange="0-6", dataDate=20200102)
    with pytest.raises(UserError, match=r"expected tp in the same units, got 'm' in .* and 'kg m\*\*-2' in "):
        opened(write(tmp_path / "a.grib", first, second))
