import math

import pytest

from tests.largest import largest, worst


@pytest.mark.parametrize("at", [0, 1, 2])
def test_what_is_not_a_number_is_the_largest_error(at):
    errors = [0.0, 1e-15, 3e-15]
    assert largest(errors) == 3e-15
    errors[at] = math.nan
    assert largest(errors) == math.inf
    assert worst(zip(errors, "abc", strict=True)) == (math.inf, "abc"[at])
