"""Every YAML file that comes with the project loads and validates."""

from pathlib import Path

import pytest
import yaml

from credit_like import registry
from credit_like.schema.checks import section_findings, world_of
from credit_like.schema.launch import SiteSection
from credit_like.schema.load import load_experiment

ROOT = Path(__file__).parents[1]
EXPERIMENTS = sorted(path for path in (ROOT / "config").glob("*.yml"))
MODELS = sorted((ROOT / "models").glob("*/model.yml"))
SITES = sorted((ROOT / "config/site").glob("*.yml"))


@pytest.fixture(autouse=True)
def variables(monkeypatch, tmp_path):
    """The variables that experiments refer to."""
    for name in ("SCRATCH", "ERA5", "CREDIT_LIKE_DATA", "WORK", "DATA"):
        monkeypatch.setenv(name, str(tmp_path))


def names(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", EXPERIMENTS, ids=names)
def test_each_experiment_is_right_as_far_as_it_can_be_said_without_its_data(path):
    experiment = load_experiment(path)
    assert not list(section_findings(experiment, world_of(experiment)))


@pytest.mark.parametrize("path", MODELS, ids=names)
def test_each_model_of_the_zoo_is_a_plugin_and_nothing_else(path):
    text = yaml.safe_load(path.read_text())
    assert list(text) == ["model"]
    registry.module("model", text["model"]["type"]).Config.model_validate(text["model"])


@pytest.mark.parametrize("path", SITES, ids=names)
def test_each_machine_is_a_profile(path):
    text = yaml.safe_load(path.read_text())
    profile = SiteSection.model_validate(text.get("site", text))
    assert profile.name == path.stem


def test_there_is_something_to_test():
    assert EXPERIMENTS
    assert SITES
