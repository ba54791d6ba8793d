"""Training with dropout, stochastic depth and noise on the input: the same numbers in every layout and after a restart."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from credit_like import build
from credit_like.nn.noise import NoiseKeys
from credit_like.parallel.runtime import Runtime
from credit_like.schema.load import load_experiment
from tests.experiments import BANDED_MODEL, DEMO, FOUR_STEPS, SHORT
from tests.training.continued import assert_same_when_continued
from tests.training.layouts import SOME_AND_ALL, assert_exact

TINY = [
    *SHORT,
    BANDED_MODEL,
    *FOUR_STEPS,
    "model.attn_dropout=0.1",
    "model.ff_dropout=0.2",
    "model.drop_path=0.3",
    "trainer.activation_checkpoint=true",
    "data.forecast_len=2",
]


def experiment_in(folder, *overrides):
    return load_experiment(DEMO, [*TINY, f"save_loc={folder}", *overrides])


def test_masks_change_with_step_and_lead_and_validation_has_none(tmp_path):
    context = build.build_context(experiment_in(tmp_path, "model.use_spectral_norm=false"), Runtime())
    trainer = build.build_trainer(context)
    sample = next(iter(build.build_loader(context, context.experiment.data.valid, False).batches(0)))
    losses = [trainer.train_step([sample], 1, 0.0, step).ready()[0] for step in (1, 2, 1)]
    assert losses[0] == losses[2]
    assert losses[0] != losses[1]
    state = context.stepper.initial(sample.prognostic, sample.index)
    other = replace(state, key=NoiseKeys.after(state.key))
    with torch.no_grad():
        forcing = sample.forcing[:, :, :1]
        first, second = (context.stepper(s, forcing).now for s in (state, other))
        assert not torch.equal(first, second)
        context.stepper.eval()
        first, second = (context.stepper(s, forcing).now for s in (state, other))
        assert torch.equal(first, second)


NOISE = "trainer.input_noise=0.3"


@pytest.mark.slow
def test_a_continued_run_is_bitwise_that_of_one_start(tmp_path):
    assert_same_when_continued(lambda folder: experiment_in(folder, NOISE), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("names", SOME_AND_ALL)
def test_every_layout_is_exact(tmp_path, names):
    assert_exact(experiment_in(tmp_path, NOISE), names)
