"""Noise on the input of training steps: its size, its place in every layout, and where there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from credit_like import build
from credit_like.nn.place import WHOLE, Place
from credit_like.parallel.runtime import Runtime
from credit_like.schema.load import load_experiment
from credit_like.training.input_noise import key_of, of_all_scales, perturbed
from tests.experiments import DEMO, SHORT, SMALL_MODEL

PARTS = ("prognostic", "forcing", "target", "index")


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    overrides = [
        *SHORT,
        SMALL_MODEL,
        f"save_loc={tmp_path_factory.mktemp('run')}",
        "trainer.input_noise=0.5",
        "trainer.scheduler.warmup_steps=1",
        "trainer.use_ema=false",
        "data.prognostic={level: [u, v, height], surface: [column_water, {name: precipitation, transform: sqrt}]}",
        "data.diagnostic={surface: []}",
    ]
    return build.build_trainer(build.build_context(load_experiment(DEMO, overrides), Runtime()))


@pytest.fixture
def sample(trainer):
    return next(iter(trainer.train_loader.batches(0)))


def key(trainer, sample, step=1):
    return key_of(trainer.train_step.input_keys, sample, step)


def test_noise_is_scaled_by_the_change_as_the_model_predicts_it(trainer, sample):
    """Over many samples, of the transformed variable where there is a transform; channels are independent."""
    stepper = trainer.context.stepper
    many = replace(
        sample,
        **{name: getattr(sample, name)[:1].expand(400, *[-1] * (getattr(sample, name).ndim - 1)) for name in PARTS},
    )
    keys = torch.arange(400)
    noisy = perturbed(many, stepper, keys, 0.5, WHOLE)
    forward = stepper.prognostic_transforms.forward
    z = forward(noisy.prognostic, torch) - forward(many.prognostic, torch)
    z = (z / (0.5 * stepper.change_std[:, None])).double()[:, :, 0]
    torch.testing.assert_close(z.var((0, 2, 3)), torch.ones(len(stepper.change_std)).double(), rtol=0.1, atol=0)
    correlation = torch.corrcoef(z.transpose(0, 1).flatten(1))
    assert float((correlation - torch.eye(len(correlation)).double()).abs().max()) < 0.05
    assert torch.equal(noisy.target, many.target)
    assert torch.equal(noisy.forcing, many.forcing)


def test_each_scale_has_its_part():
    """Means over squares of s points: the variance of all scales from s on, and of finer ones divided by their squares."""
    z = of_all_scales(torch.arange(2000), (8, 8), 1, torch.float64)[..., 0]
    octaves = 4
    for octave in range(octaves):
        size = 1 << octave
        means = z.unflatten(1, (-1, size)).unflatten(3, (-1, size)).mean((2, 4))
        expected = sum(1 if k >= octave else 4.0 ** (k - octave) for k in range(octaves)) / octaves
        assert float(means.var()) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(("row", "column"), [(20, 0), (0, 7), (9, 13)])
def test_the_part_of_a_rank_has_the_noise_of_the_whole(trainer, sample, row, column):
    stepper = trainer.context.stepper
    height, width = sample.prognostic.shape[-2:]
    whole = perturbed(sample, stepper, key(trainer, sample), 0.5, WHOLE).prognostic
    part = replace(sample, **{name: getattr(sample, name)[..., row:, column:] for name in PARTS[:3]})
    places = (Place(row, height), Place(column, width))
    assert torch.equal(
        perturbed(part, stepper, key(trainer, sample), 0.5, places).prognostic, whole[..., row:, column:]
    )


def test_a_point_without_data_stays_one(trainer, sample):
    prognostic = sample.prognostic.clone()
    prognostic[:, 0, :, 3, 4] = torch.nan
    noisy = perturbed(replace(sample, prognostic=prognostic), trainer.context.stepper, key(trainer, sample), 0.5, WHOLE)
    assert torch.equal(noisy.prognostic.isnan(), prognostic.isnan())


def test_steps_differ_a_repeated_one_does_not_and_validation_has_none(trainer, sample):
    losses = [trainer.train_step([sample], 1, 0.0, step).ready()[0] for step in (1, 2, 1)]
    assert losses[0] == losses[2]
    assert losses[0] != losses[1]
    step, keys = trainer.train_step, trainer.train_step.input_keys
    step.input_keys = None
    without = step([sample], 1, 0.0, 1).ready()[0]
    step.input_keys = keys
    assert without != losses[0]
    with torch.no_grad():
        scored = [trainer.loss(*pair) for pair in trainer.context.stepper.predict_sample(sample)]
    assert float(scored[0]) == pytest.approx(without, rel=1e-6)
