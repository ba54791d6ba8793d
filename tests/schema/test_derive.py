"""The forms of `derive` in a file."""

import pytest

from credit_like.schema.derive import Derive


def test_a_list_and_a_mapping_say_the_same():
    listed = Derive.model_validate([{"pressure_levels": [850, 500]}, "geopotential", {"model_levels": "era5-137"}])
    spelt = {"fields": ["geopotential"], "pressure_levels": [850, 500], "model_levels": "era5-137"}
    assert listed == Derive.model_validate(spelt)
    assert Derive.model_validate(listed.model_dump(mode="json")) == listed


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (["height"], "geopotential"),
        ([{"pressure_levels": [500]}, {"pressure_levels": [850]}], "pressure_levels more than once"),
        ([{"pressure_levels": [0]}], "above 0 hPa, got 0"),
        ([{"pressure_levels": [500, 500]}], "different pressure levels"),
        (["divergence", "divergence"], "each field once"),
    ],
)
def test_what_says_nothing_is_refused(value, message):
    with pytest.raises(ValueError, match=message):
        Derive.model_validate(value)
