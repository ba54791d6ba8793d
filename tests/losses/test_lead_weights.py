"""Weights per lead, and forecasts of random length."""

from __future__ import annotations

import pytest
import torch

from credit_like.schema.checks import section_findings
from credit_like.schema.experiment import Experiment
from tests.faults import tiny

LEADS = 3


def made(folder, loss=None, **section):
    return tiny.trainer(folder, phases=[{"forecast_len": LEADS, "loss": loss or {}, **section}], dropout=0.0)


def sample_of(trainer):
    return next(trainer.train_loader.batches(0))


def per_lead(trainer, sample):
    """The loss of each lead."""
    with torch.no_grad():
        return [trainer.loss(p, t).item() for p, t in trainer.context.stepper.predict_sample(sample)]


def test_the_loss_is_the_weighted_mean_over_leads(tmp_path) -> None:
    weights = [1.0, 0.0, 4.0]
    trainer = made(tmp_path, {"lead_weights": weights})
    sample = sample_of(trainer)
    parts = per_lead(trainer, sample)
    expected = sum(w * x for w, x in zip(weights, parts, strict=True)) / sum(weights)
    assert trainer.train_step([sample], 1, 0.0, 1).ready()[0] == pytest.approx(expected, rel=1e-6)
    row = trainer.validation(lambda: False, None, 0.0, 1)
    plain = made(tmp_path / "plain").validation(lambda: False, None, 0.0, 1)
    last = made(tmp_path / "last", {"lead_weights": [0, 0, 1]}).validation(lambda: False, None, 0.0, 1)
    first = made(tmp_path / "first", {"lead_weights": [1, 0, 0]}).validation(lambda: False, None, 0.0, 1)
    assert row["valid_loss"] == pytest.approx((first["valid_loss"] + 4 * last["valid_loss"]) / 5, rel=1e-5)
    assert plain["valid_loss"] > first["valid_loss"]


def test_a_random_length_is_that_of_a_shorter_sample(tmp_path) -> None:
    trainer = made(tmp_path, random_forecast_len=True)
    sample = sample_of(trainer)
    parts = per_lead(trainer, sample)
    means = [sum(parts[:n]) / n for n in range(1, LEADS + 1)]
    found = [trainer.train_step([sample], 1, 0.0, step).ready()[0] for step in range(1, 13)]
    lengths = [min(range(LEADS), key=lambda n: abs(means[n] - loss)) for loss in found]
    assert found == pytest.approx([means[n] for n in lengths], rel=1e-6)
    assert set(lengths) == set(range(LEADS))
    again = made(tmp_path, random_forecast_len=True)
    assert [again.train_step([sample], 1, 0.0, step).ready()[0] for step in range(1, 13)] == found


@pytest.mark.parametrize(
    ("loss", "section", "message"),
    [
        ({"lead_weights": [1, 2]}, {}, "expected as many weights as forecast_len = 3, got 2"),
        ({"lead_weights": [1, -2, 1]}, {}, "expected weights of at least 0"),
        ({"lead_weights": [0, 0, 0]}, {}, "expected weights of at least 0, and some above"),
        ({"lead_weights": [0, 1, 1]}, {"random_forecast_len": True}, "expected a first weight above 0"),
    ],
)
def test_weights_that_do_not_fit_are_refused(tmp_path, loss, section, message) -> None:
    phase = {"forecast_len": LEADS, "loss": loss, **section}
    whole = tiny.experiment(tmp_path, phases=[{}, phase])
    assert isinstance(whole, Experiment)
    ((path, found),) = [finding for finding in section_findings(whole, 1) if "loss" in finding[0]]
    assert path == ("trainer", "phases", 1, "loss", "lead_weights")
    assert message in found
