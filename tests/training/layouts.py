"""Training in parallel layouts gives the numbers of one process."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from credit_like import verify as kit
from credit_like.schema.experiment import Experiment

_CASES = {case.name: case for case in kit.CASES}

SOME_AND_ALL = [
    ["DDP 2", "domain 2"],
    pytest.param(["FSDP2 2", "tensor 2", "data 2 × domain 2", "domain 1 × 2", "domain 2 × 2"], marks=pytest.mark.long),
]
"""Parameters of a test: names of layouts, those that CI runs first."""


def assert_exact(experiment: Experiment, names: Sequence[str]) -> None:
    """Compare outputs, losses, gradients and weights of three steps in fp64 with those of one process."""
    rows = {row.name: row for row in kit.verify(experiment, [_CASES[name] for name in names])}
    for name in names:
        assert rows[name].ok, rows[name]
        assert not rows[name].refused, rows[name]
        assert set(rows[name].errors) == {"outputs", "loss", "gradients", "weights"}
