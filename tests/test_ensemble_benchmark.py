"""The benchmark of ensembles: its experiments, its page, and a measurement in a few steps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from credit_like.schema.load import load_experiment

ROOT = Path(__file__).parents[1]


@pytest.fixture
def ensemble(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    for name in ("ensemble", "recipes"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import ensemble

    return ensemble


def test_further_training_costs_what_its_description_says(ensemble, tmp_path):
    """Steps of 8 forecasts, those of all phases and of the runs that a recipe starts from."""
    bench = ensemble.recipes.Bench(tmp_path, (1,), False)
    for recipe in ensemble.RECIPES:
        spent = 0.0
        trained = recipe.forecasts_of or recipe
        for each in trained.all():
            if each is ensemble.recipes.PLAIN:
                continue
            experiment = load_experiment(ensemble.recipes.DEMO, bench.overrides(each, 1))
            trainer = experiment.trainer
            forecasts = trainer.global_batch_size * trainer.members * experiment.data.forecast_len
            spent += trainer.epochs * trainer.batches_per_epoch * forecasts / 8
        if spent:
            assert f"{spent / ensemble.recipes.BUDGET:.0%}".replace("%", " %") in recipe.what, recipe.name
            assert spent <= 0.1 * ensemble.recipes.BUDGET


def test_a_command_replaces_its_own_section_alone(ensemble, tmp_path):
    page = tmp_path / "ensemble.md"
    ensemble.write_section(page, "Skill", "old words\n\n| a |")
    ensemble.write_section(page, "Cost", "times")
    ensemble.write_section(page, "Skill", "new words\n\n| b |")
    text = page.read_text()
    assert text.startswith("# Ensembles\n")
    assert text.index("## Cost\n\ntimes\n") < text.index("## Skill\n\nnew words\n\n| b |\n")
    assert "old" not in text
    ensemble.write_section(page, "Skill", "new words\n\n| b |")
    assert page.read_text() == text


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["decoder", "conditional-norm"])
def test_a_measurement_counts_activations_of_every_member(tmp_path, noise):
    """Times depend on the load. In the decoder a layer of noise keeps its input and the noise, beside what a deterministic step
    keeps; a block with noise in its norm computes both again in backward."""
    page = tmp_path / "ensemble.md"
    options = ("--quick", "--members", "2", "--steps", "1", "--noise", noise, "--output", str(page))
    command = [sys.executable, str(ROOT / "benchmarks" / "ensemble.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    [row] = [line for line in page.read_text().splitlines() if line.startswith("| activations")]
    per_member = float(row.split("|")[4])
    assert 0.9 < per_member < (1.25 if noise == "decoder" else 1.02)
