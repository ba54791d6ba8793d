"""Base class of writers, and a background thread that lets computing continue during writing.

A folder of forecasts contains `forecast.json` (their origin), `done/<initial time>` (a marker of each complete one; in
formats whose members are independent `done/<initial time>.<member>` instead for an ensemble) and the files themselves,
which carry `.part` in their names until they are complete.
"""

from __future__ import annotations

import json
import os
import queue
import re
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from credit_like.data import times as calendar
from credit_like.errors import UserError, reading
from credit_like.inference.layout import ForecastLayout
from credit_like.nested import differences
from credit_like.outputs import process_name, sync
from credit_like.schema.places import RECORD
from credit_like.small_files import read_small

Fields = NDArray[np.float32]
_OWN = re.compile(r"forecast\.json\.[0-9a-f-]+\.part|\.lock")
"""What is in a folder of ours that has no record yet, or no longer."""

ForecastKey = tuple[int, int]
"""(initial time, member), as positions along their dimensions."""


class Writer:
    """Base class of writers. It takes fields of one lead of a batch at a time, of each variable in ascending order of leads.

    Positions count along the dimensions of `layout`. Leads that share a chunk are buffered and stored together; no
    chunk spans initial times or members. Safe to use from several processes at once as long as no two write the same
    initial time, or the same member of it if `by_member`, or chunks of one field in common.
    """

    by_member = False
    """Whether several processes may write members of one initial time, and a killed one keeps those that are complete."""
    part: tuple[slice, slice] = (slice(None), slice(None))
    """The rows and columns that this process writes: whole chunks."""

    def __init__(self, layout: ForecastLayout, folder: Path, chunk_bytes: int) -> None:
        self.layout = layout
        self.folder = folder
        self.chunk_bytes = chunk_bytes
        self._held: dict[str, list[Fields]] = {}

    def open(self) -> None:
        """Create the files that do not exist yet."""
        raise NotImplementedError

    def write(self, places: Sequence[ForecastKey], lead: int, by_name: Mapping[str, Fields]) -> None:
        """Write variables, all or some, as `ForecastLayout.select` returns them for each place."""
        leads_axis = len(self.layout.dims) - 1
        for name, fields in by_name.items():
            held = self._held.setdefault(name, [])
            held.append(fields)
            if len(held) == self.chunks(name)[leads_axis] or lead == len(self.layout.leads) - 1:
                self._store(name, places, slice(lead + 1 - len(held), lead + 1), np.stack(held, 1))
                del self._held[name]

    def _store(self, name: str, places: Sequence[ForecastKey], leads: slice, values: Fields) -> None:
        """Write (B, leads, [levels], H, W) to the files."""
        raise NotImplementedError

    @property
    def box(self) -> tuple[int, int]:
        """Return the rows and columns of a chunk: those of a whole field, unless the format divides it."""
        return self.layout.grid.height, self.layout.grid.width

    def chunks(self, name: str) -> tuple[int, ...]:
        """Return chunks of one box, with as many levels, then as many leads, as fit in `chunk_bytes`."""
        shape, box = self.layout.field_shape(name), self.box
        n_levels, field = (shape[0] if len(shape) == 3 else 1), 4 * box[0] * box[1]
        levels = min(n_levels, max(1, self.chunk_bytes // field))
        leads = min(len(self.layout.leads), max(1, self.chunk_bytes // (field * n_levels)))
        front = (1,) * (len(self.layout.dims) - 1)
        return (*front, leads, *([levels] if len(shape) == 3 else []), *box)

    def flush(self, init: int, member: int | None = None) -> None:
        """Flush what this process has written of an initial time, or of a member of it, to the disk."""

    def complete(self, init: int) -> None:
        """Flush an initial time of which all members and leads were written, and record that it is complete."""
        self._mark(init)

    def complete_member(self, init: int, member: int) -> None:
        """Record that all leads of a member were written; only of formats that are `by_member`."""
        self._mark(init, member)

    def is_complete(self, init: int) -> bool:
        """Return whether this initial time was completed, by this run or an earlier one."""
        members = range(self.layout.members if self.by_member and self.layout.members > 1 else 0)
        return self._record(init).exists() or (
            len(members) > 0 and all(self._record(init, member).exists() for member in members)
        )

    def is_member_complete(self, init: int, member: int) -> bool:
        """Return whether a member of an initial time was completed, by this run or an earlier one."""
        return self._record(init).exists() or self._record(init, member).exists()

    def finish(self) -> bool:
        """Give the files their final names if every initial time is complete; return whether it is."""
        return all(map(self.is_complete, range(len(self.layout.init))))

    def abandon(self) -> None:
        """Close incomplete files and ignore errors, because another error is already being raised."""

    def sweep(self) -> None:
        """Remove the partial files of killed processes, once nothing is being written any more."""
        # The glob patterns are not recursive, because another process may remove a folder during the search.
        for leftover in (path for place in ("", "done", "forecast") for path in (self.folder / place).glob("*.part")):
            if leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink(missing_ok=True)

    def _mark(self, init: int, member: int | None = None) -> None:
        record = self._record(init, member)
        record.parent.mkdir(parents=True, exist_ok=True)
        record.touch()

    def _record(self, init: int, member: int | None = None) -> Path:
        return (
            self.folder / "done" / (calendar.compact(self.layout.init[init]) + ("" if member is None else f".{member}"))
        )


class FilePerInit(Writer):
    """Base class of writers of `<initial time>.part` files, renamed when all their members and leads are written."""

    suffix: ClassVar[str]

    def __init__(self, layout: ForecastLayout, folder: Path, chunk_bytes: int) -> None:
        super().__init__(layout, folder, chunk_bytes)
        self._files: dict[int, Any] = {}
        """The open file of each initial time that is being written."""

    def path(self, init: int) -> Path:
        """Return the final name of the file of an initial time."""
        return self.folder / "forecast" / f"{calendar.compact(self.layout.init[init])}{self.suffix}"

    def _partial(self, init: int) -> Path:
        return self.path(init).with_suffix(f"{self.suffix}.part")

    def open(self) -> None:
        (self.folder / "forecast").mkdir(parents=True, exist_ok=True)

    def complete(self, init: int) -> None:
        self._files.pop(init).close()
        sync(self._partial(init))
        os.replace(self._partial(init), self.path(init))
        super().complete(init)

    def abandon(self) -> None:
        while self._files:
            with suppress(OSError, RuntimeError):
                self._files.popitem()[1].close()

    def is_complete(self, init: int) -> bool:
        return super().is_complete(init) and self.path(init).exists()

    def finish(self) -> bool:
        complete = super().finish()
        if complete:
            self.sweep()
        return complete


class Background:
    """A thread that runs submitted calls in order; their errors are raised by the next method call.

    At most `waiting` calls are pending, so that memory stays bounded if writing is slower than computing.
    """

    def __init__(self, waiting: int) -> None:
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(waiting)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="writer", daemon=True)
        self._thread.start()

    def submit(self, action: Callable[[], None]) -> None:
        self._raise()
        self._queue.put(action)

    def flush(self) -> None:
        """Wait for everything submitted; raise the first error."""
        self._queue.join()
        self._raise()

    def close(self) -> None:
        """Wait for everything submitted and end the thread; raise the first error."""
        self._queue.put(None)
        self._thread.join()
        self._raise()

    def abandon(self) -> None:
        """Finish what was submitted and ignore its errors, because another error is already being raised."""
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (action := self._queue.get()) is not None:
            if self._error is None:
                try:
                    action()
                except BaseException as error:  # noqa: BLE001 - re-raised in the thread that computes
                    self._error = error
            self._queue.task_done()

    def _raise(self) -> None:
        if self._error is not None:
            raise RuntimeError(f"writing the forecast failed: {self._error}") from self._error


def claim(folder: Path, identity: dict[str, Any], completed: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Record in `folder` the `identity` of its forecasts; `completed` brings a record to the form of this release.

    Raises UserError if it holds those of another experiment, checkpoint or selection, or files that are no forecasts.
    """
    record = folder / RECORD
    text = json.dumps(identity, indent=1, sort_keys=True)
    if not record.exists():
        check_folder(folder)
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f"forecast.json.{process_name()}.part"
        temporary.write_text(text)
        try:
            os.link(temporary, record)  # unlike a rename, this does not replace the record of a faster process
        except FileExistsError:
            pass
        finally:
            temporary.unlink(missing_ok=True)
    there = _read_record(folder)
    before, now = json.loads(json.dumps(completed(there))), json.loads(text)
    if differing := sorted(key for key, *_ in differences(before, now)):
        shown = ", ".join(differing[:5]) + (f" and {len(differing) - 5} more" if len(differing) > 5 else "")
        raise UserError(
            f"inference.output.path: expected forecasts of this experiment and checkpoint in {folder}, got some made "
            f"with another {shown}, change the path or remove the folder"
        )


def _read_record(folder: Path) -> dict[str, Any]:
    with reading("the record of forecasts", folder / RECORD, f"remove {folder}"):
        there = json.loads(read_small(folder / RECORD))
        if not isinstance(there, dict):
            raise ValueError("it is no mapping")
        return there


def check_folder(folder: Path) -> None:
    """Raise UserError for a folder of forecasts that is a file, whose record is damaged, or that holds other files."""
    with reading("a folder of forecasts", folder, "change inference.output.path"):
        if folder.exists() and not folder.is_dir():
            raise UserError(f"inference.output.path: expected a folder, got {folder}, which is a file, change it")
        record = folder / RECORD
        others = folder.exists() and any(not _OWN.fullmatch(entry.name) for entry in folder.iterdir())
        has_record = record.exists()  # in this order, because another rank may just have written the record
    if others and not has_record:
        raise UserError(
            f"inference.output.path: expected an empty folder or one of this experiment's forecasts, got {folder} "
            "with other files in it, change it to another folder"
        )
    if has_record:
        _read_record(folder)
