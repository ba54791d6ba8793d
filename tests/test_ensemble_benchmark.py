"""The benchmark of ensembles: its experiments, its page, and a measurement in a few steps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from credit_like.schema.load import load_experiment
from tests.experiments import representatives

ROOT = Path(__file__).parents[1]


@pytest.fixture
def ensemble(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    for name in ("ensemble", "recipes"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import ensemble

    return ensemble


@pytest.mark.parametrize("case", ["demo", "gcm-t21", "storm96"])
def test_further_training_costs_what_its_description_says(ensemble, monkeypatch, tmp_path, case):
    """Steps of one sample and member, relative to those of the training of the deterministic model."""
    monkeypatch.setenv("CREDIT_LIKE_DATA", str(tmp_path))
    bench, compared = ensemble.recipes.Bench(tmp_path, (1,), False), ensemble.CASES[case]
    start = load_experiment(compared.single.file, bench.overrides(compared.single, 1)).trainer.global_batch_size
    trained = [recipe for recipe in compared.ensembles if recipe.forecasts_of is None]
    for recipe in trained:
        experiment = load_experiment(recipe.file, bench.overrides(recipe, 1))
        trainer = experiment.trainer
        forecasts = trainer.global_batch_size * trainer.members * experiment.data.forecast_len
        spent = trainer.epochs * trainer.batches_per_epoch * forecasts / (start * compared.steps)
        assert 0.045 < spent < 0.0505, recipe.name
        assert f"5 %: {trainer.batches_per_epoch} batches" in recipe.what or "config" in recipe.what
        assert experiment.inference.ensemble.members == ensemble.recipes.MEMBERS
    assert trained


def test_perturbed_states_are_compared_with_noise_in_the_same_model(ensemble, monkeypatch, tmp_path):
    monkeypatch.setenv("CREDIT_LIKE_DATA", str(tmp_path))
    bench = ensemble.recipes.Bench(tmp_path, (1,), False)
    found = {
        recipe.name: [each.name for each in case.perturbed(recipe, bench)]
        for case in ensemble.CASES.values()
        for recipe in case.ensembles
        if recipe.forecasts_of is None
    }
    assert found["noise-alone"] == ["perturbed-1", "perturbed-1.5"]
    assert found["noise-damped"] == ["perturbed-damped-1", "perturbed-damped-1.5"]
    assert all(found.values())


def test_a_row_names_the_targets_that_any_value_misses(ensemble):
    met = {"spread": [0.9, 1.1], "CRPS": [0.7], "perturbed": [0.85], "RMSE": [1.0], "infinite": [1.2], "energy": [1.15]}
    columns = {name: ensemble.np.array(values) for name, values in met.items()}
    assert ensemble._verdict(columns, 72) == "met"
    missed = {"spread": [1.0, 1.11], "CRPS": [1.01], "perturbed": [0.8, 0.86], "RMSE": [1.01], "energy": [0.84]}
    for name, values in missed.items():
        assert ensemble._verdict(columns | {name: ensemble.np.array(values)}, 72) == f"MISSED: {name}"
    assert ensemble._verdict(columns | {"RMSE": ensemble.np.array([1.01])}, 24) == "met"


def test_members_on_ranks_are_compared_with_a_step_and_the_exchange(ensemble):
    """Seconds and processor seconds of the trainings, and of the exchange, in each of two rounds on two ranks."""
    steps = [[(1.0, 0.5), (1.25, 0.75), (1.5, 1.0), (0.5, 0.5)]] * 2
    ranks = [{"activations": [100, 110, 121], "seconds": steps}] * 2
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in ensemble.table(ranks, 2, 32).splitlines()[4:]]
    assert rows[0] == ["seconds", "1.0000", "1.2500", "1.5000", "0.5000", "1.000", "0.857", "1.0"]
    assert rows[1][-3:-1] == ["1.000", "0.800"]
    assert rows[2][-3:-1] == ["1.210", "1.100"]


def test_a_command_replaces_its_own_section_alone(ensemble, tmp_path):
    page = tmp_path / "ensemble.md"
    ensemble.write_section(page, "Skill", "old words\n\n| a |")
    ensemble.write_section(page, "Cost", "times")
    ensemble.write_section(page, "Skill", "new words\n\n| b |")
    text = page.read_text()
    assert text.startswith("# Ensembles\n")
    assert text.index("## Skill\n\nnew words\n\n| b |\n") < text.index("## Cost\n\ntimes\n")
    assert "old" not in text
    ensemble.write_section(page, "Skill", "new words\n\n| b |")
    assert page.read_text() == text


@pytest.mark.slow
@pytest.mark.parametrize("noise", representatives(["decoder", "conditional-norm"], "conditional-norm"))
def test_a_measurement_counts_activations_of_every_member(tmp_path, noise):
    """Times depend on the load. What noise makes is made again in backward, so a member keeps what a deterministic step keeps."""
    page = tmp_path / "ensemble.md"
    options = ("--quick", "--members", "2", "--steps", "1", "--noise", noise, "--output", str(page))
    command = [sys.executable, str(ROOT / "benchmarks" / "ensemble.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    [row] = [line for line in page.read_text().splitlines() if line.startswith("| activations")]
    per_member = float(row.split("|")[4])
    assert 0.9 < per_member <= 1.0
