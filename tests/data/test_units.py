import pytest

from credit_like.data.units import between, conversion


@pytest.mark.parametrize(
    ("source", "target", "value", "expected"),
    [
        ("degC", "K", 20.0, 293.15),
        ("°C", "K", 20.0, 293.15),
        ("K", "degC", 293.15, 20.0),
        ("degF", "degC", 212.0, 100.0),
        ("hPa", "Pa", 1013.25, 101325.0),
        ("Pa", "mbar", 101325.0, 1013.25),
        ("g/kg", "kg kg-1", 12.0, 0.012),
        ("kg kg**-1", "g kg^-1", 0.012, 12.0),
        ("m s**-1", "m/s", 3.0, 3.0),
        ("knots", "m s-1", 3600.0, 1852.0),
        ("km/h", "m s-1", 36.0, 10.0),
        ("m", "mm", 0.002, 2.0),
        ("mm", "kg m-2", 2.0, 2.0),
        ("kg m-2", "m", 2.0, 0.002),
        ("mm day-1", "kg m-2 s-1", 86400.0, 1.0),
        ("J m-2", "W s m-2", 5.0, 5.0),
        ("m2 s-2", "J/kg", 7.0, 7.0),
        ("%", "1", 50.0, 0.5),
        ("Kelvin", "K", 1.0, 1.0),
        ("degK", "K", 1.0, 1.0),
        ("degree_Celsius", "K", 20.0, 293.15),
        ("degrees Celsius", "K", 20.0, 293.15),
        ("deg C", "degF", 100.0, 212.0),
        ("(0 - 1)", "%", 0.5, 50.0),
        ("0-1", "1", 0.5, 0.5),
        ("fraction", "%", 0.5, 50.0),
    ],
)
def test_known_conversions(source, target, value, expected):
    factor, offset = conversion(source, target)
    assert factor * value + offset == pytest.approx(expected, rel=1e-12)
    back, shift = conversion(target, source)
    assert back * expected + shift == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("source", "target"),
    [("K", "Pa"), ("m", "m s-1"), ("furlong", "m"), ("K", "Kelvins?"), ("kg m-3", "kg kg-1"), ("1", "kg m-3")],
)
def test_what_does_not_convert_says_so(source, target):
    with pytest.raises(ValueError, match=r"expected units"):
        conversion(source, target)


def test_units_that_nobody_knows_are_not_compared():
    assert between("furlong", "m") is None
    assert between("m", "of water equivalent") is None
    assert between("", "m") is None
    assert between("1", "") is None
    assert between("cm", "m") == (0.01, 0.0)
    with pytest.raises(ValueError, match="expected units that 'K' converts to, got 'Pa'"):
        between("K", "Pa")
