"""What README.md promises is there: its files, its table of results, and the workflow that runs the same checks as `.ci/run`."""

import importlib.util
import os
import re
from pathlib import Path

import pandas as pd
import pytest
import yaml

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def showcase():
    spec = importlib.util.spec_from_file_location("showcase", ROOT / "docs" / "showcase.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_link_leads_to_a_file():
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link]
    assert len(links) > 15
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_table_has_the_ratios_of_the_scores(showcase):
    rows = [
        {"source": source, "variable": name, "level": level, "metric": "rmse", "region": "global", "lead_hours": lead,
         "value": value * lead, "units": "K"}
        for source, value in (("model", 1.0), ("persistence", 4.0), ("climatology", 2.0))
        for name, level in (("t", 500.0), ("t", 850.0), ("sp", float("nan")))
        for lead in (24.0, 72.0)
    ]  # fmt: skip
    made = showcase.table(pd.DataFrame(rows), hours=(24, 72))
    assert (
        made.splitlines()[0]
        == "| variable | persistence, 24 h | persistence, 72 h | climatology, 24 h | climatology, 72 h |"
    )
    assert made.splitlines()[2:] == [
        "| t, level 500 | 0.25 | 0.25 | 0.50 | 0.50 |",
        "| t, level 850 | 0.25 | 0.25 | 0.50 | 0.50 |",
        "| sp | 0.25 | 0.25 | 0.50 | 0.50 |",
    ]


@pytest.mark.parametrize("name", ["demo", "gcm-t21"])
def test_the_table_has_its_place(showcase, name):
    once = showcase.between(README, "| a |", name)
    assert showcase.between(once, "| a |", name) == once
    assert once.count("| a |") == 1
    begin = showcase.BEGIN.format(name)
    assert [part.split(showcase.END, 1)[-1] for part in once.split(begin)] == [
        part.split(showcase.END, 1)[-1] for part in README.split(begin)
    ]


def test_the_workflow_runs_what_ci_runs():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    steps = workflow["jobs"]["checks"]["steps"]
    command = next(step["run"] for step in steps if "run" in step)
    assert os.access(ROOT / command, os.X_OK)
    assert re.search(r"^TORCH \?=", (ROOT / "Makefile").read_text(), re.MULTILINE)  # the environment chooses the wheel
