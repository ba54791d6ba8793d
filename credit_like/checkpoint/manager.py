"""Atomic checkpoints: asynchronous saving, and search for the newest intact one.

A save has three phases, none of which makes the training step wait for the disk:

1. stage: every rank copies its pieces to host buffers, in stream order, so the next update cannot overtake the copy;
2. write: a thread per rank writes its file in `.step-<n>.tmp` beside the checkpoints and flushes it;
3. commit: when `poll`, called by all ranks at the same step boundary, finds that all have written, a thread of the main
   rank writes the manifest, flushes, and renames the folder to `step-<n>`.

Threads access files only. All communication between ranks takes place in `poll` and `wait`, in the training thread, so
that collectives cannot interleave. A crash at any time leaves either no `step-<n>` or a complete one. At the next start
`recover` removes the remains of an interrupted save, or completes it if everything had already been flushed.

A damaged checkpoint is skipped. A training run that goes on from an older one renames it to `.damaged-step-<n>`, so that it
does not count towards those to keep; it is removed once enough intact ones are newer. A file that cannot be read for a reason
that may pass is no damage: the run ends, and the checkpoint stays.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from credit_like.checkpoint import shards
from credit_like.checkpoint.errors import DamagedCheckpoint, SaveFailed, unreadable
from credit_like.checkpoint.files import remove, to_json, write_bytes
from credit_like.checkpoint.format import (
    FORMAT,
    MANIFEST,
    Piece,
    Reader,
    check_file,
    check_size,
    read_manifest,
    seal,
    table,
    write_tensors,
)
from credit_like.errors import RunError, UserError
from credit_like.outputs import sync
from credit_like.parallel.runtime import Runtime
from credit_like.schema.origin import LoraConf

log = logging.getLogger(__name__)

_STEP = re.compile(r"step-(0|[1-9][0-9]{0,17})")
_DAMAGED = re.compile(r"\.damaged-step-([0-9]{1,18})(?:\.[0-9]+)?")
_DONE, _BUSY, _FAILED = 0, 1, 2
_INTACT, _DAMAGE, _UNKNOWN = 0, 1, 2
_BLOCK = 2**26
"""Bytes of a block of page-locked memory; a larger tensor gets a separate block."""


@dataclass
class Checkpoint:
    """A checkpoint whose manifest is intact."""

    folder: Path
    manifest: dict[str, Any]

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Open the checkpoint in `folder`.

        Raises DamagedCheckpoint, also if the step in the folder's name is not that of the manifest; RunError and UserError
        as `read_manifest`.
        """
        checkpoint = cls(folder, read_manifest(folder))
        named = step_of(folder.name.removeprefix(".").removesuffix(".tmp"))
        if named is not None and named != checkpoint.step:
            raise DamagedCheckpoint(f"{folder} holds step {checkpoint.step}")
        return checkpoint

    @property
    def step(self) -> int:
        return int(self.manifest["step"])

    @property
    def name(self) -> str:
        """Return the step and a digest of all tensors, which tells checkpoints of one step in different runs apart."""
        return f"step-{self.step} {hashlib.sha256(to_json(self.manifest['files'])).hexdigest()[:12]}"

    @property
    def meta(self) -> dict[str, Any]:
        """Return the metadata saved with the tensors."""
        meta: dict[str, Any] = self.manifest["meta"]
        return meta

    @property
    def score(self) -> float | None:
        """Return the validation loss at this step, or None if it was not known."""
        return self.manifest["score"]

    @property
    def phase(self) -> int:
        """Return the phase of training of the newest step; 0 for a training in one phase."""
        return int(self.meta.get("phase", 0))

    @property
    def rank(self) -> Rank | None:
        """Return the place among the checkpoints with a score, the best of which is kept; None without a score."""
        return _rank(self.manifest)

    @property
    def lora_scale(self) -> float | None:
        """Return the factor of the low-rank changes that the weights have; None without them."""
        lora = (self.meta["experiment"].get("start_from") or {}).get("lora")
        return None if lora is None else LoraConf.model_validate(lora).scale

    @property
    def bytes(self) -> int:
        return sum(entry["bytes"] for entry in self.manifest["files"].values())

    def names(self, prefix: str = "") -> list[str]:
        """Return the names of the tensors that start with `prefix`."""
        return sorted(name for name in self.manifest["tensors"] if name.startswith(prefix))

    def verify(self, share: int = 0, of: int = 1) -> None:
        """Check size and checksum of every `of`-th file from `share` on.

        Raises DamagedCheckpoint naming the file, and RunError for one that cannot be read now.
        """
        for name, entry in sorted(self.manifest["files"].items())[share::of]:
            check_file(self.folder, name, entry)

    def verify_sizes(self) -> None:
        """Check the size of every file, which reads none. Raises as `verify`."""
        for name, entry in sorted(self.manifest["files"].items()):
            check_size(self.folder, name, entry)

    def read(self, name: str) -> Tensor:
        """Return a whole tensor on the host."""
        return Reader(self.folder, self.manifest).read(name)

    def load(self, pieces: Mapping[str, Piece], prefixes: tuple[str, ...] = ()) -> None:
        """Fill every piece with its saved values, regardless of the layout that saved them.

        Raises UserError if a piece was not saved, or if a saved tensor under one of `prefixes` has no piece.
        """
        saved = set(self.manifest["tensors"])
        unknown = sorted(name for name in saved - set(pieces) if name.startswith(prefixes)) if prefixes else []
        missing = sorted(set(pieces) - saved)
        if missing or unknown:
            parts = [
                f"{len(names)} {what} ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})"
                for what, names in (("missing from it", missing), ("not in the model", unknown))
                if names
            ]
            raise UserError(
                f"{self.folder}: expected the tensors of this experiment's model and optimiser, "
                f"got {' and '.join(parts)}; "
                "the experiment differs from the checkpoint's"
            )
        reader = Reader(self.folder, self.manifest)
        with torch.no_grad():
            for name, piece in pieces.items():
                if piece.local.numel():
                    reader.fill(name, piece)


@dataclass
class _Save:
    """A save in progress."""

    step: int
    folder: Path
    thread: threading.Thread
    committing: bool = False
    error: BaseException | None = None


@dataclass
class CheckpointManager:
    """The checkpoints of one run in `folder`. All ranks call every method together.

    `keep` is the number of newest checkpoints to keep in addition to the one with the best score. `before_commit` runs
    in the committing thread of the main rank, to flush files that must not be older than the checkpoint.
    """

    folder: Path
    keep: int = 3
    asynchronous: bool = True
    runtime: Runtime = field(default_factory=Runtime)
    before_commit: Callable[[], None] | None = None
    _plan: shards.SavePlan | None = None
    _planned: frozenset[str] = frozenset()
    _buffers: dict[str, Tensor] = field(default_factory=dict)
    _save: _Save | None = None

    # ---- saving ------------------------------------------------------------------------------------------------------

    def save(self, step: int, pieces: Mapping[str, Piece], meta: Mapping[str, Any], score: float | None = None) -> None:
        """Start a save after waiting for an earlier one; wait for it as well unless `asynchronous`.

        `meta` is plain JSON data. Raises SaveFailed on all ranks, for this save or the earlier one.
        """
        self.wait()
        if self._planned != pieces.keys():
            self._plan, self._planned = shards.share_out(pieces), frozenset(pieces)
            self._buffers.clear()
        body = {"format": FORMAT, "step": step, "score": score, "meta": json.loads(json.dumps(meta, allow_nan=False))}
        folder = self.folder / f".step-{step}.tmp"
        staged: list[torch.cuda.Event] = []

        def begin() -> None:
            staged.extend(self._stage(pieces))
            if self.runtime.is_main:
                self._prepare(folder)

        failed = self._attempt(begin)
        if self.runtime.agree(_FAILED if failed else _DONE):
            self._buffers.clear()
            raise SaveFailed(f"could not save step {step}: {failed or 'another rank could not begin it'}") from failed
        self._save = _Save(step, folder, threading.Thread())
        self._save.thread = self._run(lambda: self._write(folder, staged, body))
        if not self.asynchronous:
            self.wait()

    @property
    def in_flight(self) -> bool:
        return self._save is not None

    def poll(self) -> None:
        """Advance a save in progress by one phase if all ranks are ready for it. Raises SaveFailed on all ranks."""
        if self._save is None:
            return
        save = self._save
        code = _BUSY if save.thread.is_alive() else (_FAILED if save.error else _DONE)
        agreed = self.runtime.agree(code)
        if agreed == _BUSY:
            return
        if agreed == _FAILED:
            save.thread.join()
            self.runtime.barrier()
            self._save = None
            if self.runtime.is_main:
                with suppress(OSError):
                    remove(save.folder)
            raise SaveFailed(f"could not save step {save.step}: {save.error or 'another rank failed'}") from save.error
        if save.committing:
            self._save = None
            return
        save.committing = True
        if self.runtime.is_main:
            save.thread = self._run(lambda: self._commit(save))

    def wait(self) -> None:
        """Wait until no save is in progress. Raises SaveFailed on all ranks."""
        while self._save is not None:
            self._save.thread.join()
            self.poll()

    def finish_writing(self) -> None:
        """Wait until this rank has stopped writing, even if the save in progress fails. Not collective."""
        if self._save is not None and self._save.thread.is_alive():
            self._save.thread.join()

    def _run(self, work: Callable[[], None]) -> threading.Thread:
        """Run `work` in a thread and store its error in the save."""
        save, device = self._save, self.runtime.device
        assert save is not None

        def body() -> None:
            # An unexpected exception in `_attempt` ends the thread with a traceback; the save must not count as
            # successful.
            save.error = SaveFailed("the writing thread died")
            if device.type == "cuda":
                torch.cuda.set_device(device)  # else this thread would use GPU 0, and memory there
            save.error = self._attempt(work)

        # The thread is not a daemon, because the interpreter must not exit in the middle of a write.
        thread = threading.Thread(target=body, name=f"checkpoint-{save.step}")
        thread.start()
        return thread

    @staticmethod
    def _attempt(work: Callable[[], None]) -> BaseException | None:
        try:
            work()
        except (OSError, RuntimeError, ValueError, MemoryError) as error:
            return error
        return None

    def _prepare(self, folder: Path) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        remove(folder)
        folder.mkdir()

    def _stage(self, pieces: Mapping[str, Piece]) -> list[torch.cuda.Event]:
        """Begin to copy the pieces that this rank writes to host buffers; return the event to wait for, if there is one."""
        assert self._plan is not None
        sources = {name: pieces[name].local for name in self._plan.mine}
        if _forms(self._buffers) != _forms(sources):
            self._buffers = _buffers_like(sources)
        for name, source in sources.items():
            self._buffers[name].copy_(source, non_blocking=True)
        if not any(source.is_cuda for source in sources.values()):
            return []
        event = torch.cuda.Event()
        event.record()
        return [event]

    def _write(self, folder: Path, staged: Sequence[torch.cuda.Event], body: dict[str, Any]) -> None:
        """Write this rank's file once the copies are there, and beside it its part of the manifest for the main rank."""
        rank = self.runtime.rank
        for event in staged:
            event.synchronize()
        size, sha = write_tensors(folder / shards.rank_file(rank), self._buffers)
        write_bytes(folder / f"rank-{rank:05d}.json", to_json({"bytes": size, "sha256": sha}))
        if self.runtime.is_main:
            write_bytes(folder / "body.json", to_json(body))

    def _commit(self, save: _Save) -> None:
        """Write the manifest, flush, rename the folder, and remove surplus checkpoints."""
        assert self._plan is not None
        body = json.loads((save.folder / "body.json").read_bytes())
        body["files"] = {}
        for rank in range(self.runtime.world):
            body["files"][shards.rank_file(rank)] = json.loads((save.folder / f"rank-{rank:05d}.json").read_bytes())
        body |= table(self._plan.tensors)
        for part in [*save.folder.glob("rank-*.json"), save.folder / "body.json"]:
            part.unlink()
        if self.before_commit is not None:
            self.before_commit()
        write_bytes(save.folder / MANIFEST, seal(body))
        sync(save.folder)
        self._publish(save.folder, self.folder / f"step-{save.step}")
        _remember(self.folder / f"step-{save.step}", body)
        prune(self.folder, self.keep, save.step)

    def _publish(self, complete: Path, name: Path) -> None:
        """Rename a complete folder to its final name, in place of a damaged or older one of that name.

        The older one is removed afterwards, which may take long: whoever looks for a checkpoint meanwhile finds the new one.
        """
        former = _to_trash(name) if name.exists() else None
        os.rename(complete, name)
        sync(self.folder)
        if former is not None:
            remove(former)

    # ---- finding -----------------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Remove the remains of a crash; the caller holds the run's lock. Collective.

        The ranks share the work of reading every byte of an unfinished save. Raises RunError on all ranks where one of them
        cannot read it now.
        """
        unfinished: list[str] = []
        if self.runtime.is_main and self.folder.exists():
            for trash in self.folder.glob(".trash-step-*"):
                remove(trash)
            unfinished = sorted(folder.name for folder in self.folder.glob(".step-*.tmp"))
        for name in self.runtime.broadcast(unfinished):
            folder = self.folder / name
            whole, _ = examined(folder, self.runtime)
            if self.runtime.is_main and whole is None:
                remove(folder)
            elif self.runtime.is_main:
                # The folder is complete and flushed; only the rename is missing.
                self._publish(folder, self.folder / name[1:].removesuffix(".tmp"))
        self.runtime.barrier()

    def latest(self) -> Checkpoint | None:
        """Return the newest intact checkpoint, None where none has been saved; damaged ones are logged and skipped.

        Nothing is renamed. Where a training removes one meanwhile, it looks at those that are there then. The ranks share the work
        of reading every byte. Raises UserError for a format of a later release and where all checkpoints are damaged, because other
        weights would take their place; RunError on all ranks where one of them cannot read a file now.
        """
        left = there = self._there()
        while left:
            *left, step = left
            checkpoint, damage = examined(self.folder / f"step-{step}", self.runtime)
            if checkpoint is not None:
                return checkpoint
            if self.is_removed(step):
                left = there = self._there()
            elif damage:
                log.warning("skipping checkpoint step-%d, which is damaged: %s", step, damage)
        if there:
            raise none_intact(self.folder, there)
        return None

    def is_removed(self, step: int) -> bool:
        """Return whether there is no checkpoint of a step, as the main rank finds it."""
        return bool(self.runtime.broadcast(is_removed(self.folder / f"step-{step}")))

    def set_aside(self, step: int) -> None:
        """Rename the checkpoints after `step`, all of which are damaged, to `.damaged-step-<n>`; the caller holds the lock."""
        if self.runtime.is_main:
            for newer in steps(self.folder):
                if newer > step:
                    _set_aside(self.folder / f"step-{newer}")

    def _there(self) -> list[int]:
        """Return the steps of the checkpoints, oldest first, as the main rank finds them. Raises RunError on all ranks."""
        found: list[int] = []
        trouble = None
        try:
            found = steps(self.folder) if self.runtime.is_main else []
        except RunError as error:
            trouble = str(error)
        if trouble := self.runtime.first(trouble):
            raise RunError(trouble)
        return list(self.runtime.broadcast(found))

    def at(self, step: int) -> Checkpoint:
        """Return the checkpoint of a step; the ranks share the work of reading every byte.

        Raises UserError for a step without a checkpoint, or with a damaged one; RunError as `latest`.
        """
        there = self._there()
        if step in there:
            checkpoint, damage = examined(self.folder / f"step-{step}", self.runtime)
            if checkpoint is not None:
                return checkpoint
            if not self.is_removed(step):
                raise UserError(
                    f"expected an intact checkpoint of step {step}, got a damaged one: {damage or 'another rank has it'}"
                )
            there = self._there()
        raise UserError(
            f"expected a step with a checkpoint in {self.folder} ({', '.join(map(str, there)) or 'there is none'}), got {step}"
        )


def examined(folder: Path, runtime: Runtime) -> tuple[Checkpoint | None, str]:
    """Return the checkpoint in a folder, or None where any rank finds it damaged, and what this rank has found. Collective.

    The ranks share the work of reading every byte. Raises RunError on all ranks where one of them cannot read a file now.
    """
    checkpoint, damage, trouble = None, "", None
    try:
        checkpoint = Checkpoint.open(folder)
        checkpoint.verify(runtime.rank, runtime.world)
    except DamagedCheckpoint as error:
        damage = str(error)
    except RunError as error:
        trouble = str(error)
    worst = runtime.agree(_UNKNOWN if trouble is not None else _DAMAGE if damage else _INTACT)
    if worst == _UNKNOWN:
        raise RunError(runtime.first(trouble))
    return (checkpoint if worst == _INTACT else None), damage


def is_removed(folder: Path) -> bool:
    """Return whether a checkpoint is no longer there: it was not damaged, but a training keeps newer ones."""
    return not os.path.lexists(folder)


def step_of(name: str) -> int | None:
    """Return the step in the name of a checkpoint's folder, or None for another name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def steps(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in a folder, oldest first, without opening them; none where there is no folder.

    Raises RunError for a folder that cannot be read now.
    """
    try:
        names = os.listdir(folder)
    except (OSError, ValueError) as error:
        trouble = unreadable(folder, error)
        if isinstance(trouble, DamagedCheckpoint):
            return []
        raise trouble from error
    return sorted(step for name in names if (step := step_of(name)) is not None)


def none_intact(folder: Path, damaged: Sequence[int]) -> UserError:
    """Return the error of a folder without an intact checkpoint, with those of the steps `damaged`, if there are any."""
    if not damaged:
        return UserError(f"expected a checkpoint in {folder}, got none; train first")
    return UserError(
        f"save_loc: expected an intact checkpoint in {folder}, got only damaged ones (step {', '.join(map(str, damaged))}); "
        "restore one of them, or begin anew with --fresh"
    )


def prune(folder: Path, keep: int, saved: int | None = None) -> list[int]:
    """Remove superseded checkpoints and return their steps.

    Keeps the `keep` newest, the one with the best (lowest) score of the newest phase that has one, and the one just
    `saved`. Damaged checkpoints, and those set aside earlier, do not count; they are removed once `keep` intact ones are
    newer. Those that cannot be read now do not count either, and stay.
    """
    kept: list[int] = []
    ranks: dict[int, Rank] = {}
    removed: list[int] = []
    for step in steps(folder)[::-1]:
        try:
            rank = _rank_of(folder / f"step-{step}")
        except DamagedCheckpoint:
            if len(kept) >= keep:
                removed.append(step)
            continue
        except (UserError, RunError):  # written by a later release, or it may be intact
            continue
        kept.append(step)
        if rank is not None:
            ranks[step] = rank
    removed += kept[keep:]
    spared = {saved, best_step(ranks)}
    removed = sorted(step for step in removed if step not in spared)
    for step in removed:
        _discard(folder / f"step-{step}")
    for path in list(folder.iterdir()):
        match = _DAMAGED.fullmatch(path.name)
        if match and sum(step > int(match[1]) for step in kept) >= keep:
            remove(path)
    return removed


Rank = tuple[int, float]
"""Order of checkpoints with a score, the best first: newest phase, then lowest score."""


def best_step(ranks: Mapping[int, Rank]) -> int | None:
    """Return the step of the best checkpoint, of equal ones the last; None where none has a score."""
    return min(ranks, key=lambda step: (ranks[step], -step), default=None)


_ranks: dict[tuple[str, int, int, int], Rank | None] = {}
"""Rank by folder, inode, size and time of change of an intact manifest."""


def _rank_of(folder: Path) -> Rank | None:
    """Return the rank of a checkpoint, reading its manifest only if that has changed since it was last read.

    Parsing the manifest of many ranks takes seconds, in which a thread holds up the training step. Raises as
    `Checkpoint.open`.
    """
    try:
        found = (folder / MANIFEST).stat()
    except OSError:
        return _rank(Checkpoint.open(folder).manifest)
    key = _identity(folder, found)
    if key not in _ranks:
        _ranks[key] = _rank(Checkpoint.open(folder).manifest)
    return _ranks[key]


def _rank(manifest: Mapping[str, Any]) -> Rank | None:
    score = manifest["score"]
    return None if score is None else (-int(manifest["meta"].get("phase", 0)), score)


def _forms(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (x.shape, x.dtype) for name, x in tensors.items()}


def _buffers_like(sources: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a host buffer for each tensor; those for tensors of a GPU are parts of blocks of page-locked memory.

    Each allocation of such memory is expensive, and its size is rounded up to a power of two.
    """
    if not any(source.is_cuda for source in sources.values()):
        return {name: torch.empty(x.shape, dtype=x.dtype) for name, x in sources.items()}
    buffers: dict[str, Tensor] = {}
    block, end = torch.empty(0, dtype=torch.uint8), 0
    for name, source in sources.items():
        begin, size = -(-end // 16) * 16, source.numel() * source.element_size()
        if begin + size > len(block):
            block, begin = torch.empty(max(size, _BLOCK), dtype=torch.uint8, pin_memory=True), 0
        end = begin + size
        buffers[name] = block[begin:end].view(source.dtype).view(source.shape)
    return buffers


def _remember(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Record the rank of a checkpoint that was just written."""
    with suppress(OSError):
        _ranks[_identity(folder, (folder / MANIFEST).stat())] = _rank(manifest)


def _identity(folder: Path, found: os.stat_result) -> tuple[str, int, int, int]:
    return str(folder), found.st_ino, found.st_size, found.st_mtime_ns


def _set_aside(folder: Path) -> None:
    """Rename a damaged checkpoint. If that fails it stays in place, which only costs space."""
    names = (folder.with_name(f".damaged-{folder.name}{more}") for more in ("", *(f".{n}" for n in range(1, 1000))))
    name = next((name for name in names if not name.exists()), folder)
    try:
        folder.rename(name)
    except OSError as error:
        log.warning("%s could not be set aside: %s", folder, error)


def _discard(folder: Path) -> None:
    """Remove a checkpoint such that an interrupted removal leaves nothing that looks like one."""
    remove(_to_trash(folder))


def _to_trash(folder: Path) -> Path:
    """Rename a checkpoint, so that it is none any more, and return its new place."""
    trash = folder.with_name(f".trash-{folder.name}")
    remove(trash)
    folder.rename(trash)
    return trash
