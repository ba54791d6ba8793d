"""The copy of the experiment that a job reads: equal to what was submitted, in any environment and whatever its texts hold."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from credit_like.launch.submit import _frozen
from credit_like.schema.load import load_experiment
from tests.launch.cases import SITES, experiment
from tests.launch.test_hostile_text import FIELDS, PLAIN, SITE, texts

SETUP = ["export LD_LIBRARY_PATH=/lib:${LD_LIBRARY_PATH:-}", "echo $UNSET_ANYWHERE $$ ${", "x='$$(( 1 ))'"]


def assert_loads_back(given_experiment, folder: Path, name: str = "experiment.yml") -> None:
    stored = folder / "stored.yml"
    stored.write_text(_frozen(given_experiment, Path(name)), encoding="utf-8")
    assert stored.read_text(encoding="utf-8").startswith("# ")
    again = load_experiment(stored)
    assert again.to_dict() == given_experiment.to_dict()
    assert again == given_experiment


@pytest.mark.parametrize("site", SITES)
def test_every_site(tmp_path, site):
    assert_loads_back(experiment(site), tmp_path)
    assert_loads_back(experiment(site, pbs={"setup": SETUP}), tmp_path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)
@given(field=st.sampled_from(FIELDS), text=texts)
def test_every_text(tmp_path, field, text):
    changed = field(text)
    whole = experiment("generic-pbs").to_dict() | {"site": SITE} | changed
    whole["pbs"] = {"account": PLAIN, "queue": PLAIN, **changed.get("pbs", {})}
    try:
        made = type(experiment("generic-pbs")).model_validate(whole)
    except ValidationError:
        return
    assert_loads_back(made, tmp_path)


@pytest.mark.parametrize("key", ["a$b", "$HOME", "${x", "007", "null", "a: b"])
def test_a_dollar_in_a_key_is_kept_too(tmp_path, key):
    assert_loads_back(experiment("generic-pbs", loss={"variable_weights": {key: 2.0}}), tmp_path)


@pytest.mark.parametrize("name", ["a\nb: c.yml", "a\u2028b: c.yml", "a\x07.yml", "\udcff.yml", "é $HOME.yml"])
def test_every_name_of_the_file(tmp_path, name):
    assert_loads_back(experiment("generic-pbs"), tmp_path, name)
