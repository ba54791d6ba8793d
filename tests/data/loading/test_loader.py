import errno
import gc
import multiprocessing
import os
import signal
import sys
import traceback

import numpy as np
import pytest
import torch

from credit_like.data.loading.loader import Loader, sample_order
from credit_like.data.loading.windows import Windows
from credit_like.data.store import ReadError
from credit_like.errors import RunError, known_message

FIELDS = ("prognostic", "forcing", "target", "index")


@pytest.fixture
def windows(stored):
    _, data, variables, store = stored()
    return Windows(store, variables, data.train, history_len=1, forecast_len=1)


def loader(windows, **more):
    return Loader(windows, **{"seed": 3, "micro_batch_size": 2, "global_batch_size": 4, **more})


def test_the_order_is_a_permutation_of_its_seed_and_epoch_alone():
    for n in (1, 5, 1000):
        orders = [sample_order(seed, epoch, n).tolist() for seed in (0, 1) for epoch in (0, 1)]
        assert all(sorted(order) == list(range(n)) for order in orders)
        assert orders[0] == sample_order(0, 0, n).tolist()
        if n == 1000:
            assert len(set(map(tuple, orders))) == 4
    # pinned: a restarted run must find its place again, whatever the versions of numpy
    assert sample_order(1, 2, 8).tolist() == [4, 2, 0, 6, 1, 5, 7, 3]


def test_orders_are_uniform():
    """Each sample is equally often in each place: chi-square of 4000 orders of 5 within 5 sigma."""
    counts = np.zeros((5, 5))
    for epoch in range(4000):
        counts[np.arange(5), sample_order(7, epoch, 5)] += 1
    chi2 = ((counts - 800) ** 2 / 800).sum()
    assert abs(chi2 - 16) < 5 * np.sqrt(2 * 16)


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_global_batches_do_not_depend_on_the_layout(windows, dp_size):
    reference = [b.tolist() for b in loader(windows, micro_batch_size=4).indices(1)]
    micro = 4 // dp_size if dp_size > 2 else 2 // dp_size or 1
    ranks = [loader(windows, dp_rank=rank, dp_size=dp_size, micro_batch_size=micro) for rank in range(dp_size)]
    per = 4 // (dp_size * micro)
    assert {r.accumulation for r in ranks} == {per}
    for g, wanted in enumerate(reference):
        got = [i for r in ranks for part in r.indices(1)[g * per : (g + 1) * per] for i in part.tolist()]
        assert sorted(got) == sorted(wanted)
    assert {len(r) for r in ranks} == {len(reference) * per}


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_change_nothing_and_epochs_resume_in_the_middle(windows, num_workers):
    plain, many = loader(windows), loader(windows, num_workers=num_workers)
    for epoch in (0, 1):
        alone, together = list(plain.batches(epoch)), list(many.batches(epoch))
        assert len(alone) == len(together) == len(plain) == 10
        for a, b in zip(alone, together, strict=True):
            assert all(torch.equal(getattr(a, f), getattr(b, f)) for f in FIELDS)
    later = list(many.batches(1, start=7))
    assert [s.index.tolist() for s in later] == [s.index.tolist() for s in alone[7:]]
    assert {tuple(s.index.tolist()) for s in plain.batches(0)} != {tuple(s.index.tolist()) for s in plain.batches(1)}


def test_an_epoch_left_early_does_not_disturb_the_next(windows):
    many = loader(windows, num_workers=2)
    first = next(iter(many.batches(0)))
    again = list(many.batches(0))
    assert torch.equal(first.prognostic, again[0].prognostic)
    assert len(again) == len(many)


def test_a_sample_stays_what_it_is_as_long_as_it_is_held(windows):
    """Blocks are used again only when nothing refers to them: not a batch, a slice of one, or what autograd saved."""
    plain, many, random = list(loader(windows).batches(0)), loader(windows, num_workers=2), np.random.default_rng(0)
    for epoch in range(3):
        expected = plain if epoch == 0 else list(loader(windows).batches(epoch))
        held = {}
        for k, sample in enumerate(many.batches(epoch)):
            held[k] = sample.prognostic[0, 1:] if k % 3 else sample
            del sample
            for gone in [j for j in held if random.random() < 0.3]:
                del held[gone]
            for j, kept in held.items():
                if isinstance(kept, torch.Tensor):
                    assert torch.equal(kept, expected[j].prognostic[0, 1:])
                else:
                    assert all(torch.equal(getattr(kept, f), getattr(expected[j], f)) for f in FIELDS)
        arena = many._loader.dataset.arena
        assert int(arena.taken.sum()) <= len(held)
    weight = torch.ones((), requires_grad=True)
    loss = sum((sample.target * weight).sum() for sample in many.batches(0))
    gc.collect()
    assert arena.taken.any()
    loss.backward()
    assert float(weight.grad) == pytest.approx(sum(float(s.target.sum()) for s in plain), rel=1e-5)
    held.clear()
    del loss, kept
    gc.collect()
    assert not arena.taken.any()


def test_what_a_forked_process_forgets_is_still_held_here(windows):
    many = loader(windows, num_workers=1)
    held = [next(iter(many.batches(0)))]
    (before,) = (sample.prognostic.clone() for sample in held)
    taken = many._loader.dataset.arena.taken
    child = multiprocessing.get_context("fork").Process(target=held.clear)
    child.start()
    child.join()
    assert child.exitcode == 0
    assert taken.any()
    list(many.batches(1))
    assert torch.equal(held[0].prognostic, before)


def test_a_worker_finalises_nothing_of_its_parent(windows, monkeypatch, dropped):
    """It would close, and with that write into, files that the parent still writes."""
    read = windows.batch

    def collecting(*args):
        gc.collect()
        assert not dropped, "a worker took down what its parent had dropped"
        return read(*args)

    monkeypatch.setattr(windows, "batch", collecting)
    list(loader(windows, num_workers=1).batches(0))


def test_validation_takes_all_in_order(windows):
    got = [s.index.tolist() for s in loader(windows, shuffle=False).batches(0)]
    assert [i for part in got for i in part] == windows.starts.tolist()
    assert len(got[-1]) == 1
    ranks = [loader(windows, shuffle=False, dp_rank=r, dp_size=2, micro_batch_size=1) for r in range(2)]
    parts = [[s.index.tolist() for s in r.batches(0)] for r in ranks]
    assert [len(p) for p in parts[0]] == [len(p) for p in parts[1]]
    assert sorted(i for p in parts for part in p for i in part) == [-1, *windows.starts.tolist()]
    assert parts[1][-1] == [-1]  # nothing is left for this rank


def test_batches_per_epoch(windows):
    assert len(loader(windows, batches_per_epoch=2)) == 4
    assert sum(len(s.index) for s in loader(windows, batches_per_epoch=2, shuffle=False).batches(0)) == 8


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"global_batch_size": 5}, "trainer.global_batch_size: expected a multiple of micro_batch_size"),
        ({"global_batch_size": 64}, "trainer.global_batch_size: expected at most the 23 training samples, got 64"),
    ],
)
def test_sizes_that_do_not_fit(windows, more, message):
    with pytest.raises(ValueError, match=message):
        loader(windows, **more)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_failed_read_comes_out_with_its_time_and_file(windows, tmp_path, num_workers):
    chunk = tmp_path / "store.zarr" / "t" / "c" / "9" / "0" / "0" / "0"
    chunk.write_bytes(chunk.read_bytes()[:30])
    before = set(multiprocessing.active_children())
    with pytest.raises(ReadError, match=r"cannot read t at 2001-01-03T06:00:00 from .*store.zarr"):
        list(loader(windows, num_workers=num_workers).batches(0))
    assert set(multiprocessing.active_children()) <= before


def test_a_failed_read_beside_the_epoch_is_the_same_error(windows, tmp_path):
    """As when a skipped step is looked at once more."""
    chunk = tmp_path / "store.zarr" / "t" / "c" / "9" / "0" / "0" / "0"
    chunk.write_bytes(chunk.read_bytes()[:30])
    plain = loader(windows)
    with pytest.raises(ReadError, match=r"cannot read t at 2001-01-03T06:00:00 from .*store.zarr"):
        plain.again(0, 0, len(plain))


def _kill(pid):
    """Kill a worker and wait for its end, in which torch raises an error."""
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def test_a_killed_worker_is_named(windows, monkeypatch):
    """Here it dies while it is waited for."""
    many = loader(windows, num_workers=1, prefetch_factor=1)
    batches = many.batches(0)
    next(batches)
    killed = many._loader._iterator._workers[0].pid
    monkeypatch.setattr(type(many._loader._iterator), "__next__", lambda self: _kill(killed))
    with pytest.raises(ReadError, match=r"a loader worker died near micro-batch 1 of epoch 0 \(2001-"):
        next(batches)


def test_a_worker_that_is_killed_while_others_compute_is_one_message(windows):
    many = loader(windows, num_workers=1, prefetch_factor=1)
    next(many.batches(0))
    with pytest.raises(RuntimeError) as raised:
        _kill(many._loader._iterator._workers[0].pid)
    assert known_message(raised.value).startswith(
        "a loader worker died, perhaps for lack of memory (DataLoader worker (pid"
    )


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), RunError, "^Too many open files; raise the limit"),
        (RuntimeError("shape"), RuntimeError, "^Caught RuntimeError in DataLoader worker"),
    ],
    ids=["limit", "fault"],
)
def test_an_error_of_a_worker_that_lives_keeps_its_kind(windows, monkeypatch, error, kind, message):
    def fail(*_):
        raise error

    monkeypatch.setattr(Windows, "batch", fail)
    before = set(multiprocessing.active_children())
    with pytest.raises(kind, match=message) as raised:
        list(loader(windows, num_workers=1).batches(0))
    assert raised.type is kind
    assert set(multiprocessing.active_children()) <= before
    assert "in fail" in "".join(traceback.format_exception(raised.value))


def test_workers_that_cannot_be_started_are_one_error(windows, monkeypatch):
    """Whatever torch had made by then is dropped without a further message."""
    start, started, unraised = multiprocessing.Process.start, [], []

    def refuse(process):
        if started:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        started.append(process)
        start(process)

    monkeypatch.setattr(multiprocessing.Process, "start", refuse)
    monkeypatch.setattr(sys, "unraisablehook", unraised.append)
    with pytest.raises(OSError, match="Resource temporarily unavailable"):
        list(loader(windows, num_workers=2).batches(0))
    gc.collect()
    started[0].terminate()
    started[0].join()
    assert unraised == []


def test_rows_of_a_domain_rank(stored):
    _, data, variables, store = stored()
    whole = Windows(store, variables, data.train, history_len=1, forecast_len=1)
    part = Windows(store, variables, data.train, history_len=1, forecast_len=1, rows=slice(3, 6))
    for a, b in zip(loader(whole).batches(0), loader(part).batches(0), strict=True):
        assert torch.equal(a.prognostic[..., 3:6, :], b.prognostic)
        assert torch.equal(a.target[..., 3:6, :], b.target)
        assert torch.equal(a.forcing[..., 3:6, :], b.forcing)


def test_random_numbers_of_the_run_are_left_alone(windows):
    before = torch.get_rng_state()
    list(loader(windows).batches(0, start=2))
    assert torch.equal(torch.get_rng_state(), before)
