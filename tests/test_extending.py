"""The parts in docs/extending.md work as they stand there."""

import re
from pathlib import Path

import pytest

from credit_like import build
from credit_like import verify as kit
from credit_like.check import checked_experiment

TEXT = (Path(__file__).parents[1] / "docs" / "extending.md").read_text()


@pytest.fixture
def experiment(tmp_path):
    """Every block that begins with the name of a file, written to that file."""
    blocks = re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", TEXT, re.DOTALL)
    assert len(blocks) == TEXT.count("```python") + TEXT.count("```yaml")
    for name, text in blocks:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return checked_experiment(tmp_path / "experiment.yml", [f"save_loc={tmp_path / 'run'}"])[0]


def test_they_train_and_score(experiment, tmp_path):
    assert build.train(experiment) == 0
    assert build.rollout(experiment) == 0
    assert build.evaluate(experiment) == 0
    assert (tmp_path / "run" / "evaluation" / "model.nc").is_file()


def test_they_are_the_same_in_two_layouts(experiment):
    cases = [case for case in kit.CASES if case.name in ("DDP 2", "domain 2")]
    rows = list(kit.verify(experiment, cases))
    assert all(row.ok and not row.refused for row in rows), rows


def test_the_tolerances_are_those_that_are_stated():
    for value in (kit.TOLERANCE, kit.SLOPE_TOLERANCE, kit.UNSTABLE):
        assert f"{value:.0e}".replace("e-0", "e-") in TEXT
    assert f"{kit.GROWTH} times" in TEXT
