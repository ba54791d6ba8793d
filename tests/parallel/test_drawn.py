"""Experiments with random options on random boxes, with data, ensemble and tensor parallelism: the numbers of one process."""

from __future__ import annotations

import pytest

from tests.parallel.drawn import as_training, compare, compare_trainings, draw, refusal, written

CHEAP, MORE = (15, 8), range(100, 124)
"""Numbers of draws: two that take seconds, and a sample of the others."""


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=pytest.mark.slow if n in CHEAP else pytest.mark.long) for n in (*CHEAP[:1], *MORE)]
)
def test_three_steps_of_what_is_drawn(tmp_path, seed):
    drawn = draw(seed, tmp_path)
    result = compare(drawn, tmp_path)
    assert not result.refused
    assert not result.wrong(), (str(drawn), result)


@pytest.mark.long
def test_what_exceeds_is_rounding_that_the_optimiser_amplifies(tmp_path):
    """The same gradients, updates that are not divided by their size: three steps are as exact as the first one."""
    drawn = draw(104, tmp_path)
    drawn.sections["trainer"]["optimizer"]["eps"] = 1.0
    errors = compare(drawn, tmp_path).errors
    assert errors is not None
    assert all(errors[what] < 1e-13 for what in ("outputs", "loss", "norm", "weights")), errors


LOGGED = {
    "loss": 1e-6,
    "grad_norm": 1e-6,
    "correction": 1e-4,
    "forecast/rmse": 1e-6,
    "forecast/bias": 1e-6,
    "forecast/acc": 1e-6,
}
"""Largest errors of what is rounded to float32 before it is logged, or before it is scored; all others are those of fp64."""


@pytest.mark.parametrize(
    "seed",
    [pytest.param(n, marks=pytest.mark.slow if n in CHEAP else pytest.mark.long) for n in (*CHEAP[1:], *MORE[:12])],
)
def test_a_training_of_what_is_drawn_logs_the_same(tmp_path, seed):
    """Phases, validations, scores, short forecasts and derived fields."""
    drawn = as_training(draw(seed, tmp_path))
    errors = compare_trainings(drawn, tmp_path)
    assert {"loss", "valid_loss", "rmse", "acc", "forecast/rmse"} <= errors.keys()
    assert {k: e for k, e in errors.items() if not e <= LOGGED.get(k, 1e-10)} == {}, str(drawn)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"tensor": 3}, "expected a divisor of the heads of every stage"),
        ({"domain": (1, 5)}, "leaves every rank columns, got 5"),
    ],
)
def test_what_check_refuses_the_ranks_refuse(tmp_path, layout, message):
    drawn = draw(15, tmp_path, **({"domain": (1, 1)} | layout))
    assert message in refusal(written(drawn, tmp_path), drawn.case)
    assert message in compare(drawn, tmp_path).refused
