"""The order of channels, which the whole program takes from one place."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_like.schema.data import DataSection
from credit_like.variables import ROLES, Variables

BASE = {
    "source": {"type": "netcdf", "path": "x.nc"},
    "timestep": "6h",
    "train": ["2000-01-01", "2000-01-31"],
    "valid": ["2000-02-01", "2000-02-28"],
    "test": ["2000-03-01", "2000-03-31"],
}


def section(**roles):
    return DataSection.model_validate({**BASE, **roles})


def test_channels_are_level_variables_with_the_level_fastest_then_the_surface():
    variables = Variables(
        section(
            levels=[500, 850.5],
            prognostic={"level": ["U", {"name": "Q", "levels": [1000]}], "surface": ["SP"]},
            diagnostic={"surface": ["rain"]},
            dynamic_forcing={"surface": ["sun"]},
            static={"surface": ["z"], "level": ["mask"]},
        )
    )
    assert Variables.channel_names(variables.outputs) == ["U@500", "U@850.5", "Q@1000", "SP", "rain"]
    assert Variables.channel_names(variables.role("static")) == ["mask@500", "mask@850.5", "z"]
    assert (variables.in_channels, variables.out_channels) == (4 + 3 + 1, 5)
    assert [variable.name for variable in variables] == ["U", "Q", "SP", "rain", "sun", "mask", "z"]
    assert variables["Q"].levels == (1000.0,)
    assert len(variables["U"]) == 2
    assert len(variables["sun"]) == 1


_name = st.text("abcdefgh_", min_size=1, max_size=6)


@settings(deadline=None)
@given(st.data(), st.lists(st.integers(1, 1000), min_size=1, max_size=4, unique=True))
def test_slices_cut_the_stack_of_channels_into_its_variables(data, levels):
    names = data.draw(st.lists(_name, min_size=1, max_size=12, unique=True))
    roles = {role: {"level": [], "surface": []} for role in ROLES}
    roles["prognostic"][data.draw(st.sampled_from(["level", "surface"]))].append(names[0])
    for name in names[1:]:
        roles[data.draw(st.sampled_from(ROLES))][data.draw(st.sampled_from(["level", "surface"]))].append(name)
    variables = Variables(section(levels=levels, **roles))
    for role in ROLES:
        stack = Variables.channel_names(variables.role(role))
        assert len(stack) == variables.n(role)
        slices = Variables.slices(variables.role(role))
        assert list(slices) == roles[role]["level"] + roles[role]["surface"]
        for name, where in slices.items():
            assert stack[where] == list(variables[name].channels)
        assert sum(len(stack[where]) for where in slices.values()) == len(stack)
    assert variables.out_channels == len(Variables.channel_names(variables.outputs))


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ({"prognostic": {"level": ["U"]}}, "expected data.levels for prognostic variable 'U'"),
        ({"prognostic": {"surface": ["a", "a"]}}, "got a more than once"),
        ({"prognostic": {"surface": ["a"]}, "static": {"surface": ["a"]}}, "got a more than once"),
        ({"prognostic": {}}, "at least one prognostic"),
    ],
)
def test_what_makes_no_channels_is_refused(roles, message):
    with pytest.raises(ValueError, match=message):
        Variables(section(**roles))


def test_an_unknown_name_is_answered_with_the_closest():
    variables = Variables(section(prognostic={"surface": ["temperature", "pressure"]}))
    with pytest.raises(ValueError, match="did you mean 'temperature'"):
        variables["temprature"]
