"""Files behind a URL, by blocks: servers that fail, go away or change, and processes that share copies and are killed."""

import errno
import logging
import multiprocessing
import os
import random
import shutil
import signal
import socket
from collections import Counter

import numpy as np
import pytest

from credit_like.data.files import object_cache, remote, remote_file
from credit_like.data.files.object_cache import ObjectCache
from credit_like.data.files.remote_file import RemoteFile
from tests.stores import serving

FORK = multiprocessing.get_context("fork")
CONTENT = np.random.default_rng(0).bytes(10_500)
BLOCKS = 11


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(remote, "PAUSE", 0.01)
    monkeypatch.setattr(remote_file, "BLOCK", 1000)
    monkeypatch.setattr(object_cache, "_FETCH_WAIT", 1e6)  # a lock that is not given back would stop the test
    monkeypatch.setattr(remote_file, "_failed", {})


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "a.nc").write_bytes(CONTENT)
    return tmp_path


@pytest.fixture
def server(folder):
    with serving(folder / "served") as server:
        yield server


def opened(server, folder=None, limit=10**6):
    return RemoteFile(f"{server.url}/a.nc", {}, None if folder is None else ObjectCache(folder / "cache", limit))


def blocks_sent(server):
    """Return how often each block was sent."""
    return Counter(number for _, start, stop in server.sent for number in range(start // 1000, -(-stop // 1000)))


@pytest.mark.parametrize("cached", [True, False])
def test_any_part_of_it_is_that_of_the_file(folder, server, cached):
    file, draw = opened(server, folder if cached else None), random.Random(0)
    for _ in range(40):
        start, count = draw.randrange(11_000), draw.randrange(4000)
        assert file.seek(start) == start
        assert file.read(count) == CONTENT[start : start + count]
    assert file.seek(-500, os.SEEK_END) == 10_000
    assert file.read() == CONTENT[-500:]
    assert file.read() == b""
    file.seek(0)
    assert file.read() == CONTENT


def test_adjacent_blocks_are_one_request(folder, server):
    file = opened(server, folder)
    file.seek(3500)
    file.read(10)
    file.seek(1500)
    file.read(6000)
    assert [part[1:] for part in server.sent] == [(3000, 4000), (1000, 3000), (4000, 8000)]


def _read_all(url, folder, seed):
    file = RemoteFile(url, {}, ObjectCache(folder, 10**6))
    draw = random.Random(seed)
    for _ in range(60):
        start, count = draw.randrange(10_500), draw.randrange(3000)
        file.seek(start)
        if file.read(count) != CONTENT[start : start + count]:
            os._exit(1)
    file.seek(0)
    os._exit(0 if file.read() == CONTENT else 1)


def test_every_block_is_fetched_once_by_all_processes(folder, server):
    url = f"{server.url}/a.nc"
    processes = [FORK.Process(target=_read_all, args=(url, folder / "cache", seed)) for seed in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert blocks_sent(server) == Counter(range(BLOCKS))


def _die_while_fetching(url, folder, moment):
    real = remote_file._range

    def killed(*args, **span):
        data = real(*args, **span)
        if moment == "before it is stored":
            os.kill(os.getpid(), signal.SIGKILL)
        return data

    def half(file, data):
        os.write(file, data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    remote_file._range = killed
    if moment == "half stored":
        object_cache._write = half
    file = RemoteFile(url, {})
    file._cache = ObjectCache(folder, 10**6)  # the first object that it stores is a block
    file.seek(2500)
    file.read(2000)


@pytest.mark.parametrize("moment", ["before it is stored", "half stored"])
def test_a_process_killed_while_it_fetches_leaves_nothing_wrong_and_no_lock(folder, server, moment):
    process = FORK.Process(target=_die_while_fetching, args=(f"{server.url}/a.nc", folder / "cache", moment))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    server.sent.clear()
    assert opened(server, folder).read() == CONTENT
    assert blocks_sent(server) == Counter(range(BLOCKS))
    server.sent.clear()
    assert opened(server, folder).read() == CONTENT
    assert not server.sent


def test_the_limit_holds(folder, server):
    file, limit = opened(server, folder, limit=4500), 4500
    for start in range(0, 10_500, 700):
        file.seek(start)
        assert file.read(700) == CONTENT[start : start + 700]
        stored = [path for path in (folder / "cache" / "objects").rglob("*") if path.is_file()]
        assert sum(path.stat().st_size for path in stored) <= limit


def test_on_a_full_disk_it_says_so_once_and_reads_on(folder, server, monkeypatch, caplog):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(object_cache, "_write", full)
    with caplog.at_level(logging.WARNING):
        file = opened(server, folder)
        for _ in range(2):
            file.seek(0)
            assert file.read() == CONTENT
    assert len(caplog.records) == 1
    assert "No space left on device" in caplog.text


def test_a_folder_in_which_nothing_can_be_locked_costs_no_data(folder, server, caplog):
    (folder / "cache").write_text("")
    assert opened(server, folder).read() == CONTENT
    assert len(caplog.records) == 1


@pytest.mark.parametrize("cached", [True, False])
def test_a_read_that_breaks_off_is_repeated(folder, server, cached):
    server.broken += ["a.nc"] * (remote.TRIES - 1)
    assert opened(server, folder if cached else None).read() == CONTENT
    assert not server.broken


@pytest.mark.parametrize("cached", [True, False])
def test_a_server_that_stays_broken_is_one_message_and_costs_nothing(folder, server, cached):
    file = opened(server, folder if cached else None)
    file.read(500)
    server.broken += ["a.nc"] * 100
    with pytest.raises(
        remote.RemoteError, match=rf"^{server.url}/a.nc cannot be read \(4 attempts\): Client"
    ) as caught:
        file.read()
    assert len(str(caught.value).splitlines()) == 1
    server.broken.clear()
    file.seek(0)
    assert file.read() == CONTENT


def test_a_restart_without_the_server_reads_the_copies(folder, caplog):
    shutil.copy(folder / "served" / "a.nc", folder / "served" / "b.nc")
    with serving(folder / "served") as server:
        urls = [f"{server.url}/{name}.nc" for name in "ab"]
        for url in urls:
            RemoteFile(url, {}, ObjectCache(folder / "cache", 10**6)).read(5000)
    for url in urls:
        file = RemoteFile(url, {}, ObjectCache(folder / "cache", 10**6))
        assert file.read(5000) == CONTENT[:5000]
        with pytest.raises(remote.RemoteError, match=f"{url} cannot be read"):
            file.read()
    assert len(caplog.records) == 1
    assert "the copies in" in caplog.text


def test_a_file_that_was_replaced_is_not_mixed_with_its_copies(folder):
    with serving(folder / "served") as server:
        opened(server, folder).read()
        changed = CONTENT[::-1]
        (folder / "served" / "a.nc").write_bytes(changed)
        os.utime(folder / "served" / "a.nc", (1, 1))
        assert opened(server, folder).read() == changed
    assert opened(server, folder).read() == changed  # without the server


def test_a_server_without_ranges_is_one_message(folder, server):
    server.ranges = False
    with pytest.raises(remote.RemoteError, match="expected 1000 bytes from byte 0 on, got 10500"):
        opened(server).read(10)


def test_a_server_that_does_not_answer_is_one_message(monkeypatch):
    monkeypatch.setattr(remote, "ANSWER", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/a.nc"
        with pytest.raises(remote.RemoteError, match=r"a.nc cannot be read \(1 attempts\): no answer within 0.2 s"):
            RemoteFile(url, {})


def test_a_file_that_is_not_there_is_one_message(server):
    with pytest.raises(remote.RemoteError, match=r"b.nc cannot be read \(4 attempts\): ClientResponseError: 404"):
        RemoteFile(f"{server.url}/b.nc", {})
