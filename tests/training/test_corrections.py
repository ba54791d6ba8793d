"""Corrections of predictions in training: when they begin, and what is logged of them."""

from __future__ import annotations

import json

import pytest

from credit_like import build
from credit_like.schema.load import load_experiment
from tests.experiments import BANDED_MODEL, DEMO, FOUR_STEPS, SHORT
from tests.training.continued import stopped_in_step

SETTINGS = [
    *SHORT,
    BANDED_MODEL,
    *FOUR_STEPS,
    "inference.init=null",
    "inference.lead=12h",
]
CLIPS = (
    "physics=[{type: clip, variables: [column_water], minimum: 20, after_epochs: %d}, "
    "{type: clip, variables: [precipitation, u], maximum: 0.1, minimum: null}]"
)


def rows_of(folder, *overrides):
    """Train, and return the log without what depends on the clock."""
    assert build.train(load_experiment(DEMO, [*SETTINGS, f"save_loc={folder}", *overrides])) == 0
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [
        {
            key: value
            for key, value in row.items()
            if key not in ("samples_per_second", "data_wait", "memory_mib", "seconds")
        }
        for row in rows
    ]


FIRST, SECOND = "correction/clip/column_water", "correction/clip 2/precipitation"


@pytest.mark.slow
def test_a_correction_begins_after_its_epochs_and_is_logged(tmp_path):
    late = rows_of(tmp_path / "late", CLIPS % 1)
    assert [(FIRST in row, SECOND in row) for row in late if "loss" in row] == [(False, True)] * 2 + [(True, True)] * 2
    assert all(row[FIRST] > 0 for row in late if FIRST in row)  # a minimum adds
    assert all(row[SECOND] < 0 and row["correction/clip 2/u"] < 0 for row in late if "loss" in row)
    never = rows_of(tmp_path / "never", (CLIPS % 0).replace("minimum: 20", "minimum: -1e9"))
    validations = [[row["valid_loss"] for row in rows if "valid_loss" in row] for rows in (late, never)]
    assert validations[0][0] == validations[1][0]
    assert validations[0][1] != validations[1][1]


@pytest.mark.slow
def test_a_validation_that_was_missing_is_that_of_its_epoch(tmp_path):
    """The run stops after the last step of the first epoch, before the validation; the correction begins with the second."""
    whole = rows_of(tmp_path / "whole", CLIPS % 1)
    with stopped_in_step(2):
        rows_of(tmp_path / "parts", CLIPS % 1)
    assert not json.loads((tmp_path / "parts" / "log.jsonl").read_text().splitlines()[-1]).get("valid_loss")
    assert rows_of(tmp_path / "parts", CLIPS % 1) == whole


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["{data: ddp}", "{domain: 2}", "{domain: [1, 2]}"])
def test_every_layout_logs_the_same(tmp_path, run_ranks, layout):
    alone = rows_of(tmp_path / "alone", CLIPS % 0)
    logs = run_ranks(2, _train, tmp_path / "two", f"trainer.parallelism={layout}", CLIPS % 0)
    for row, other in zip(alone, logs[0], strict=True):
        names = [name for name in row if name.startswith("correction/")]
        assert {name: other[name] for name in names} == pytest.approx({name: row[name] for name in names}, rel=1e-4)


def _train(rank, folder, *overrides):
    return rows_of(folder, *overrides)
