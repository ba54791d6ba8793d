"""The demonstration: which commands it runs on which experiments, and what its report says of an ensemble."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import xarray as xr

from credit_like import demo, figures
from credit_like.evaluation.results import save_results
from credit_like.schema.checks import section_findings
from credit_like.schema.load import load_experiment

LEADS = np.array([6, 24, 72], "timedelta64[h]").astype("timedelta64[ns]")
SCORES = {
    "rmse": (1.0, 2.0, 4.0, 4.0),
    "fair-crps": (0.3, 0.5, 2.0, 2.0),
    "spread-error": (0.9, np.nan, np.nan, np.nan),
}


def results(only_errors=()):
    """Scores of the model, the deterministic model, persistence and climatology; some variables without spread."""
    sources = ["model", "deterministic", "persistence", "climatology"]
    values = np.broadcast_to(np.array(list(SCORES.values())).T[:, :, None, None], (4, 3, 1, 3))
    coords = {"source": sources, "metric": list(SCORES), "region": ["global"], "lead_time": LEADS}
    coords["provenance"] = ("source", sources)
    dims = ("source", "metric", "region", "lead_time")
    dataset = xr.Dataset({name: (dims, values.copy()) for name in ("height", *only_errors)}, coords)
    for name in only_errors:
        dataset[name] = dataset[name].where(dataset["metric"] == "rmse")
    return dataset.assign(initial_times=18)


@pytest.fixture
def stages(monkeypatch):
    """(command, experiment) of every stage that was run.

    `fails` names the command that ends with status 1; `state` is that of a run after its training.
    """
    ran, control = [], SimpleNamespace(fails=None, state="finished")

    def stage(command):
        def run(experiment):
            ran.append((command, experiment))
            if command == "train":
                Path(experiment.save_loc).mkdir(parents=True, exist_ok=True)
                (Path(experiment.save_loc) / "status.json").write_text(json.dumps({"state": control.state}))
            return int(command == control.fails)

        return run

    for command in ("preprocess", "train", "rollout", "evaluate"):
        monkeypatch.setattr(demo.build, command, stage(command))

    def plot(experiment):
        save_results(results(["wind"]), demo.evaluation_folder(experiment))
        return stage("plot")(experiment)

    monkeypatch.setattr(figures, "plot", plot)
    monkeypatch.setattr(demo, "checked_experiment", lambda file: (load_experiment(file),))
    return SimpleNamespace(ran=ran, control=control)


def test_the_ensemble_starts_from_the_deterministic_model_and_is_compared_with_it(stages, tmp_path):
    assert demo.run(tmp_path, ensemble=True) == 0
    first, second = (["preprocess", "train", "rollout"], ["preprocess", "train", "rollout", "evaluate", "plot"])
    assert [command for command, _ in stages.ran] == [*first, *second]
    deterministic, ensemble = stages.ran[0][1], stages.ran[-1][1]
    assert [experiment.name for _, experiment in stages.ran] == ["demo-deterministic"] * 3 + ["demo-ensemble"] * 5
    assert deterministic.save_loc == str(tmp_path / "deterministic")
    assert ensemble.save_loc == str(tmp_path)
    assert str(ensemble.start_from.path) == deterministic.save_loc
    assert ensemble.evaluation.baselines == {"deterministic": f"{deterministic.save_loc}/forecasts/forecast.zarr"}
    assert deterministic.inference.init == ensemble.inference.init
    assert deterministic.inference.lead == ensemble.inference.lead
    for experiment in (deterministic, ensemble):
        assert list(section_findings(experiment, 1)) == []
    report = (tmp_path / "report.md").read_text()
    assert "| height | 0.90 | 0.90 | 0.90 | 0.60 | 0.60 | 0.60 |" in report
    assert report.count("| wind |") == 1  # which has errors, but no spread


def test_without_an_ensemble_there_is_one_experiment(stages, tmp_path):
    assert demo.run(tmp_path) == 0
    assert [command for command, _ in stages.ran] == ["preprocess", "train", "rollout", "evaluate", "plot"]
    assert stages.ran[0][1].save_loc == str(tmp_path)
    assert list(tmp_path.glob("*.yml")) == [tmp_path / "demo.yml"]


def test_a_stage_that_fails_ends_it(stages, tmp_path):
    stages.control.fails = "rollout"
    assert demo.run(tmp_path, ensemble=True) == 1
    assert [command for command, _ in stages.ran] == ["preprocess", "train", "rollout"]


def test_a_training_that_was_stopped_ends_it(stages, tmp_path):
    stages.control.state = "continue"
    assert demo.run(tmp_path) == 143
    assert [command for command, _ in stages.ran] == ["preprocess", "train"]


@pytest.mark.slow
def test_a_training_imports_neither_figures_nor_the_compiler_before_its_first_step():
    program = """
import sys, torch
from credit_like import build, demo
from credit_like.models.wxformer import Config, build as model
with torch.device("meta"):
    model(Config(), in_channels=3, out_channels=2, frames=1, height=32, width=64)
print([name for name in ("matplotlib", "torch._dynamo", "aiohttp") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]", done.stdout
