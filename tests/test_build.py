"""Every experiment and every model of the zoo is built on the meta device; the wiring trains, forecasts and scores."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import xarray as xr
import yaml
from typer.testing import CliRunner

from credit_like import build, cli, figures
from credit_like.checkpoint.manager import CheckpointManager
from credit_like.checkpoint.shards import Piece
from credit_like.cli import app
from credit_like.data import statistics
from credit_like.errors import UserError
from credit_like.evaluation.needs import open_truth
from credit_like.inference.forecast import forecast_path, write_forecasts
from credit_like.nn.area import identity
from credit_like.parallel.runtime import Runtime
from credit_like.schema.load import load_experiment
from credit_like.schema.origin import StartFrom
from credit_like.schema.phases import phases
from credit_like.training.derived import DerivedFields
from credit_like.variables import Variables
from tests.derived import A, B, make_experiment, make_world
from tests.experiments import DEMO, SHORT, SMALL_MODEL
from tests.faults import tiny

ROOT = Path(__file__).parents[1]
EXPERIMENTS = sorted(ROOT.glob("config/*.yml"))
ZOO = sorted(ROOT.glob("models/*/model.yml"))
GRIDS = {
    "demo": (32, 64),
    "demo-long": (32, 64),
    "storm96": (33, 36),
    "gcm-t21": (32, 64),
    "gcm-t21-ensemble": (32, 64),
    "gcm-t21-long": (32, 64),
    "era5-1deg": (181, 360),
    "arco-era5": (721, 1440),
    "weatherbench2-64x32": (32, 64),
}


@pytest.fixture(autouse=True)
def variables_of_the_environment(monkeypatch):
    for name in ("SCRATCH", "ERA5", "CREDIT_LIKE_DATA"):
        monkeypatch.setenv(name, os.environ.get(name, "/nowhere"))


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda p: p.stem)
def test_every_experiment_builds(path):
    experiment = load_experiment(path)
    variables = Variables(experiment.data)
    with torch.device("meta"):
        model = build.build_model(experiment, variables, *GRIDS[path.stem])
        x = torch.empty(1, variables.in_channels, experiment.data.history_len, *GRIDS[path.stem])
        assert model(x).shape == (1, variables.out_channels, 1, *GRIDS[path.stem])
    # Parameters that fit every GPU many times over need not be gathered over the network in every step.
    parallelism = experiment.trainer.parallelism
    whole = parallelism.data != "fsdp2" or parallelism.replicate > 1
    assert whole or sum(p.numel() for p in model.parameters()) > 1e9


def test_there_are_experiments_and_a_zoo():
    assert len(EXPERIMENTS) >= 4
    assert len(ZOO) >= 3


def test_the_demo_uses_the_tiny_model_of_the_zoo():
    demo = yaml.safe_load((ROOT / "credit_like" / "demo.yml").read_text())["model"]
    zoo = yaml.safe_load((ROOT / "models" / "wxformer-tiny" / "model.yml").read_text())["model"]
    assert demo == zoo


TINY = [
    *SHORT,
    SMALL_MODEL,
    "trainer.epochs=1",
    "trainer.scheduler.warmup_steps=1",
    "inference={init: [2000-01-11T06, 2000-01-12T06, 12h], lead: 12h, batch_size: 2}",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    save_loc = tmp_path_factory.mktemp("run")
    experiment = load_experiment(DEMO, [*TINY, f"save_loc={save_loc}"])
    assert build.train(experiment) == 0
    assert build.rollout(experiment) == 0
    assert build.evaluate(experiment) == 0
    assert figures.plot(experiment) == 0
    return experiment, save_loc


def test_phases_with_the_same_loss_share_it(tmp_path):
    """Its masks have the size of a sample, and lie on the device as long as the run."""
    losses = [{}, {"loss": {"type": "mae"}}, {"forecast_len": 2}, {"loss": {"type": "mae"}}]
    experiment = tiny.experiment(tmp_path, phases=losses)
    context = SimpleNamespace(
        runtime=Runtime(), variables=Variables(experiment.data), statistics=tiny.Statistics(), store=tiny.Store(),
        rows=slice(None), columns=slice(None), whole_rows=identity,
    )  # fmt: skip
    made = []
    used = [build._loss(context, phase.experiment.loss, made) for phase in phases(experiment)]
    assert [loss.config.type for loss in used] == ["mse", "mae", "mse", "mae"]
    assert used[0] is used[2]
    assert used[1] is used[3]
    assert made == used[:2]


def test_several_ranks_do_not_wait_for_a_long_pass_over_the_data(tmp_path, monkeypatch):
    experiment = load_experiment(DEMO, [*TINY, f"save_loc={tmp_path}"])
    variables = Variables(experiment.data)
    store = build.open_store(experiment.data, variables)
    monkeypatch.setattr(statistics, "_FITTED_AT_START", 0)
    with pytest.raises(UserError, match="credit-like preprocess"):
        build.load_statistics(experiment, store, variables, Runtime(world=2))
    assert not list(tmp_path.iterdir())
    fitted = build.load_statistics(experiment, store, variables, Runtime())  # one process makes nobody wait
    monkeypatch.setattr(Runtime, "barrier", lambda runtime: None)
    again = build.load_statistics(experiment, store, variables, Runtime(world=2))
    assert again.dataset.identical(fitted.dataset)


def test_statistics_of_an_earlier_experiment_in_the_folder_are_not_taken(tmp_path):
    def loaded(*changes):
        experiment = load_experiment(DEMO, [*TINY, f"save_loc={tmp_path}", *changes])
        variables = Variables(experiment.data)
        return build.load_statistics(experiment, build.open_store(experiment.data, variables), variables, Runtime())

    first = loaded()
    assert loaded("trainer.epochs=3").dataset.identical(first.dataset)
    other = "data.train=[2000-01-02, 2000-01-09]"
    with pytest.raises(
        UserError, match=r"period \[2000-01-02T00:00:00, .*; run `credit-like preprocess` again, or remove"
    ):
        loaded(other)
    options = [f"--set={text}" for text in (*TINY, f"save_loc={tmp_path}", other)]
    assert "expected statistics of the training period" in str(
        CliRunner().invoke(app, ["check", str(DEMO), *options]).exception
    )
    (tmp_path / "checkpoints" / "step-1").mkdir(parents=True)
    assert loaded(other).dataset.identical(first.dataset)  # a run goes on with its own
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "statistics.nc").unlink()
    assert not np.array_equal(loaded(other).dataset["mean"], first.dataset["mean"])


def test_a_job_of_several_ranks_is_not_submitted_before_such_a_pass(tmp_path, monkeypatch):
    monkeypatch.setattr(statistics, "_FITTED_AT_START", 0)
    monkeypatch.setenv("PATH", str(tmp_path))  # no batch system is found, after all checks
    settings = [*TINY, f"save_loc={tmp_path}/run"]
    trainer = "trainer={micro_batch_size: 1, global_batch_size: 4, parallelism: {data: ddp}}"
    options = [f"--set={text}" for text in (*settings, trainer)]

    def refusal(*more: str) -> str:
        request = ["--site", "derecho", "--account", "A1", "--nodes", "1"]
        return str(CliRunner().invoke(app, ["submit", str(DEMO), *request, *more, *options]).exception)

    assert re.search("data.statistics: expected.*`credit-like preprocess`", refusal("--ngpus", "4"))
    for allowed in (["--ngpus", "1"], ["--ngpus", "4", "--after", "7"], ["--mode", "preprocess"]):
        assert "expected qsub" in refusal(*allowed)  # one rank, statistics to come, the pass itself
    assert refusal("--ngpus", "4", "--dry-run") == "None"
    experiment = load_experiment(DEMO, settings)
    variables = Variables(experiment.data)
    build.load_statistics(experiment, build.open_store(experiment.data, variables), variables, Runtime())
    assert "expected qsub" in refusal("--ngpus", "4")


def test_a_job_before_or_in_which_statistics_are_written_is_submitted_without_them(tmp_path):
    fitted = tmp_path / "fitted.nc"
    options = [f"--set={text}" for text in (*TINY, f"save_loc={tmp_path}/run", f"data.statistics={fitted}")]

    def refusal(*more: str) -> str:
        submission = CliRunner().invoke(app, ["submit", str(DEMO), "--site", "local", "--dry-run", *more, *options])
        return str(submission.exception)

    assert "expected a netCDF file" in refusal()
    assert "expected a netCDF file" in refusal("--mode", "rollout")
    for allowed in (["--mode", "preprocess"], ["--after", "7"], ["--mode", "rollout", "--after", "7"]):
        assert refusal(*allowed) == "None"
    fitted.write_bytes(b"of something else")
    assert "cannot be read" in refusal("--after", "7")
    fitted.unlink()
    assert CliRunner().invoke(app, ["preprocess", str(DEMO), *options]).exit_code == 0
    assert refusal("--after", "7") == refusal() == "None"
    assert f"expected no statistics yet, got {fitted}" in refusal("--mode", "preprocess")
    assert refusal("--mode", "preprocess", "--force") == "None"


def test_a_run_leaves_what_it_promises(run):
    _, save_loc = run
    assert json.loads((save_loc / "status.json").read_text())["state"] == "finished"
    rows = [json.loads(line) for line in (save_loc / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 5))
    assert {"loss", "grad_norm", "learning_rate", "samples_per_second", "data_wait", "memory_mib"} <= set(rows[0])
    assert any("valid_loss" in row for row in rows)
    for name in (
        "experiment.yml",
        "statistics.nc",
        "evaluation/report.html",
        "evaluation/rmse.png",
        "evaluation/acc.png",
        "evaluation/map_u.png",
    ):
        assert (save_loc / name).stat().st_size > 0, name
    again = load_experiment(save_loc / "experiment.yml")
    assert again == run[0]


def test_the_forecast_is_what_the_stepper_gives(run):
    experiment, save_loc = run
    forecast = xr.open_zarr(save_loc / "forecasts" / "forecast.zarr", decode_timedelta=True)
    assert dict(forecast.sizes) | {"level": 2} == {
        "time": 3, "prediction_timedelta": 2, "level": 2, "latitude": 32, "longitude": 64,
    }  # fmt: skip
    runtime = build.start(experiment)
    context = build.build_context(experiment, runtime)
    build.load_weights(context)
    when = str(forecast.time.values[1].astype("datetime64[s]"))
    now = context.store.index(when)
    frames = context.store.read(context.variables.role("prognostic"), [now])
    state = context.stepper.initial(torch.from_numpy(frames).transpose(0, 1)[None], torch.tensor([now]))
    with torch.no_grad():
        *_, last = context.stepper.rollout(state, torch.empty(1, 0, 2, 32, 64), 2)
    u = last.now[0, Variables.slices(context.variables.outputs)["u"]].numpy()
    np.testing.assert_allclose(forecast["u"].isel(time=1, prediction_timedelta=1).values, u, rtol=1e-4, atol=1e-3)


def test_weights_that_a_training_prunes_before_they_are_read_are_chosen_anew(run, tmp_path, monkeypatch):
    """A long time may pass between the choice of a checkpoint and its reading."""
    experiment = run[0].model_copy(update={"save_loc": str(tmp_path)})
    newest = max((run[1] / "checkpoints").glob("step-*"), key=lambda folder: int(folder.name[5:]))
    shutil.copytree(newest, tmp_path / "checkpoints" / newest.name)
    context = build.build_context(run[0], build.start(experiment, training=False), train=False)
    context = replace(context, experiment=experiment)
    first = build.chosen_checkpoint(experiment, context.runtime)
    away, chosen = (tmp_path / "checkpoints" / newest.name).rename(tmp_path / "away"), build.chosen_checkpoint

    def chosen_anew(*arguments):
        away.rename(tmp_path / "checkpoints" / newest.name)
        return chosen(*arguments)

    monkeypatch.setattr(build, "chosen_checkpoint", chosen_anew)
    assert build.load_weights(context, first).name == first.name
    assert not away.exists()


def test_forecasts_are_made_with_the_checkpoint_that_is_named(run, tmp_path):
    experiment, folder = run[0], tmp_path / "checkpoints"
    manager = CheckpointManager(folder, keep=9, asynchronous=False)
    for step, loss in ((3, 0.3), (5, 0.1), (7, 0.2)):
        manager.save(step, {"model/x": Piece.whole(torch.zeros(2))}, {}, score=loss)

    def chosen(which):
        inference = experiment.inference.model_copy(update={"checkpoint": which})
        copied = experiment.model_copy(update={"save_loc": str(tmp_path), "inference": inference})
        with build.start(experiment, training=False) as runtime:
            return build.chosen_checkpoint(copied, runtime).step

    assert [chosen(which) for which in ("newest", "best", 3)] == [7, 5, 3]
    with pytest.raises(
        UserError, match=r"inference.checkpoint: expected a step with a checkpoint in .* \(3, 5, 7\), got 4"
    ):
        chosen(4)
    start = {
        "path": "elsewhere"
    }  # whose weights a rollout takes where the newest checkpoint is asked for and there is none
    for which in ("best", 4):
        inference = experiment.inference.model_copy(update={"checkpoint": which})
        changed = {"save_loc": str(tmp_path / "none"), "inference": inference, "start_from": StartFrom(**start)}
        with (
            build.start(experiment, training=False) as runtime,
            pytest.raises(UserError, match=r"inference.checkpoint: expected"),
        ):
            build._chosen(experiment.model_copy(update=changed), runtime)
    damaged = next((folder / "step-3").glob("*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(
        UserError, match=r"inference\.checkpoint: expected an intact checkpoint of step 3, got a damaged one"
    ):
        chosen(3)
    for step in (5, 7):
        next((folder / f"step-{step}").glob("*.safetensors")).write_bytes(b"")
    changed = {"save_loc": str(tmp_path), "start_from": StartFrom(**start)}  # whose weights would be other ones
    with (
        build.start(experiment, training=False) as runtime,
        pytest.raises(UserError, match=r"expected an intact checkpoint in .* got only damaged ones \(step 3, 5, 7\)"),
    ):
        build._chosen(experiment.model_copy(update=changed), runtime)


def test_a_finished_run_is_not_trained_again(run):
    experiment, save_loc = run
    before = (save_loc / "log.jsonl").read_bytes()
    assert build.train(experiment) == 0
    assert (save_loc / "log.jsonl").read_bytes() == before


def test_fresh_asks_before_it_removes(run):
    with pytest.raises(ValueError, match="add --force"):
        build.train(run[0], fresh=True)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("absent", "got nothing at"),
        ("run", "expected a folder apart from start_from.path"),
        ("run/checkpoints/step-3", "expected a folder apart from start_from.path"),
    ],
)
def test_a_run_is_not_removed_for_weights_that_are_not_there(run, tmp_path, capsys, source, message):
    save_loc = shutil.copytree(run[1], tmp_path / "run")
    before = {path: path.read_bytes() for path in save_loc.rglob("*") if path.is_file()}
    sets = [*TINY, f"save_loc={save_loc}", f"start_from.path={tmp_path / source}"]
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", str(DEMO), *(part for each in sets for part in ("--set", each)), "--fresh", "--force"])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert {path: path.read_bytes() for path in save_loc.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("variable", ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"])
def test_a_process_that_was_restarted_by_itself_keeps_the_run(run, monkeypatch, caplog, variable):
    """torchrun and Slurm start the same command again; what it did before has to be continued."""
    experiment, save_loc = run
    before = (save_loc / "log.jsonl").read_bytes()
    monkeypatch.setenv(variable, "2")
    with caplog.at_level(logging.WARNING):
        assert build.train(experiment, fresh=True, force=True) == 0
    assert (save_loc / "log.jsonl").read_bytes() == before
    assert "ignoring --fresh: this is restart 2 of the same command" in caplog.text
    monkeypatch.setenv(variable, "0")
    with pytest.raises(UserError, match="add --force"):
        build.train(experiment, fresh=True)


def test_rollout_without_a_checkpoint_says_what_to_do(tmp_path):
    experiment = load_experiment(DEMO, [*TINY, f"save_loc={tmp_path}"])
    with pytest.raises(ValueError, match="credit-like train"):
        build.rollout(experiment)


def test_the_layout_of_a_training_does_not_bind_a_single_process(run, tmp_path):
    """Trained on four ranks, one sample on each: statistics, forecasts and scores need one process."""
    _, save_loc = run
    layout = "trainer.parallelism={data: fsdp2, tensor: 2, domain: 2, replicate: 2}"
    here = load_experiment(DEMO, [*TINY, layout, f"save_loc={tmp_path / 'run'}"])
    assert build.preprocess(here) == 0
    for name in ("checkpoints", "statistics.nc"):
        (shutil.copytree if (save_loc / name).is_dir() else shutil.copy)(save_loc / name, tmp_path / "run" / name)
    assert build.rollout(here) == 0
    assert build.evaluate(here) == 0
    ours, theirs = (xr.open_zarr(f / "forecasts" / "forecast.zarr")["u"].values for f in (tmp_path / "run", save_loc))
    np.testing.assert_array_equal(ours, theirs)
    with pytest.raises(ValueError, match="tensor × domain = 2 × 2 = 4 divides, got 1"):
        build.train(here)


def test_units_are_compared_without_check_too(tmp_path):
    """Of what corrections, derived fields, their scores in training, and their truth are computed from."""
    with xr.open_dataset(make_world(tmp_path) / "data.nc") as opened:
        data = opened.load()
    data["temperature"].attrs["units"], data["surface_pressure"].attrs["units"] = "degC", "hPa"
    data.to_netcdf(tmp_path / "data.nc")
    mass = {"type": "mass", "a": A.tolist(), "b": B.tolist()}
    with pytest.raises(UserError, match=r"^physics.surface_pressure: expected surface_pressure in 'Pa', got 'hPa'"):
        build.build_context(make_experiment(tmp_path, tmp_path / "run", physics=[mass]), Runtime())
    derive = {"derive": [{"model_levels": str(tmp_path / "levels.yml")}, "geopotential"]}
    message = "derive: expected temperature in 'K', got 'degC'"
    written = make_experiment(tmp_path, tmp_path / "run", inference=derive)
    context = build.build_context(written, Runtime())
    with pytest.raises(UserError, match=f"^inference.{message}"):
        write_forecasts(context, "step-1")
    assert not forecast_path(written).exists()
    scored = make_experiment(tmp_path, tmp_path / "run", evaluation=derive)
    for function, arguments in (
        (open_truth, (scored, context.store)),
        (DerivedFields, (replace(context, experiment=scored),)),
    ):
        with pytest.raises(UserError, match=f"^evaluation.{message}"):
            function(*arguments)
