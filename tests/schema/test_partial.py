"""An experiment with a key that is not valid is checked without it: no consequences are reported, and nothing else is lost."""

from __future__ import annotations

import copy

import pytest
import yaml

from credit_like.check import checked_experiment
from credit_like.schema.base import HiddenKey
from credit_like.schema.errors import ExperimentError
from credit_like.schema.experiment import Experiment
from credit_like.schema.load import dump_experiment, load_experiment
from credit_like.schema.partial import partial_experiment
from tests.experiments import DEMO, SHORT

SMALL = (
    *SHORT,
    "inference.init=[2000-01-11T06, 2000-01-12, 6h]",
    "inference.lead=1d",
    "trainer.scheduler.warmup_steps=2",
)


def keys(value, path=()):
    """Paths of all keys of plain data."""
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield (*path, key)
        yield from keys(inner, (*path, key))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A valid experiment as plain data, with every key."""
    save_loc = tmp_path_factory.mktemp("partial") / "run"
    return yaml.safe_load(dump_experiment(load_experiment(DEMO, [*SMALL, f"save_loc={save_loc}"])))


def reported(data, file):
    """The keys of which `check` reports something."""
    file.write_text(yaml.safe_dump(data))
    with pytest.raises(ExperimentError) as refused:
        checked_experiment(file, scoring=True)
    return [problem.key for problem in refused.value.problems]


def with_value(data, path, value):
    changed = copy.deepcopy(data)
    section = changed
    for key in path[:-1]:
        section = section[key]
    section[path[-1]] = value
    return changed


@pytest.mark.parametrize("step", [13, pytest.param(1, marks=pytest.mark.slow)])
def test_a_wrong_value_is_the_one_problem(whole, tmp_path, step):
    paths = list(keys(whole))
    assert len(paths) > 100
    for path in paths[::step]:
        key = ".".join(path)
        for found in reported(with_value(whole, path, {"nonsense": 1}), tmp_path / "one.yml"):
            assert found == key or found.startswith(f"{key}.") or key.startswith(f"{found}."), (key, found)


def test_a_wrong_value_hides_no_other_problem(whole, tmp_path):
    for path in list(keys(whole))[::11]:
        if path[0] in ("data", "evaluation"):
            continue
        data = with_value(with_value(whole, path, {"nonsense": 1}), ("evaluation", "metrics"), ["rmsee"])
        data["data"]["test"] = ["2004-01-01", "2004-01-02"]
        found = reported(data, tmp_path / "two.yml")
        assert "evaluation.metrics.0" in found, path
        assert any(key.startswith("data.test") for key in found), path


def test_a_hidden_key_is_hidden_in_this_experiment_alone(whole):
    wrong = with_value(whole, ("trainer", "parallelism", "domain"), "many")
    experiment = partial_experiment(wrong, [("trainer", "parallelism", "domain")])
    assert experiment.trainer.parallelism.tensor == 1
    with pytest.raises(HiddenKey):
        _ = experiment.trainer.parallelism.domain
    assert Experiment.model_validate(whole).trainer.parallelism.domain == 1
    del wrong["trainer"]
    assert Experiment.model_validate(wrong).trainer.parallelism.domain == 1


def test_a_section_and_a_key_of_it_may_both_be_hidden(whole):
    paths = [
        ("model",),
        ("model", "dim"),
        ("data", "source"),
        ("data", "source", "type"),
        ("trainer",),
        ("trainer", "epochs"),
    ]
    for wrong in (paths, paths[::-1]):
        experiment = partial_experiment(whole, wrong)
        for section, key in ((experiment, "model"), (experiment.data, "source"), (experiment, "trainer")):
            with pytest.raises(HiddenKey):
                getattr(section, key)


def test_a_misspelt_key_hides_the_one_that_it_means(whole):
    data = with_value(whole, ("trainer", "epoks"), 3)
    with pytest.raises(HiddenKey):
        _ = partial_experiment(data, [("trainer", "epoks")]).trainer.epochs


@pytest.mark.parametrize("path", [(), ("data",), ("data", 0)])
def test_without_data_nothing_is_left(whole, path):
    assert partial_experiment(whole if path != ("data", 0) else with_value(whole, ("data",), [1]), [path]) is None


def test_a_key_that_resembles_a_section_is_the_one_problem(whole, tmp_path):
    for section in ("data", *(key for key, value in whole.items() if isinstance(value, dict | list))):
        other = section.capitalize()
        assert set(reported(with_value(whole, (other,), {"nonsense": 1}), tmp_path / "one.yml")) == {other}
