"""Stopped in one layout, continued in another: the same samples in the same order, the same curve to rounding."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.experiments import representatives
from tests.faults import harness

SECTIONS = {
    "plain": {},
    "rollout": {"forecast_len": 3},
    "accumulating": {"global_batch_size": 8},
    "muon": {"optimizer": {"type": "muon", "learning_rate": 1e-2}},
    "phases": {
        "phases": [
            {"epochs": 1},
            {
                "epochs": 1,
                "forecast_len": 3,
                "global_batch_size": 8,
                "optimizer": {"type": "muon", "learning_rate": 1e-2},
            },
        ]
    },
}
LAYOUTS = {1: {"data": "none"}, 2: {"data": "fsdp2"}, 4: {"data": "fsdp2"}}


def section(name: str, world: int, stop: int | None = None) -> dict:
    made = {
        "dropout": 0.0,
        "global_batch_size": 4,
        "checkpoint": {"every": 5},
        **SECTIONS[name],
        "parallelism": LAYOUTS[world],
    }
    return {**made, "stop_at": stop} if stop else made


def losses(folder) -> np.ndarray:
    return np.array([row["loss"] for row in harness.rows(folder) if "loss" in row])


def check(tmp_path, name: str, worlds: tuple[int, ...], stops: tuple[int, ...]) -> None:
    harness.reference(tmp_path / "whole", section(name, 1))
    for world, stop in itertools.zip_longest(worlds, stops):
        harness.reference(tmp_path / "moved", section(name, world, stop), world)
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    assert [row["step"] for row in harness.rows(moved)] == [row["step"] for row in harness.rows(whole)]
    np.testing.assert_allclose(losses(moved), losses(whole), rtol=2e-6)
    a, b = harness.tensors(whole), harness.tensors(moved)
    # Forwards are counted per rank and micro-batch, and random numbers drawn per rank.
    kept = [key for key in a if not key.startswith(("random/", "model/calls"))]
    assert kept == [key for key in b if not key.startswith(("random/", "model/calls"))]
    for key in kept:
        np.testing.assert_allclose(b[key], a[key], rtol=1e-4, atol=2e-6, err_msg=key)


@pytest.mark.parametrize("name", ["plain", "muon", pytest.param("phases", marks=pytest.mark.slow)])
def test_one_then_two_then_one(tmp_path, name) -> None:
    # 4 is mid-epoch; 9 is the end of the first epoch, before its validation.
    check(tmp_path, name, (1, 2, 1), (4, 9))


@pytest.mark.slow
@pytest.mark.parametrize("name", representatives(list(SECTIONS), "rollout"))
def test_four_then_one_then_two(tmp_path, name) -> None:
    check(tmp_path, name, (4, 1, 2), (2, 4))


@pytest.mark.slow
def test_more_ranks_than_rows_go_on_bitwise(tmp_path) -> None:
    """The last two of four ranks hold no row of the head; whichever copy of its state is saved must be right."""
    harness.reference(tmp_path / "whole", section("plain", 4), 4)
    harness.reference(tmp_path / "stopped", section("plain", 4, 6), 4)
    harness.reference(tmp_path / "stopped", section("plain", 4), 4)
    harness.assert_same(tmp_path / "stopped", tmp_path / "whole")
