"""A run that is stopped in its second step and continued ends with the bits of a run of one start."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from credit_like import build
from credit_like.checkpoint.export import export
from credit_like.schema.experiment import Experiment
from credit_like.training.step import TrainStep


@contextmanager
def stopped_in_step(number: int, sent: signal.Signals = signal.SIGTERM) -> Iterator[None]:
    """Send this process a signal in that optimiser step, by default as a batch system asks for a stop."""
    step_of = TrainStep.__call__

    def interrupted(self, micro_batches, count, learning_rate, step):
        if step == number:
            os.kill(os.getpid(), sent)
        return step_of(self, micro_batches, count, learning_rate, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainStep, "__call__", interrupted)
        yield


def trained(experiment: Experiment, which: str = "raw") -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train to the end; return the losses of the log, and the exported weights."""
    folder = Path(experiment.save_loc)
    assert build.train(experiment) == 0
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    weights = load_file(export(folder, folder / "weights.safetensors", which))
    return [row["loss"] for row in rows if "loss" in row], weights


def assert_same_when_continued(
    experiment_in: Callable[[Path], Experiment], folder: Path, which: str = "raw"
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Compare a run in `folder/whole` with one in `folder/parts`; return what `trained` does."""
    losses, weights = trained(experiment_in(folder / "whole"), which)
    with stopped_in_step(2):
        build.train(experiment_in(folder / "parts"))
    assert json.loads((folder / "parts" / "status.json").read_text())["step"] == 2
    found, continued = trained(experiment_in(folder / "parts"), which)
    assert found == losses
    assert weights.keys() == continued.keys()
    assert all(torch.equal(weights[name], continued[name]) for name in weights)
    return losses, weights
