"""Signals to the whole process group, as terminals, `timeout` and batch systems send them, with loader workers."""

from __future__ import annotations

import json
import multiprocessing
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Protocol

import pytest

from credit_like.processes import signals_held, work_for
from credit_like.training import stop as stop_module
from tests.experiments import DEMO
from tests.faults import harness, tiny
from tests.faults.test_agents import is_running
from tests.integration.test_restart import TINY

LONG = ["inference.init=null", "inference.lead=12h", "trainer.epochs=200", "trainer.checkpoint.every=1000"]


class Started(Protocol):
    """The leader of a process group."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float) -> int | None: ...


class Forked:
    """The command in a fork of this process, at the head of a process group of its own."""

    def __init__(self, arguments: list[str], save_loc: Path) -> None:
        self.job = harness.Job(save_loc, {"arguments": arguments}, body=_leader)
        self.pid: int = self.job.processes[0].pid

    def poll(self) -> int | None:
        return self.job.processes[0].exitcode

    def wait(self, timeout: float) -> int | None:
        self.job.wait(timeout)
        return self.poll()


def _leader(rank, world, port, save_loc, section) -> int:
    os.setpgid(0, 0)
    return harness.called(section["arguments"])


def interpreter(arguments: list[str], save_loc: Path) -> subprocess.Popen:
    """The command in an interpreter of its own, at the head of a process group of its own."""
    with save_loc.with_suffix(".0.out").open("w") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "credit_like.cli", *arguments],
            stdout=out,
            stderr=out,
            cwd=DEMO.parents[1],
            process_group=0,
        )


def training(save_loc: Path, settings: list[str]) -> list[str]:
    values = [f"save_loc={save_loc}", *TINY, *LONG, *settings]
    return ["train", str(DEMO), *(part for value in values for part in ("--set", value))]


def wait_for_steps(save_loc: Path, process: Started, count: int) -> None:
    path = save_loc / "log.jsonl"
    deadline = time.monotonic() + 300
    while not (path.exists() and len(path.read_bytes().splitlines()) >= count):
        assert process.poll() is None, save_loc.with_suffix(".0.out").read_text()[-4000:]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def group(leader: int) -> list[int]:
    """Processes of a group that have not ended."""
    listed = subprocess.run(["ps", "-A", "-o", "pid=,pgid=,stat="], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in listed.splitlines()]
    return [int(pid) for pid, pgid, state in rows if int(pgid) == leader and not state.startswith("Z")]


def gone(leader: int) -> bool:
    deadline = time.monotonic() + 300
    while group(leader) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not group(leader)


@pytest.mark.parametrize(
    ("number", "workers", "start"),
    [
        (signal.SIGINT, 1, Forked),
        pytest.param(signal.SIGTERM, 2, Forked, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, 2, Forked, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 2, interpreter, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 1, Forked, marks=pytest.mark.slow),
    ],
)
def test_the_whole_group_is_asked_to_stop(tmp_path, number, workers, start) -> None:
    run = tmp_path / "run"
    process = start(training(run, [f"trainer.loader.num_workers={workers}"]), run)
    wait_for_steps(run, process, 3)
    assert len(group(process.pid)) >= 1 + workers
    os.killpg(process.pid, number)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # `timeout` sends it twice at a time
    code = process.wait(900)
    said = run.with_suffix(".0.out").read_text()
    assert code == (130 if number == signal.SIGINT else 0), said
    assert "Traceback" not in said
    assert said.count(f"(signal {number.name}); run the same command to continue") == 1, said
    status = json.loads((run / "status.json").read_text())
    assert status["state"] == "continue"
    # Nothing of what was trained is lost: the last step of the log is saved.
    assert status["step"] == harness.rows(run)[-1]["step"] == harness.steps(run / "checkpoints")[-1]
    assert gone(process.pid)


def test_a_second_interrupt_ends_in_the_midst_of_a_step(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(stop_module, "_ONE_REQUEST", 0.0)
    made = tiny.trainer(tmp_path / "run")
    inner = made.train_step

    def interrupted_twice(micro_batches, count, learning_rate, step):
        if step == 4:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)
        return inner(micro_batches, count, learning_rate, step)

    made.train_step = interrupted_twice
    with pytest.raises(KeyboardInterrupt):
        made.fit()
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "continue"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


KEYS = """
import time
from credit_like.training.stop import StopRequest
with StopRequest() as stop:
    print("begun", flush=True)
    while not stop.interrupted:
        time.sleep(0.01)
    print(stop.reason(), flush=True)
    while True:  # a step that does not end
        time.sleep(0.01)
"""


def test_ctrl_c_of_a_terminal_asks_once_and_ends_the_second_time() -> None:
    """The terminal's line discipline turns the key into a signal to all processes in the foreground."""
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # whoever started the tests may ignore it
        os.execv(sys.executable, [sys.executable, "-c", KEYS])
    said = b""

    def wait_for(text: bytes) -> None:
        nonlocal said
        while text not in said:
            assert select.select([terminal], [], [], 300)[0], said
            said += os.read(terminal, 1000)

    wait_for(b"begun")
    os.write(terminal, b"\x03")
    wait_for(b"signal SIGINT")
    time.sleep(1.1 * stop_module._ONE_REQUEST)
    os.write(terminal, b"\x03")
    wait_for(b"KeyboardInterrupt")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGINT
    os.close(terminal)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_worker_obeys_its_parent_alone(number) -> None:
    parent, ready = os.getpid(), multiprocessing.Event()

    def work() -> None:
        work_for(parent)
        ready.set()
        time.sleep(120)

    worker = multiprocessing.get_context("fork").Process(target=work)
    with signals_held():  # threads that a library starts in the child while it is forked inherit the block
        worker.start()
    assert ready.wait(900)
    for _ in range(3):
        subprocess.run(["kill", f"-{number.name.removeprefix('SIG')}", str(worker.pid)], check=True)
    worker.join(0.5)
    assert worker.exitcode is None
    worker.terminate()
    worker.join(300)
    assert worker.exitcode == 0


def test_workers_of_a_killed_training_end_with_it(tmp_path) -> None:
    run = tmp_path / "run"
    process = Forked(training(run, ["trainer.loader.num_workers=2"]), run)
    wait_for_steps(run, process, 1)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(900)
    assert gone(process.pid)


def test_a_worker_ends_with_its_parent() -> None:
    """It does nothing itself: the kernel ends it."""
    receive, send = os.pipe()

    def work() -> None:
        work_for(os.getppid())
        os.write(send, str(os.getpid()).encode())
        time.sleep(600)

    def own() -> None:
        if os.fork() == 0:
            work()
        time.sleep(600)

    parent = multiprocessing.get_context("fork").Process(target=own)
    parent.start()
    worker = int(os.read(receive, 100))
    parent.kill()
    parent.join()
    deadline = time.monotonic() + 300
    while is_running(worker):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.close(receive)
    os.close(send)


@pytest.mark.slow
def test_an_interrupted_pass_of_several_processes_has_the_traceback_of_one(tmp_path) -> None:
    code = "import time; from credit_like.data.tools.preprocess import in_processes as over"
    code += "\nif __name__ == '__main__': list(over(2)(time.sleep, [600, 600, 600]))"
    script, log = tmp_path / "script.py", tmp_path / "out"
    script.write_text(code)
    with log.open("w") as out:
        process = subprocess.Popen([sys.executable, script], stdout=out, stderr=out, process_group=0)
    deadline = time.monotonic() + 300
    while len(group(process.pid)) < 4:  # two workers, and the tracker of multiprocessing
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    process.wait(900)
    assert log.read_text().count("Traceback (most recent call last)") == 1, log.read_text()
    assert "KeyboardInterrupt" in log.read_text()
    assert gone(process.pid)
