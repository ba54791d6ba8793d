"""Which variables are precipitation, and below which value a step is dry."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from credit_like.evaluation.precipitation import dry_limit, is_precipitation
from credit_like.schema.data import VariableSpec
from credit_like.variables import Variable


def variable(name="tp", levels=()):
    return Variable(name, "diagnostic", levels, VariableSpec(name=name))


def store(**attrs):
    return SimpleNamespace(attrs=lambda _: attrs, step_seconds=21600)


@pytest.mark.parametrize(
    ("units", "limit"),
    [
        ("kg m-2", 0.25),
        ("mm", 0.25),
        ("m", 0.25e-3),
        ("cm", 0.025),
        ("kg m-2 s-1", 0.25 / 21600),
        ("mm h-1", 0.25 / 6),
        ("mm/day", 1.0),
        ("m s-1", 0.25e-3 / 21600),
        ("", 0.25),
        ("inches of something", 0.25),
        ("K", 0.25),
    ],
)
def test_a_quarter_of_a_millimetre_in_a_step_is_dry(units, limit):
    assert dry_limit(variable(), store(units=units)) == pytest.approx(limit, rel=1e-12)


def test_precipitation_is_known_by_name_or_standard_name_at_the_surface():
    assert is_precipitation(variable("tp"), store())
    assert is_precipitation(variable("pr"), store(standard_name="precipitation_flux"))
    assert is_precipitation(variable("large_scale_precip"), store())
    assert not is_precipitation(variable("t2m"), store())
    assert not is_precipitation(variable("precipitable_water"), store())
    assert not is_precipitation(variable("precip", (500.0, 850.0)), store())
