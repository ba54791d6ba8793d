"""What happens around a run while it lasts: memory, disks, clocks and files that others change."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import netCDF4
import numpy as np
import pytest
import torch
import xarray as xr

from credit_like import build, cli
from credit_like.checkpoint.manager import CheckpointManager
from credit_like.data.files import netcdf_files
from credit_like.data.sources.synthetic import Config, generate
from credit_like.data.tools.preprocess import load_scan
from credit_like.errors import RunError, UserError, known_message
from credit_like.evaluation.sources import ForecastFiles, open_forecast
from credit_like.grid import Grid
from credit_like.lock import RunLock
from credit_like.schema.experiment import Experiment
from credit_like.schema.load import load_experiment
from credit_like.training import loop as loop_module
from credit_like.training.step import TrainStep
from credit_like.variables import Variables
from tests.experiments import DEMO
from tests.faults import harness, planted, tiny
from tests.faults.test_disk import small_disk  # noqa: F401 - a fixture
from tests.integration import test_restart
from tests.integration.test_restart import TINY

# ---- memory ----------------------------------------------------------------------------------------------------------


def numpy_array() -> None:
    np.empty(2**55, np.uint8)


def torch_tensor() -> None:
    torch.empty(2**55, dtype=torch.uint8)


def process() -> None:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))  # as os.fork does


def consequence() -> None:
    try:
        numpy_array()
    except MemoryError as error:
        raise RuntimeError("writing the forecast failed") from error


@pytest.mark.parametrize("exhaust", [numpy_array, torch_tensor, process, consequence])
def test_exhausted_memory_is_one_message(exhaust, capsys) -> None:
    with pytest.raises(SystemExit) as end, cli._OneMessage():
        exhaust()
    assert end.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith("out of memory: ")
    assert len(said.splitlines()) == 1


@contextlib.contextmanager
def files_of_at_most(size: int):
    """Limit the size of the files that this process writes, in shared memory too; Python ignores the signal."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_shared_memory_without_room_is_one_message(capsys) -> None:
    with pytest.raises(SystemExit) as end, cli._OneMessage(), files_of_at_most(4096):
        torch.UntypedStorage._new_shared(2**20)
    assert end.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith("no room in shared memory: unable to ")
    assert said.endswith("enlarge /dev/shm (of a container: --shm-size), or set trainer.loader.num_workers: 0\n")


@pytest.mark.parametrize(
    "number",
    [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.EMFILE, errno.EFBIG],
)
@pytest.mark.parametrize("file", ["scores.csv", None])
def test_what_the_system_refuses_is_one_message(capsys, number, file) -> None:
    with pytest.raises(SystemExit) as end, cli._OneMessage():
        raise OSError(number, os.strerror(number), file)
    assert end.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith(os.strerror(number) + (f": {file}; " if file else "; "))
    assert len(said.splitlines()) == 1


def test_a_limit_of_threads_is_one_message(capsys) -> None:
    with pytest.raises(SystemExit) as end, cli._OneMessage():
        raise RuntimeError("can't start new thread")  # as Python does
    assert end.value.code == 1
    assert capsys.readouterr().err.startswith("can't start new thread; raise the limit of processes (ulimit -u)")


def test_a_limit_of_processes_is_one_message_and_other_waits_are_not_called_so() -> None:
    """A file that another program has locked, and a pipe that is full, give the same number as a refused fork."""
    number = errno.EAGAIN
    assert known_message(OSError(number, os.strerror(number))).endswith(
        "raise the limit of processes (ulimit -u), or use fewer workers"
    )
    for other in (OSError(number, "unable to lock file"), OSError(number, os.strerror(number), "x.nc")):
        assert known_message(other) is None


def test_a_full_disk_under_the_output_of_a_command_is_one_message() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "credit_like.cli", "schema"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert done.stderr == "No space left on device; free some space, or write to another disk\n"


def test_a_bug_keeps_its_traceback() -> None:
    absent = FileNotFoundError(errno.ENOENT, "no such file", "x")
    for error in (RuntimeError("shape"), KeyError("gloo"), ValueError("out of memory"), absent):
        assert known_message(error) is None
        with pytest.raises(type(error)), cli._OneMessage():
            raise error


def _limited(rank, world, port, save_loc, section) -> int:
    """Train a large model with 256 MiB more address space than the process has by now."""
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + 2**28, resource.RLIM_INFINITY))
    large = "model={type: wxformer, dim: [512, 1024, 2048, 4096], depth: [1, 1, 1, 1], dim_head: 8}"
    values = [*TINY, large, "inference.init=null", "inference.lead=12h", f"save_loc={save_loc}"]
    try:
        cli.main(["train", str(DEMO), *(part for value in values for part in ("--set", value))])
    except SystemExit as end:
        return end.code or 0
    return 0


@pytest.mark.slow
def test_a_limit_of_memory_fails_the_run_with_one_message(tmp_path) -> None:
    job = harness.Job(tmp_path / "run", {}, body=_limited)
    assert job.wait()
    said = (tmp_path / "run.0.out").read_text()
    assert job.end() == [1], said
    assert said.count("out of memory: ") == 1
    assert "Traceback" not in said
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] == "failed"
    assert status["reason"].startswith("out of memory: ")


@pytest.fixture
def control_group():
    """A group of processes to which the kernel gives 64 MiB, of version 1 or 2."""
    for root, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(root) / f"credit_like-{os.getpid()}"
        try:
            group.mkdir()
            if (group / limit).exists():  # else a folder like any other
                (group / limit).write_text(str(2**26))
                break
            group.rmdir()
        except OSError:
            with contextlib.suppress(OSError):
                group.rmdir()
    else:
        pytest.skip("no control group of memory can be made here")
    yield group
    group.rmdir()


def _killed_for_its_memory(rank, world, port, save_loc, section) -> int:
    """Train; in step 3, rank 1 takes more memory than its control group has."""
    inner = TrainStep.__call__

    def step(self, micro_batches, count, learning_rate, number):
        if number == 3 and rank == 1:
            (Path(section["group"]) / "cgroup.procs").write_text(str(os.getpid()))
            assert len(b"x" * 2**28) < 0, "the kernel gave more memory than the control group has"
        return inner(self, micro_batches, count, learning_rate, number)

    TrainStep.__call__ = step
    planted.train(save_loc)
    return 0


@pytest.mark.slow
@pytest.mark.long
def test_a_rank_that_the_kernel_kills_for_its_memory_is_named(tmp_path, control_group) -> None:
    run = tmp_path / "run"
    job = harness.Job(run, {"group": str(control_group)}, 2, body=_killed_for_its_memory)
    assert job.wait()
    said = [run.with_suffix(f".{rank}.out").read_text() for rank in range(2)]
    assert job.end() == [1, -signal.SIGKILL], said
    assert said[0].count("rank 1 does not respond: it was stopped or killed") == 1, said[0]
    assert "Traceback" not in "".join(said), said
    status = json.loads((run / "status.json").read_text())
    assert status["state"] == "failed"
    assert "rank 1 does not respond: it was stopped or killed" in status["reason"]
    test_restart.whole(run, planted.SETTINGS, 2)
    test_restart.whole(tmp_path / "whole", planted.SETTINGS, 2)
    harness.assert_same(run, tmp_path / "whole")


# ---- the clock -----------------------------------------------------------------------------------------------------------


def test_no_time_of_day_stops_a_run_or_saves_a_checkpoint(tmp_path, monkeypatch) -> None:
    """Each look at it finds another year; what is due after hours is not due in a run of a second."""
    section = {"epochs": 1, "checkpoint": {"every": "10h"}, "stop_after": "10h"}
    tiny.trainer(tmp_path / "whole", **section).fit()
    draw, looks = random.Random(3), []

    def jumping() -> float:
        looks.append(draw.uniform(0, 4e9))
        return looks[-1]

    monkeypatch.setattr(time, "time", jumping)
    monkeypatch.setattr(time, "time_ns", lambda: int(jumping() * 1e9))
    run = tiny.trainer(tmp_path / "run", **section)
    saved, inner = [], run.state.save
    monkeypatch.setattr(run.state, "save", lambda score: (saved.append(run.state.progress.step), inner(score))[1])
    assert run.fit().state == "finished"
    monkeypatch.undo()
    assert looks
    assert saved == harness.steps(tmp_path / "whole" / "checkpoints")
    harness.assert_same(tmp_path / "run", tmp_path / "whole")


FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(FAKETIME is None, reason="libfaketime is not installed (apt-get install libfaketime)")
def test_the_clock_of_the_system_jumps(tmp_path) -> None:
    """By up to three years, again and again; only the clock that counts from the start of the machine goes on as before."""
    section, clock = {"checkpoint": {"every": 2}}, tmp_path / "clock"
    harness.reference(tmp_path / "whole", section)
    environment = {
        **os.environ, "LD_PRELOAD": str(FAKETIME), "FAKETIME_TIMESTAMP_FILE": str(clock), "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    clock.write_text("+1000d")
    shown = subprocess.run(
        [sys.executable, "-c", "import time; print(time.time())"], env=environment, capture_output=True, text=True
    )
    assert float(shown.stdout) - time.time() > 900 * 86400
    draw, run = random.Random(3), tmp_path / "run"
    for stop in (9, None):
        described = json.dumps({**section, "stop_at": stop})
        process = subprocess.Popen([sys.executable, "-m", "tests.faults.tiny", str(run), described], env=environment)
        while process.poll() is None:
            draft = tmp_path / "draft"
            draft.write_text(f"{draw.uniform(-1000, 1000):+.4f}d")
            draft.rename(clock)
            time.sleep(0.001)
        assert process.returncode == 0
    harness.assert_same(run, tmp_path / "whole")


# ---- the folder of the run ---------------------------------------------------------------------------------------------


def test_a_note_of_another_host_without_a_lock_does_not_stop_a_run(tmp_path) -> None:
    """As a node leaves it that lost its power: the lock is the kernel's, the note is only a note."""
    run = tmp_path / "run"
    run.mkdir()
    (run / ".lock").write_text(json.dumps({"host": "elsewhere", "pid": os.getpid(), "PBS_JOBID": "7.server"}))
    with RunLock(run):
        assert "elsewhere" not in (run / ".lock").read_text()
    (run / ".lock").write_bytes(b"\xff\0" * 1000)
    assert tiny.trainer(run, epochs=1).fit().state == "finished"


def test_a_disk_of_checkpoints_that_becomes_read_only(small_disk, tmp_path, monkeypatch) -> None:  # noqa: F811
    monkeypatch.setattr(loop_module.time, "sleep", lambda seconds: None)
    section = {"checkpoint": {"every": 2, "keep": 2}, "epochs": 1}
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").symlink_to(small_disk)
    trainer = tiny.trainer(run, **section)
    inner = trainer.train_step

    def step(micro_batches, count, learning_rate, number):
        if number == 5:
            trainer.manager.wait()
            subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
        return inner(micro_batches, count, learning_rate, number)

    monkeypatch.setattr(trainer, "train_step", step)
    try:
        outcome = trainer.fit()
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    assert outcome.state == "failed"
    assert "Read-only file system" in outcome.reason
    newest = CheckpointManager(run / "checkpoints").latest()
    assert newest is not None
    assert newest.step == 4
    assert tiny.trainer(run, **section).fit().state == "finished"
    tiny.trainer(tmp_path / "whole", **section).fit()
    harness.assert_same(run, tmp_path / "whole")


# ---- data --------------------------------------------------------------------------------------------------------------


def _with_changed_data(store: Path, save_loc: Path, change) -> int:
    """Train on a zarr store, and change it during the first step."""
    described = load_experiment(DEMO, [*TINY, "trainer.loader.num_workers=0", f"save_loc={save_loc}"]).to_dict()
    described["data"]["source"] = {"type": "zarr", "path": str(store)}
    experiment = Experiment.model_validate(described)
    inner, changed = TrainStep.__call__, []

    def step(self, *arguments, **options):
        if not changed:
            changed.append(True)
            change(store)
        return inner(self, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainStep, "__call__", step)
        return build.train(experiment)


@pytest.fixture
def store(tmp_path):
    """The data of the demonstration, as a store."""
    (source,) = load_experiment(DEMO, TINY).data.source
    generate(source).to_zarr(tmp_path / "data.zarr", zarr_format=3, consolidated=False)
    return tmp_path / "data.zarr"


def removed(store: Path) -> None:
    shutil.rmtree(store)


def smaller(store: Path) -> None:
    shutil.rmtree(store)
    generate(Config(steps=60, longitudes=32, latitudes=16)).to_zarr(store, zarr_format=3, consolidated=False)


def missing(store: Path) -> None:
    dataset = xr.open_zarr(store, consolidated=False).load()
    dataset.close()
    shutil.rmtree(store)
    for variable in dataset.data_vars.values():
        if "time" in variable.dims:
            variable.values[:] = np.nan
    for variable in dataset.variables.values():
        variable.encoding.clear()
    dataset.to_zarr(store, zarr_format=3, consolidated=False)


@pytest.mark.slow
@pytest.mark.parametrize("change", [removed, smaller, missing])
def test_data_that_change_during_a_training_end_it_with_one_message(tmp_path, store, change) -> None:
    """Fields that are gone or of another shape cannot be read; those that lost all values are not those of the statistics."""
    run = tmp_path / "run"
    with pytest.raises((RunError, UserError)) as error:
        _with_changed_data(store, run, change)
    assert ("the data have changed since the statistics were fitted" if change is missing else str(store)) in str(
        error.value
    )
    status = json.loads((run / "status.json").read_text())
    assert status["state"] == "failed"
    assert status["reason"] == str(error.value)


def test_a_truncated_chunk_of_a_forecast_is_named(tmp_path) -> None:
    grid = Grid(np.linspace(75, -75, 6), np.arange(8) * 45.0)
    times = np.array(["2000-01-01", "2000-01-02"], "datetime64[ns]")
    leads = np.array([6, 12], "timedelta64[h]").astype("timedelta64[ns]")
    axes = {"time": times, "prediction_timedelta": leads, "latitude": grid.latitude, "longitude": grid.longitude}
    values = np.random.default_rng(0).normal(size=(2, 2, 6, 8)).astype("f4")
    dataset = xr.Dataset({"u": (tuple(axes), values)}, axes)
    dataset.to_zarr(tmp_path / "f.zarr", zarr_format=3, consolidated=False, encoding={"u": {"chunks": (1, 1, 6, 8)}})
    chunk = tmp_path / "f.zarr" / "u" / "c" / "1" / "0" / "0" / "0"
    chunk.write_bytes(chunk.read_bytes()[:-20])
    variables = Variables(tiny.experiment(tmp_path / "run").data)
    (variable,) = variables.role("prognostic")[:1]
    unknown = {"attrs": lambda _: {}, "level_units": lambda _: ""}
    truth = SimpleNamespace(grid=grid, variables=variables, calendar="standard", **unknown)
    files = ForecastFiles(open_forecast(tmp_path / "f.zarr"), truth, str(tmp_path / "f.zarr"))
    hours = [6 * 3600, 12 * 3600]
    read = files.fields(int(times[0].astype("datetime64[s]").astype(int)), hours, variable, [0])
    np.testing.assert_array_equal(read[0, :, 0], values[0])
    with pytest.raises(UserError, match=r"values of u from 2000-01-02T00:00:00, got .*f\.zarr"):
        files.fields(int(times[1].astype("datetime64[s]").astype(int)), hours, variable, [0])


# ---- files that are larger than they look --------------------------------------------------------------------------------


def test_a_netcdf_file_that_declares_more_than_it_can_hold_is_refused(tmp_path) -> None:
    path = tmp_path / "bomb.nc"
    with netCDF4.Dataset(path, "w") as file:
        file.createDimension("x", 2**40)
        file.createVariable("mean", "f8", ("x",), zlib=True, chunksizes=(2**20,))
    assert path.stat().st_size < 2**20
    with pytest.raises(ValueError, match="bytes of values, got a file that declares"):
        netcdf_files.load(path)


def test_a_piece_of_a_pass_that_is_compressed_or_damaged_is_refused(tmp_path) -> None:
    np.savez_compressed(tmp_path / "bomb.npz", valid=np.zeros(2**22, np.uint8), shape=np.array([1, 2**15, 2**10]))
    np.savez(tmp_path / "shape.npz", valid=np.zeros(8, np.uint8), shape=np.array([1, 2**30, 2**30]))
    (tmp_path / "noise.npz").write_bytes(b"PK\3\4" + os.urandom(100))
    for name in ("bomb", "shape", "noise"):
        with pytest.raises(ValueError, match="expected"):
            load_scan(tmp_path / f"{name}.npz")
