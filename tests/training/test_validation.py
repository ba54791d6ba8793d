"""A validation leaves the training as it was."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from credit_like.parallel.runtime import Runtime
from credit_like.parallel.shards import whole
from credit_like.parallel.unwrap import canonical_name
from credit_like.training.nonfinite import first_module
from credit_like.training.validation import Validation
from tests.faults import tiny
from tests.training.without_data import global_grid, small_experiment, trainer_without_data

GRID = global_grid(32, 64)
VARIABLES = {"prognostic": {"level": ["height"], "surface": ["column_water"]}}
MODEL = {"type": "wxformer", "dim": [8, 16, 32, 64], "depth": [1, 1, 1, 1], "dim_head": 8, "use_spectral_norm": True}
MODEL |= {"local_window_size": 2, "global_window_size": [2, 2, 1, 1]}


class Samples:
    """A loader of a few samples."""

    def __init__(self, samples) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def batches(self, epoch, start=0):
        return iter(self.samples[start:])


def _around_a_validation(rank, use_ema, keep):
    """Return the weights after steps with forwards without a backward in between, and the loss of the validation."""
    section = {
        "parallelism": {"data": "fsdp2"},
        "use_ema": use_ema,
        "ema_decay": 0.9,
        "fsdp2_reshard_after_forward": not keep,
    }
    section |= {"global_batch_size": 2, "micro_batch_size": 1}
    experiment = small_experiment(GRID, VARIABLES, model=MODEL, trainer=section)
    runtime = Runtime.start(experiment.trainer.parallelism, torch.device("cpu"))
    made, sample = trainer_without_data(experiment, GRID, runtime)
    generator = torch.Generator().manual_seed(rank)
    samples = []
    for _ in range(3):
        fields = [torch.randn(x.shape, generator=generator) for x in (sample.prognostic, sample.forcing, sample.target)]
        samples.append(replace(sample, prognostic=fields[0], forcing=fields[1], target=fields[2]))
    made.validation.begin(replace(made.stage, valid_loader=Samples(samples)))
    poisoned = replace(sample, prognostic=torch.full_like(sample.prognostic, torch.nan))
    numbers = itertools.count(1)
    losses = []

    def step():
        made.train_step(iter(samples[:1]), 1, 1e-3, next(numbers))

    for _ in range(2):
        step()
        assert first_module(made.train_step, [poisoned], 1) is not None  # found without a backward
        losses.append(made.validation(lambda: False, None, 1.0, 1)["valid_loss"])
    step()
    return {canonical_name(n): whole(p.detach()) for n, p in made.state.parameters.items()}, losses


@pytest.mark.parametrize(
    "use_ema", [pytest.param(True, marks=pytest.mark.slow), pytest.param(False, marks=pytest.mark.long)]
)
def test_a_step_after_a_validation_computes_with_the_weights(run_ranks, use_ema) -> None:
    """Where parameters stay gathered after a forward, the next forward takes them, whatever the shards hold then."""
    for (freed, ideal), (kept, losses) in zip(
        *(run_ranks(2, _around_a_validation, use_ema, keep) for keep in (False, True)), strict=True
    ):
        assert losses == ideal
        for name, value in freed.items():
            assert torch.equal(kept[name], value), name


@pytest.mark.parametrize(("random", "leads"), [(False, 5), (True, 3)])
def test_the_first_short_forecasts_are_estimated_by_the_steps_of_training(tmp_path, random, leads) -> None:
    """A step of training costs as three of the model; of 1 to 5 random ones, 3 on average."""
    section = {"monitor": {"every": 1}, "forecast_len": 5, "random_forecast_len": random, "global_batch_size": 2}
    asked = []
    due = Validation._forecasts_due(
        SimpleNamespace(
            stage=SimpleNamespace(phase=SimpleNamespace(experiment=tiny.experiment(tmp_path, **section))),
            context=SimpleNamespace(runtime=Runtime()),
            forecasts=SimpleNamespace(steps=30),
            allowance=SimpleNamespace(affords=lambda _, estimate: asked.append(estimate) or True),
        ),
        ended=1, trained=100.0, steps=10,
    )  # fmt: skip
    assert due
    assert asked == [pytest.approx(30 * 10.0 / 2 / (3 * leads))]
