"""Find out which rank holds up the others: the position of every rank, and the ranks that the others wait for.

PyTorch's flight recorder keeps the newest collectives of each process, with their numbers in their groups. A rank that
waits has begun a collective that has not ended; the ranks of its group that have not begun it are those it waits for.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

FOLDER = "hang"
"""Folder of a run with the stacks of the ranks of its newest hang, one file per rank."""


@dataclass(frozen=True)
class Collective:
    """A collective of this rank: the ranks of its group, its number among the group's, and what it does."""

    group: str
    ranks: tuple[int, ...]
    number: int
    kind: str

    def __str__(self) -> str:
        return f"{self.kind} {self.number} of ranks {_listed(self.ranks)}"


@dataclass(frozen=True)
class Position:
    """Where a rank is: the newest collective of each of its groups, the one that it waits in, and its line of code."""

    newest: tuple[Collective, ...] = ()
    waits: Collective | None = None
    at: str = ""

    @classmethod
    def here(cls, failed: bool = False) -> Position:
        """Return the position of this process; with `failed`, an error has just ended the newest collective."""
        newest: dict[str, Collective] = {}
        waits = None
        groups = {str(pg.group_name): pg for pg in dist.distributed_c10d._world.pg_map}
        entries = _recorded()
        for entry in entries:
            name = entry["process_group"][0]
            if name not in groups:
                continue
            ranks = tuple(dist.get_process_group_ranks(groups[name]))
            kind = entry["profiling_name"].rpartition(":")[2]
            call = Collective(name, ranks, entry["collective_seq_id"], kind)
            newest[name] = call
            if not entry["retired"] or (failed and entry is entries[-1]):
                waits = call if waits is None else waits  # the oldest one
        return cls(tuple(newest.values()), waits, _line())

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of_json(cls, text: str | bytes) -> Position:
        data = json.loads(text)
        calls = [Collective(**{**call, "ranks": tuple(call["ranks"])}) for call in data["newest"]]
        waits = next((call for call in calls if data["waits"] and call.group == data["waits"]["group"]), None)
        if waits is not None:
            waits = Collective(waits.group, waits.ranks, data["waits"]["number"], data["waits"]["kind"])
        return cls(tuple(calls), waits, data["at"])

    def begun(self, group: str) -> int:
        """Return the number of the newest collective in a group; 0 if there is none."""
        return max((call.number for call in self.newest if call.group == group), default=0)


def missing(positions: Mapping[int, Position], world: int) -> list[int]:
    """Return the ranks that hold up the others.

    They do not answer, or others wait for them in a collective while they wait in none themselves.
    """
    silent = set(range(world)) - set(positions)
    late = set()
    for position in positions.values():
        if position.waits is not None:
            for rank in set(position.waits.ranks) & set(positions):
                other = positions[rank]
                if other.waits is None and other.begun(position.waits.group) < position.waits.number:
                    late.add(rank)
    return sorted(silent | late)


def describe(positions: Mapping[int, Position], world: int, stacks: Path | None) -> str:
    """Return one line: the ranks that hold up the others, what they do, and who waits where."""
    held_up = missing(positions, world)
    parts = []
    for rank in held_up:
        if rank not in positions:
            parts.append(f"rank {rank} does not respond: it was stopped or killed, or its node is gone")
            continue
        last = positions[rank].newest
        parts.append(f"rank {rank} is at {positions[rank].at}" + (f", last in {last[-1]}" if last else ""))
    waiting: dict[str, list[int]] = {}
    for rank, position in positions.items():
        if rank not in held_up and position.waits is not None:
            waiting.setdefault(str(position.waits), []).append(rank)
    parts += [f"{_named(ranks)} in {call}" for call, ranks in waiting.items()]
    head = f"{_named(held_up)} held up the others" if held_up else "no rank is missing, but all wait"
    where = f"; the stacks of the ranks that responded are in {stacks}" if stacks is not None else ""
    return f"{head}: {'; '.join(parts)}{where}"


def write_stacks(folder: Path, rank: int, position: Position) -> None:
    """Write the stacks of all threads of this process, and its newest collectives, to `folder/rank-N.txt`."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"rank-{rank}.txt").open("w") as file:
        file.write(f"rank {rank} at {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
        file.write(f"waits in {position.waits}\n" if position.waits else "waits in no collective\n")
        file.writelines(f"newest {call}\n" for call in position.newest)
        file.write("\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)


def _recorded() -> list[dict[str, Any]]:
    """Return the newest collectives of this process, oldest first, as PyTorch's flight recorder holds them."""
    library: Any = cast(Any, torch._C)._distributed_c10d
    entries: list[dict[str, Any]] = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):  # of gloo; of NCCL, where it is built in
        if (dump := getattr(library, name, None)) is not None:
            entries += json.loads(dump()).get("entries", [])
    return sorted(entries, key=lambda entry: entry["time_created_ns"])


def _line() -> str:
    """Return the line that the main thread executes, and the innermost one of this package on the way to it."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = traceback.extract_stack(frame)
    if not stack:
        return "no line of Python"
    ours = [f for f in stack if "credit_like" in Path(f.filename).parts]
    shown = [*ours[-1:], *(stack[-1:] if not ours or stack[-1] is not ours[-1] else [])]
    return ", ".join(f"{'/'.join(Path(f.filename).parts[-3:])}:{f.lineno} ({f.name})" for f in shown)


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {_listed(ranks)}"
