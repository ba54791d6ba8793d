"""An index of many files: the metadata that are needed to join them, so that a file is opened only when it is read.

The index lies in the user's cache (`CREDIT_LIKE_CACHE`), one for each set of files and options. An entry holds for as long as
the file's size and times of change are those of the entry; entries of changed and new files are rebuilt, those of
removed files dropped. The first of several processes makes the index while the others wait for it. Damage to an index, or
a folder in which it cannot be written, costs time only: what is in a file is compared with its entry when it is opened.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import logging
import os
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from credit_like.data.sources._cache import SET_CACHE, cache_folder
from credit_like.data.sources._conventions import DIMS, fields
from credit_like.data.times import Times, calendar_of, from_seconds, seconds
from credit_like.errors import UserError, reason
from credit_like.outputs import replacing

_LOG = logging.getLogger(__name__)
_MANY = 1000
_WAIT = 600.0
"""Seconds to wait for another process that makes the index, after which it is made here too."""
_NOT_AN_INDEX = (OSError, ValueError, KeyError, TypeError, IndexError, EOFError, zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True)
class Kind:
    """The facts that files of one kind have in common."""

    fields: tuple[str, ...]
    """Variables on latitude and longitude, or all of them where there is none, sorted."""
    dtypes: dict[str, str]
    """dtype of every variable."""
    dims: dict[str, str]
    """Dimensions of every variable, in the order of the file, separated by spaces."""
    units: dict[str, str]
    """Units of every field that has some."""
    names: tuple[str, ...]
    """Variables and dimensions, by their names in the file."""
    coordinates: dict[str, str]
    """SHA-256 of the values of level, latitude and longitude."""
    calendar: str | None
    """Calendar of the time axis; None without one."""


@dataclass(frozen=True)
class About:
    """The facts about a file that are needed to join it to others. Files of one kind share the object `kind`."""

    kind: Kind
    seconds: NDArray[np.int64]
    """Times of the file since 1970 in its calendar."""
    exact: bool = True
    """Whether `seconds` are the very times."""

    @classmethod
    def of(cls, dataset: xr.Dataset, names: Iterable[str]) -> About:
        """Return the facts of a file with canonical dimensions, whose own `names` are given."""
        coordinates = {}
        for name in DIMS[1:]:
            if name in dataset.coords:
                values = np.ascontiguousarray(dataset[name].values)
                described = f"{values.dtype.str} {values.shape} ".encode()
                coordinates[name] = hashlib.sha256(described + values.tobytes()).hexdigest()
        times = dataset["time"].values if "time" in dataset.coords and "time" in dataset.dims else None
        calendar = None if times is None else calendar_of(times)
        since = np.zeros(0, np.int64) if times is None else seconds(times)
        exact = times is None or np.array_equal(from_seconds(since, str(calendar)), times)
        variables = {str(name): variable.dtype.str for name, variable in dataset.variables.items()}
        dims = {str(name): " ".join(map(str, variable.dims)) for name, variable in dataset.variables.items()}
        chosen = sorted(fields(dataset) or map(str, dataset.data_vars))
        dtypes, dims = (dict(sorted(facts.items())) for facts in (variables, dims))
        units = {name: str(unit) for name in chosen if (unit := dataset[name].attrs.get("units")) is not None}
        kind = Kind(tuple(chosen), dtypes, dims, units, tuple(sorted(names)), coordinates, calendar)
        return cls(kind, since, exact)

    @property
    def times(self) -> Times:
        """Return the time axis."""
        return from_seconds(self.seconds, str(self.kind.calendar))

    def same(self, other: About) -> bool:
        """Return whether another file has the same times and is of the same kind."""
        return self.kind == other.kind and np.array_equal(self.seconds, other.seconds)


def indexed(paths: Sequence[str], options: str, look: Callable[[str], About]) -> list[About | None]:
    """Return the metadata of each file, from the index or from a `look` at it; None for a file that no entry can describe.

    `options` is everything besides the files on which a look depends. Raises as `look` does.
    """
    here = Path(__file__)
    code = b"".join(here.with_name(name).read_bytes() for name in ("_index.py", "_files.py", "_conventions.py"))
    key = hashlib.sha256(options.encode() + code).hexdigest()[:16]
    index, full = cache_folder() / f"index-{key}.npz", [os.path.abspath(path) for path in paths]
    stamps = dict(zip(full, map(_stamp, full), strict=True))

    def missing(known: _Entries) -> list[str]:
        return [path for path, stamp in stamps.items() if path not in known or known[path][0] != stamp]

    known = _load(index)
    if missing(known) or len(known) > len(stamps):
        with _alone(index):
            known = _load(index)  # another process may have made it in the meantime
            known = {path: entry for path, entry in known.items() if path in stamps}
            new = missing(known)
            if len(new) >= _MANY:
                _LOG.info("reading the metadata of %d files; they are kept in %s", len(new), index)
            kinds = {repr(about.kind): about.kind for _, about in known.values()}
            try:
                for path in new:
                    stamp, about = _stamp(path), look(path)
                    known[path] = stamp, replace(about, kind=kinds.setdefault(repr(about.kind), about.kind))
            finally:
                _save(index, {path: entry for path, entry in known.items() if entry[1].exact})
    return [known[path][1] if known[path][1].exact else None for path in full]


_Stamp = tuple[int, int, int]
_Entries = dict[str, tuple[_Stamp, About]]


def _stamp(path: str) -> _Stamp:
    """Return size and times of change; the last one no program can set."""
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _load(index: Path) -> _Entries:
    """Return the entries of an index; none if there is no index or it is damaged."""
    try:
        with np.load(io.BytesIO(index.read_bytes()), allow_pickle=False) as file:
            text = json.loads(file["text"].tobytes())
            stamps, kinds, counts, times = (file[name] for name in ("stamps", "kinds", "counts", "seconds"))
        if not len(text["paths"]) == len(stamps) == len(kinds) == len(counts) or counts.sum() != len(times):
            return {}
        of = [
            Kind(
                tuple(k["fields"]),
                k["dtypes"],
                k["dims"],
                k["units"],
                tuple(k["names"]),
                k["coordinates"],
                k["calendar"],
            )
            for k in text["kinds"]
        ]
        parts = np.split(times, np.cumsum(counts)[:-1])
        rows = zip(text["paths"], stamps.tolist(), kinds.tolist(), parts, strict=True)
        return {
            path: ((size, changed, entered), About(of[kind], part))
            for path, (size, changed, entered), kind, part in rows
        }
    except _NOT_AN_INDEX:
        return {}


def _save(index: Path, entries: _Entries) -> None:
    """Write an index under another name and rename it, so that readers find the old or the new one."""
    numbers: dict[str, int] = {}
    texts = [json.dumps(asdict(about.kind)) for _, about in entries.values()]
    kinds = [numbers.setdefault(text, len(numbers)) for text in texts]
    body = json.dumps({"paths": list(entries), "kinds": [json.loads(text) for text in numbers]})
    arrays: dict[str, NDArray[Any]] = {
        "text": np.frombuffer(body.encode(), np.uint8),
        "stamps": np.array([stamp for stamp, _ in entries.values()], np.int64).reshape(-1, 3),
        "kinds": np.array(kinds, np.int32),
        "counts": np.array([len(about.seconds) for _, about in entries.values()], np.int64),
        "seconds": np.concatenate([np.zeros(0, np.int64), *(about.seconds for _, about in entries.values())]),
    }
    content = io.BytesIO()
    np.savez_compressed(content, allow_pickle=False, **arrays)
    try:
        index.parent.mkdir(parents=True, exist_ok=True)
        with replacing(index) as draft:
            draft.write_bytes(content.getvalue())
    except (OSError, UserError) as error:
        _LOG.warning(
            "the index of %d files could not be kept in %s (%s), so every process rebuilds it; %s",
            len(entries),
            index.parent,
            reason(error),
            SET_CACHE,
        )


@contextmanager
def _alone(index: Path) -> Iterator[None]:
    """Wait, for a limited time, until no other process makes this index; such a process may be stopped.

    Where files cannot be locked, and after the wait, several may make it.
    """
    try:
        index.parent.mkdir(parents=True, exist_ok=True)
        file = index.with_suffix(".lock").open("a")
    except OSError:
        yield
        return
    with file:
        if not _locked(file):
            _LOG.info("another process makes the index %s; waiting up to %.0f s for it", index, _WAIT)
            end = time.monotonic() + _WAIT
            while not _locked(file) and time.monotonic() < end:
                time.sleep(0.1)
        yield


def _locked(file: IO[str]) -> bool:
    """Lock a file and return whether no other process has it; True where files cannot be locked."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return True
    return True
