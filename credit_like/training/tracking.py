"""Experiment trackers: metrics and the experiment of a run for MLflow or Weights & Biases.

Both work offline by default, in `SAVE_LOC/tracking`; their own environment variables (`MLFLOW_TRACKING_URI`,
`WANDB_MODE=online`) name a server. The packages are imported by the runs that use them alone. The id of the tracker's run is
kept in `SAVE_LOC/tracking/<kind>.json`, so that a training that continues goes on in the same run.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from credit_like.checkpoint.files import replace_file, to_json
from credit_like.nested import leaves
from credit_like.small_files import read_small

log = logging.getLogger(__name__)

Kind = Literal["mlflow", "wandb"]
_PARAMETERS, _METRICS = 100, 1000  # that MLflow takes at once
_LONGEST = 6000  # characters of a parameter in MLflow


class _Backend(ABC):
    """A run of a tracker: the one with an id, or a new one."""

    id: str

    @abstractmethod
    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add metrics of an optimiser step."""

    @abstractmethod
    def close(self, state: str) -> None:
        """End the run, or this part of it where `state` is `continue`."""


class _MLflow(_Backend):
    def __init__(self, folder: Path, name: str, config: Mapping[str, Any], known: str | None) -> None:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self.client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or (folder / "mlflow").absolute().as_uri())
        if known is not None:
            self.id = known
            self.client.update_run(known, status="RUNNING")
            return
        experiment = self.client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else self.client.create_experiment(name)
        self.id = self.client.create_run(experiment_id, run_name=name).info.run_id
        parameters = [Param(_allowed(key), str(value)[:_LONGEST]) for key, value in leaves(config)]
        for start in range(0, len(parameters), _PARAMETERS):
            self.client.log_batch(self.id, params=parameters[start : start + _PARAMETERS])

    def log(self, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(_allowed(key), float(value), now, step) for key, value in values.items()]
        for start in range(0, len(metrics), _METRICS):
            self.client.log_batch(self.id, metrics=metrics[start : start + _METRICS])

    def close(self, state: str) -> None:
        status = {"finished": "FINISHED", "failed": "FAILED"}.get(state)
        if status is None:
            self.client.update_run(self.id, status="SCHEDULED")
        else:
            self.client.set_terminated(self.id, status)


def _allowed(key: str) -> str:
    """Return a name that MLflow accepts."""
    return re.sub(r"[^\w\-. :/]", "_", key)


class _Wandb(_Backend):
    def __init__(self, folder: Path, name: str, config: Mapping[str, Any], known: str | None) -> None:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or name, name=name, id=known, resume="allow", dir=str(folder),
            config=dict(config), mode=os.environ.get("WANDB_MODE") or "offline",
            settings=wandb.Settings(console="off", silent=True),
        )  # fmt: skip
        self.id = str(self.run.id)
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")  # a run that continues may be at a step that was logged before

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.run.log({**values, "step": step})

    def close(self, state: str) -> None:
        self.run.finish(exit_code=1 if state == "failed" else 0)


_BACKENDS: Mapping[Kind, type[Any]] = {"mlflow": _MLflow, "wandb": _Wandb}


class Tracking:
    """Sends what a run reports to a tracker; its first failure is a warning, after which the run goes on without it."""

    def __init__(self, kind: Kind, save_loc: Path, name: str, config: Mapping[str, Any]) -> None:
        self.kind, self.folder = kind, save_loc / "tracking"
        self._backend: _Backend | None = None
        self._failed = False
        self._try(lambda: self._open(name, config))

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add metrics of an optimiser step."""
        backend = self._backend
        if backend is not None:
            self._try(lambda: backend.log(values, step))

    def close(self, state: str) -> None:
        """End the tracker's run with the `state` of status.json."""
        backend, self._backend = self._backend, None
        if backend is not None:
            self._try(lambda: backend.close(state))

    def _open(self, name: str, config: Mapping[str, Any]) -> None:
        file = self.folder / f"{self.kind}.json"
        known = json.loads(read_small(file))["id"] if file.is_file() else None
        self._backend = _BACKENDS[self.kind](self.folder, name, config, known)
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_file(file, to_json({"id": self._backend.id}))

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - a tracker may raise anything, and no training ends for that
            if not self._failed:
                cure = f"; pip install 'credit-like[{self.kind}]'" if isinstance(error, ImportError) else ""
                log.warning(
                    "tracking by %s is disabled from now on: %s%s", self.kind, error or type(error).__name__, cure
                )
            self._backend, self._failed = None, True
