"""Statistics and an audit of the data in one streamed pass that can be interrupted, continued and distributed.

The times are cut into pieces. The result of each piece is saved as soon as it is complete, under a key that covers
everything it depends on, so that an interrupted pass continues where it stopped. Pieces are independent and are merged
exactly.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from credit_like.data.statistics import (
    Moments,
    Progress,
    Scan,
    Statistics,
    TimeBlock,
    finish,
    scan,
    scan_blocks,
    varying,
    wanted_times,
)
from credit_like.data.store import Fields, FieldStore
from credit_like.data.stored_statistics import stored_statistics
from credit_like.data.times import to_text
from credit_like.data.tools.audit import Audit, audit
from credit_like.data.tools.climatology import CLIMATOLOGY, Slot, SlotMeans, period_text, slots_of, write_climatology
from credit_like.data.tools.stamps import digest_of_files
from credit_like.errors import UserError, reading
from credit_like.outputs import replacing, sync
from credit_like.processes import signals_held, work_for
from credit_like.schema.data import DataSection
from credit_like.variables import Variables

Mapper = Callable[[Callable[["PassPiece"], Path], Sequence["PassPiece"]], Iterable[Path]]
"""Runs a function on every piece, anywhere and in any order, e.g. dask's `lambda f, x: client.gather(client.map(f,
x))`.
"""
_PIECES, _PIECE_TIMES = 64, 32
_SLOT_BYTES = 256 * 2**20  # of a piece's climatology slots in memory; larger ones, of a single day, are in files


@dataclass(frozen=True)
class PassPiece:
    """Some blocks of times and the file for their results, with the store to read from.

    `slots` are those of the climatology, if requested."""

    store: FieldStore
    variables: Variables
    blocks: tuple[TimeBlock, ...]
    file: Path
    slots: tuple[Slot, ...] = ()

    @property
    def times(self) -> int:
        return sum(len(positions) for positions, _ in self.blocks)

    @property
    def is_complete(self) -> bool:
        """Return whether all results exist; some may be absent if the removal after an earlier pass was interrupted."""
        means = (self.file.with_suffix(f".{name}.npy") for name in ("mean", "count") if self.slots)
        return self.file.exists() and all(file.exists() for file in means)


def preprocess(
    store: FieldStore,
    variables: Variables,
    data: DataSection,
    folder: Path,
    progress: Progress | None = None,
    mapper: Mapper | None = None,
    statistics_path: Path | None = None,
    climatology_days: int = 0,
    keep: bool = False,
) -> tuple[Statistics, Audit]:
    """Fit the statistics, audit every field, and write `statistics.nc`, `audit.csv` and `audit.png` into `folder`.

    Statistics that the data hold are written as they are (`stored_statistics`).
    If `climatology_days` > 0, also write `climatology.zarr` of the predicted variables, smoothed over that window; the
    pass then runs in the order of days of the year. Pieces that an earlier, unfinished pass over the same files left in
    `folder` are not read again. Raises UserError as `fit_statistics` does, after writing the audit, since it shows the
    cause; no piece remains then, because the files have to be corrected. With `keep`, the statistics are not written.
    """
    stored = stored_statistics(store, variables, data)
    parts = folder / "preprocess-parts"
    parts.mkdir(parents=True, exist_ok=True)
    pieces = list(_pieces(store, variables, data, parts, by_day=climatology_days > 0))
    todo = [piece for piece in pieces if not piece.is_complete]
    total = sum(piece.times for piece in pieces)
    done = total - sum(piece.times for piece in todo)
    by_file = {piece.file: piece.times for piece in pieces}
    if progress is not None:
        progress(done, total)
    for file in (mapper or map)(scan_piece, todo):
        done += by_file[file]
        if progress is not None:
            progress(done, total)
    whole = Scan.zero(sum(map(len, varying(variables))), store.grid.height, store.grid.width)
    for piece in pieces:
        with reading("a piece of an unfinished pass", piece.file, f"remove {parts}"):
            whole = whole.merge(load_scan(piece.file))
    found = audit(store, variables, whole)
    found.save(folder)
    try:
        statistics = stored if stored is not None else finish(store, variables, data, whole)
    except UserError:
        shutil.rmtree(parts, ignore_errors=True)
        raise
    if not keep:
        statistics.save(statistics_path or folder / "statistics.nc")
    if climatology_days:
        means = [(piece.file.with_suffix(""), piece.slots) for piece in pieces if piece.slots]
        period = period_text(store, store.period(data.train))
        write_climatology(store, variables.outputs, means, folder / CLIMATOLOGY, period, climatology_days)
    shutil.rmtree(parts, ignore_errors=True)  # a worker that dask has given up may still write its piece
    return statistics, found


def in_processes(count: int) -> Mapper:
    """Return a mapper over processes of this machine, spawned rather than forked because the parent may have threads."""

    def run(function: Callable[[PassPiece], Path], pieces: Sequence[PassPiece]) -> Iterator[Path]:
        with ProcessPoolExecutor(
            count, mp_context=get_context("spawn"), initializer=work_for, initargs=(os.getpid(),)
        ) as pool:
            try:
                with signals_held():
                    futures = [pool.submit(function, piece) for piece in pieces]
                for future in as_completed(futures):
                    yield future.result()
            except BaseException:  # do not wait for unfinished pieces; the next start repeats them
                pool.shutdown(wait=False, cancel_futures=True)
                for child in active_children():
                    child.terminate()
                raise

    return run


def scan_piece(piece: PassPiece) -> Path:
    """Scan a piece and save the result atomically."""
    store, outputs = piece.store, piece.variables.outputs
    means = None
    if piece.slots:
        size = (sum(map(len, outputs)), store.grid.height, store.grid.width)
        stem = piece.file.with_suffix("")
        is_large = len(piece.slots) * SlotMeans.bytes_per_slot(*size) > _SLOT_BYTES
        means = SlotMeans(piece.slots, *size, stem if is_large else None)

    def each(position: int, field_CHW: Fields) -> None:
        assert means is not None
        means.add(slots_of(store.times[[position]])[0], field_CHW[: means.mean.shape[1]])

    found = scan(store, varying(piece.variables), piece.blocks, look=True, each=each if means else None)
    if means is not None:
        means.save(piece.file.with_suffix(""))
    with replacing(piece.file) as draft:
        with draft.open("wb") as file:
            save_scan(found, file)
        sync(draft)
    return piece.file


def save_scan(found: Scan, file: Any) -> None:
    """Save a scan as an npz file of plain arrays."""
    arrays: dict[str, NDArray[Any]] = {"valid": np.packbits(found.valid), "shape": np.array(found.valid.shape)}
    for name, moments in (("value", found.value), ("change", found.change)):
        arrays[name] = np.stack([moments.count, moments.mean, moments.squares])
    for name, table in (("lacking", found.lacking), ("looks", found.looks)):
        arrays[f"{name}_at"] = np.array(list(table), np.int64)
        arrays[name] = np.array(list(table.values()))
    np.savez(file, **arrays)  # type: ignore[arg-type]


def load_scan(path: Path) -> Scan:
    """Load a scan that `save_scan` wrote. Raises ValueError for a file that is damaged or larger than it looks."""
    with ExitStack() as stack:
        try:
            file = stack.enter_context(np.load(stack.enter_context(path.open("rb")), allow_pickle=False))
        except zipfile.BadZipFile as error:
            raise ValueError(f"expected an archive, got {error}") from error
        if any(member.compress_type != zipfile.ZIP_STORED for member in file.zip.infolist()):
            raise ValueError("expected an archive without compression")
        shape = tuple(file["shape"].tolist())
        if math.prod(shape) > 8 * file["valid"].size:
            raise ValueError(f"expected {math.prod(shape)} points, got at most {8 * file['valid'].size}")
        valid = np.unpackbits(file["valid"], count=int(np.prod(shape))).astype(bool).reshape(shape)
        tables = [dict(zip(file[f"{name}_at"].tolist(), file[name], strict=True)) for name in ("lacking", "looks")]
        return Scan(Moments(*file["value"]), Moments(*file["change"]), valid, *tables)


def _pieces(
    store: FieldStore, variables: Variables, data: DataSection, folder: Path, by_day: bool = False
) -> Iterator[PassPiece]:
    """Divide the pass into about 64 pieces of whole blocks, or, `by_day`, at most 366 pieces of days of the year.

    No piece is much shorter than 32 times, because every piece also reads the time before its first one.
    """
    positions, training = wanted_times(store, data)
    files = digest_of_files(store, variables)
    if by_day:
        yield from _pieces_by_day(store, variables, data, folder, positions, training, files)
        return
    blocks = scan_blocks(store, varying(variables), positions, training)
    size = max(-(-len(blocks) // _PIECES), -(-_PIECE_TIMES // max((len(at) for at, _ in blocks), default=1)))
    for i in range(0, len(blocks), size):
        some = tuple(blocks[i : i + size])
        yield PassPiece(store, variables, some, folder / f"{_key(store, variables, data, some, files)}.npz")


def _pieces_by_day(
    store: FieldStore,
    variables: Variables,
    data: DataSection,
    folder: Path,
    positions: NDArray[np.int64],
    training: NDArray[np.bool_],
    files: str,
) -> Iterator[PassPiece]:
    """Divide by days of the year, such that each piece completes its own slots of the climatology."""
    of_time = slots_of(store.times[positions])
    days = np.array([day for day, _ in of_time])
    hours = len({second for _, second in of_time})
    slot_bytes = SlotMeans.bytes_per_slot(sum(map(len, variables.outputs)), store.grid.height, store.grid.width)
    there = np.unique(days)
    at_once = max(1, min(_SLOT_BYTES // (hours * slot_bytes), -(-len(there) // _PIECES)))
    for i in range(0, len(there), at_once):
        inside = np.isin(days, there[i : i + at_once])
        some = tuple(scan_blocks(store, varying(variables), positions, training, inside))
        slots = tuple(sorted({of_time[k] for k in np.flatnonzero(inside & training)}))
        key = _key(store, variables, data, some, files)
        yield PassPiece(store, variables, some, folder / f"{key}-days.npz", slots)


def _key(store: FieldStore, variables: Variables, data: DataSection, blocks: Sequence[TimeBlock], files: str) -> str:
    """Return a hash of the data that are read, of their files, and of the part of the result for which they are read."""
    told = {
        "files": files,
        "source": [source.model_dump(mode="json") for source in data.source],
        "variables": [[v.name, v.levels, v.spec.model_dump(mode="json")] for v in varying(variables)],
        "timestep": str(data.timestep),
        "grid": [store.grid.latitude.tolist(), store.grid.longitude.tolist()],
        "blocks": [[to_text(store.times[p[0]]), len(p), counts.tolist()] for p, counts in blocks],
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:20]
