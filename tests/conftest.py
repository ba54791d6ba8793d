"""Fixtures for all tests."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from credit_like.ops.cpu import policy

# Timings on a shared machine say nothing about correctness.
settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")
policy.configure()  # as at the start of every run

# Imports and collection make millions of objects that stay: the collector would go through all of them again and again, a
# third of the time until the first test. It is not disabled, because dask restores the state at its import after each slice.
gc.set_threshold(10_000_000)

# A shell without job control starts background processes with SIGINT ignored, which they and their children inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

LONGEST = (
    "parallel/test_layouts.py", "test_gpu_benchmark.py", "notebooks/test_notebooks.py", "integration/test_compiled_run.py",
    "parallel/test_rows_and_columns.py", "launch/test_real_training.py", "plan/test_simulate.py", "parallel/test_compiled.py",
    "test_verify.py", "faults/test_run_folder.py", "integration/test_restart.py", "parallel/test_ensemble.py",
    "parallel/test_communication.py", "launch/test_slurm.py", "parallel/test_wiring.py", "faults/test_kill.py",
    "integration/test_forecasts.py", "malformed/test_sweep.py", "test_recipes_benchmark.py", "test_wheel.py",
)  # fmt: skip
"""Files whose slow tests take minutes."""


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark long tests as slow ones too, so that the everyday tests do without them."""
    if item.get_closest_marker("long"):
        item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Collect garbage from the first test on, but seldom: it is 4 % of the everyday tests' time otherwise."""
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first, so that no worker is left alone with one of them at the end."""
    places = {Path(__file__).parent / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


GRACE = 20.0  # seconds that the other ranks get to end after one has failed


def _child(rank, world, port: Connection, fn, args, pipe: Connection):
    """Run one rank with the launcher's environment; send back the result or the traceback."""
    import torch

    from credit_like.parallel.environment import local_launch

    # This process must not finalise the parent's garbage: that would close the parent's files, and the warning about one
    # keeps alive everything in the frames of that moment.
    gc.freeze()
    os.environ.update(local_launch(rank, world, port.recv()))
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1, file=os.fdopen(os.dup(2), "w"), all_threads=True)
    try:
        answer = pickle.dumps(("ok", fn(rank, *args)))
    except BaseException as error:  # noqa: BLE001 - every failure is sent to the test
        answer = pickle.dumps(("error", f"{type(error).__name__}: {error}", traceback.format_exc()))
    pipe.send_bytes(answer)  # bytes: `send` would share tensors with a process that is about to end
    pipe.close()
    os._exit(0)


def _collect(pipes, processes, timeout):
    """Return every rank's answer; end the remaining ranks when one has failed or the time is up."""
    answers, deadline = {}, time.monotonic() + timeout
    while len(answers) < len(pipes):
        left = deadline - time.monotonic()
        ready = wait([p for r, p in pipes.items() if r not in answers], timeout=max(left, 0))
        for rank, pipe in pipes.items():
            if pipe in ready:
                try:
                    answers[rank] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    answers[rank] = ("error", "died", f"rank {rank} ended without an answer")
                if answers[rank][0] == "error":
                    deadline = min(deadline, time.monotonic() + GRACE)
        if not ready:
            break
    for rank, process in processes.items():
        if rank not in answers:
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)  # prints its stack on stderr
            process.join(0.3)
            process.kill()
            answers[rank] = ("error", "hung", f"rank {rank} was still running and was ended")
        process.join()
    return [answers[rank] for rank in sorted(answers)]


def launch(world, fn, *args, timeout=900.0):
    """Return the answers ("ok", value) or ("error", message, traceback) of `world` forked ranks that ran fn(rank, *args)."""
    import torch._dynamo  # noqa: F401  the first step needs it: the ranks have it from here instead of importing it each
    import torch.distributed as dist

    context = multiprocessing.get_context("fork")
    pipes, processes, ports = {}, {}, []
    for rank in range(world):
        receive, send = context.Pipe(duplex=False)
        port, tell = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(rank, world, port, fn, args, send))
        process.start()
        send.close()
        pipes[rank], processes[rank] = receive, process
        ports.append(tell)
    # After the forks: a lock held by the store's thread during a fork would never be released in that rank.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for tell in ports:
        tell.send(str(store.port))
    return _collect(pipes, processes, timeout)


@pytest.fixture(scope="session", autouse=True)
def no_netcdf_file_is_left_to_the_collector():
    """Fail the test if a Dataset, or xarray's manager of one, is collected while open, since it is then closed without the lock.

    An error in `__del__` is a warning of pytest, which is an error in turn.
    """
    import netCDF4
    import xarray as xr

    class Watched(netCDF4.Dataset):
        def __del__(self):
            if self.isopen():
                raise AssertionError("a netCDF file was left to the garbage collector, close it")

    # netCDF4 looks up attributes of the class in `__dealloc__`: a class that is freed before its objects causes a crash.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(Watched))
    with pytest.MonkeyPatch.context() as patch, xr.set_options(warn_for_unclosed_files=True):
        patch.setattr(netCDF4, "Dataset", Watched)
        yield


@pytest.fixture(scope="module", autouse=True)
def what_exists_is_frozen():
    """Exclude the modules loaded so far from garbage collection: there are so many objects that each one takes 0.2 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def compiled_code_is_forgotten():
    """Count the compiler's limits for one test: it counts by function, also what other tests of this process have compiled."""
    yield
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        dynamo.reset()


@pytest.fixture(scope="session")
def run_ranks():
    """Return run_ranks(n, fn, *args), which runs fn(rank, *args) in n forked processes and returns the n results.

    The processes have a launcher's environment. Forked from this process, in which torch is loaded already, a rank costs
    hundredths of a second. fn joins the process group itself (Runtime.start). The first rank that fails fails the test, with its
    traceback.
    """

    def run(world, fn, *args, timeout=900.0):
        answers = launch(world, fn, *args, timeout=timeout)
        failed = [(rank, answer) for rank, answer in enumerate(answers) if answer[0] == "error"]
        if failed:
            failed.sort(key=lambda item: item[1][1] in ("hung", "died") or "closed by peer" in item[1][1])
            pytest.fail("\n".join(f"rank {rank}: {answer[2]}" for rank, answer in failed[:2]))
        return [answer[1] for answer in answers]

    return run


@pytest.fixture
def launch_ranks():
    """As run_ranks, but return ("ok", value) or ("error", message, traceback) of each rank: for tests of failures."""
    return launch


class _Dropped:
    """Records the process in which it is collected."""

    def __init__(self, collected_by):
        self.itself, self.collected_by = self, collected_by

    def __del__(self):
        self.collected_by.append(os.getpid())


@pytest.fixture
def dropped():
    """Return a list that stays empty while no process collects an object dropped by this one; collect it after the test."""
    collected_by = []
    gc.disable()
    try:
        _Dropped(collected_by)
        yield collected_by
    finally:
        gc.enable()
    gc.collect()
    assert collected_by == [os.getpid()]
