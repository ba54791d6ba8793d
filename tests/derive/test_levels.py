"""Coefficients of hybrid levels from files."""

import netCDF4
import numpy as np
import pytest

from credit_like.derive.levels import HybridLevels, read_levels
from credit_like.errors import UserError


def write(path, **variables):
    with netCDF4.Dataset(path, "w") as dataset:
        dataset.createDimension("ilev", len(next(iter(variables.values()))))
        for name, values in variables.items():
            dataset.createVariable(name, "f8", ("ilev",) if np.ndim(values) else ())[...] = values
    return str(path)


def test_era5_has_137_levels_from_the_top_of_the_atmosphere_to_the_surface():
    levels = read_levels("era5-137")
    assert len(levels) == 137
    assert (levels.a[0], levels.b[0], levels.a[-1], levels.b[-1]) == (0, 0, 0, 1)


def test_cams_dimensionless_coefficients_are_multiplied_by_their_reference_pressure(tmp_path):
    where = write(tmp_path / "cam.nc", hyai=[0.002, 0.1, 0.0], hybi=[0.0, 0.2, 1.0], P0=1e5)
    np.testing.assert_allclose(read_levels(where).a, [200, 10_000, 0])


def test_coefficients_of_a_yaml_file(tmp_path):
    path = tmp_path / "levels.yml"
    path.write_text("a: [0, 5000, 0]\nb: [0, 0.3, 1]\n")
    np.testing.assert_allclose(read_levels(str(path)).b, [0, 0.3, 1])


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("a: [0, 5000, 0]\nb: [1, 0.3, 0]\n", "do not increase"),
        ("a: [0, 5000, 0]\nb: [1, 0.3]\n", "as many"),
        ("x: [1]\n", "coefficients"),
        ("a: [0, one, 2]\nb: [0, 0.3, 1]\n", "cannot be read"),
        ("[1, 2]\n", "coefficients"),
    ],
)
def test_a_file_that_holds_no_levels_is_refused_in_one_message(tmp_path, content, complaint):
    path = tmp_path / "levels.yml"
    path.write_text(content)
    with pytest.raises(UserError, match=complaint):
        read_levels(str(path))


def test_levels_of_the_file_come_before_numbers():
    """A file with some of the levels of a model: 60 is one of its own, although it has more than 60."""
    interfaces = np.linspace(0, 1e5, 89)
    levels = HybridLevels(interfaces * 0.5, interfaces * 0.5e-5, np.arange(50.0, 138.0))
    for wanted in ([60.0, 70.0], [100.0, 137.0]):
        np.testing.assert_array_equal(levels.numbers(np.array(wanted)), np.array(wanted) - 50)
    np.testing.assert_array_equal(levels.numbers(np.array([1.0, 60.0])), [0, 59])  # 1 is none of its own


def test_an_unknown_name_is_refused():
    with pytest.raises(UserError, match="era5-137 or a file"):
        read_levels("era5-60")
