"""All runs below a folder: state, progress and loss of each, and how their experiments differ."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from credit_like.errors import UserError
from credit_like.nested import leaves
from credit_like.small_files import LOG_BYTES, read_small, yaml_values

_BLOCK = 64 * 1024  # bytes of a log that are read at once, from the end
_LONGEST_LINE = 16 * 2**20
_OWN = ("name", "save_loc")
"""Keys in which every run differs."""


@dataclass(frozen=True)
class Run:
    """One run; None means not known."""

    folder: Path
    state: str
    step: int | None = None
    phase: int | None = None
    """Position in `trainer.phases`; None where the training has one phase alone."""
    epoch: int | None = None
    loss: float | None = None
    best: float | None = None
    """Lowest validation loss."""
    samples_per_second: float | None = None
    keys: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Values of the experiment by dotted key."""


def find_runs(folder: Path) -> list[Run]:
    """Return the runs in a folder and below it, sorted by folder. Raises UserError if there is none."""
    if not folder.is_dir():
        raise UserError(f"expected a folder with runs, got {folder}; change it")
    runs = [read_run(path) for path in sorted(_folders(folder))]
    if not runs:
        raise UserError(f"expected runs below {folder}, got no status.json, log.jsonl or experiment.yml; change it")
    return runs


def _folders(folder: Path) -> Iterator[Path]:
    """Yield the folders of runs; a run's own folders are not searched."""
    for here, below, files in os.walk(folder):
        if "status.json" in files or "log.jsonl" in files:
            below.clear()
            yield Path(here)
        else:
            below[:] = [name for name in below if not name.endswith(".zarr") and not name.startswith(".")]


def read_run(folder: Path) -> Run:
    """Return the facts in the files of a run; those of absent or damaged files are None."""
    status = _json(_bytes(folder / "status.json"))
    log = _bytes(folder / "log.jsonl")
    last = newest_row(folder / "log.jsonl", "loss")
    validated = [row for row in map(_json, _lines_with(log, b'"valid_loss"')) if _is_number(row, "valid_loss")]
    # Losses of phases are not comparable: the best is that of the newest one.
    best = [row["valid_loss"] for row in validated if row.get("phase") == validated[-1].get("phase")]
    return Run(
        folder,
        str(status.get("state", "not begun")),
        step=_number(last, "step"),
        phase=_number(last, "phase"),
        epoch=_number(last, "epoch"),
        loss=_number(last, "loss"),
        best=min(best, default=None),
        samples_per_second=_number(last, "samples_per_second"),
        keys=experiment_keys(folder / "experiment.yml"),
    )


def newest_row(log: Path, *keys: str) -> dict[str, Any]:
    """Return the newest row of a JSON-lines file with one of these keys; empty where there is none.

    The file is read backwards, since the rows of short forecasts that follow may be of any length. Lines that are damaged,
    or still being written, are passed over.
    """
    quoted = [json.dumps(key).encode() for key in keys]
    for line in _lines_backwards(log):
        if any(key in line for key in quoted) and any(key in (row := _json(line)) for key in keys):
            return row
    return {}


def _lines_backwards(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, the last one first; none of a file that cannot be read."""
    if not os.path.isfile(path):
        return
    try:
        with path.open("rb") as file:
            start, first = file.seek(0, os.SEEK_END), b""
            while start:
                end, start = start, max(0, start - _BLOCK)
                file.seek(start)
                first, *others = (file.read(end - start) + first).split(b"\n")
                yield from reversed(others)
                if len(first) > _LONGEST_LINE:  # no log, but perhaps a file of zeros of any size
                    return
            yield first
    except OSError:
        return


def _number(row: Mapping[str, Any], key: str) -> Any:
    return row[key] if _is_number(row, key) else None


def _is_number(row: Mapping[str, Any], key: str) -> bool:
    return isinstance(row.get(key), int | float)


def _lines_with(text: bytes, wanted: bytes) -> Iterator[bytes]:
    at = text.find(wanted)
    while at >= 0:
        end = text.find(b"\n", at)
        end = len(text) if end < 0 else end
        yield text[text.rfind(b"\n", 0, at) + 1 : end]
        at = text.find(wanted, end)


def _bytes(path: Path) -> bytes:
    """Return the content of a file; nothing of one that cannot be read, such as a pipe or one that no run writes."""
    try:
        return read_small(path, LOG_BYTES)
    except (OSError, ValueError):
        return b""


def _json(text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def experiment_keys(path: Path) -> dict[str, Any]:
    """Return the values of an experiment file by dotted key.

    The file is parsed by top-level section, so that a section that many runs share is parsed once.
    """
    text = _bytes(path).decode(errors="replace")
    sections: list[list[str]] = []
    for line in text.splitlines():
        if sections and (not line or line[0] in " -#"):
            sections[-1].append(line)
        else:
            sections.append([line])
    result: dict[str, Any] = {}
    for section in sections:
        result.update(_section("\n".join(section)))
    return result


@lru_cache(maxsize=8192)
def _section(text: str) -> dict[str, Any]:
    try:
        return dict(leaves(yaml_values(text) or {}))
    except ValueError:
        return {}


def differing_keys(runs: Sequence[Run]) -> list[str]:
    """Return the keys, in order, whose values are not the same in all runs that have an experiment."""
    with_keys = [run.keys for run in runs if run.keys]
    names = dict.fromkeys(key for keys in with_keys for key in keys if key not in _OWN)
    return [key for key in names if len({repr(keys.get(key)) for keys in with_keys}) > 1]
