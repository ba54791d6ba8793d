"""Garbage is collected between steps alone, and a step leaves no tensors that wait for it."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch

from credit_like import build
from credit_like.schema.load import load_experiment
from credit_like.training import garbage
from credit_like.training.garbage import EVERY, automatic, collected_between_steps
from tests.experiments import BANDED_MODEL, DEMO, SHORT

SETTINGS = [
    *SHORT,
    BANDED_MODEL,
    "trainer.epochs=1",
    "trainer.batches_per_epoch=4",
    "trainer.valid_batches=1",
    "trainer.global_batch_size=2",
    "trainer.micro_batch_size=1",
    "trainer.scheduler.warmup_steps=1",
]


@pytest.fixture
def collections():
    """The generation of every collection that began."""
    began = []

    def note(phase, info):
        if phase == "start":
            began.append(info["generation"])

    thresholds = gc.get_threshold()
    gc.set_threshold(700, 10, 10)  # Python's own
    gc.callbacks.append(note)
    yield began
    gc.callbacks.remove(note)
    gc.set_threshold(*thresholds)


@pytest.fixture
def nothing_frozen():
    gc.unfreeze()
    yield
    gc.freeze()


def _cycles(count):
    for _ in range(count):
        one = []
        one.append(one)


def test_nothing_is_collected_but_at_its_step(collections, nothing_frozen):
    assert gc.isenabled()
    with collected_between_steps() as collect:
        assert gc.get_freeze_count() > 0
        collections.clear()
        for step in range(1, 2 * EVERY + 1):
            _cycles(200)
            collect(step)
            assert len(collections) == step // EVERY
        with automatic():
            _cycles(2000)
        assert len(collections) > 2
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_what_was_frozen_before_stays_frozen(nothing_frozen):
    """A forked process freezes its parent's objects, so that it does not finalise them."""
    gc.freeze()
    before = gc.get_freeze_count()
    with collected_between_steps():
        pass
    assert gc.get_freeze_count() == pytest.approx(before, rel=0.01)  # those that the reference counts free are fewer


def test_the_few_objects_that_python_freezes_at_its_start_are_not_the_callers(nothing_frozen, monkeypatch):
    """Python 3.12 begins with 375 of them."""
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 375)
    thawed = []
    monkeypatch.setattr(gc, "unfreeze", lambda: thawed.append(True))
    with collected_between_steps():
        pass
    assert thawed == [True]


def test_an_error_leaves_collection_as_it_was():
    with pytest.raises(ZeroDivisionError), collected_between_steps():
        raise ZeroDivisionError
    assert gc.isenabled()
    gc.disable()
    try:
        with collected_between_steps():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def _left(rank, folder, parallelism):
    """The tensors that only a collection frees after three steps of a training, and its collections: at the start, at steps."""
    left, taken = [], []

    def collect():
        step = len(taken)
        taken.append(step)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(0)
        if step > 1:  # the first step makes what is made once
            left.extend(tuple(x.shape) for x in gc.garbage if isinstance(x, torch.Tensor))
        gc.garbage.clear()

    garbage.gc = SimpleNamespace(**{**vars(gc), "collect": collect})
    garbage.EVERY, every = 1, garbage.EVERY
    try:
        settings = [*SETTINGS, f"trainer.parallelism={parallelism}", f"save_loc={folder}", "trainer.device=cpu"]
        assert build.train(load_experiment(DEMO, settings)) == 0
    finally:
        garbage.gc, garbage.EVERY = gc, every
    return taken, left


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "parallelism"), [(1, "{}"), (2, "{data: fsdp2}"), (2, "{domain: 2}")])
def test_a_step_leaves_no_tensors_to_collect(run_ranks, tmp_path, ranks, parallelism):
    for taken, left in run_ranks(ranks, _left, str(tmp_path), parallelism):
        assert taken == [0, 1, 2, 3, 4]
        assert left == []
