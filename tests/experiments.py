"""Settings that several rooms' tests share: the demonstration, cut down until training takes a second."""

from pathlib import Path

import pytest

from credit_like import cli

DEMO = Path(__file__).parents[1] / "config" / "demo.yml"

SHORT = (
    "data.source.steps=60",
    "data.train=[2000-01-01, 2000-01-09]",
    "data.valid=[2000-01-09T06, 2000-01-11]",
    "data.test=[2000-01-11T06, 2000-01-15T18]",
)
"""Sixty times of the synthetic source."""

FOUR_STEPS = (
    "trainer={global_batch_size: 4, micro_batch_size: 2, epochs: 2, batches_per_epoch: 2, checkpoint: {async: false}}",
    "trainer.scheduler.warmup_steps=1",
)
"""Two epochs of two steps, each of two micro-batches."""

SMALL_MODEL = "model={type: wxformer, dim: [8, 16, 32, 64], depth: [1, 1, 1, 1], dim_head: 8}"

BANDED_MODEL = (
    "model={type: wxformer, dim: [8, 16, 32, 64], depth: [1, 1, 1, 1], dim_head: 4, use_spectral_norm: true, "
    "padding_conf: {activate: true, mode: earth, pad_lat: [16, 16], pad_lon: [0, 0]}}"
)
"""64 padded rows are 4 at the coarsest level: two bands of one window each."""


def call(*arguments):
    """Run a command; return its exit status."""
    with pytest.raises(SystemExit) as end:
        cli.main([str(argument) for argument in arguments])
    return end.value.code


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder, by its path in it."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def representatives(values, *kept):
    """Return parameters of a slow test, those not `kept` (by their text) marked `long`: CI runs the representatives alone."""
    missing = set(kept) - {str(value) for value in values}
    assert not missing, f"no such parameters: {missing}"
    return [value if str(value) in kept else pytest.param(value, marks=pytest.mark.long) for value in values]
