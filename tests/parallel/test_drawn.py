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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "messages"),
    [
        ({"tensor": 3}, ("trainer.parallelism.tensor: expected a divisor", "trainer.parallelism.tensor 3: stages.0.")),
        (
            {"domain": (1, 3)},
            ("trainer.parallelism.domain: expected a degree that leaves every rank columns, got 3",) * 2,
        ),
    ],
    ids=["tensor", "columns"],
)
def test_what_check_refuses_the_ranks_refuse(tmp_path, layout, messages):
    drawn = draw(15, tmp_path, **({"domain": (1, 1)} | layout))
    for message, refused in zip(
        messages, (refusal(written(drawn, tmp_path), drawn.case), compare(drawn, tmp_path).refused), strict=True
    ):
        assert message in refused
