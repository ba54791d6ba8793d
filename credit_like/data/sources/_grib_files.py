"""Messages of GRIB files: an index of their fields and positions, and the decoding of a message by ecCodes.

A file is indexed once per process; forked processes inherit the index. A message is read by its offset, so that no file
stays open. All calls of ecCodes are made under one lock, because not every build of it is thread-safe.
"""

from __future__ import annotations

import datetime as dt
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from credit_like.data.files.reduced import regular_rows
from credit_like.data.sources._spectral import Synthesis, gaussian_grid, size
from credit_like.errors import UserError
from credit_like.grid import turn

_MISSING = -1.0e300  # stands for a point without value; no packing reaches it
_END = b"7777"
_PRESSURE = {"isobaricInhPa": 1.0, "isobaricInPa": 0.01}
_REDUCED = ("reduced_gg", "reduced_ll")
_REGRID = "regrid it first, for instance with `cdo remapbil`, or leave it out with data.source.select.gridType"
_LOCK = threading.RLock()


# A fork waits until no thread is inside the library, and parent and child each have a free lock afterwards.
os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)


def locked() -> AbstractContextManager[object]:
    """Return a context in which no other thread calls ecCodes."""
    return _LOCK


@dataclass(frozen=True, slots=True)
class Message:
    """One field in a file; times are in seconds since 1970-01-01, `step` and `period` in hours.

    `parts` are (offset, length) of the bytes that together form a message with this field alone.
    """

    path: str
    number_in_file: int
    parts: tuple[tuple[int, int], ...]
    edition: int
    name: str
    level_type: str
    level: float
    time: int
    step: float
    period: float
    keys: tuple[tuple[str, int | float | str], ...]
    """Keys of ecCodes by which messages can be selected."""
    grid: str
    """Identity of the grid section."""
    attrs: tuple[tuple[str, str], ...]

    @property
    def where(self) -> str:
        """Return the message's name and place, for error messages."""
        return f"message {self.number_in_file} ({self.name}) of {self.path}"

    @property
    def spectral(self) -> bool:
        """Return whether the values are coefficients of spherical harmonics."""
        return self.key("gridType") == "sh"

    def key(self, name: str) -> int | float | str:
        """Return a key by which messages can be selected."""
        return dict(self.keys)[name]


@dataclass(frozen=True, eq=False)
class Geometry:
    """Rows and columns of a grid, and how values are arranged on them; longitudes go eastward."""

    latitude: NDArray[np.float64]
    longitude: NDArray[np.float64]
    size: int
    """Number of values of a message."""
    arrange: Callable[[NDArray[np.float64]], NDArray[np.float64]]


def library() -> ModuleType:
    """Return the module of ecCodes. Raises UserError if it is not installed."""
    try:
        import eccodes
    except (ImportError, RuntimeError) as error:  # RuntimeError: the package is there and its library is not
        raise UserError(
            f"expected the package eccodes for a source of type grib, got none ({error}); install 'credit-like[grib]'"
        ) from error
    return eccodes


def index(path: str) -> tuple[Message, ...]:
    """Return the messages of a file, read from their headers once.

    Raises UserError that names file and message if the file is not GRIB, is truncated or has a date that does not exist.
    """
    status = os.stat(path)
    return _index(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=100_000)
def _index(path: str, size: int, _mtime_ns: int) -> tuple[Message, ...]:
    eccodes = library()
    found: list[Message] = []
    with _LOCK, open(path, "rb") as file:
        for number, (start, length) in enumerate(_messages(eccodes, file, path, size), 1):
            try:
                for parts in _fields(file, start, length):
                    make = _joined(file, parts) if len(parts) > 1 else _header(path, start)
                    with _handle(eccodes, make) as handle:
                        found.append(_described(eccodes, handle, path, number, parts))
            except OSError as error:
                raise UserError(f"{_broken(path, number, start, size)} ({error})") from error
    if not found:
        raise UserError(f"expected a GRIB file, got {path} without any message; change data.source.path")
    return tuple(found)


def _messages(eccodes: ModuleType, file: BinaryIO, path: str, size: int) -> Iterator[tuple[int, int]]:
    """Yield (offset, length) of all messages; bytes between messages are skipped."""
    at, number = _next(file, 0), 0
    while at is not None:
        number += 1
        file.seek(at)
        head = file.read(16)
        if len(head) < 16 or head[7] not in (1, 2):
            raise UserError(_broken(path, number, at, size) if len(head) < 16 else _unknown(path, number, head[7]))
        length = int.from_bytes(head[8:16], "big") if head[7] == 2 else int.from_bytes(head[4:7], "big")
        if head[7] == 1 and length >= 1 << 23:  # longer than the field can hold, in a coding of ecCodes' own
            with _handle(eccodes, _header(path, at)) as handle:
                length = int(eccodes.codes_get(handle, "totalLength"))
        if length < 16 or at + length > size:
            raise UserError(_broken(path, number, at, size))
        file.seek(at + length - len(_END))
        if file.read(len(_END)) != _END:
            raise UserError(_broken(path, number, at, size))
        yield at, length
        at = _next(file, at + length)


def _broken(path: str, number: int, at: int, size: int) -> str:
    return (
        f"expected complete GRIB messages, got {path} ({size} bytes) whose message {number} at byte {at} is "
        "truncated or damaged; copy the file again"
    )


def _unknown(path: str, number: int, edition: int) -> str:
    return f"expected GRIB of edition 1 or 2, got edition {edition} in message {number} of {path}; convert the file"


def _next(file: BinaryIO, start: int) -> int | None:
    """Return where the next message begins, or None at the end of the file."""
    file.seek(start)
    before, base = b"", start
    while block := file.read(1 << 16):
        found = (before + block).find(b"GRIB")
        if found >= 0:
            return base - len(before) + found
        base += len(block)
        before = (before + block)[-3:]
    return None


def _fields(file: BinaryIO, start: int, length: int) -> list[tuple[tuple[int, int], ...]]:
    """Return the parts of each field of a message: of edition 2, sections 2 to 7 may be repeated from any of them on.

    A section that is not repeated is the one before, and so is a bitmap of indicator 254. Raises OSError if a section
    does not fit into the message: ecCodes trusts the lengths of sections and would read other memory.
    """
    file.seek(start + 7)
    whole: list[tuple[tuple[int, int], ...]] = [((start, length),)]
    if file.read(1) == b"\1":
        at, present = start + 8, [True]
        while present:
            file.seek(at)
            head = file.read(8)
            size = int.from_bytes(head[:3], "big")
            if at == start + 8:
                present += [bool(head[7] & 128), bool(head[7] & 64)]
            if present.pop(0):
                _fits(at, size, start + length)
                at += size
        return whole
    sections: dict[int, tuple[int, int]] = {0: (start, 16)}
    fields: list[tuple[tuple[int, int], ...]] = []
    at = start + 16
    while at < start + length - len(_END):
        file.seek(at)
        head = file.read(6)
        size, section = int.from_bytes(head[:4], "big"), head[4]
        _fits(at, size, start + length)
        if not (section == 6 and head[5] == 254 and 6 in sections):
            sections[section] = (at, size)
        if section == 7:
            fields.append(tuple(sections[number] for number in sorted(sections)))
        at += size
    return fields if len(fields) > 1 else whole


def _fits(at: int, size: int, end: int) -> None:
    if size < 5 or at + size > end - len(_END):
        raise OSError(f"a section of {size} bytes at byte {at}, where the message ends at byte {end}")


def _joined(file: BinaryIO, parts: tuple[tuple[int, int], ...]) -> Callable[[ModuleType], Any]:
    """Return a function that makes an ecCodes handle of a message with these parts, which contain a single field."""
    pieces = []
    for offset, length in parts:
        file.seek(offset)
        pieces.append(file.read(length))
    content = b"".join(pieces)
    if len(parts) > 1:
        content = content[:8] + (len(content) + len(_END)).to_bytes(8, "big") + content[16:] + _END
    if content[:4] != b"GRIB" or content[-4:] != _END:
        raise OSError("the message is no longer where it was when the file was indexed")
    return lambda eccodes: eccodes.codes_new_from_message(content)


def _header(path: str, start: int) -> Callable[[ModuleType], Any]:
    """Return a function that makes a handle without data of the message at an offset.

    The file is opened for this alone: ecCodes reads from the position of the file descriptor, which Python's buffer hides.
    """

    def make(eccodes: ModuleType) -> Any:
        with open(path, "rb", buffering=0) as file:
            file.seek(start)
            return eccodes.codes_grib_new_from_file(file, headers_only=True)

    return make


@contextmanager
def _handle(eccodes: ModuleType, make: Callable[[ModuleType], Any]) -> Iterator[Any]:
    """Yield a handle, released afterwards; errors of ecCodes become OSError."""
    try:
        handle = make(eccodes)
        try:
            yield handle
        finally:
            eccodes.codes_release(handle)
    except eccodes.CodesInternalError as error:
        raise OSError(f"ecCodes: {error}") from error


def _described(eccodes: ModuleType, handle: Any, path: str, number: int, parts: tuple[tuple[int, int], ...]) -> Message:
    def get(key: str, kind: type = str, default: Any = "") -> Any:
        try:
            return eccodes.codes_get(handle, key, kind)
        except eccodes.KeyValueNotFoundError:
            return default

    edition, param = get("edition", int), get("paramId", int, 0)
    short = get("shortName")
    known = (edition, param, short)
    if known not in _ATTRS:
        wanted = {"units": "units", "long_name": "name", "standard_name": "cfName"}
        texts = {attr: get(key) for attr, key in wanted.items()}
        _ATTRS[known] = tuple((attr, text) for attr, text in texts.items() if text not in ("", "unknown", "~"))
    if short in ("", "unknown", "~"):
        names = ["table2Version", "indicatorOfParameter"]
        if edition == 2:
            names = ["discipline", "parameterCategory", "parameterNumber"]
        short = "_".join(["param", *(get(name) for name in names)])
    level_type, level = get("typeOfLevel"), get("level", float, 0.0)
    if level_type in _PRESSURE:
        level_type, level = "isobaricInhPa", level * _PRESSURE[level_type]
    reference = (get("dataDate", int, 0), get("dataTime", int, 0))
    try:
        start = _seconds(*reference)
        time = _seconds(get("validityDate", int, reference[0]), get("validityTime", int, reference[1]))
    except ValueError as error:
        raise UserError(
            f"expected a date in message {number} ({short}) of {path}, got dataDate {reference[0]}, dataTime "
            f"{reference[1]}; leave the message out, for instance with `grib_copy -w`"
        ) from error
    unit = {0: 60, 1: 3600, 2: 86400, 10: 10800, 11: 21600, 12: 43200, 13: 1 if edition == 2 else 900}
    length = (get("endStep", int, 0) - get("startStep", int, 0)) * unit.get(get("stepUnits", int, 1), 3600) / 3600
    step = (time - start) / 3600
    keys = {
        "number": get("number", int, 0),
        "step": step,
        "period": length,
        **{key: get(key) for key in ("stepType", "stepRange", "dataType", "gridType")},
        "typeOfLevel": level_type,
        "dataDate": reference[0],
        "dataTime": reference[1],
    }
    grid = get("md5GridSection", str, keys["gridType"])
    listed = tuple(keys.items())
    return Message(
        path, number, parts, edition, short, level_type, level, time, step, length, listed, grid, _ATTRS[known]
    )


_ATTRS: dict[tuple[int, int, str], tuple[tuple[str, str], ...]] = {}
"""Attributes by edition, parameter and name: looking them up is what takes longest."""


def _seconds(date: int, time: int) -> int:
    """Return seconds since 1970 of a date YYYYMMDD and a time HHMM. Raises ValueError if there is no such time."""
    moment = dt.datetime(date // 10000, date // 100 % 100, date % 100, time // 100, time % 100, tzinfo=dt.UTC)
    return int(moment.timestamp())


def decode(messages: list[Message], geometry: Callable[[Message], Geometry]) -> Iterator[NDArray[np.float64]]:
    """Yield the fields (H, W) of some messages, NaN at points without value. Raises OSError if one cannot be read."""
    eccodes = library()
    files: dict[str, BinaryIO] = {}
    try:
        for message in messages:
            if message.path not in files:
                files[message.path] = open(message.path, "rb")  # noqa: SIM115  # closed below
            make = _joined(files[message.path], message.parts)
            with _LOCK, _handle(eccodes, make) as handle:
                eccodes.codes_set(handle, "missingValue", _MISSING)
                values = np.asarray(eccodes.codes_get_values(handle), np.float64)
                # Missing points are in a bitmap or, with complex packing, among the values.
                values = np.where(values == _MISSING, np.nan, values)
            plane = geometry(message)
            if len(values) != plane.size:
                raise OSError(f"expected {plane.size} values in {message.where}, got {len(values)}")
            yield plane.arrange(values)
    finally:
        for file in files.values():
            file.close()


@lru_cache(maxsize=64)
def _geometry(grid: str, message: Message) -> Geometry:
    del grid
    eccodes = library()
    with open(message.path, "rb") as file, _LOCK, _handle(eccodes, _joined(file, message.parts)) as handle:
        return _of_handle(eccodes, handle, message)


@lru_cache(maxsize=64)
def truncation(grid: str, message: Message) -> int:
    """Return the truncation of spectral coefficients, read once for a grid section. Raises UserError if not triangular."""
    del grid
    eccodes = library()
    with open(message.path, "rb") as file, _LOCK, _handle(eccodes, _joined(file, message.parts)) as handle:
        limits = [eccodes.codes_get(handle, key, int) for key in ("J", "K", "M")]
    if len(set(limits)) > 1:
        raise UserError(
            f"expected triangular truncation of spectral coefficients, got J, K, M = {limits} in {message.where}; convert the "
            "file with `cdo sp2gpl`"
        )
    return int(limits[0])


class Geometries:
    """Geometry of messages, read once for each grid section.

    Spectral coefficients are evaluated on the grid of the first of `messages` that is on one, or else on the Gaussian grid of
    their largest truncation.
    """

    def __init__(self, messages: Sequence[Message] = ()) -> None:
        self._found: dict[str, Geometry] = {}
        self._target: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None
        spectral = {message.grid: message for message in messages if message.spectral}
        gridded = next((message for message in messages if not message.spectral), None)
        if spectral and gridded is not None:
            plane = self(gridded)
            self._target = plane.latitude, plane.longitude
        elif spectral:
            self._target = gaussian_grid(max(truncation(*one) for one in spectral.items()))

    def __call__(self, message: Message) -> Geometry:
        """Return the geometry of a message. Raises UserError if its values are not on rows and columns."""
        if message.grid not in self._found:
            make = self._spectral if message.spectral else _geometry
            self._found[message.grid] = make(message.grid, message)
        return self._found[message.grid]

    def _spectral(self, grid: str, message: Message) -> Geometry:
        assert self._target is not None, "the messages are known"
        degree = truncation(grid, message)
        return Geometry(*self._target, size(degree), Synthesis(degree, *self._target))


def _of_handle(eccodes: ModuleType, handle: Any, message: Message) -> Geometry:
    kind = eccodes.codes_get(handle, "gridType", str)
    try:
        latitude, longitude = (eccodes.codes_get_array(handle, key) for key in ("latitudes", "longitudes"))
    except (eccodes.CodesInternalError, MemoryError) as error:  # memory: the size of the grid is not that of the data
        raise UserError(
            f"expected fields on rows and columns, got {message.where} on grid {kind} ({error}); {_REGRID}"
        ) from error
    if kind in _REDUCED:
        return _reduced(np.asarray(eccodes.codes_get_array(handle, "pl"), int), latitude, longitude, message)
    get = {key: _flag(eccodes, handle, key) for key in ("jPointsAreConsecutive", "alternativeRowScanning")}
    size = [_flag(eccodes, handle, key) for key in ("Nj", "Ni")]
    if size[0] * size[1] != len(latitude):
        raise UserError(f"expected fields on rows and columns, got {message.where} on grid {kind}; {_REGRID}")
    plane = _Plane((size[0], size[1]), bool(get["jPointsAreConsecutive"]), bool(get["alternativeRowScanning"]))
    rows, columns = plane(latitude, alternate=False), plane(longitude, alternate=False)
    if np.ptp(rows, axis=1).max() > 1e-5 or np.abs(turn(columns - columns[:1])).max() > 1e-5:
        raise UserError(f"expected fields on rows and columns, got {message.where} on grid {kind}; {_REGRID}")
    eastward = columns[0, 0] + (columns[0] - columns[0, 0]) % 360
    if len(eastward) > 1 and np.any(np.diff(eastward) <= 0):
        plane = _Plane(plane.shape, plane.by_column, plane.alternate, westward=True)
        columns = columns[:, ::-1]
        eastward = columns[0, 0] + (columns[0] - columns[0, 0]) % 360
    return Geometry(rows[:, 0], eastward - 360 * (eastward[-1] > 360 + 1e-9), rows.size, plane)


def _flag(eccodes: ModuleType, handle: Any, key: str) -> int:
    try:
        return int(eccodes.codes_get(handle, key, int))
    except eccodes.KeyValueNotFoundError:
        return 0


@dataclass(frozen=True)
class _Plane:
    """Values in the order of a scanning mode as rows and columns."""

    shape: tuple[int, int]
    by_column: bool = False
    alternate: bool = False
    westward: bool = False

    def __call__(self, values: NDArray[np.float64], alternate: bool | None = None) -> NDArray[np.float64]:
        lines = values.reshape(self.shape[::-1] if self.by_column else self.shape)
        if self.alternate if alternate is None else alternate:
            lines = lines.copy()
            lines[1::2] = lines[1::2, ::-1]
        plane = lines.T if self.by_column else lines
        return plane[:, ::-1] if self.westward else plane


def _reduced(
    per_row: NDArray[np.int64], latitude: NDArray[np.float64], longitude: NDArray[np.float64], message: Message
) -> Geometry:
    """Return the regular grid with the columns of the longest row, onto which each row is interpolated linearly.

    Raises UserError unless every row goes around the globe from the same longitude at even spacing.
    """
    found = regular_rows(per_row, longitude)
    if found is None:
        raise UserError(
            f"expected rows around the whole globe in a reduced grid, got {message.where}, a part of it; {_REGRID}"
        )
    starts = np.concatenate([[0], np.cumsum(per_row)])
    return Geometry(latitude[starts[:-1]], found[0], len(longitude), found[1])
