import numpy as np
import pytest

from credit_like.data import solar
from credit_like.data.store import StoreError, open_store
from credit_like.data.times import from_seconds, parse
from credit_like.errors import UserError
from credit_like.schema.data import Role
from credit_like.schema.load import load_experiment
from credit_like.variables import Variables
from tests.experiments import DEMO, SHORT

LATITUDE = np.array([-90.0, -66.0, -30.0, 0.0, 23.4, 51.0, 80.0, 90.0])
LONGITUDE = np.arange(0, 360, 7.5)


def over_a_day(day, step_hours):
    end = parse(f"{day}T00:00:00", "standard") + np.arange(step_hours, 25, step_hours) * 3600
    times = from_seconds(end, "standard")
    return solar.insolation(times, "standard", step_hours * 3600, LATITUDE, LONGITUDE).astype(np.float64)


def test_the_orbit_is_as_close_to_the_almanac_as_stated():
    """The low-precision formulas of the Astronomical Almanac: the Sun to 0.01°, the equation of time to 3.5 s."""
    times = np.arange("1979-01-01", "2024-01-01", 6, dtype="datetime64[h]").astype("datetime64[s]")
    days = (times - np.datetime64("2000-01-01T12:00:00")) / np.timedelta64(1, "D")
    longitude, anomaly = np.deg2rad(280.460 + 0.9856474 * days), np.deg2rad(357.528 + 0.9856003 * days)
    ecliptic = longitude + np.deg2rad(1.915 * np.sin(anomaly) + 0.020 * np.sin(2 * anomaly))
    tilt = np.deg2rad(23.439 - 4e-7 * days)
    ascension = np.arctan2(np.cos(tilt) * np.sin(ecliptic), np.cos(ecliptic))
    distance = 1.00014 - 0.01671 * np.cos(anomaly) - 0.00014 * np.cos(2 * anomaly)
    equation = (longitude - ascension + np.pi) % (2 * np.pi) - np.pi
    found = solar.orbit(times)
    assert np.abs(found[0] - np.arcsin(np.sin(tilt) * np.sin(ecliptic))).max() < 0.006
    assert np.abs(found[1] - equation).max() * 86400 / (2 * np.pi) < 42
    assert np.abs(found[2] * distance**2 - 1).max() < 1.1e-3


@pytest.mark.parametrize("day", ["2001-01-04", "2001-03-20", "2001-06-21", "2001-11-09"])
def test_the_day_adds_up_to_the_closed_form(day):
    """Daily insolation = S (d/r)² / π · (h₀ sin φ sin δ + cos φ cos δ sin h₀) · 86400 s, orbit of noon.

    (e.g. Hartmann, Global Physical Climatology, 2.7). The declination moves during the day: hence 1 %, or 2e5 J m-2.
    """
    noon = from_seconds(np.array([parse(f"{day}T12:00:00", "standard")]), "standard")
    declination, _, distance = (x[0] for x in solar.orbit(noon))
    phi = np.deg2rad(np.clip(LATITUDE, -89.99, 89.99))
    sunset = np.arccos(np.clip(-np.tan(phi) * np.tan(declination), -1, 1))
    mean = sunset * np.sin(phi) * np.sin(declination) + np.cos(phi) * np.cos(declination) * np.sin(sunset)
    expected = solar.SOLAR_CONSTANT * distance / np.pi * mean * 86400
    for hours in (1, 6, 24):
        total = over_a_day(day, hours).sum(0)
        np.testing.assert_allclose(total.mean(1), expected, rtol=0.01, atol=2e5)


def test_steps_of_any_length_add_up():
    fine, coarse = over_a_day("2001-05-13", 3), over_a_day("2001-05-13", 6)
    np.testing.assert_allclose(fine[0::2] + fine[1::2], coarse, rtol=1e-6, atol=1)


def test_against_quadrature_of_the_zenith_angle():
    """Midpoint rule in 20 s steps of S (d/r)² max(0, cos θ)."""
    end = np.array([parse("2001-04-17T09:00:00", "standard")])
    got = solar.insolation(from_seconds(end, "standard"), "standard", 6 * 3600, LATITUDE, LONGITUDE)[0]
    seconds = end[0] - 6 * 3600 + np.arange(10, 6 * 3600, 20)
    declination, equation, distance = solar.orbit(from_seconds(seconds, "standard"))
    hour = (2 * np.pi * (seconds / 86400 % 1) - np.pi + equation)[:, None, None] + np.deg2rad(LONGITUDE)
    phi = np.deg2rad(LATITUDE)[:, None]
    tilt = declination[:, None, None]
    cosine = np.sin(phi) * np.sin(tilt) + np.cos(phi) * np.cos(tilt) * np.cos(hour)
    expected = (solar.SOLAR_CONSTANT * distance[:, None, None] * np.maximum(cosine, 0)).sum(0) * 20
    np.testing.assert_allclose(got, expected, rtol=5e-3, atol=5e3)


def test_the_orbit_at_its_marks():
    """Solstices, equinoxes, perihelion: tilt 23.44°, eccentricity 0.0167."""
    marks = ["2001-06-21T07:38:00", "2001-12-21T19:21:00", "2001-03-20T13:31:00", "2001-09-22T23:04:00"]
    times = from_seconds(np.array([parse(mark, "standard") for mark in marks]), "standard")
    declination, _, _ = solar.orbit(times)
    np.testing.assert_allclose(np.rad2deg(declination), [23.44, -23.44, 0, 0], atol=0.5)
    near, far = (
        solar.orbit(from_seconds(np.array([parse(day, "standard")]), "standard"))[2][0]
        for day in ("2001-01-04T09:00:00", "2001-07-04T14:00:00")
    )
    assert np.sqrt(near) == pytest.approx(1 / (1 - 0.0167), rel=5e-4)
    assert np.sqrt(far) == pytest.approx(1 / (1 + 0.0167), rel=5e-4)


def test_noon_follows_the_sun():
    """Over a step that ends at 12 UTC the subsolar longitude has come from the east."""
    end = from_seconds(np.array([parse("2001-04-15T12:00:00", "standard")]), "standard")
    field = solar.insolation(end, "standard", 3600, np.array([0.0]), LONGITUDE)[0, 0]
    assert LONGITUDE[field.argmax()] == 7.5


def test_global_mean_over_a_year_is_a_quarter_of_the_constant():
    days = np.arange(0, 365, 5) * 86400 + parse("2001-01-01T00:00:00", "standard")
    latitude = np.linspace(-89, 89, 90)
    field = solar.insolation(from_seconds(days, "standard"), "standard", 86400, latitude, np.array([0.0, 180.0]))
    weights = np.cos(np.deg2rad(latitude))
    mean = (field.mean((0, 2)) * weights).sum() / weights.sum() / 86400
    assert mean == pytest.approx(solar.SOLAR_CONSTANT / 4, rel=2e-3)


TABLE = """# year, W m-2
1999, 1361.5
2001 1360.5   # 2000 is missing, and lies between
2002 1362.5
"""


@pytest.fixture
def table(tmp_path):
    (tmp_path / "sun.txt").write_text(TABLE)
    return solar.read_irradiance(str(tmp_path / "sun.txt"))


@pytest.mark.parametrize("calendar", ["standard", "noleap", "360_day"])
def test_irradiance_holds_in_the_middle_of_its_year_and_is_linear_between(table, calendar):
    marks = {
        "1999-01-01T00:00:00": 1361.5,
        "1999-07-02T12:00:00": 1361.5,
        "2000-07-02T00:00:00": 1361.0,
        "2001-07-02T12:00:00": 1360.5,
        "2002-01-01T00:00:00": 1361.5,
        "2002-12-30T00:00:00": 1362.5,
    }
    times = from_seconds(np.array([parse(mark, calendar) for mark in marks]), calendar)
    np.testing.assert_allclose(table.at(times), list(marks.values()), atol=0.01)


def test_insolation_is_proportional_to_the_irradiance(table):
    times = from_seconds(np.array([parse("2001-07-02T12:00:00", "standard")]), "standard")
    plain, scaled = (
        solar.insolation(times, "standard", 6 * 3600, LATITUDE, LONGITUDE, given) for given in (None, table)
    )
    lit = plain > 1e5
    np.testing.assert_allclose(scaled[lit] / plain[lit], 1360.5 / solar.SOLAR_CONSTANT, rtol=1e-6)


@pytest.mark.parametrize("year", [1998, 2003])
def test_a_year_outside_the_table_is_an_error(table, year):
    times = from_seconds(np.array([parse(f"{year}-06-01T00:00:00", "standard")]), "standard")
    with pytest.raises(UserError, match=f"expected years from 1999 to 2002, which .*sun.txt has, got {year}-06-01"):
        table.at(times)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected lines of a year and its W m-2 in .*, got none"),
        ("2000 1361\n2000 1362\n", ":2: expected a year after 2000, got 2000"),
        ("2000.5 1361\n", ":1: expected a whole year and its W m-2, got '2000.5 1361'"),
        ("2000 1361 2\n", ":1: expected a whole year"),
        ("2000 nan\n", ":1: expected W m-2 above 0, got nan"),
        ("2000 -1\n", ":1: expected W m-2 above 0, got -1"),
    ],
)
def test_a_table_that_cannot_be_read_is_named_with_its_line(tmp_path, text, message):
    path = tmp_path / "sun.txt"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        solar.read_irradiance(str(path))


def test_an_experiment_reads_insolation_of_its_table(tmp_path):
    """From the keys of an experiment to the fields, and its messages where the table does not suit."""
    (tmp_path / "sun.txt").write_text("1999 1000\n2000 1000\n")

    def store(**keys):
        sun = {"name": "sun", "compute": "solar", **keys}
        data = load_experiment(DEMO, SHORT).data
        data = data.model_copy(update={"dynamic_forcing": Role.model_validate({"surface": [sun]})})
        return open_store(data, Variables(data))

    fields = []
    for opened in (store(), store(irradiance=str(tmp_path / "sun.txt"))):
        fields.append(opened.forcing([0, 59], now=0))
        opened.close()
    np.testing.assert_allclose(fields[1], fields[0] * (1000 / solar.SOLAR_CONSTANT), rtol=1e-6)
    with pytest.raises(StoreError, match=r"data.dynamic_forcing.surface.0.irradiance: expected a table .*nothing.txt"):
        store(irradiance=str(tmp_path / "nothing.txt"))
    (tmp_path / "old.txt").write_text("1850 1360\n1900 1361\n")
    with pytest.raises(StoreError, match=r"expected years from 1850 to 1900, which .*old.txt has, got 2000-01-01"):
        store(irradiance=str(tmp_path / "old.txt"))
