"""Files of results: checks that they can be written and replace only a command's own output, and atomic writing."""

from __future__ import annotations

import glob
import os
import shutil
import socket
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from credit_like.errors import UserError, cut

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRAWN = {"Software": "Drawn by credit-like"}
"""Metadata of the figures (PNG) that commands draw under fixed names."""
_BEGINNING = 1 << 20
_LONGEST_NAME = 255
_DRAFT = 40
"""Bytes by which the name of an unfinished file is longer."""
_SHOWN = 80


def check_new(option: str, path: Path) -> None:
    """Raise UserError if anything is at `path`, for results that a user changes or that take long, or it cannot be written."""
    _check_place(option, path)
    if os.path.lexists(path):
        raise UserError(f"{option}: expected a path where nothing is, got {path}; remove it or name another one")


def check_own(option: str, path: Path, what: str, is_own: Callable[[Path], bool]) -> None:
    """Raise UserError if something is at `path` that is not `what`, or it cannot be written.

    `is_own` tells whether a file or folder is `what`. An empty file, such as an interrupted command leaves, may be replaced.
    """
    _check_place(option, path)
    # Pipes and devices are not opened.
    known = path.is_file() or path.is_dir()
    empty = path.is_file() and not path.stat().st_size
    if known and not empty and not os.access(path, os.R_OK):
        raise UserError(
            f"{option}: expected {what} or a path where nothing is, got {path}, which may not be read; change its permissions "
            "or name another path"
        )
    if os.path.lexists(path) and not (empty or (known and is_own(path))):
        raise UserError(
            f"{option}: expected {what} or a path where nothing is, got something else at {path}; remove it or name "
            "another path"
        )


def check_figure(path: Path) -> None:
    """Raise UserError if something is at `path`, a name in a run's folder, that is no figure with the metadata `DRAWN`."""
    check_own("save_loc", path, "a figure of this command", begins_with(DRAWN["Software"]))


def save_figure(figure: Figure, path: Path, dpi: int) -> None:
    """Write a figure whole, or not at all. Raises UserError as `check_figure` does.

    Its texts, but for the numbers at the ticks, are drawn as they are: a $ in names or units begins no mathematics.
    """
    from matplotlib.text import Text

    check_figure(path)
    axis = [axis for ax in figure.axes for axis in (ax.xaxis, ax.yaxis)]
    ticks = [tick for one in axis for tick in (*one.get_major_ticks(), *one.get_minor_ticks())]
    numbers = {label for tick in ticks for label in (tick.label1, tick.label2)}
    for text in set(figure.findobj(Text)) - numbers:
        if "$" in text.get_text():
            text.set_parse_math(False)
    with replacing(path) as draft:
        figure.savefig(draft, format="png", dpi=dpi, metadata=DRAWN)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a file to write, which takes the place of `path` if the block ends well and is removed otherwise.

    Several processes may do so at once: the last one's file remains. Raises UserError where a folder is at `path`.
    """
    draft = draft_beside(path)
    try:
        yield draft
        if path.is_dir():
            raise UserError(f"expected a file or nothing at {path}, got a folder; remove it")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def sync(path: str | Path) -> None:
    """Flush a file, or the names in a folder, to the disk; a rename is only durable after that of its folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def draft_beside(path: Path) -> Path:
    """Return a hidden name for this process beside `path`; remove files that dead processes of this host left under such names."""
    stem = f".{path.name}.{_machine():08x}-"
    for left in path.parent.glob(f"{glob.escape(stem)}*"):
        with suppress(OSError):
            if not _is_alive(left.name.removeprefix(stem)):
                shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
    return path.with_name(f"{stem}{os.getpid()}")


def process_name() -> str:
    """Return a name of this process among those of all hosts; containers often give the same number to each one's processes."""
    return f"{_machine():08x}-{os.getpid()}"


@cache
def _machine() -> int:
    """Return a number of this host and of the process numbers that this process sees, which containers have of their own.

    Its length is fixed, unlike that of the host's name: a name may be as long as `_LONGEST_NAME` - `_DRAFT`.
    """
    name = socket.gethostname()
    with suppress(OSError):
        name += str(os.stat("/proc/self/ns/pid").st_ino)
    return zlib.crc32(name.encode())


def _is_alive(pid: str) -> bool:
    """Return whether `pid` may be a process other than this one; a name that is no number may be anyone's."""
    if not pid.isdecimal():
        return True
    if int(pid) == os.getpid():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        pass
    return True


def folder_identity(path: Path) -> tuple[int, int] | None:
    """Return an identity that distinguishes a folder from a later one at the same path; None if there is no folder.

    A store that was read is the one that was opened if this is the same afterwards.
    """
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return (found.st_dev, found.st_ino) if stat.S_ISDIR(found.st_mode) else None


def begins_with(mark: str) -> Callable[[Path], bool]:
    """Return a function that tells whether the first MiB of a file holds `mark`."""

    def holds(path: Path) -> bool:
        if not os.path.isfile(path):  # a pipe would wait for a writer
            return False
        try:
            with path.open("rb") as file:
                return mark.encode() in file.read(_BEGINNING)
        except OSError:  # a folder, or a file that cannot be read
            return False

    return holds


def _check_place(option: str, path: Path) -> None:
    problem = folder_problem(str(path.absolute().parent)) or _why_not_a_path(path)
    if problem is None and len(os.fsencode(path.name)) > _LONGEST_NAME - _DRAFT:
        problem = "its name is too long"
    if problem:
        raise UserError(f"{option}: {problem}; name another path than {_shown(path)}")


def folder_problem(path: str) -> str | None:
    """Return why a path is not, and cannot become, a folder that can be written; None if it is or can."""
    folder = Path(path).absolute()
    if wrong := _why_not_a_folder(folder):
        return f"expected a folder, got {_shown(path)}: {wrong}"
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not existing.is_dir():
        return f"expected a folder, got {_shown(path)}, but {existing} is a file"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"expected a folder that may be written to, got {_shown(path)}, but {existing} may not"
    return None


def _why_not_a_folder(folder: Path) -> str | None:
    """Return why a path can never be a folder; None if it is one or can become one."""
    if folder.is_relative_to("/proc") or folder.is_relative_to("/sys"):
        return "nothing can be kept there"
    if wrong := _why_not_a_path(folder):
        return wrong
    for path in (folder, *folder.parents):
        if path.is_symlink() and not path.exists():
            return f"{path} is a link to nothing"
    return None


def _why_not_a_path(path: Path) -> str | None:
    """Return why nothing can be at a path: files cannot hold its name, names are too long, or links lead in a circle."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return "its name is not UTF-8"
    try:
        # The system reports a name that is too long only if its folder exists.
        if any(len(os.fsencode(part)) > _LONGEST_NAME for part in path.parts):
            return "a name in it is too long"
        with suppress(FileNotFoundError, NotADirectoryError):
            path.stat()
    except OSError as error:
        return str(error.strerror).lower()
    except ValueError as error:
        return str(error)
    return None


def _shown(path: str | Path) -> str:
    return cut(repr(str(path)), _SHOWN)
