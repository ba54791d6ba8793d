"""The benchmark of training recipes: its experiments, and a rehearsal in a few steps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from credit_like.schema.load import load_experiment

ROOT = Path(__file__).parents[1]


@pytest.fixture
def recipes(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.delitem(sys.modules, "recipes", raising=False)
    import recipes

    return recipes


def test_recipes_that_are_compared_cost_the_same(recipes, tmp_path):
    """Model steps of all phases, from the experiments as they are loaded; a phase without batches takes whole epochs."""
    bench = recipes.Bench(tmp_path, (1,), False)
    cost = {}
    for recipe in {
        r for _, used, _ in recipes.CASES.values() for each in used for r in each.all() if r.file == recipes.DEMO
    }:
        experiment = load_experiment(recipes.DEMO, bench.overrides(recipe, 1))
        trainer = experiment.trainer
        phases = trainer.phases or (trainer,)
        length = experiment.data.forecast_len
        cost[recipe.name] = sum(
            phase.epochs
            * (phase.batches_per_epoch or trainer.batches_per_epoch or recipes.STEPS_PER_EPOCH)
            * getattr(phase, "forecast_len", length)
            for phase in phases
        )
    for name in ("plain", "prognostic", "prognostic-sqrt", "prognostic-curriculum", "curriculum"):
        assert cost[name] == pytest.approx(recipes.BUDGET, rel=0.01), name
    assert cost["added"] <= 0.25 * recipes.BUDGET
    assert cost["noise"] <= 0.05 * recipes.BUDGET
    assert cost["noise"] + cost["noise-long"] <= 0.1 * recipes.BUDGET


@pytest.mark.slow
def test_a_rehearsal_writes_the_tables(tmp_path):
    page = tmp_path / "recipes.md"
    options = (
        "--small",
        "--cases",
        "precipitation",
        "--recipes",
        "plain",
        "--seeds",
        "3",
        "--work",
        str(tmp_path / "runs"),
    )
    command = [sys.executable, str(ROOT / "benchmarks" / "recipes.py"), *options, "--output", str(page)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [
        line for line in page.read_text().splitlines() if line.startswith("| precipitation diagnostic | precipitation")
    ]
    assert len(rows) == 1
    assert all(float(cell) > 0 for cell in rows[0].split("|")[3:7])
