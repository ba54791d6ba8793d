"""Errors that are reported to the user as one message, and known conditions of the machine that are reported alike.

Every other exception is a bug and keeps its traceback.
"""

from __future__ import annotations

import errno
import os
import re
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, EOFError)
"""Exceptions that the file libraries raise for incomplete or invalid files."""


_SURROUNDINGS = {
    number: advice
    for numbers, advice in (
        (("ENOSPC", "EDQUOT"), "free some space, or write to another disk"),
        (("EROFS", "EIO", "ESTALE"), "write to another disk, or ask the administrator of this one"),
        (("EMFILE", "ENFILE"), "raise the limit of open files (ulimit -n)"),
        (("EFBIG",), "raise the limit of the size of files (ulimit -f), or write to another disk"),
        (("ENAMETOOLONG", "ELOOP"), "name another path"),
        (("EACCES", "EPERM"), "change its permissions, ask its owner, or name another path"),
        (("EISDIR", "ENOTDIR"), "remove what is there, or name another path"),
    )
    for name in numbers
    if (number := getattr(errno, name, None)) is not None
}
"""Errors of the system that are no fault of the program's, and what to do about them."""
_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
"""Folders of Python's own modules and of packages that are installed."""
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_OUT_OF_MEMORY = re.compile("can't allocate memory|[Oo]ut of memory")
"""torch's messages for exhausted memory of the host or the GPU."""
_NO_THREAD = "can't start new thread"
_PROCESSES = "raise the limit of processes (ulimit -u), or use fewer workers"
_SHARED_MEMORY = re.compile(r"</torch_[0-9]+_|torch_shm_manager|raise your shared memory limit")
"""What is in messages of torch and of its loader about files in /dev/shm."""
DEAD_WORKER = "DataLoader worker (pid"
"""What is in messages of torch about a loader worker that has died, raised in whatever the main process does at that moment."""
_NO_ANSWER = re.compile(
    "gloo.*(Timed out waiting|(Connect|Read|Write) timeout)|Application timeout caused pair closure|"
    "Watchdog caught collective operation timeout"
)
_LOST = re.compile(
    "gloo.*(Connection (closed|reset) by peer|Connection (refused|timed out)|Broken pipe|Socket closed|"
    "No route to host|Network is unreachable)|ncclRemoteError"
)
"""Messages of gloo and NCCL about a rank that does not answer, or that has ended.

Where several collectives of a process wait at a time, one of them reports gloo's time-out. Gloo then closes the connections,
and the others report the closure, in a message that names no source file of gloo. Either error may be the one raised.
"""


class UserError(ValueError):
    """An error that the user has to correct; the message states what was expected, what was found and what to change.

    The command line prints it without a traceback and exits with status 2. Packages derive their own kinds from it
    (`ExperimentError`, `StoreError`, `PluginError`, `DamagedCheckpoint`, `Locked`).
    """


class RunError(RuntimeError):
    """A cause outside the program ended a run, such as unreadable data: one message, exit status 1."""


def known_message(error: BaseException) -> str | None:
    """Return the one message of an error whose cause lies outside the program; None for a bug, which keeps its traceback.

    These are UserError and RunError, an exit in a plug-in, exhausted memory, disks and limits of the system, loader workers that
    were killed, and ranks that do not answer each other in time.
    """
    if isinstance(error, (UserError, RunError)):
        return str(error)
    if isinstance(error, SystemExit):
        # No part of the program exits: this is code of a plug-in or a library.
        place = "".join(f" at {at}" for at in (own_line(error),) if at)
        return (
            f"expected code that returns or raises an error, got an exit with status {error.code!r}{place}; change it"
        )
    text = " ".join(str(error).split())
    if is_out_of_memory(error):
        return (
            f"out of memory: {text[:300] or type(error).__name__}; use fewer trainer.loader.num_workers or a smaller "
            "trainer.micro_batch_size (of forecasts: inference.batch_size), set trainer.activation_checkpoint: true, or request "
            "more memory"
        )
    if isinstance(error, RuntimeError) and _SHARED_MEMORY.search(text):
        return (
            f"no room in shared memory: {text[:300]}; enlarge /dev/shm (of a container: --shm-size), or set "
            "trainer.loader.num_workers: 0"
        )
    if isinstance(error, RuntimeError) and DEAD_WORKER in text:
        return (
            f"a loader worker died, perhaps for lack of memory ({text[:300]}); use fewer trainer.loader.num_workers or request "
            "more memory"
        )
    if isinstance(error, RuntimeError) and text == _NO_THREAD:
        return f"{text}; {_PROCESSES}"
    if (
        isinstance(error, OSError)
        and error.filename is None
        and error.args == (errno.EAGAIN, os.strerror(errno.EAGAIN))
    ):
        return f"{error.strerror}; {_PROCESSES}"  # of fork; locks and pipes that are not waited for say more
    if isinstance(error, OSError) and error.errno in _SURROUNDINGS:
        where = f": {str(error.filename)[:200]}" if error.filename is not None else ""
        return f"{error.strerror}{where}; {_SURROUNDINGS[error.errno]}"
    if isinstance(error, RuntimeError) and _NO_ANSWER.search(text):
        return f"another rank did not answer within trainer.timeout: it hangs, was stopped, or its node is gone ({text[:300]})"
    if isinstance(error, RuntimeError) and _LOST.search(text):
        return f"the connection to another rank was lost: it has ended, or its node is gone ({text[:300]})"
    return known_message(error.__cause__) if error.__cause__ is not None else None


def reads_values(error: BaseException) -> bool:
    """Return whether an error of torch is about reading a tensor of the meta device, which has no values."""
    return re.search(r"\bmeta\b", str(error)) is not None


def own_line(error: BaseException) -> str:
    """Return `file:line` of the innermost frame of an error outside of this and of installed packages, or else the innermost."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [at for at in frames if not at.filename.startswith((*_LIBRARIES, _HERE))] or frames
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


def cut(text: str, most: int) -> str:
    """Return the text, or its beginning and an ellipsis if it has more than `most` characters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def reason(error: BaseException, path: object = None) -> str:
    """Return on one line why something failed, such as reading a file, for a message that names the file or the line of code.

    This is the system's text without its number and path, or the first 300 characters of a library's message, without
    `path` at its end.
    """
    text = error.strerror if isinstance(error, OSError) and isinstance(error.strerror, str) else str(error)
    return " ".join(text.removesuffix(f": {path}").split())[:300] or type(error).__name__


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that the memory of the host or of the GPU is exhausted."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    text = " ".join(str(error).split())
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and bool(_OUT_OF_MEMORY.search(text)))


def of_another_rank(error: BaseException) -> str:
    """Return `silent` if an error means that another rank does not answer, `lost` if it means that one has ended, else ""."""
    text = " ".join(str(error).split())
    if isinstance(error, RuntimeError):
        if _NO_ANSWER.search(text):
            return "silent"
        if _LOST.search(text):
            return "lost"
    return of_another_rank(error.__cause__) if error.__cause__ is not None else ""


@contextmanager
def reading(what: str, path: object, advice: str) -> Iterator[None]:
    """Convert errors of a library that reads `path` to UserError; use it around calls into such libraries only.

    The `advice` is for damaged content; for files without read permission, the message names the permissions instead.
    """
    try:
        yield
    except UserError:
        raise
    except PermissionError as error:
        advice = _SURROUNDINGS[errno.EACCES]
        of_server = f": {reason(error)}" if error.errno is None else ""
        raise UserError(
            f"expected {what}, got {error.filename or path}, which may not be read{of_server}; {advice}"
        ) from error
    except UNREADABLE as error:
        raise UserError(f"expected {what}, got {path}, which cannot be read: {reason(error)}; {advice}") from error
