"""The benchmark of training recipes: its experiments, and a rehearsal in a few steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from credit_like.schema.load import load_experiment
from credit_like.schema.phases import phases
from credit_like.training.schedulers import linear_warmup_cosine
from credit_like.variables import Variables

ROOT = Path(__file__).parents[1]


@pytest.fixture
def recipes(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.delitem(sys.modules, "recipes", raising=False)
    import recipes

    return recipes


def test_recipes_that_are_compared_cost_the_same(recipes, tmp_path):
    """Steps of the model with 8 samples, from the experiments as they are loaded; a phase without batches takes whole epochs."""
    bench = recipes.Bench(tmp_path, (1,), False)
    cost = {}
    for recipe in {
        r for _, used, _ in recipes.CASES.values() for each in used for r in each.all() if r.file == recipes.DEMO
    }:
        experiment = load_experiment(recipes.DEMO, bench.overrides(recipe, 1))
        cost[recipe.name] = 0.0
        for phase in phases(experiment):
            trainer, length = phase.experiment.trainer, phase.experiment.data.forecast_len
            samples = trainer.global_batch_size * trainer.members
            batches = trainer.batches_per_epoch or 8 * recipes.STEPS_PER_EPOCH // samples
            cost[recipe.name] += trainer.epochs * batches * length * samples / 8
    same = (recipe.name for recipe in recipes.PRECIPITATION if recipe is not recipes.PROGNOSTIC_SHARP)
    for name in (*same, *(r.name for r in recipes.CURRICULA)):
        assert cost[name] == pytest.approx(recipes.BUDGET, rel=0.01), name
    # A batch of two samples and four steps takes 1.5 times the processor time of one of eight; one of four samples 2.6 times.
    assert cost["curriculum-equal"] == 3 * recipes.STEPS_PER_EPOCH + recipes.BUDGET / 5 * 2 * 2 / 3
    assert cost["prognostic-sharp"] <= cost["curriculum-equal"]
    further = cost["curriculum-twice"] - 6 * recipes.STEPS_PER_EPOCH
    assert further / 2 * 2.6 <= 4 * recipes.STEPS_PER_EPOCH
    assert len({cost[recipe.name] for recipe in recipes.ADDITIONS}) == 1
    assert cost["added"] <= 0.25 * recipes.BUDGET
    assert cost["spectral-damped"] == cost["spectral-long"] == cost["spectral"] == cost["more-mse"]
    assert cost["fine-from-coarse"] == cost["fine"]
    assert cost["noise"] <= 0.05 * recipes.BUDGET
    assert cost["noise"] + cost["noise-long"] <= 0.1 * recipes.BUDGET


def test_a_curriculum_begins_as_the_training_that_it_continues(recipes, tmp_path, monkeypatch):
    """Its first phase has the keys and the learning rates of that training, and ends at the checkpoint that is copied."""
    monkeypatch.setenv("CREDIT_LIKE_DATA", str(tmp_path))
    bench = recipes.Bench(tmp_path, (1,), False)
    for recipe in (
        *recipes.CURRICULA,
        recipes.EQUAL,
        recipes.EQUAL_TWICE,
        recipes.PROGNOSTIC_SHARP,
        recipes.GCM_CURRICULUM,
    ):
        single = load_experiment(recipe.file, bench.overrides(recipe.like, 1))
        first = phases(load_experiment(recipe.file, bench.overrides(recipe, 1)))[0].experiment
        assert single.trainer.epochs == recipe.like.epochs
        assert first.trainer.epochs == recipe.trunk
        assert recipe.like.epochs - recipe.trunk <= single.trainer.checkpoint.keep
        assert single.trainer.checkpoint.every == recipe.like.batches
        for section in ("data", "model", "loss", "seed"):
            assert getattr(first, section) == getattr(single, section)
        assert all(correction.after_epochs >= first.trainer.epochs for correction in first.physics)
        same = {"epochs": 0, "scheduler": None, "checkpoint": None}
        assert first.trainer.model_copy(update=same) == single.trainer.model_copy(update=same)
        steps = recipe.trunk * recipe.like.batches
        rates = [
            [linear_warmup_cosine.learning_rate(e.trainer.scheduler, 1.0, k, total) for k in range(steps)]
            for e, total in ((first, steps), (single, recipe.like.steps))
        ]
        assert rates[0] == rates[1]


def test_the_run_to_which_variables_are_added_lacks_them(recipes, tmp_path):
    bench = recipes.Bench(tmp_path, (1,), False)
    there, here = (
        {v.name for v in Variables(load_experiment(recipes.DEMO, bench.overrides(recipe, 1)).data).outputs}
        for recipe in (recipes.DRY, recipes.ADDED)
    )
    assert there == {"u", "v", "height"}
    assert here == there | {"column_water", "precipitation"}


@pytest.mark.long
def test_a_rehearsal_writes_the_tables(recipes, tmp_path):
    page = tmp_path / "recipes.md"
    options = (
        "--small",
        "--cases",
        "precipitation",
        "curriculum",
        "--recipes",
        "plain",
        "curriculum",
        "--seeds",
        "3",
        "--work",
        str(tmp_path / "runs"),
    )
    command = [sys.executable, str(ROOT / "benchmarks" / "recipes.py"), *options, "--output", str(page)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    section = recipes.sections(page.read_text())["Precipitation and humidity"]
    (row,) = (line for line in section.splitlines() if line.startswith("| plain | precipitation"))
    assert all(float(cell) > 0 for cell in row.split("|")[3:7])
    # The curriculum continues the training that it is compared with, which has one epoch here.
    text = (tmp_path / "runs/curriculum-s3/train.log").read_text()
    assert "step 2  phase 1 begins" in text
    assert "| mean |" in page.read_text()


def test_sections_of_other_cases_stay_on_the_page(recipes, tmp_path):
    bench = recipes.Bench(tmp_path, (1,), False)
    before = (
        "# Title\n\n## Growth of nothing\n\nold\n\n## Ensembles\n\nkept, as | it | was\n\n## What grows\n\nreplaced\n"
    )
    page = recipes.report(bench, ["growth"], before)
    parts = recipes.sections(page)
    assert list(parts) == [title for title, _, _ in recipes.CASES.values()]
    assert parts["Ensembles"].strip() == "kept, as | it | was"
    assert "Not measured yet." in parts["What grows"]
    assert "replaced" not in page
    assert recipes.report(bench, [], page) == page


@pytest.mark.parametrize(("steps", "days"), [(8, [2]), (4 * 182, [182]), (2920, [365, 365]), (4 * 548, [365, 183])])
def test_the_spectrum_of_a_year_is_the_mean_over_its_days(recipes, steps, days):
    counted = {}
    for lead in range(4, steps + 1, 4):
        year, number = recipes.year_of(lead, steps)
        counted[year] = counted.get(year, 0) + 1 / number
    assert list(counted.values()) == pytest.approx([1.0] * len(days))
    assert [recipes.year_of(1460 * year + 4, steps)[1] for year in counted] == days


def test_free_runs_of_all_seeds_are_one_row(recipes, tmp_path):
    """Two seeds of two forecasts; one blows up on its second day and is left out of the climate of the others."""
    for seed, means in ((1, 1.0), (2, 3.0)):
        (tmp_path / f"run-s{seed}").mkdir()
        blown = np.zeros((730, 2), bool)
        blown[1:, 0] = seed == 2
        daily = np.full((730, 2, 1), means)
        np.savez(
            tmp_path / f"run-s{seed}" / "free-2.npz",
            names=["u"],
            means=daily,
            eddies=2 * daily,
            blown=blown,
            first_spectrum=np.ones((2, 1, 33)),
            last_spectrum=np.ones((2, 1, 33)) * means,
            cpu=86400.0,
            steps=2920,
            truth_mean=[1.0],
            truth_change=[0.1],
            truth_eddies=[2.0],
            truth_spectrum=np.ones((1, 33)),
        )
    text = recipes.free_runs([recipes.Recipe("run", "it")], recipes.Bench(tmp_path, (1, 2), False))
    assert "| run | 1, 2 | 2.00 | 1 of 4, day 2–2 | 4 |" in text
    # The kept forecasts have the means 1, 1 and 3, and as many times the truth's eddies; the last year's energy too.
    assert "| run | u | 1 ± 0.1 | 1.6667 → 1.6667 | 2 | 1.67 → 1.67 | 1.00–1.00 → 1.67–1.67 | 3e-01 → 6e-01 |" in text


def test_a_training_that_was_stopped_is_continued_and_its_time_counts(recipes, tmp_path, monkeypatch):
    """A signal ends a training with exit status 0."""
    bench, folder = recipes.Bench(tmp_path, (1,), False), tmp_path / "plain-s1"
    states = iter(["continue", "finished"])

    def run(command, **options):
        if "train" in command:
            (folder / "status.json").write_text(json.dumps({"state": next(states)}))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(recipes.subprocess, "run", run)
    with pytest.raises(SystemExit, match="the same command continues it"):
        bench.run(recipes.PLAIN, 1)
    assert bench.spent(recipes.PLAIN, 1).keys() == {"stopped"}
    cost = folder / "cost.json"
    cost.write_text(json.dumps({"stopped": 100.0}))
    bench.run(recipes.PLAIN, 1)
    spent = bench.spent(recipes.PLAIN, 1)
    assert spent["train"] >= 100.0
    assert {"rollout", "evaluate"} <= spent.keys()
    assert "stopped" not in spent
