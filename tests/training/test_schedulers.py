"""Learning rates against their formulas, and what depends on validation losses."""

from __future__ import annotations

import math
import random
import shutil
from types import SimpleNamespace

import pytest
import torch
from torch.optim import lr_scheduler

from credit_like import registry
from credit_like.checkpoint.manager import steps
from credit_like.launch.status import status
from credit_like.training.loop import Loop
from credit_like.training.patience import stalls
from credit_like.training.state import Progress
from credit_like.training.validation import Validation
from tests.faults import harness, tiny

BASE = 0.4


def rates(kind, total=20, **keys):
    module = registry.module("scheduler", kind)
    config = module.Config(**keys)
    return [module.learning_rate(config, BASE, step, total) for step in range(total)]


@pytest.mark.parametrize("shape", ["linear", "sqrt"])
def test_warmup_stable_decay(shape) -> None:
    found = rates("warmup-stable-decay", warmup_steps=4, decay_steps=5, shape=shape, min_lr=0.1)
    assert found[:4] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert found[4:15] == [BASE] * 11
    done = [n / 6 for n in range(1, 6)]
    assert found[15:] == pytest.approx([0.1 + 0.3 * (1 - (x if shape == "linear" else math.sqrt(x))) for x in done])
    assert rates("warmup-stable-decay") == [BASE] * 20
    with pytest.raises(
        ValueError, match=r"trainer\.scheduler\.decay_steps: expected warmup_steps \+ decay_steps of at most"
    ):
        rates("warmup-stable-decay", warmup_steps=10, decay_steps=11)


def test_cosine_restarts() -> None:
    found = rates("cosine-restarts", warmup_steps=2, period=3, factor=2, min_lr=0.2)
    cosine = [0.2 + 0.1 * (1 + math.cos(math.pi * t / period)) for period in (3, 6, 12) for t in range(period)]
    assert found == pytest.approx([0.2, 0.4, *cosine[:18]])
    assert rates("cosine-restarts", period=5)[:5] == rates("cosine-restarts", period=5)[15:]


def test_stalls() -> None:
    assert stalls([3, 2, 1], 1, 0) == 0
    assert stalls([1, 1, 1], 2, 0) == 1
    assert stalls([1, 2, 0.5, 2, 2, 2, 2], 2, 0) == 2
    assert stalls([None, None], 2, 0) == 1
    assert stalls([1.0, 0.95, 0.9, 0.85], 2, 0.1) == 1  # 0.9 is no better than 1 by more than a tenth
    assert stalls([-1.0, -1.05, -1.2], 2, 0.1) == 0


def test_plateau() -> None:
    module = registry.module("scheduler", "plateau")
    config = module.Config(factor=0.1, patience=2, min_lr=0.01, warmup_steps=2)

    def rate(step, losses):
        return module.learning_rate_after(config, BASE, step, 100, losses)

    assert rate(0, []) == module.learning_rate(config, BASE, 0, 100) == BASE / 2
    assert rate(9, [1, 2, 0.5]) == BASE
    assert rate(9, [1, 2, 2]) == pytest.approx(0.04)
    assert rate(9, [1, 2, 2, 2, 2]) == rate(9, [1] * 50) == 0.01


def rates_of_torch(make, steps, losses=None):
    """The rates of one of torch's schedules, which steps with a loss where there are some."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=BASE)
    schedule, found = make(optimizer), []
    for step in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step(*(() if losses is None else (losses[step],)))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_schedules_are_those_of_torch(seed) -> None:
    draw = random.Random(seed)
    total, warmup, low = draw.randint(40, 80), draw.randint(0, 9), draw.choice([0, 0.01])
    rise = [BASE * (step + 1) / warmup for step in range(warmup)]
    cosine = rates_of_torch(lambda o: lr_scheduler.CosineAnnealingLR(o, total - warmup, low), total - warmup)
    assert rates("linear-warmup-cosine", total, warmup_steps=warmup, min_lr=low) == pytest.approx([*rise, *cosine])
    keys = {"period": draw.randint(2, 9), "factor": draw.randint(1, 3)}
    restarts = rates_of_torch(
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, keys["period"], keys["factor"], low), total - warmup
    )
    found = rates("cosine-restarts", total, warmup_steps=warmup, min_lr=low, **keys)
    assert found == pytest.approx([*rise, *restarts])
    losses = [draw.uniform(0.5, 1.5) * 0.99**number for number in range(total)]
    patience, change = draw.randint(1, 4), draw.choice([0, 0.05])
    plateau = rates_of_torch(
        lambda o: lr_scheduler.ReduceLROnPlateau(
            o, factor=0.7, patience=patience - 1, threshold=change, min_lr=low, eps=0
        ),
        total,
        losses,
    )
    module = registry.module("scheduler", "plateau")
    config = module.Config(factor=0.7, patience=patience, min_change=change, min_lr=low)
    found = [module.learning_rate_after(config, BASE, 99, total, losses[:number]) for number in range(total)]
    assert found == pytest.approx(plateau)


@pytest.mark.parametrize("kind", [name for name in registry.names("scheduler") if name != "constant"])
def test_no_rate_is_below_the_lowest(kind) -> None:
    """A lowest rate above that of the optimiser is refused in the first step, also where it would apply to a later one."""
    assert rates(kind, min_lr=BASE) == [BASE] * 20
    with pytest.raises(
        ValueError, match=r"^trainer\.scheduler\.min_lr: expected at most the learning rate 0\.4, got 0\.5"
    ):
        rates(kind, min_lr=0.5, warmup_steps=1)


CURVES = [
    {"type": "constant", "warmup_steps": 6},
    {"type": "linear-warmup-cosine", "warmup_steps": 3, "min_lr": 1e-5},
    {"type": "warmup-stable-decay", "warmup_steps": 2, "decay_steps": 5},
    {"type": "cosine-restarts", "warmup_steps": 1, "period": 3, "factor": 2},
    {"type": "plateau", "patience": 1, "factor": 0.5, "min_change": 0.3},
]


def test_an_interrupted_run_has_the_rates_of_every_schedule(tmp_path) -> None:
    """Stops in the warm-up, at the end of a phase, in the decay, before a restart and after a reduction."""
    steps, end = 9, 9 * len(CURVES)
    section = {
        "checkpoint": {"every": 1000, "keep": 9, "async": False},
        "valid_every": 2,
        "phases": [{"epochs": 1, "scheduler": scheduler} for scheduler in CURVES],
    }
    for stop in (4, 18, 24, 31, 42):
        assert tiny.trainer(tmp_path / "run", stop_at=stop, **section).fit().state == "continue"
    assert tiny.trainer(tmp_path / "run", **section).fit().state == "finished"
    rows = harness.rows(tmp_path / "run")
    found = {row["step"]: row["learning_rate"] for row in rows if "loss" in row}
    assert list(found) == list(range(1, end + 1))
    expected, base = [], 1e-3
    for step in range(1, end + 1):
        kind, at = (step - 1) // steps, (step - 1) % steps
        module, config = registry.module("scheduler", CURVES[kind]["type"]), CURVES[kind]
        if config["type"] != "plateau":
            expected.append(module.learning_rate(module.Config(**config), base, at, steps))
            continue
        before = [row for row in rows if "valid_loss" in row and row["phase"] == kind and row["step"] < step]
        best, rate = math.inf, base
        for row in before:
            if row["valid_loss"] < best * 0.7:
                best = row["valid_loss"]
            else:
                rate *= 0.5
        expected.append(rate)
    assert list(found.values()) == pytest.approx(expected, rel=1e-12)
    assert expected[-1] < expected[41] < base


STILL = {"learning_rate": 1e-30}
SECTION = {
    "checkpoint": {"every": 1, "keep": 1000, "async": False},
    "use_ema": False,
    "phases": [
        {
            "epochs": 9,
            "early_stopping": {"patience": 3},
            "optimizer": STILL,
            "scheduler": {"type": "plateau", "patience": 1, "factor": 0.5},
        },
        {"epochs": 1, "optimizer": {"learning_rate": 1e-3}},
    ],
}
RESUMED = {**SECTION, "checkpoint": {"every": 1000, "keep": 1000, "async": False}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("early") / "whole"
    assert tiny.trainer(folder, **SECTION).fit().state == "finished"
    return folder


def test_a_phase_ends_early_and_the_next_begins(whole) -> None:
    rows = [row for row in harness.rows(whole) if "loss" in row]
    assert {row["epoch"] for row in rows if row["phase"] == 0} == {0, 1, 2, 3}  # the first is the best
    assert {row["epoch"] for row in rows if row["phase"] == 1} == {9}
    by_epoch = {row["epoch"]: row["learning_rate"] for row in rows}
    assert [by_epoch[epoch] for epoch in range(4)] == pytest.approx([1e-30, 1e-30, 5e-31, 2.5e-31])


@pytest.mark.parametrize(
    "back", [1, 0, pytest.param(-1, marks=pytest.mark.slow), pytest.param(12, marks=pytest.mark.slow)]
)
def test_a_crash_near_an_early_end_goes_on_bitwise(whole, tmp_path, back) -> None:
    end = max(row["step"] for row in harness.rows(whole) if row["phase"] == 0)
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    for step in steps(folder / "checkpoints"):
        if step > end - back:
            shutil.rmtree(folder / "checkpoints" / f"step-{step}")
    assert tiny.trainer(folder, **RESUMED).fit().state == "finished"
    harness.assert_same(folder, whole)


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"patience": 2, "min_change": 0.01}, "lower than the best by min_change (0.01 of it) in 2 validations"),
        ({"patience": 1, "min_change": 0}, "lower than the best in 1 validation"),
    ],
)
def test_an_early_end_says_what_is_better(section, text, caplog) -> None:
    """Where losses fall by less than `min_change`, a phase ends although each was the lowest so far."""
    losses = [1.0, 0.999, 0.998] if section["min_change"] else [1.0, 1.0]
    schedule = SimpleNamespace(section=SimpleNamespace(early_stopping=SimpleNamespace(**section)))
    loop = SimpleNamespace(
        state=SimpleNamespace(progress=Progress(step=3, epoch=2, losses=losses)),
        stage=SimpleNamespace(schedule=schedule, phase=SimpleNamespace(end=9)),
        _named=lambda: "",
    )
    with caplog.at_level("INFO"):
        Loop._end_early(loop)
    assert caplog.messages == [f"step 3 ends early: no validation loss {text}"]


def test_status_names_the_best_checkpoint(whole) -> None:
    scores = {
        row["step"]: row["valid_loss"] for row in harness.rows(whole) if "valid_loss" in row and row["phase"] == 1
    }
    step, loss = status(whole).best
    assert (step, loss) == min(scores.items(), key=lambda item: item[1])
    assert f"step {step}, validation loss {loss:.6g}" in dict(status(whole).rows()).values()


STOPPED = {"scheduler": {"type": "constant", "warmup_steps": 1}, "use_ema": False, "optimizer": STILL}
STOPPED |= {"checkpoint": {"every": 1000, "keep": 1000, "async": False}}
PATIENT = {**STOPPED, "early_stopping": {"patience": 2}}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A training of six epochs that ended after three: the first is the best."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    assert tiny.trainer(folder, epochs=6, **PATIENT).fit().state == "finished"
    assert {row["epoch"] for row in harness.rows(folder)} == {
        0,
        1,
        2,
        3,
    }  # a validation is logged with the epoch that follows
    return folder


def goes_on(stopped, folder, epochs, losses):
    """The epochs that are trained after the early end, with validations of these losses."""
    shutil.copytree(stopped, folder)
    before, values = len(harness.rows(folder)), iter(losses)
    inner = Validation.__call__

    def validated(self, *arguments):
        row = inner(self, *arguments)
        return {**row, "valid_loss": next(values)}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Validation, "__call__", validated)
        assert tiny.trainer(folder, epochs=epochs, **PATIENT).fit().state == "finished"
    return sorted({row["epoch"] for row in harness.rows(folder)[before:] if "loss" in row})


def test_a_run_that_ended_early_goes_on_with_more_epochs(stopped, tmp_path) -> None:
    """With the epoch after the last that it took, as long as its loss falls, and not past another early end."""
    assert goes_on(stopped, tmp_path / "same", 6, []) == []
    falling = [1e-3 / number for number in range(1, 6)]
    assert goes_on(stopped, tmp_path / "falling", 8, falling) == [3, 4, 5, 6, 7]
    assert goes_on(stopped, tmp_path / "still", 8, [9.0] * 5) == [3, 4]
    assert goes_on(stopped, tmp_path / "later", 8, [1e-3, *[9.0] * 4]) == [3, 4, 5]


def test_what_follows_an_early_end_is_what_it_would_have_been_without(stopped, tmp_path) -> None:
    """No epoch is left out, of the schedule or of the samples."""
    shutil.copytree(stopped, tmp_path / "run")
    tiny.trainer(tmp_path / "run", epochs=7, **STOPPED).fit()
    tiny.trainer(tmp_path / "whole", epochs=7, **STOPPED).fit()
    a, b = harness.tensors(tmp_path / "run"), harness.tensors(tmp_path / "whole")
    assert all(a[name].equal(b[name]) for name in b)
    assert [row.get("epoch") for row in harness.rows(tmp_path / "run")] == [
        row.get("epoch") for row in harness.rows(tmp_path / "whole")
    ]
