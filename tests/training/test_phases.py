"""A training in phases is the trainings of its phases one after the other, wherever it is interrupted."""

from __future__ import annotations

import json
import multiprocessing
import shutil

import pytest
import torch

from credit_like import build
from credit_like.checkpoint.commands import entries
from credit_like.checkpoint.manager import prune, steps
from credit_like.checkpoint.rng import set_random_state
from credit_like.errors import UserError
from credit_like.launch.chain import best_checkpoint
from credit_like.parallel.runtime import Runtime
from credit_like.schema.experiment import Experiment
from credit_like.schema.load import load_experiment
from credit_like.schema.phases import hungriest, hungry, phases
from credit_like.training.loop import Loop
from tests.experiments import DEMO, SHORT, SMALL_MODEL
from tests.faults import harness, tiny
from tests.faults.harness import at, begun, last_steps

PHASES = [
    {"epochs": 2},
    {
        "epochs": 1,
        "forecast_len": 3,
        "global_batch_size": 2,
        "optimizer": {"type": "muon", "learning_rate": 1e-3},
        "scheduler": {"warmup_steps": 0},
        "use_ema": False,
        "shift_longitude": True,
    },
    {"epochs": 1, "loss": {"type": "mae"}, "input_noise": 0.5, "grad_max_norm": None, "ema_decay": 0.5},
]
SECTION = {"phases": PHASES, "checkpoint": {"every": 1, "keep": 1000, "async": False}, "dropout": 0.1}
RESUMED = {**SECTION, "checkpoint": {"every": 1000, "keep": 1000, "async": False}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that is never interrupted, with a checkpoint of every step."""
    folder = tmp_path_factory.mktemp("phases") / "whole"
    assert tiny.trainer(folder, **SECTION).fit().state == "finished"
    return folder


def test_every_step_says_its_phase(whole) -> None:
    rows = harness.rows(whole)
    assert [row["phase"] for row in rows] == sorted(row["phase"] for row in rows)
    assert {row["phase"] for row in rows if "valid_loss" in row} == {0, 1, 2}
    first, second, _ = last_steps(whole)
    # a validation at the end of a phase is that of the phase, with its lead times
    assert [row["step"] for row in rows if "rmse_last" in row] == [second]
    assert at(whole, first).phase == 0
    assert at(whole, first + 1).phase == 1
    assert {name.split("/")[1] for name in at(whole, second).names("optimizer/")} != {
        name.split("/")[1] for name in at(whole, first).names("optimizer/")
    }


def test_a_phase_is_a_run_of_its_own_from_the_weights_before_it(whole, tmp_path) -> None:
    first, second, last = last_steps(whole)
    for number, (before, after) in enumerate([(first, second), (second, last)], 1):
        alone = tiny.trainer(tmp_path, phases=[PHASES[number]])
        checkpoint = at(whole, before)
        pieces = {name: piece for name, piece in alone.state.pieces().items() if name.startswith("model/")}
        checkpoint.load(pieces)
        random = "random/0/"
        set_random_state({n.removeprefix(random): checkpoint.read(n) for n in checkpoint.names(random)})
        schedule, epoch = alone.schedule, 1 + number
        assert schedule.total_steps == after - before
        batches = alone.train_loader.batches(epoch)
        for k in range(schedule.total_steps):
            micro = (next(batches) for _ in range(schedule.accumulation))
            alone.train_step(micro, schedule.accumulation, schedule.rate(k), before + k + 1)
        for name, piece in pieces.items():
            assert torch.equal(piece.local, at(whole, after).read(name)), name


NEAR = [
    (0, 0),
    (0, 1),
    *(pytest.param(*at, marks=pytest.mark.slow) for at in ((0, -1), (1, -1), (1, 0), (1, 1), (2, 0))),
]


@pytest.mark.parametrize(("phase", "after"), NEAR)
def test_a_crash_near_a_boundary_goes_on_bitwise(whole, tmp_path, phase, after) -> None:
    folder = tmp_path / "run"
    begun(whole, folder, last_steps(whole)[phase] + after)
    assert tiny.trainer(folder, **RESUMED).fit().state == "finished"
    harness.assert_same(folder, whole)


@pytest.mark.parametrize(("phase", "after"), NEAR[:-1])
def test_a_stop_near_a_boundary_goes_on_bitwise(whole, tmp_path, phase, after) -> None:
    """A stop in the last step of a phase comes before its validation."""
    folder, step = tmp_path / "run", last_steps(whole)[phase] + after
    begun(whole, folder, step - 1)
    assert tiny.trainer(folder, stop_at=step, **RESUMED).fit().state == "continue"
    assert steps(folder / "checkpoints")[-1] == step
    assert tiny.trainer(folder, **RESUMED).fit().state == "finished"
    harness.assert_same(folder, whole)


def test_the_average_follows_the_weights_in_a_phase_without_one(whole) -> None:
    _, second, last = last_steps(whole)
    checkpoint = at(whole, second)
    for name in checkpoint.names("ema/"):
        assert torch.equal(checkpoint.read(name), checkpoint.read(name.replace("ema/", "model/")))
    assert any(
        not torch.equal(at(whole, last).read(name), at(whole, last).read(name.replace("ema/", "model/")))
        for name in at(whole, last).names("ema/")
    )


def test_a_phase_with_an_average_may_be_added_to_a_run_without_one(tmp_path, caplog, monkeypatch) -> None:
    """The average begins with the weights, and is saved and restored from there on."""
    section = {"use_ema": False, "checkpoint": {"every": 1, "keep": 1000, "async": False}}
    made = tiny.trainer(tmp_path, epochs=1, **section)
    last = made.total_steps
    assert made.fit().state == "finished"
    assert not at(tmp_path, last).names("ema/")
    section["phases"] = [{"epochs": 1}, {"epochs": 1, "use_ema": True}]
    with caplog.at_level("INFO"):
        longer = tiny.trainer(tmp_path, stop_at=last + 1, **section)
        assert longer.fit().state == "continue"
    assert f"step {last} has no averaged weights; the moving average starts from the current weights" in caplog.text
    checkpoint, decay = at(tmp_path, last + 1), (2 + last) / (11 + last)
    names = checkpoint.names("ema/")
    assert len(names) == len(longer.state.parameters)
    for name in names:
        name = name.replace("ema/", "model/")
        before, after = at(tmp_path, last).read(name), checkpoint.read(name)
        average = torch.lerp(before, after, 1 - min(decay, longer.state.ema.decay))
        torch.testing.assert_close(checkpoint.read(name.replace("model/", "ema/")), average)
    assert f"the experiment changed since step {last}: " in caplog.text
    caplog.clear()
    with monkeypatch.context() as other_rank:
        other_rank.setattr(Runtime, "is_main", False)
        longer.state.restore(at(tmp_path, last))
    assert "the experiment changed" not in caplog.text  # one rank says it
    assert tiny.trainer(tmp_path, **section).fit().state == "finished"
    assert "no average" not in caplog.text


def test_the_best_checkpoint_is_that_of_the_newest_phase(tmp_path) -> None:
    """The losses of the second phase are twice as large; its best is kept all the same."""
    double = [{"epochs": 2}, {"epochs": 3, "optimizer": {"learning_rate": 0.5}, "loss": {"scale": "change"}}]
    section = {"phases": double, "checkpoint": {"every": 1000, "keep": 1, "async": False}}
    tiny.trainer(tmp_path, **section).fit()
    kept = [at(tmp_path, step) for step in steps(tmp_path / "checkpoints")]
    scores = {
        row["step"]: row["valid_loss"]
        for row in harness.rows(tmp_path)
        if row.get("phase") == 1 and "valid_loss" in row
    }
    best = min(scores, key=scores.get)
    assert best in [checkpoint.step for checkpoint in kept]
    assert all(checkpoint.phase == 1 for checkpoint in kept)


def test_the_best_checkpoint_that_is_listed_is_the_one_that_is_kept(tmp_path) -> None:
    """The losses of the first phase are lower, but not those of the same thing."""
    double = [{"epochs": 2}, {"epochs": 2, "optimizer": {"learning_rate": 1e-6}, "loss": {"type": "mae"}}]
    section = {"phases": double, "checkpoint": {"every": 1000, "keep": 1000, "async": False}}
    tiny.trainer(tmp_path, **section).fit()
    listed = entries(tmp_path)
    scores = {entry.step: entry.score for entry in listed if entry.score is not None}
    phase = {step: at(tmp_path, step).phase for step in scores}
    newest = [step for step in scores if phase[step] == 1]
    assert min(scores, key=scores.get) not in newest
    assert [entry.step for entry in listed if entry.best] == [min(newest, key=scores.get)]
    assert best_checkpoint(tmp_path)[0] == min(newest, key=scores.get)
    prune(tmp_path / "checkpoints", 1)
    assert min(newest, key=scores.get) in steps(tmp_path / "checkpoints")


def test_workers_of_a_phase_end_with_it(tmp_path, monkeypatch) -> None:
    """Those of its training and of its validation samples."""
    closed = []
    monkeypatch.setattr(tiny.Loader, "close", lambda self: closed.append(self), raising=False)
    made = tiny.trainer(tmp_path, phases=[{"epochs": 1}, {"epochs": 1, "forecast_len": 2}])
    assert made.fit().state == "finished"
    assert closed == [made.stages[0].train_loader, made.stages[0].valid_loader]


@pytest.mark.slow
def test_no_worker_process_of_an_ended_phase_is_left(tmp_path, monkeypatch) -> None:
    workers = []
    inner = Loop._epoch

    def counted(self):
        reason = inner(self)
        workers.append(len(multiprocessing.active_children()))
        return reason

    monkeypatch.setattr(Loop, "_epoch", counted)
    phases = "trainer.phases=[{epochs: 1}, {epochs: 1, micro_batch_size: 1}, {epochs: 1, forecast_len: 2}]"
    sets = [*SHORT, SMALL_MODEL, phases, "trainer.loader.num_workers=1", "trainer.scheduler.warmup_steps=1"]
    before = len(multiprocessing.active_children())
    assert build.train(load_experiment(DEMO, [*sets, f"save_loc={tmp_path}"])) == 0
    assert [count - before for count in workers] == [2, 2, 2]


def test_phases_survive_being_written_and_read(tmp_path) -> None:
    whole = tiny.experiment(
        tmp_path, phases=[*PHASES, {"scheduler": {"total_steps": None}}], scheduler={"total_steps": 7}
    )
    data = json.loads(json.dumps(whole.to_dict()))
    again = Experiment.model_validate(data)
    assert again.to_dict() == data
    assert [phase.experiment for phase in phases(again)] == [phase.experiment for phase in phases(whole)]
    assert phases(again)[3].experiment.trainer.scheduler.total_steps is None
    assert phases(again)[0].experiment.trainer.scheduler.total_steps == 7
    assert phases(again)[2].experiment.trainer.grad_max_norm is None


def test_without_phases_an_experiment_is_as_before(tmp_path) -> None:
    for section in ({}, {"phases": []}, {"phases": None}):
        experiment = tiny.experiment(tmp_path, **section)
        (only,) = phases(experiment)
        assert only.experiment is hungriest(experiment) is experiment
        assert "phases" not in experiment.to_dict()["trainer"]


def test_the_hungriest_phase_has_the_longest_forecasts(tmp_path) -> None:
    chosen = hungriest(
        tiny.experiment(tmp_path, phases=[{}, {"forecast_len": 4, "use_ema": False}, {"forecast_len": 2}])
    )
    assert chosen.data.forecast_len == 4
    assert chosen.trainer.use_ema
    assert chosen.trainer.phases is None
    assert hungriest(tiny.experiment(tmp_path, phases=[{"micro_batch_size": 4}, {}])).trainer.micro_batch_size == 4


@pytest.mark.parametrize(
    ("section", "left"),
    [
        ([{"optimizer": {"type": "muon"}}, {"optimizer": {"type": "adamw"}}], [0, 1]),
        ([{"forecast_len": 2}, {"forecast_len": 4}, {"forecast_len": 3}], [1]),
        ([{"forecast_len": 3}, {"forecast_len": 6, "backprop_steps": 1}], [0, 1]),
        ([{"global_batch_size": 4}, {"global_batch_size": 1}, {"global_batch_size": 8}], [2]),  # gradients are added up
        ([{"global_batch_size": 4}, {"forecast_len": 2, "global_batch_size": 1}], [0, 1]),
        ([{"loss": {"type": "mse"}}, {"loss": {"type": "spectral"}, "forecast_len": 2}], [0, 1]),
        ([{"members": 1}, {"epochs": 7}], [0]),
        ([{"freeze": ["conv.*"]}, {}], [1]),
        ([{"freeze": ["conv.*"]}, {"freeze": ["head.*"]}, {"freeze": ["head.*", "conv.*"]}], [0, 1]),
        ([{"loss": {"type": "spectral"}}, {"loss": {"type": "sum", "terms": [{"loss": {"type": "mse"}}]}}], [0, 1]),
    ],
)
def test_phases_that_cannot_take_the_most_memory_are_left_out(tmp_path, section, left) -> None:
    experiment = tiny.experiment(tmp_path, phases=section)
    every = [phase.experiment for phase in phases(experiment)]
    assert sorted(every.index(each) for each in hungry(experiment)) == left
    assert hungriest(experiment) in hungry(experiment)


def test_every_phase_keeps_the_average_of_the_weights(tmp_path) -> None:
    section = [{"use_ema": False, "optimizer": {"type": "muon"}}, {"use_ema": True}]
    assert [each.trainer.use_ema for each in hungry(tiny.experiment(tmp_path, phases=section))] == [True, True]


def test_an_epoch_that_was_longer_before_ends_with_its_validation(tmp_path, monkeypatch):
    section = {"epochs": 2, "checkpoint": {"every": 1000, "keep": 9, "async": False}}
    before = tiny.trainer(tmp_path, **section).schedule.steps_per_epoch - 1
    assert tiny.trainer(tmp_path, **section, stop_at=before).fit().state == "continue"
    length = tiny.Loader.__len__
    monkeypatch.setattr(tiny.Loader, "__len__", lambda self: length(self) // (2 if self.shuffle else 1))
    shorter = tiny.trainer(tmp_path, **section)
    last = before + shorter.schedule.steps_per_epoch
    assert shorter.schedule.steps_per_epoch < before
    assert shorter.fit().step == last
    assert [row["step"] for row in harness.rows(tmp_path) if "valid_loss" in row] == [before, last]


@pytest.mark.parametrize("validated", ["before the stop", "at the next start"])
def test_a_validation_in_an_epoch_that_becomes_shorter_is_not_repeated_at_its_end(tmp_path, monkeypatch, validated):
    """The end of the epoch is then the step that was validated already."""
    section = {"epochs": 2, "valid_every": 8, "checkpoint": {"every": 1, "keep": 99, "async": False}}
    first = tiny.trainer(tmp_path, **section, stop_at=8 if validated == "at the next start" else 9)
    assert first.fit().state == "continue"
    shutil.rmtree(tmp_path / "checkpoints" / "step-9", ignore_errors=True)
    assert at(tmp_path, 8).meta["progress"]["validated"] == (validated == "before the stop")
    length = tiny.Loader.__len__
    monkeypatch.setattr(tiny.Loader, "__len__", lambda self: length(self) // (2 if self.shuffle else 1))
    shorter = tiny.trainer(tmp_path, **section)
    last = 8 + shorter.schedule.steps_per_epoch
    assert shorter.fit().step == last
    assert [row["step"] for row in harness.rows(tmp_path) if "valid_loss" in row] == [8, last]
    assert len(at(tmp_path, last).meta["progress"]["losses"]) == 2
    assert at(tmp_path, 8).score is not None


def test_a_larger_batch_early_in_a_phase_does_not_move_its_step_to_the_phase_before(tmp_path):
    """The samples of the phase are less than one batch now; a stop before that has been filled saves the phase's beginning."""

    def phases(batch):
        return {"phases": [{"epochs": 1}, {"epochs": 1, "global_batch_size": batch}]}

    before = tiny.trainer(tmp_path, **phases(2), stop_at=10)
    first = before.stages[0].schedule.steps_per_epoch
    assert before.fit().step == first + 1
    stopped = tiny.trainer(tmp_path, **phases(4))
    tiny.stop_before_first_step(stopped)
    assert stopped.fit().state == "continue"
    progress = at(tmp_path, first + 1).meta["progress"]
    assert (at(tmp_path, first + 1).phase, progress["epoch"], progress["position"]) == (1, 1, 0)
    last = tiny.trainer(tmp_path, **phases(4))
    outcome = last.fit()
    assert (outcome.state, outcome.step) == ("finished", first + 1 + last.stages[1].schedule.steps_per_epoch)


TWICE = [{"epochs": 2}, {"epochs": 2}]


def ended(folder, number, *epochs, **section):
    """Train in two phases of two epochs to the middle or the end of one, and go on with other phases."""
    steps_per_epoch = tiny.trainer(folder, phases=TWICE).schedule.steps_per_epoch
    tiny.trainer(folder, phases=TWICE, stop_at=int(number * steps_per_epoch)).fit()
    return tiny.trainer(folder, phases=[{"epochs": n} for n in epochs], **section)


@pytest.mark.parametrize(
    ("after", "epochs", "message"),
    [
        (
            2.5,
            (4, 2),
            r"phase 1, after 2 epochs of earlier phases \(epochs were 2, 2\), got epochs 4, 2, .* phase 0, after 0",
        ),
        (
            2.5,
            (1, 2),
            r"phase 1, after 2 epochs of earlier phases .* got epochs 1, 2, .* phase 1, after 1;",
        ),  # in another place
        (1.5, (1, 2), r"phase 0, after 0 epochs of earlier phases .* got epochs 1, 2, .* phase 1, after 1;"),
        (2.5, (4,), r"phase 1, after 2 epochs of earlier phases .* got epochs 4, .* phase 0, after 0"),
        (4, (3, 2), r"phase 1, after 2 epochs of earlier phases .* phase 1, after 3"),
    ],
)
def test_a_step_is_not_continued_in_another_phase(tmp_path, after, epochs, message) -> None:
    """Nor in another place of its own: its schedule would jump."""
    changed = ended(tmp_path, after, *epochs)
    with pytest.raises(UserError, match="^trainer.phases: expected step .*" + message):
        changed.fit()
    assert tiny.trainer(tmp_path, phases=TWICE).fit().state == "finished"  # the run is as it was


@pytest.mark.parametrize(("after", "epochs"), [(2.5, (2, 3)), (2, (3, 1)), (2, (2, 1, 1)), (0.5, (1, 2)), (4, (2, 3))])
def test_the_phase_of_the_newest_step_may_end_later_or_sooner_and_those_after_it_be_anything(
    tmp_path, after, epochs
) -> None:
    assert ended(tmp_path, after, *epochs).fit().state == "finished"
    last = {row["phase"]: row["epoch"] for row in harness.rows(tmp_path) if "loss" in row}
    assert last == {number: sum(epochs[: number + 1]) - 1 for number in range(len(epochs))}
