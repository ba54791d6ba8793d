"""Whatever an experiment file holds, `check` answers: exit status 0 or 2, no traceback, in seconds, and writes nothing."""

import copy
import os
import time

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from credit_like import cli

VALID = {
    "name": "fuzzed",
    "save_loc": "run",
    "data": {
        "source": {"type": "zarr", "path": "store.zarr"},
        "timestep": "6h",
        "levels": [1],
        "prognostic": {"level": ["u", {"name": "v", "units": "m s-1"}], "surface": ["column_water"]},
        "dynamic_forcing": {"surface": [{"name": "sun", "compute": "solar"}]},
        "static": {"surface": ["orography"]},
        "train": ["2000-01-01", "2000-01-03"],
        "valid": ["2000-01-03T06", "2000-01-04"],
        "test": ["2000-01-04T06", "2000-01-05T18"],
    },
    "model": {"type": "wxformer", "noise": {"correlation": 0.5}, "drop_path": 0.1},
    "loss": {"type": "sum", "terms": [{"weight": 1, "loss": {"type": "crps"}}], "level_weights": {1: 2}},
    "physics": [
        {"type": "clip", "variables": ["column_water"]},
        {"type": "relax", "variables": ["u"], "climatology": ["2000-01-01", "2000-01-03"]},
        {"type": "spherical-filter", "winds": ["u", "v"], "highest": 21},
        {"type": "zonal-energy", "variables": ["u"], "rate": 0.5, "climatology": ["2000-01-01", "2000-01-03"]},
    ],
    "trainer": {
        "phases": [{"epochs": 1}, {"epochs": 1, "forecast_len": 2, "optimizer": {"learning_rate": 1e-4}}],
        "members": 2,
        "optimizer": {"type": "adamw", "learning_rate": 1e-3, "groups": [{"match": "head.*", "learning_rate": 1e-2}]},
        "monitor": {"every": 1, "lead": 1},
        "parallelism": {"domain": [1, 1], "ensemble": 1},
    },
    "inference": {
        "init": "2000-01-04T06",
        "lead": "12h",
        "output": {"type": "zarr", "variables": ["u"], "levels": [1], "leads": [2]},
        "ensemble": {"members": 3, "amplitude": {"u": 0.1}, "perturbations": {"type": "bred", "cycles": 3}},
    },
    "evaluation": {
        "metrics": ["rmse", "fair-crps", "brier"],
        "thresholds": {"values": {"u": [5]}, "quantiles": [0.5]},
        "regions": {"belt": {"south": -20, "north": 20}},
        "climatology_period": ["2000-01-01", "2000-01-03"],
    },
    "site": "generic-pbs",
    "pbs": {"account": "me", "nodes": 1, "ngpus": 0, "walltime": "01:00:00"},
}
ODD = [
    None, True, 0, -1, 2, 1.5, 10**30, 1e308, "", " ", "\0", "a\nb", "²", "6h", "1e-3", "0h", "$", "$$", "2000-13-45", "9999-12-31",
    "0000-01-01", [], {}, [[]], {"type": "x"}, {"": ""}, ["a"] * 30, "x" * 3000, [1, "a", None], {"type": ["x"]}, "../..", "/",
    "inf", "https://", "::", "file://", "*", "[", "%Y", "{x}", "\ud800", "!env", float("nan"), float("inf"),
]  # fmt: skip


def places(tree, path=()):
    """The paths of all values inside a tree."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


PLACES = list(places(VALID))


def changed(changes):
    """The valid experiment with values replaced, keys renamed or removed."""
    tree = copy.deepcopy(VALID)
    for path, what, value in changes:
        at = tree
        try:
            for part in path[:-1]:
                at = at[part]
            if what == "set":
                at[path[-1]] = value
            elif what == "remove":
                del at[path[-1]]
            else:
                at[str(value)[:50]] = at.pop(path[-1])
        except (KeyError, IndexError, TypeError, AttributeError):
            continue
    return tree


mutations = st.lists(
    st.tuples(
        st.sampled_from(PLACES), st.sampled_from(["set", "set", "set", "remove", "rename"]), st.sampled_from(ODD)
    ),
    min_size=1,
    max_size=3,
)
TEXT = yaml.safe_dump(VALID, sort_keys=False)
cuts = st.tuples(st.integers(0, len(TEXT)), st.integers(0, 40), st.text(st.characters(codec="utf-8"), max_size=8))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A store of two layers of weather, and nothing else."""
    from credit_like.data.sources.synthetic import Config, generate

    folder = tmp_path_factory.mktemp("fuzz")
    generate(Config(longitudes=64, latitudes=32, steps=20)).to_zarr(
        folder / "store.zarr", zarr_format=3, consolidated=False
    )
    return folder


def answer(folder, text, capsys):
    """The exit status of `check`."""
    (folder / "x.yml").write_bytes(text.encode("utf-8", "replace"))
    before = sorted(folder.rglob("*"))
    here = os.getcwd()
    os.chdir(folder)
    began = time.process_time()
    try:
        with pytest.raises(SystemExit) as end:
            cli.main(["check", "x.yml"])
    finally:
        os.chdir(here)
    assert time.process_time() - began < 5
    assert sorted(folder.rglob("*")) == before
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert bool(said.err) == (end.value.code == 2)
    return end.value.code or 0


few = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
many = settings(few, max_examples=100)
very_many = settings(few, max_examples=1000)


def test_the_experiment_that_is_changed_is_right(folder, capsys):
    assert answer(folder, TEXT, capsys) == 0


@few
@given(changes=mutations)
@example(changes=[(("data", "levels"), "set", [10**30])])
def test_changed_values_are_answered(changes, folder, capsys):
    assert answer(folder, yaml.safe_dump(changed(changes), sort_keys=False, allow_unicode=True), capsys) in (0, 2)


@few
@given(cut=cuts)
def test_changed_texts_are_answered(cut, folder, capsys):
    start, length, put = cut
    assert answer(folder, TEXT[:start] + put + TEXT[start + length :], capsys) in (0, 2)


@few
@given(text=st.text(max_size=60) | st.text("[]{}:,&*!|>-?\"'%@` \n\tab0#~", max_size=60))
def test_any_texts_are_answered(text, folder, capsys):
    assert answer(folder, text, capsys) in (0, 2)


@pytest.mark.slow
@many
@given(changes=mutations)
def test_many_changed_values_are_answered(changes, folder, capsys):
    assert answer(folder, yaml.safe_dump(changed(changes), sort_keys=False, allow_unicode=True), capsys) in (0, 2)


@pytest.mark.long
@very_many
@given(changes=mutations)
def test_very_many_changed_values_are_answered(changes, folder, capsys):
    assert answer(folder, yaml.safe_dump(changed(changes), sort_keys=False, allow_unicode=True), capsys) in (0, 2)
