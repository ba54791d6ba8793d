"""A run continues, and makes forecasts, only with the model, the variables and the statistics of its weights."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import xarray as xr

from credit_like import build, cli
from credit_like.check import checked_experiment
from credit_like.checkpoint.manager import Checkpoint
from credit_like.errors import RunError, UserError
from credit_like.schema.errors import ExperimentError
from credit_like.schema.load import load_experiment

ROOT = Path(__file__).parents[2]
BASE = [
    "data.source={type: synthetic, longitudes: 32, latitudes: 16, steps: 60}",
    "data.train=[2000-01-01, 2000-01-09]",
    "data.valid=[2000-01-09T06, 2000-01-11]",
    "data.test=[2000-01-11T06, 2000-01-15T18]",
    "model={type: wxformer, dim: [8, 16, 32, 64], depth: [1, 1, 1, 1], dim_head: 8, global_window_size: [2, 2, 2, 1], "
    "local_window_size: 1, padding_conf: {activate: true, mode: earth, pad_lat: [8, 8], pad_lon: [16, 16]}}",
    "trainer.epochs=1",
    "trainer.batches_per_epoch=2",
    "trainer.global_batch_size=2",
    "trainer.micro_batch_size=2",
    "trainer.valid_batches=1",
    "trainer.scheduler.warmup_steps=1",
    "inference={init: 2000-01-12, lead: 6h}",
]
LORA = ["start_from.lora={rank: 2, alpha: 4}"]
FILE = ROOT / "config" / "demo.yml"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    assert build.train(load_experiment(FILE, [*BASE, f"save_loc={folder / 'plain'}"])) == 0
    lora = [*BASE, *LORA, f"start_from.path={folder / 'plain'}", f"save_loc={folder / 'lora'}"]
    assert build.train(load_experiment(FILE, lora)) == 0
    return folder


def other_statistics(run):
    with xr.open_dataset(run / "statistics.nc") as dataset:
        dataset = dataset.load()
    dataset["mean"][0] += 1e-3 * dataset["std"][0]
    dataset.to_netcdf(run / "statistics.nc")


CHANGES = {
    "order of levels": ("plain", ["data.levels=[2, 1]"], r"the order of the inputs was u@1, u@2"),
    "order of variables": (
        "plain", ["data.prognostic={level: [v, u, height], surface: [column_water]}"], "the order of the inputs was",
    ),
    "another variable": ("plain", ["data.static={surface: [orography]}"], "inputs are now without land_sea_mask"),
    "transform": (
        "plain", ["data.diagnostic={surface: [{name: precipitation, transform: sqrt}]}"],
        "outputs are now without precipitation, with precipitation as sqrt",
    ),
    "state": ("plain", ["model.predict=state"], "model.predict was 'increment' and is 'state'"),
    "heads": ("plain", ["model.dim_head=4"], "model.dim_head was 8 and is 4"),
    "time step": ("plain", ["data.timestep=12h", "data.source.steps=60", "inference.lead=12h"], "data.timestep was 6h and is 12h"),
    "statistics": ("plain", other_statistics, "the statistics are not those of the training: u@1"),
    "units": (
        "lora", ["data.prognostic={level: [{name: u, units: knots}, v, height], surface: [column_water]}"],
        "u was in 'm s-1' and is in 'knots'",
    ),
    "alpha": ("lora", ["start_from.lora={rank: 2, alpha: 40}"], r"start_from.lora was .*4.0.* and is .*40.0"),
    "rank": ("lora", ["start_from.lora={rank: 3, alpha: 4}"], "start_from.lora was"),
}  # fmt: skip


EVERYDAY = ("order of levels", "state", "statistics", "units", "alpha")


@pytest.mark.parametrize("change", [c if c in EVERYDAY else pytest.param(c, marks=pytest.mark.slow) for c in CHANGES])
def test_other_weights_are_refused_by_every_command(finished, tmp_path, change):
    kind, overrides, message = CHANGES[change]
    run = tmp_path / "run"
    shutil.copytree(finished / kind, run)
    sets = [*BASE, f"save_loc={run}", "trainer.epochs=2"]
    sets += [*LORA, f"start_from.path={finished / 'plain'}"] if kind == "lora" else []
    if callable(overrides):
        overrides(run)
    else:
        sets += overrides
        if overrides[0].startswith("data."):
            (run / "statistics.nc").unlink()
    experiment = load_experiment(FILE, sets)
    before = {path: path.read_bytes() for path in (run / "checkpoints").rglob("*") if path.is_file()}
    for command in (build.rollout, build.train):
        with pytest.raises(UserError, match=f"expected the experiment of these weights, .*{message}.*; undo this"):
            command(experiment)
        assert {path: path.read_bytes() for path in (run / "checkpoints").rglob("*") if path.is_file()} == before
    assert json.loads((run / "status.json").read_text())["step"] == 2
    with pytest.raises(UserError, match=message):
        checked_experiment(FILE, sets, continuing=True)
    checked_experiment(FILE, sets)


@pytest.mark.parametrize("how", ["unreadable", "damaged"])
def test_a_check_reports_checkpoints_that_a_run_cannot_continue_from(finished, tmp_path, monkeypatch, how):
    run = tmp_path / "run"
    shutil.copytree(finished / "plain", run)
    sets = [*BASE, f"save_loc={run}", "trainer.epochs=2"]
    message = "got only damaged ones"
    if how == "damaged":
        for file in run.glob("checkpoints/*/*.safetensors"):
            file.write_bytes(b"")
    else:
        message = "Input/output error"

        def fail(folder):
            raise RunError(f"{folder} cannot be read: {message}")

        monkeypatch.setattr(Checkpoint, "open", fail)
    with pytest.raises(ExperimentError, match=rf"(?s)save_loc: .*{message}"):
        checked_experiment(FILE, sets, continuing=True)


@pytest.mark.parametrize("kind", ["plain", pytest.param("lora", marks=pytest.mark.slow)])
def test_what_does_not_change_the_weights_may_change(finished, tmp_path, kind):
    run = tmp_path / "run"
    shutil.copytree(finished / kind, run)
    (run / "statistics.nc").unlink() if kind == "plain" else None  # fitted again to the same data
    sets = [
        *BASE,
        f"save_loc={run}",
        "trainer.epochs=2",
        "model.ff_dropout=0.1",
        "seed=5",
        "trainer.optimizer.learning_rate=1e-4",
    ]
    sets += [*LORA, f"start_from.path={finished / 'plain'}"] if kind == "lora" else []
    checked_experiment(FILE, sets, continuing=True)
    assert build.train(load_experiment(FILE, sets)) == 0
    assert build.rollout(load_experiment(FILE, sets)) == 0


def test_preprocess_keeps_the_statistics_of_a_trained_run(finished, tmp_path, caplog):
    run = tmp_path / "run"
    shutil.copytree(finished / "plain", run)
    kept, same = (run / "statistics.nc").read_bytes(), [f"save_loc={run}", *BASE]
    assert not preprocessed([*same, "data.train=[2000-01-01, 2000-01-08]"], "--climatology")
    assert "statistics.nc stays as it is: the weights in" in caplog.text
    assert (run / "statistics.nc").read_bytes() == kept
    assert (run / "climatology.zarr").is_dir()
    assert not (run / "preprocess-parts").exists()
    (run / "statistics.nc").unlink()
    assert not preprocessed(same)  # what was lost comes back
    checked_experiment(FILE, same, continuing=True)


@pytest.mark.parametrize(
    ("wanted", "state", "found"), [(1, "running", True), (9, "finished", True), (9, "running", False)]
)
def test_a_step_without_a_checkpoint_is_found_by_check(finished, tmp_path, wanted, state, found):
    """A training that goes on may still save a later one."""
    run = tmp_path / "run"
    shutil.copytree(finished / "plain", run)
    (run / "status.json").write_text(json.dumps({"state": state}))
    sets = [*BASE, f"save_loc={run}", f"inference.checkpoint={wanted}"]
    refused = pytest.raises(
        ExperimentError, match=rf"inference.checkpoint: expected a step .*\(2\), got {wanted}, change it"
    )
    with refused if found else nullcontext():
        checked_experiment(FILE, sets, continuing=True)


@pytest.mark.parametrize("value", ["true", "false", "1.0", "-1"])
def test_a_checkpoint_is_a_whole_number(value):
    with pytest.raises(ExperimentError, match=r"inference\.checkpoint"):
        load_experiment(FILE, [*BASE, f"inference.checkpoint={value}"])


def preprocessed(overrides, *options):
    with pytest.raises(SystemExit) as end:
        cli.main(["preprocess", str(FILE), *options, *(part for override in overrides for part in ("--set", override))])
    return end.value.code


def test_another_optimiser_is_named(finished, tmp_path):
    shutil.copytree(finished / "plain", tmp_path / "run")
    sets = [*BASE, f"save_loc={tmp_path / 'run'}", "trainer.epochs=2", "trainer.optimizer={type: muon}"]
    with pytest.raises(UserError, match=r"the experiment differs from the checkpoint's in .*trainer\.optimizer\.type"):
        build.train(load_experiment(FILE, sets))


@pytest.mark.slow
def test_another_source_before_the_first_checkpoint_brings_its_statistics(finished, tmp_path):
    """Of two sources, the second has other statistics; the run has been used with the first, without a training."""
    other, run = tmp_path / "other", tmp_path / "run"
    sets = [*BASE, "data.train=[2000-01-01, 2000-01-07]", f"save_loc={other}"]
    assert build.train(load_experiment(FILE, sets)) == 0
    for source in (finished / "plain", other):
        shutil.rmtree(run / "forecasts", ignore_errors=True)
        assert build.rollout(load_experiment(FILE, [*BASE, f"save_loc={run}", f"start_from={source}"])) == 0
        with xr.open_dataset(run / "statistics.nc") as own, xr.open_dataset(source / "statistics.nc") as theirs:
            for moment in ("mean", "std", "change_std"):
                xr.testing.assert_equal(own[moment], theirs[moment])


def test_the_state_of_an_optimiser_goes_to_the_same_kind_alone_and_without_what_is_frozen(finished, tmp_path):
    start = f"start_from.path={finished / 'plain'}"
    sets = [*BASE, "start_from.optimizer=true", start, f"save_loc={tmp_path / 'run'}"]
    other = [*sets, "trainer.optimizer={type: muon}"]
    message = (
        "start_from.optimizer: expected the state of muon, .* got that of adamw .* or trainer.optimizer.type to adamw"
    )
    for refused in (lambda: checked_experiment(FILE, other), lambda: build.train(load_experiment(FILE, other))):
        with pytest.raises(UserError, match=message):
            refused()
    frozen = [*sets, "start_from.freeze=['stages.0.*']"]
    checked_experiment(FILE, frozen)
    assert build.train(load_experiment(FILE, frozen)) == 0


def test_low_rank_changes_have_the_scale_of_the_source(finished, tmp_path):
    start = f"start_from.path={finished / 'lora' / 'checkpoints' / 'step-2'}"
    same = [*BASE, *LORA, start, f"save_loc={tmp_path / 'same'}"]
    checked_experiment(FILE, same)
    other = [*BASE, "start_from.lora={rank: 2, alpha: 40}", start, f"save_loc={tmp_path / 'other'}"]
    message = "start_from.lora.alpha: expected changes times 2 as in the source, got 20"
    for refused in (lambda: checked_experiment(FILE, other), lambda: build.train(load_experiment(FILE, other))):
        with pytest.raises(UserError, match=message):
            refused()


@pytest.mark.parametrize(
    ("init", "said"), [("[2000-01-08, 2000-01-12, 2d]", "1 of 3 forecasts include times"), ("2000-01-12", "")]
)
def test_forecasts_of_the_weather_of_the_training_are_told(finished, tmp_path, caplog, init, said):
    """The experiment may have other periods than those that its weights were trained on."""
    shutil.copytree(finished / "plain", tmp_path / "run")
    sets = [*BASE, f"save_loc={tmp_path / 'run'}", f"inference.init={init}", "data.train=[2000-01-01, 2000-01-07]"]
    assert build.rollout(load_experiment(FILE, sets)) == 0
    warnings = [record.message for record in caplog.records if "were trained" in record.message]
    assert len(warnings) == bool(said)
    assert said in "".join(warnings)
