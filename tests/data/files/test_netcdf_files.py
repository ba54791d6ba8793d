"""netCDF files have one owner and one lock; none is left to the garbage collector."""

import ctypes.util
import fcntl
import gc
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import netCDF4
import numpy as np
import pytest
import xarray as xr
from xarray.backends.netCDF4_ import NETCDF4_PYTHON_LOCK

from credit_like.data.files import netcdf_files
from credit_like.data.files.netcdf_files import File

STRESS = Path(__file__).with_name("netcdf_stress.py")


@pytest.fixture
def path(tmp_path):
    xr.Dataset({"v": (("t", "y"), np.arange(12.0).reshape(3, 4)), "name": ("y", list("abcd"))}).to_netcdf(
        tmp_path / "a.nc"
    )
    return tmp_path / "a.nc"


@pytest.fixture
def opened_files(monkeypatch):
    """Every Dataset that is made, in order."""
    made = []
    open_now = File._open_now

    def record(self):
        open_now(self)
        made.append(netcdf_files._open[self._number])

    monkeypatch.setattr(File, "_open_now", record)
    yield made
    netcdf_files._close_all()


def stress(folder, seconds, **environment):
    command = [sys.executable, "-X", "faulthandler", "-W", "error", STRESS, folder, str(seconds)]
    ended = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=seconds * 3 + 240
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert "Exception ignored" not in ended.stderr, ended.stderr[-4000:]
    assert "'fork'" in ended.stdout, ended.stdout
    print(ended.stdout)


def test_threads_that_read_write_fork_and_collect(tmp_path):
    stress(tmp_path, 4)


@pytest.mark.parametrize("mode", ["r", "w"])
def test_a_lock_that_another_process_is_about_to_release_is_waited_for(path, mode, monkeypatch):
    """As after a fork, until the child has let go of what its parent was writing."""
    with open(path, "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(OSError, match=r"Permission denied|HDF error"):
            netCDF4.Dataset(path, mode)
        waited = []
        monkeypatch.setattr(
            netcdf_files.time, "sleep", lambda seconds: waited.append(seconds) or fcntl.flock(held, fcntl.LOCK_UN)
        )
        file = File(path, mode)
        with file.opened():
            pass
        file.close()
    assert waited == [netcdf_files._PAUSES[0]]


def test_a_damaged_file_is_not_waited_for(path, monkeypatch):
    monkeypatch.setattr(netcdf_files.time, "sleep", lambda seconds: pytest.fail("waited"))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(OSError, match=r"a\.nc"), File(path).opened():
        pass


def test_a_file_that_stays_locked_is_an_error(path, monkeypatch):
    monkeypatch.setattr(netcdf_files, "_PAUSES", (0.01,))
    with open(path, "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(PermissionError):
            File(path, "w")


@pytest.mark.slow
@pytest.mark.timeout(4000)
def test_threads_for_longer_with_memory_checked(tmp_path):
    """For CREDIT_LIKE_STRESS_SECONDS, 15 if that is not set; 600 are a thorough test."""
    checker = ctypes.util.find_library("c_malloc_debug")
    checked = {"LD_PRELOAD": checker, "MALLOC_CHECK_": "3"} if checker else {}
    seconds = int(os.environ.get("CREDIT_LIKE_STRESS_SECONDS", "15"))
    stress(tmp_path, seconds, PYTHONMALLOC="debug", **checked)


def test_a_dataset_that_the_collector_closes_is_noticed(path, monkeypatch):
    noticed = []
    monkeypatch.setattr(sys, "unraisablehook", lambda told: noticed.append(str(told.exc_value)))
    netCDF4.Dataset(path)
    dataset = xr.open_dataset(path)
    del dataset
    gc.collect()
    assert len(noticed) == 2
    assert all("collector" in message or "not already closed" in message for message in noticed)


def test_an_owner_that_is_dropped_has_its_file_closed_under_the_lock(path, opened_files):
    file = File(path)
    with file.opened():
        pass
    cycle = [file]
    cycle.append(cycle)
    with NETCDF4_PYTHON_LOCK:
        del file, cycle
        gc.collect()
        assert opened_files[0].isopen()
    with netcdf_files.reading(path):
        assert not opened_files[0].isopen()


def test_a_file_is_opened_again_after_it_was_closed_or_pickled(path, opened_files):
    dataset = netcdf_files.open_lazily(path)
    other = pickle.loads(pickle.dumps(dataset))
    dataset.close()
    assert not any(file.isopen() for file in opened_files)
    assert dataset["v"][1, 2] == other["v"][1, 2] == 6
    dataset.close()
    del other


def test_no_more_files_stay_open_than_allowed(path, opened_files, monkeypatch):
    monkeypatch.setattr(netcdf_files, "_MOST_OPEN", 3)
    netcdf_files._close_all()
    files = [File(path) for _ in range(6)]
    written = File(path.with_name("w.nc"), "w")
    for file in [*files, *files]:
        with file.opened() as opened:
            assert opened["v"][1, 2] == 6
        assert sum(file.isopen() for file in opened_files) <= 3
    assert opened_files[0].isopen()  # the one that is being written
    written.close()


def test_a_written_file_stays_closed(path):
    file = File(path.with_name("b.nc"), "w")
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(file)
    file.close()
    with pytest.raises(ValueError, match=r"b.nc to be open for writing"), file.opened():
        pass


def test_what_cannot_be_opened_leaves_the_lock_free(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        netcdf_files.load(tmp_path / "none.nc")
    (tmp_path / "text.nc").write_text("text")
    with pytest.raises(OSError, match="Unknown file format"):
        netcdf_files.open_lazily(tmp_path / "text.nc")
    assert NETCDF4_PYTHON_LOCK.acquire(blocking=False)
    NETCDF4_PYTHON_LOCK.release()


def test_a_fork_waits_for_the_library_and_leaves_the_files_of_its_parent(path, opened_files):
    dataset = netcdf_files.open_lazily(path)
    written = File(path.with_name("b.nc"), "w")
    inside, go_on = threading.Event(), threading.Event()

    def use():
        with written.opened():
            inside.set()
            go_on.wait(900)

    thread = threading.Thread(target=use)
    thread.start()
    inside.wait(900)
    threading.Timer(0.2, go_on.set).start()
    if (child := os.fork()) == 0:
        right = False
        try:
            inherited = list(opened_files)
            written.close()
            links = [os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")]
            assert str(written.path) not in links  # its lock would last as long as this process
            right = dataset["v"].values[1, 2] == 6 and all(file.isopen() for file in inherited)
            dataset.close()
            right = right and all(file.isopen() for file in inherited) and len(opened_files) == len(inherited) + 1
        finally:
            os._exit(0 if right else 1)
    assert go_on.is_set()  # the thread was outside the library when the process was forked
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    written.close()
    dataset.close()


def test_saved_and_loaded_as_by_xarray(tmp_path):
    dataset = xr.Dataset(
        {"v": (("t", "y"), np.arange(12.0).reshape(3, 4), {"units": "K"}), "name": ("y", list("abcd"))},
        {"t": np.array(["2000-01-01", "2000-01-02", "2000-01-03"], "datetime64[ns]")},
        {"title": "a"},
    )
    encoding = {"v": {"zlib": True, "dtype": "f4"}}
    netcdf_files.save(dataset.chunk(t=1), tmp_path / "ours.nc", encoding)
    dataset.to_netcdf(tmp_path / "theirs.nc", encoding=encoding)
    theirs = xr.load_dataset(tmp_path / "theirs.nc")
    xr.testing.assert_identical(xr.load_dataset(tmp_path / "ours.nc"), theirs)
    xr.testing.assert_identical(netcdf_files.load(tmp_path / "ours.nc"), theirs)
    lazy = netcdf_files.open_lazily(tmp_path / "theirs.nc")
    assert not lazy["v"].variable._in_memory
    xr.testing.assert_identical(xr.decode_cf(lazy).load(), theirs)
    lazy.close()
