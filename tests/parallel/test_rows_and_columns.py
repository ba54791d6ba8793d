"""Training on boxes of rows and columns: all of a step that surrounds the model, in fp64, against one process."""

from __future__ import annotations

from functools import partial

import pytest

from credit_like import registry
from credit_like import verify as kit
from credit_like.check import checked_experiment
from credit_like.check.describe import describe, print_table
from credit_like.errors import UserError
from credit_like.parallel.processes import run_ranks as answers_of
from credit_like.schema.checks import shares_columns
from credit_like.schema.load import load_experiment
from tests.experiments import BANDED_MODEL, DEMO, SHORT

WAYS = {
    "rollout": [
        "data.forecast_len=3",
        "trainer.input_noise=0.3",
        "physics=[{type: clip, variables: [column_water], minimum: 20}, {type: conserve, variables: [u]}]",
    ],
    "whole rows": [
        "loss={type: sum, terms: [{loss: {type: mse}}, {weight: 0.5, loss: {type: spectral}}]}",
        "physics=[{type: zonal-filter, variables: [u], highest: 8}, "
        "{type: spherical-filter, variables: [column_water], winds: [u, v], highest: 10, damping: 0.1}, "
        "{type: spherical-filter, variables: [height], highest: 10, climatology: [2000-01-01, 2000-01-03]}, "
        "{type: zonal-energy, variables: [v, height], lowest: 2, rate: 0.5}]",
    ],
    "members": [
        "loss={type: sum, terms: [{loss: {type: crps}}, {weight: 0.5, loss: {type: spectral-crps}}, {loss: {type: energy}}]}",
        "trainer.members=2",
        "model.noise={channels: 2}",
    ],
    "noise in norms": [
        "loss={type: sum, terms: [{loss: {type: crps}}, {weight: 0.5, loss: {type: spectral-crps}}]}",
        "trainer.members=2",
        "model.noise={type: conditional-norm, channels: 3, correlation: 0.5}",
    ],
}
WIDE = BANDED_MODEL.replace("pad_lat: [16, 16], pad_lon: [0, 0]", "pad_lat: [32, 32], pad_lon: [16, 16]")
"""96 padded rows and columns are 6 at the coarsest level: three bands of one window each."""
TAME = "trainer.optimizer.eps=1e-2"
"""AdamW divides by the root of second moments and eps. With one above the smallest gradients it does not amplify their rounding."""
EXACT = dict.fromkeys(("outputs", "loss", "gradients", "weights"), 1e-12)
COARSE = {**EXACT, "weights": 1e-9}
"""Largest errors, relative to the largest value of the tensor: with `TAME`, and with the default eps."""


def experiment_in(folder, *changes):
    settings = [
        *SHORT,
        "trainer.device=cpu",
        "trainer.scheduler.warmup_steps=1",
        "inference.lead=12h",
        "inference.init=null",
    ]
    return load_experiment(DEMO, [*settings, *changes, f"save_loc={folder}"])


def compared(folder, experiment, cases, bounds=EXACT, **trainer):
    """The errors of cases against one process; `trainer` are keys that the kit itself would not choose."""
    problem = kit.prepare(experiment, str(folder))
    section = problem.experiment.trainer.model_copy(update=trainer)
    problem.experiment = problem.experiment.model_copy(update={"trainer": section})
    reference = folder / "reference.pt"
    (answer,) = answers_of(1, partial(kit._reference, problem, reference), 300)
    assert answer.state == "done", answer.value
    for case in cases:
        row = kit._compared(case, answers_of(case.world, partial(kit._layout, problem, case, reference), 300))
        assert not row.failed, row.failed
        assert not row.refused, row.refused
        assert all(row.errors[what] < bound for what, bound in bounds.items()), row.errors


BOXES = [
    ("members", BANDED_MODEL, kit.Case("1 × 2, ensemble 2", 4, "fsdp2", domain=(1, 2), ensemble=2), False),
    ("whole rows", WIDE, kit.Case("2 × 3", 6, "fsdp2", domain=(2, 3)), True),
    ("rollout", WIDE, kit.Case("3 × 2", 6, "none", domain=(3, 2)), False),
    ("members", BANDED_MODEL, kit.Case("data 2 × 1 × 2", 4, "ddp", domain=(1, 2)), False),
    ("rollout", BANDED_MODEL, kit.Case("tensor 2 × 1 × 2", 4, "fsdp2", tensor=2, domain=(1, 2)), False),
    ("noise in norms", BANDED_MODEL, kit.Case("norms 1 × 2, ensemble 2", 4, "ddp", domain=(1, 2), ensemble=2), False),
    ("noise in norms", BANDED_MODEL, kit.Case("norms 2 × 2, ensemble 2", 8, "fsdp2", domain=(2, 2), ensemble=2), False),
    ("members", BANDED_MODEL, kit.Case("2 × 2, ensemble 2", 8, "fsdp2", domain=(2, 2), ensemble=2), False),
]


@pytest.mark.parametrize(
    ("way", "model", "case", "shifted"),
    [pytest.param(*box, marks=pytest.mark.slow if i < 1 else pytest.mark.long) for i, box in enumerate(BOXES)],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_box_has_the_numbers_of_the_whole(tmp_path, way, model, case, shifted):
    compared(tmp_path, experiment_in(tmp_path, model, *WAYS[way], TAME), [case], shift_longitude=shifted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "data", "shifted", "eps", "bounds"),
    [
        ("rollout", "none", True, [TAME], EXACT),
        pytest.param("whole rows", "fsdp2", False, [], COARSE, marks=pytest.mark.long),
    ],
    ids=["rollout", "whole rows, default eps"],
)
def test_small_boxes_have_the_numbers_of_the_whole(tmp_path, way, data, shifted, eps, bounds):
    cases = kit.Case("1 × 2", 2, data, domain=(1, 2)), kit.Case("2 × 2", 4, "fsdp2", domain=(2, 2))
    experiment = experiment_in(tmp_path, BANDED_MODEL, *WAYS[way], *eps)
    compared(tmp_path, experiment, cases, bounds, shift_longitude=shifted)


@pytest.mark.long
def test_a_run_continues_in_any_other_layout(tmp_path, monkeypatch):
    cases = {case.name: case for case in kit.CASES} | {"one process": kit.Case("one process")}
    pairs = [("domain 1 × 2", "domain 2"), ("domain 2 × 2", "one process"), ("FSDP2 2", "domain 2 × 2")]
    monkeypatch.setattr(kit, "_continuations", lambda accepted: [(cases[a], cases[b]) for a, b in pairs])
    rows = {row.name: row for row in kit.verify(experiment_in(tmp_path, BANDED_MODEL), [])}
    for first, second in pairs:
        row = rows[f"{first}, continued in {second}"]
        assert row.ok, row
        assert row.errors["weights"] < COARSE["weights"]


def test_every_correction_that_ships_shares_columns():
    assert [name for name in registry.names("physics") if not shares_columns(registry.module("physics", name))] == []


def test_what_has_no_form_for_columns_is_refused_by_name(tmp_path, monkeypatch):
    from credit_like.physics import clip

    monkeypatch.delattr(clip, "shares_columns")
    with pytest.raises(UserError) as raised:
        checked_experiment(
            DEMO,
            [
                *SHORT,
                BANDED_MODEL,
                "trainer.parallelism.domain=[2, 2]",
                "physics=[{type: clip, variables: [column_water], minimum: 20}]",
                f"save_loc={tmp_path}",
            ],
            4,
        )
    assert "expected a correction that can share columns with trainer.parallelism.domain: [2, 2], got clip" in str(
        raised.value
    )


@pytest.mark.parametrize(
    ("domain", "message"),
    [
        ("[2, 3]", "expected a degree that leaves every rank columns, got 3: at 4 columns (windows of "),
        ("[3, 2]", "expected a degree that leaves every rank rows, got 3: at 4 rows (windows of "),
        ("[2, 0]", "expected an integer of at least 1, or [rows, columns] of such, got [2, 0]"),
        ("[2]", "expected an integer of at least 1, or [rows, columns] of such, got [2]"),
    ],
)
def test_degrees_that_do_not_fit_are_refused_before_a_run(tmp_path, domain, message):
    changes = [*SHORT, BANDED_MODEL, f"trainer.parallelism.domain={domain}", f"save_loc={tmp_path}"]
    with pytest.raises(UserError) as raised:
        checked_experiment(DEMO, changes, 6)
    assert message in str(raised.value)
    assert ("degrees that work: 1, 2" in str(raised.value)) == ("degree that" in message)


def test_check_shows_what_each_rank_has(tmp_path, capsys):
    plain = [
        *SHORT,
        WIDE,
        "trainer.scheduler.warmup_steps=1",
        "inference.lead=12h",
        "inference.init=null",
        f"save_loc={tmp_path}",
    ]
    boxes = [*plain, "trainer.parallelism={data: fsdp2, domain: [2, 3]}"]
    description = describe(*checked_experiment(DEMO, boxes, 6))
    rows, columns = (description["shards"][name] for name in ("rows", "columns"))
    assert list(rows) == [32, 96, 48, 24, 12, 6]
    assert rows[12] == [6, 6]
    assert rows[6] == [4, 2]  # three windows
    assert columns[64] == [22, 21, 21]  # the image has no windows
    assert columns[12] == [4, 4, 4]
    print_table(description)
    assert "6 = 4 + 2" in capsys.readouterr().out
    assert "shards" not in describe(*checked_experiment(DEMO, plain, 1))
