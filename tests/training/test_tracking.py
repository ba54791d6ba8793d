"""Trackers offline, with the real packages: every value once, one run over restarts, and no training ends for their failures."""

import json
import logging
import sys
from types import SimpleNamespace

import pytest

from credit_like import build
from credit_like.schema.load import load_experiment
from credit_like.training import tracking
from credit_like.training.monitor import Monitor
from credit_like.training.tracking import Tracking
from tests.experiments import DEMO, SHORT, SMALL_MODEL

CONFIG = {"name": "a", "trainer": {"epochs": 2, "optimizer": {"type": "adamw"}}, "data": {"levels": [500, 850]}}
ROW = {
    "epoch": 0,
    "grad_norm": 1.0,
    "learning_rate": 0.1,
    "samples_per_second": 8.0,
    "data_wait": 0.0,
    "memory_mib": 1.0,
}


@pytest.fixture
def offline(monkeypatch):
    for name in ("MLFLOW_TRACKING_URI", "WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")


def run(folder, kind, steps, state="finished", validated=True):
    """A run of a monitor over some steps, the last of them validated."""
    monitor = Monitor(folder, 10, track=lambda: Tracking(kind, folder, "a", CONFIG))
    monitor.open(steps[0] - 1, False)
    for step in steps:
        monitor.step({"step": step, "loss": 1 / step, **ROW})
    if validated:
        monitor.validation({"step": steps[-1], "epoch": 0, "valid_loss": 0.5, "rmse": {"u@500": 0.25}, "acc": {}})
    monitor.status(state, steps[-1])
    monitor.close()


def runs_of_mlflow(folder):
    mlflow = pytest.importorskip("mlflow", reason="the package mlflow is not installed")
    client = mlflow.MlflowClient((folder / "tracking" / "mlflow").as_uri())
    (experiment,) = (one for one in client.search_experiments() if one.name == "a")
    return client, client.search_runs([experiment.experiment_id])


def test_mlflow_has_the_values_and_continues_its_run(tmp_path, offline):
    pytest.importorskip("mlflow", reason="the package mlflow is not installed")
    run(tmp_path, "mlflow", range(1, 4), state="continue", validated=False)
    client, (found,) = runs_of_mlflow(tmp_path)
    assert found.info.status == "SCHEDULED"
    run(tmp_path, "mlflow", range(4, 6))
    client, (found,) = runs_of_mlflow(tmp_path)
    assert found.info.status == "FINISHED"
    assert found.info.run_id == json.loads((tmp_path / "tracking" / "mlflow.json").read_text())["id"]
    assert found.data.params["trainer.optimizer.type"] == "adamw"
    assert found.data.params["data.levels"] == "[500, 850]"
    history = client.get_metric_history(found.info.run_id, "train/loss")
    assert [(one.step, one.value) for one in history] == [(n, 1 / n) for n in range(1, 6)]
    assert found.data.metrics["valid/loss"] == 0.5
    assert found.data.metrics["rmse/u_500"] == 0.25


def test_mlflow_gets_no_more_at_once_than_it_takes(tmp_path, offline, monkeypatch):
    """A stand-in with MLflow's limits: 1000 metrics and 100 parameters."""
    logged = {"metrics": {}, "params": {}}

    class Client:
        def __init__(self, *_):
            pass

        def get_experiment_by_name(self, name):
            return SimpleNamespace(experiment_id="1")

        def create_run(self, *_, **__):
            return SimpleNamespace(info=SimpleNamespace(run_id="2"))

        def log_batch(self, run, metrics=(), params=()):
            if len(metrics) > 1000 or len(params) > 100:
                raise ValueError("more than a batch may have")
            logged["metrics"] |= {key: (value, step) for key, value, _, step in metrics}
            logged["params"] |= dict(params)

    entities = SimpleNamespace(Param=lambda *values: values, Metric=lambda *values: values)
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    monkeypatch.setitem(sys.modules, "mlflow.tracking", SimpleNamespace(MlflowClient=Client))
    many = {f"key {number}": float(number) for number in range(2001)}
    tracker = Tracking("mlflow", tmp_path, "a", many)
    tracker.log(many, 7)
    assert logged["params"] == {key: str(value) for key, value in many.items()}
    assert logged["metrics"] == {key: (value, 7) for key, value in many.items()}


def test_wandb_has_the_values_and_continues_its_run(tmp_path, offline):
    pytest.importorskip("wandb", reason="the package wandb is not installed")
    run(tmp_path, "wandb", range(1, 4), state="continue")
    known = json.loads((tmp_path / "tracking" / "wandb.json").read_text())["id"]
    run(tmp_path, "wandb", range(4, 6))
    assert json.loads((tmp_path / "tracking" / "wandb.json").read_text())["id"] == known
    parts = sorted((tmp_path / "tracking" / "wandb").glob("offline-run-*"))
    assert [part.name.endswith(known) for part in parts] == [True, True]
    assert [value for part in parts for value in losses(next(part.glob("*.wandb")))] == [1 / n for n in range(1, 6)]


def losses(file):
    """The training losses in a file of an offline run: 7 bytes, then records of checksum, length, kind and a message."""
    from wandb.proto import wandb_internal_pb2

    content, at, found = file.read_bytes(), 7, []
    while at < len(content):
        length = int.from_bytes(content[at + 4 : at + 6], "little")
        record = wandb_internal_pb2.Record()
        record.ParseFromString(content[at + 7 : at + 7 + length])
        at += 7 + length
        values = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
        found += [json.loads(values["train/loss"])] if "train/loss" in values else []
    assert at < 32768, "the test reads one block"
    return found


def test_a_training_is_tracked(tmp_path, offline):
    pytest.importorskip("mlflow", reason="the package mlflow is not installed")
    changes = [
        "trainer.epochs=1",
        "trainer.batches_per_epoch=2",
        "name=a",
        "tracking=mlflow",
        "trainer.scheduler.warmup_steps=1",
    ]
    experiment = load_experiment(DEMO, [*SHORT, SMALL_MODEL, *changes, f"save_loc={tmp_path}"])
    assert build.train(experiment) == 0
    client, (found,) = runs_of_mlflow(tmp_path)
    logged = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    history = client.get_metric_history(found.info.run_id, "train/loss")
    assert [one.value for one in history] == [row["loss"] for row in logged if "loss" in row]
    assert found.data.params["tracking"] == "mlflow"


class Broken(Exception):
    """An error that only a tracker knows."""


@pytest.mark.parametrize("where", ["open", "log", "close", "import"])
def test_a_failure_is_one_warning(tmp_path, monkeypatch, caplog, where):
    class Backend:
        id = "1"

        def __init__(self, *_):
            if where == "open":
                raise Broken("no server")
            if where == "import":
                raise ModuleNotFoundError("No module named 'mlflow'")

        def log(self, values, step):
            if where == "log":
                raise Broken("no server")

        def close(self, state):
            if where == "close":
                raise Broken("no server")

    monkeypatch.setattr(tracking, "_BACKENDS", {"mlflow": Backend})
    with caplog.at_level(logging.WARNING):
        run(tmp_path, "mlflow", range(1, 4))
    (record,) = (r for r in caplog.records if r.levelno >= logging.WARNING)
    assert "tracking by mlflow is disabled from now on: " in record.getMessage()
    assert ("pip install 'credit-like[mlflow]'" in record.getMessage()) == (where == "import")
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 4


def test_a_damaged_id_is_one_warning(tmp_path, caplog):
    (tmp_path / "tracking").mkdir()
    (tmp_path / "tracking" / "mlflow.json").write_text("{")
    run(tmp_path, "mlflow", range(1, 3))
    assert [r.levelno for r in caplog.records if "tracking" in r.getMessage()] == [logging.WARNING]


@pytest.mark.slow
def test_the_packages_are_imported_by_runs_that_use_them_alone():
    import subprocess
    import sys

    program = "import sys, credit_like.training.trainer; sys.exit(bool({'mlflow', 'wandb'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=900)
