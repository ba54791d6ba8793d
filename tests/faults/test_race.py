"""Two trainings in one folder: one of them is refused, and the lock does not outlive its owner."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import signal
import threading
import time

import pytest

from credit_like import lock as lock_module
from credit_like.checkpoint.manager import steps
from credit_like.lock import FileLock, Locked, RunLock
from credit_like.training import trainer as trainer_module
from tests.faults import harness, tiny
from tests.faults.test_signals import SECTION, wait_for_rows


def test_the_second_training_is_refused_and_the_first_unharmed(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PAUSE", "0.02")
    monkeypatch.setattr(trainer_module, "_LOCK_PATIENCE", 0.2)
    harness.reference(tmp_path / "whole", SECTION)
    run = tmp_path / "run"
    first = harness.Job(run, {**SECTION, "hold_at": 6})
    wait_for_rows(run, 2)
    with pytest.raises(Locked, match=f"is in use by .*{first.processes[0].pid}"):
        tiny.trainer(run, **SECTION).fit()
    harness.release(run)
    assert first.wait()
    assert first.end() == [0]
    harness.assert_same(run, tmp_path / "whole")


def test_a_run_that_fails_holds_the_lock_until_its_save_is_written(tmp_path, monkeypatch) -> None:
    """The next start, or the next job of a chain, would take what is being written for the remains of a crash."""
    made, waited_for, held = tiny.trainer(tmp_path, checkpoint={"every": 2}), threading.Event(), []
    inner, commit, leave, join = made.train_step, made.manager._commit, RunLock.__exit__, threading.Thread.join

    def failing(micro_batches, count, learning_rate, step):
        if made.manager.in_flight:
            if not made.manager._save.committing:
                made.manager._save.thread.join()  # so that the next boundary commits
            else:
                raise KeyboardInterrupt
        return inner(micro_batches, count, learning_rate, step)

    def slow(save):
        waited_for.wait(900)
        commit(save)

    def joined(thread, timeout=None):
        if thread.name == "checkpoint-2" and made.manager._save.committing:
            waited_for.set()
        join(thread, timeout)

    def released(lock, *error):
        held.append(steps(tmp_path / "checkpoints"))
        waited_for.set()
        leave(lock, *error)

    made.train_step = failing
    monkeypatch.setattr(made.manager, "_commit", slow)
    monkeypatch.setattr(RunLock, "__exit__", released)
    monkeypatch.setattr(threading.Thread, "join", joined)
    with pytest.raises(KeyboardInterrupt):
        made.fit()
    assert held == [[2]]


def test_many_at_once_one_trains(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PAUSE", "0.02")
    monkeypatch.setattr(trainer_module, "_LOCK_PATIENCE", 0.0)
    harness.reference(tmp_path / "whole", SECTION)
    jobs = [harness.Job(tmp_path / "run", SECTION) for _ in range(4)]
    codes = sorted(code for job in jobs if job.wait() for code in job.end())
    # A late one may come when the first has finished, and find nothing to do.
    assert codes[0] == 0
    assert set(codes) <= {0, 1}
    harness.assert_same(tmp_path / "run", tmp_path / "whole")


def test_the_lock_of_a_killed_owner_is_free_though_its_workers_live(tmp_path) -> None:
    """A loader's worker is a fork that outlives a killed trainer for seconds; it must not keep the folder."""

    def own(rank, world, port, save_loc, section):
        lock = RunLock(tmp_path)
        lock.__enter__()
        if os.fork() == 0:
            (tmp_path / "worker").write_text(str(os.getpid()))
            time.sleep(600)
            os._exit(0)
        time.sleep(600)
        return 0

    job = harness.Job(tmp_path / "run", {}, body=own)
    while not ((tmp_path / "worker").exists() and (tmp_path / "worker").read_text()):
        time.sleep(0.01)
    with pytest.raises(Locked):
        RunLock(tmp_path).__enter__()
    job.signal(signal.SIGKILL)
    job.end()
    worker = int((tmp_path / "worker").read_text())
    try:
        os.kill(worker, 0)
        with RunLock(tmp_path, patience=2.0):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)


def test_the_same_process_cannot_lock_twice(tmp_path) -> None:
    with RunLock(tmp_path), pytest.raises(Locked, match="this very process"):
        RunLock(tmp_path).__enter__()
    with RunLock(tmp_path):
        pass


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, caplog, number) -> None:
    """Lustre that is mounted without `flock` answers ENOSYS, NFS without `lockd` ENOLCK; a run must be possible there."""

    def lockf(file, how):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", lockf)
    assert tiny.trainer(tmp_path / "run", epochs=1).fit().state == "finished"
    (said,) = [record.getMessage() for record in caplog.records if "has no locks" in record.getMessage()]
    assert said.startswith(f"{tmp_path / 'run'}: its file system has no locks ({os.strerror(number)})")


def test_another_failure_of_the_lock_ends_the_run(tmp_path, monkeypatch) -> None:
    def lockf(file, how):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "lockf", lockf)
    with pytest.raises(Locked, match="Input/output error"):
        tiny.trainer(tmp_path / "run", epochs=1).fit()


def held_by_another(lock: FileLock):
    """Return a process that holds a lock, and the event that ends it."""
    context = multiprocessing.get_context("fork")
    begun, over = context.Event(), context.Event()

    def hold() -> None:
        with lock:
            begun.set()
            over.wait(900)

    process = context.Process(target=hold)
    process.start()
    assert begun.wait(900)
    return process, over


def test_places_of_one_file_are_locked_one_by_one(tmp_path) -> None:
    def lock(*places: int) -> FileLock:
        return FileLock(tmp_path / ".lock", tmp_path, "wait", places=places, names=[f"number {p}" for p in places])

    other, over = held_by_another(lock(0, 2, 700))
    with lock(1, 3, 699):
        pass
    with pytest.raises(Locked, match=r"is in use by another process \(number 1 or after\); wait for it to end or wait"):
        lock(1, 2, 3).__enter__()
    with lock(1):  # a refused one holds nothing
        pass
    over.set()
    other.join(900)
    with lock(1, 2, 3):
        pass


def test_a_temporary_lock_is_removed_and_excludes_all_the_same(tmp_path) -> None:
    """Many processes that increase a number under a lock whose file each one removes."""
    path, number = tmp_path / ".lock", tmp_path / "number"
    number.write_text("0")

    def increase() -> None:
        for _ in range(50):
            with FileLock(path, tmp_path, "wait", 900, temporary=True):
                number.write_text(str(int(number.read_text()) + 1))

    monkey = pytest.MonkeyPatch()
    monkey.setattr(lock_module.time, "sleep", lambda seconds: None)
    processes = [multiprocessing.get_context("fork").Process(target=increase) for _ in range(4)]
    for process in processes:
        process.start()
    monkey.undo()
    for process in processes:
        process.join(900)
        assert process.exitcode == 0
    assert number.read_text() == "200"
    assert not path.exists()
