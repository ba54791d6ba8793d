"""Life cycle of helper processes, which end with their parent or on its request, and the standard streams of this one."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_TO_ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def open_standard_streams() -> None:
    """Connect standard streams that this process was started without to /dev/null.

    Otherwise the first file that is opened takes the descriptor of a closed stream, and receives what libraries report there.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor, which is this one
            os.set_inheritable(number, True)  # as helper processes expect
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies; at once if `parent` is no longer its parent.

    Does nothing on systems other than Linux.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def work_for(parent: int) -> None:
    """Let this worker process end only with its parent or by the parent's SIGTERM.

    Terminals, `timeout` and batch systems send SIGINT, SIGTERM and SIGUSR1 to the whole process group. The parent
    handles them, and may need its workers to finish a step, so the worker ignores these signals from any other sender.
    """
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_when_asked, args=(parent,), name="end", daemon=True).start()
    end_with(parent)


def _end_when_asked(parent: int) -> None:
    if sys.platform == "linux":
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
            pass
    else:
        signal.sigwait({signal.SIGTERM})
    os._exit(0)


@contextmanager
def signals_held() -> Iterator[None]:
    """Block signals while workers are started; workers inherit the block until they call `work_for`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _TO_ALL)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def identity(pid: int | None = None) -> str:
    """Return the name of a process (this one) among all of this machine, also earlier ones; empty where it is not known."""
    pid = os.getpid() if pid is None else pid
    machine, found = _machine(), _state(pid)
    return f"{machine} {pid} {found[1]}" if machine and found is not None else ""


def has_ended(name: str) -> bool:
    """Return whether the process with this `identity` is known to have ended; one of another machine never is."""
    machine, _, process = name.partition(" ")
    if not machine or machine != _machine():
        return False
    pid, _, started = process.partition(" ")
    now = _state(int(pid))
    return now is None or now[0] in "ZX" or now[1] != started


def _machine() -> str:
    """Return a name of this start of the system and of the process numbers that this process sees."""
    try:
        started = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{started}-{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _state(pid: int) -> tuple[str, str] | None:
    """Return the state of a process and when it was started; None if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], fields[19]
