"""Objects kept as files: shared by processes that may be killed, within a size, on disks that fill up."""

import errno
import fcntl
import logging
import multiprocessing
import os
import random
import signal
import time

import numpy as np
import pytest

from credit_like.data.files import object_cache
from credit_like.data.files.object_cache import ObjectCache

FORK = multiprocessing.get_context("fork")


def content(number, size=1000):
    """Return the object of a number."""
    return np.random.default_rng(number).bytes(size)


def stored(folder):
    return [path for path in (folder / "objects").rglob("*") if path.is_file()]


def test_an_object_comes_back_and_others_are_absent(tmp_path):
    cache = ObjectCache(tmp_path, 10**6)
    assert cache.get("a") is None
    cache.put("a", content(1))
    cache.put("empty", b"")
    assert cache.get("a") == content(1)
    assert cache.get("empty") == b""
    assert ObjectCache(tmp_path, 10**6).get("a") == content(1)


@pytest.mark.parametrize("harm", ["cut off", "changed", "empty", "longer"])
def test_a_damaged_file_is_absent_and_replaced(tmp_path, harm, caplog):
    cache = ObjectCache(tmp_path, 10**6)
    cache.put("a", content(1))
    (path,) = stored(tmp_path)
    whole = path.read_bytes()
    path.write_bytes({"cut off": whole[:-1], "changed": whole[:-1] + b"?", "empty": b"", "longer": whole + b"?"}[harm])
    assert cache.get("a") is None
    assert "is damaged" in caplog.text
    cache.put("a", content(1))
    assert cache.get("a") == content(1)


def test_the_least_recently_used_goes_first(tmp_path):
    cache = ObjectCache(tmp_path, 10 * 1020)
    for number in range(10):
        cache.put(str(number), content(number))
        for path in stored(
            tmp_path
        ):  # a file system's clock may be coarse: each object is a second older than the next
            found = path.stat()
            os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns - 10**9))
    assert cache.get("0") == content(0)  # used now
    cache.put("new", content(99))
    held = [name for name in map(str, range(10)) if cache.get(name) is not None]
    assert held == ["0", *map(str, range(3, 10))]  # 1 and 2 made room: down to 90 % of the limit
    assert cache.get("new") == content(99)


def test_an_object_may_be_replaced(tmp_path):
    cache = ObjectCache(tmp_path, 10**6)
    cache.put("a", content(1))
    cache.put("a", content(2))
    assert cache.get("a") == content(1)  # objects are taken as unchanging
    cache.put("a", content(2), replace=True)
    assert cache.get("a") == content(2)
    assert len(stored(tmp_path)) == 1


def test_a_process_that_keeps_others_waiting_costs_time_only(tmp_path, monkeypatch):
    """Another process may be stopped while it fetches."""
    monkeypatch.setattr(object_cache, "_FETCH_WAIT", 0.05)
    with ObjectCache(tmp_path, 10**6).alone(["a", "b"]), ObjectCache(tmp_path, 10**6).alone(["b", "a"]):
        entered = True
    assert entered


def test_a_child_forked_meanwhile_does_not_keep_the_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(object_cache, "_FETCH_WAIT", 1e6)  # a lock that is kept would stop the test
    cache = ObjectCache(tmp_path, 10**6)
    with cache.alone(["a"]):
        child = FORK.Process(target=time.sleep, args=(1000,))
        child.start()
    with cache.alone(["a"]):
        pass
    child.kill()
    child.join()


def test_what_is_larger_than_the_limit_is_not_stored(tmp_path):
    ObjectCache(tmp_path, 500).put("a", content(1))
    assert not stored(tmp_path)


def _use(folder, limit, seed, rounds):
    """Read or store an object in each round; leave with 1 if one is wrong."""
    cache, draw = ObjectCache(folder, limit), random.Random(seed)
    for _ in range(rounds):
        number = draw.randrange(60)
        found = cache.get(str(number))
        if found is None:
            cache.put(str(number), content(number, 200 + 50 * number))
        elif found != content(number, 200 + 50 * number):
            os._exit(1)
    os._exit(0)


def test_processes_that_are_killed_harm_nothing(tmp_path):
    limit = 40_000
    rounds = [10**9, 10**9, 1000, 1000, 1000]
    processes = [FORK.Process(target=_use, args=(tmp_path, limit, *each)) for each in enumerate(rounds)]
    for process in processes:
        process.start()
    while len(stored(tmp_path)) < 10:
        time.sleep(0.01)
    for process in processes[:2]:
        os.kill(process.pid, signal.SIGKILL)
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes[2:]] == [0, 0, 0]
    assert sum(path.stat().st_size for path in stored(tmp_path)) <= limit
    cache = ObjectCache(tmp_path, limit)
    held = [number for number in range(60) if cache.get(str(number)) == content(number, 200 + 50 * number)]
    assert len(held) == len(stored(tmp_path)) > 5


def _die_at(moment, folder):
    """Store an object and be killed at a call of `os`."""
    real = getattr(os, moment)

    def killed(*args, **kwargs):
        if moment == "write":
            real(args[0], args[1][: len(args[1]) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(os, moment, killed)
    ObjectCache(folder, 5000).put("a", content(1))


@pytest.mark.parametrize("moment", ["write", "pwrite", "replace"])
def test_a_process_killed_while_it_stores_leaves_no_half_object_and_no_lock(tmp_path, moment):
    process = FORK.Process(target=_die_at, args=(moment, tmp_path))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    (draft,) = (tmp_path / "drafts").iterdir()
    os.utime(draft, (0, time.time() - 2 * object_cache._DRAFT_AGE))
    cache = ObjectCache(tmp_path, 5000)
    assert cache.get("a") is None
    for number in range(8):
        cache.put(str(number), content(number))
    assert 3 <= len(stored(tmp_path)) <= 4
    assert cache.get("7") == content(7)
    assert not list((tmp_path / "drafts").iterdir())


def test_a_lock_that_is_not_given_back_costs_no_object(tmp_path, monkeypatch):
    """Another process may be stopped while it evicts."""
    monkeypatch.setattr(object_cache, "_LOCK_WAIT", 0.05)
    cache = ObjectCache(tmp_path, 10**6)
    with open(tmp_path / "usage", "w") as usage:
        fcntl.flock(usage, fcntl.LOCK_EX)
        cache.put("a", content(1))
        assert cache.get("a") is None
    cache.put("a", content(1))
    assert cache.get("a") == content(1)
    assert not list((tmp_path / "drafts").iterdir())


@pytest.mark.parametrize("call", ["write", "pwrite", "replace"])
def test_on_a_full_disk_it_says_so_once_and_still_reads(tmp_path, monkeypatch, caplog, call):
    cache = ObjectCache(tmp_path, 10**6)
    cache.put("before", content(1))

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(os, call, full)
        for number in range(3):
            cache.put(str(number), content(number))
    assert caplog.text.count("No space left on device") == len(caplog.records) == 1
    assert cache.get("before") == content(1)
    assert cache.get("0") is None
    assert len(stored(tmp_path)) == 1
    assert not list((tmp_path / "drafts").iterdir())


def test_a_folder_that_cannot_be_made_is_one_message(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    cache = ObjectCache(tmp_path / "file", 10**6)
    cache.put("a", content(1))
    cache.put("a", content(1))
    assert cache.get("a") is None
    assert len(caplog.records) == 1
