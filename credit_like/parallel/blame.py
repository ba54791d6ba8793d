"""Report one cause when a run of several ranks fails: the first error, reported once, by the rank that raised it.

A rank that fails writes its error to the rendezvous store, unless another rank has done so before. In that case its own
error is a consequence, such as a connection closed by the other rank, and it exits without a message. A thread in every
rank polls for such an error too and ends a rank that waits for the others in vain, independent of backend and launcher.

Where the first error is that another rank does not answer, all ranks write their stacks and report their position, and the
message names the rank that holds up the others (`parallel/hang.py`).
"""

from __future__ import annotations

import datetime as dt
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch.distributed as dist

from credit_like.errors import known_message, of_another_rank
from credit_like.parallel import hang
from credit_like.parallel.environment import Environment
from credit_like.processes import has_ended, identity

_POLL = 1.0
_PATIENCE = 5.0
"""Seconds to reach the store, and to let the rank with the first error report it."""
_GRACE = 6.0
"""Seconds that a rank has to exit by itself after another one has failed."""
_ANSWER = 8.0
"""Seconds in which a rank must report its position."""
_CONSEQUENCE = 2.0
"""Seconds to wait after a lost connection, so that the rank with the original error can report first."""
_IN_ALL = 14.0
"""Seconds that a rank waits for others from the first sign of a failure to its end. A rank sees the first cause
`_CONSEQUENCE` + `_POLL` later than others at most, so that none is left after `_IN_ALL` + 3 s and what it computes."""


@dataclass(frozen=True)
class Cause:
    """The reason why a run ended: rank, one-line message and exit status of the first error."""

    rank: int
    message: str
    status: int = 1
    peers: str = ""
    """`silent` or `lost` if another rank is the reason: it does not answer, or has ended."""

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.message}"


class Causes:
    """Access to the first cause of failure of this start of the run, which is saved in the rendezvous store."""

    def __init__(self, place: Environment, store: dist.Store) -> None:
        self._place, self._store = place, store
        self._first: Cause | None = None
        self._over = threading.Event()
        self._answered = threading.Lock()
        self._deadline: float | None = None
        """When this rank waits for others no longer; None: there is no failure yet."""
        self._failed = False
        """Whether an error of another rank has ended the newest collective of this one."""
        # Until all ranks are present, the start is identified by torchrun's restart count, because the agent's store
        # outlives the start.
        self._keys = [f"failed/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"]

    def name_start(self, name: str) -> None:
        """Save errors under the name shared by all ranks of this start from now on."""
        self._keys.append(f"failed/{name}")

    def announce(self) -> None:
        """Tell the others which process this rank is, so that none waits for it once it has ended."""
        self._store.set(self._process(self._place.rank), identity())

    def _process(self, rank: int) -> str:
        return f"{self._keys[0]}/process/{rank}"

    def _has_ended(self, rank: int) -> bool:
        """Return whether a rank of this machine has ended; False if that is not known."""
        key = self._process(rank)
        return self._store.check([key]) and has_ended(self._store.get(key).decode())

    def _left(self, patience: float) -> float:
        """Return the part of `patience` that this rank may still wait; the limit of all waits counts from the first call."""
        now = time.monotonic()
        self._deadline = self._deadline or now + _IN_ALL
        return max(0.0, min(patience, self._deadline - now))

    def first(self) -> Cause | None:
        """Return the first cause, or None. Raises torch's DistError if the store is gone."""
        for key in list(self._keys):
            if self._first is None and self._store.check([key]):
                self._first = Cause(**json.loads(self._store.get(key)))
        return self._first

    def claim(self, cause: Cause) -> Cause:
        """Record `cause` as the first one unless there is one already; return the first.

        If another rank is the reason and the positions of the ranks identify it, the message names it.
        """
        if self._first is None:
            self._failed = bool(cause.peers)
            result: list[Cause] = []

            def record() -> None:
                with suppress(dist.DistError):
                    result.append(self._record(cause))

            # The process that holds the store may be the one that is stopped, and the store has no limit of time.
            thread = threading.Thread(target=record, daemon=True)
            thread.start()
            thread.join(self._left(_ANSWER + _CONSEQUENCE + _PATIENCE))
            self._first = result[0] if result else self._first or self._without_store(cause)
        return self._first

    def _record(self, cause: Cause) -> Cause:
        """Do the part of `claim` that needs the store."""
        if cause.peers == "lost":
            self._wait_for(lambda: self.first() is not None, _CONSEQUENCE)
        first = self.first()
        if first is None:
            kept = self._store.compare_set(self._keys[-1], "", json.dumps(asdict(cause)))
            first = Cause(**json.loads(kept))
        if first.peers:
            self._answer()
            if first.rank == self._place.rank:
                first = self._named(first)
                self._store.set(self._keys[-1], json.dumps(asdict(first)))
        return first

    def _named(self, cause: Cause) -> Cause:
        """Return the cause with the names of the ranks that hold up the others."""
        world = range(self._place.world)
        keys = {rank: f"{self._keys[-1]}/position/{rank}" for rank in world}
        self._wait_for_ranks(keys, _ANSWER)
        found = {rank: self._store.get(key) for rank, key in keys.items() if self._store.check([key])}
        positions = {rank: hang.Position.of_json(text) for rank, text in found.items()}
        stacks = stacks_folder if positions else None
        return replace(
            cause, message=f"{cause.message.partition(':')[0]}: {hang.describe(positions, len(world), stacks)}"
        )

    def _without_store(self, cause: Cause) -> Cause:
        """Return the cause where the store does not answer, which belongs to rank 0 unless an agent holds it."""
        if not cause.peers:
            return cause
        self._write_stacks(hang.Position.here(failed=True))
        if of_agent() or self._place.rank == 0:
            return cause
        return replace(
            cause, message=f"{cause.message}; rank 0 does not respond: it was stopped or killed, or its node is gone"
        )

    def _answer(self) -> None:
        """Write the stacks of this rank and report its position, once."""
        if not self._answered.acquire(blocking=False):
            return
        position = hang.Position.here(self._failed)
        self._write_stacks(position)
        self._store.set(f"{self._keys[-1]}/position/{self._place.rank}", position.to_json())

    def _write_stacks(self, position: hang.Position) -> None:
        if stacks_folder is not None:
            with suppress(OSError):
                hang.write_stacks(stacks_folder, self._place.rank, position)

    def reported(self) -> None:
        """Announce that this rank has reported the first cause, so that the other ranks may exit."""
        try:
            self._store.set(f"{self._keys[0]}/reported", "yes")
            if self._place.rank == 0 and not of_agent():  # the store ends with this process
                others = set(range(1, self._place.world))
                self._wait_for_ranks({rank: f"{self._keys[0]}/seen/{rank}" for rank in others}, _PATIENCE)
        except dist.DistError:
            return

    def wait_for_report(self) -> None:
        """Wait until the rank of the first cause has reported it, for a limited time."""
        patience = _PATIENCE + (_ANSWER if self._first is not None and self._first.peers else 0.0)
        try:
            self._store.set(f"{self._keys[0]}/seen/{self._place.rank}", "yes")
            self._wait_for(lambda: self._store.check([f"{self._keys[0]}/reported"]), patience)
        except dist.DistError:
            return

    def _wait_for_ranks(self, keys: Mapping[int, str], patience: float) -> None:
        """Wait until every rank has set its key or has ended, for a limited time."""
        absent = set(keys)

        def have_come() -> bool:
            absent.difference_update(
                [rank for rank in absent if self._store.check([keys[rank]]) or self._has_ended(rank)]
            )
            return not absent

        self._wait_for(have_come, patience)

    def _wait_for(self, condition: Callable[[], bool], patience: float) -> None:
        deadline = time.monotonic() + self._left(patience)
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.05)

    def watch(self) -> Causes:
        """Start a thread that ends this process soon after another rank has failed."""
        threading.Thread(target=self._watch, name="blame", daemon=True).start()
        return self

    def close(self) -> None:
        """Stop watching."""
        self._over.set()

    def _watch(self) -> None:
        try:
            while (cause := self.first()) is None:
                if self._over.wait(_POLL):
                    return
        except dist.DistError:  # the process that owned the store has ended, and the store's connections with it
            return
        grace = self._left(_GRACE)
        if cause.peers:
            with suppress(dist.DistError):
                self._answer()
        if cause.rank != self._place.rank and not self._over.wait(grace):
            self.wait_for_report()
            os._exit(cause.status)


def cause_of(error: BaseException, rank: int, status: int = 1) -> Cause:
    """Return an error as a cause: known errors by their message, others with their type."""
    message = known_message(error) or f"{type(error).__name__}: {error}"
    return Cause(rank, message, status, of_another_rank(error))


_causes: Causes | None = None
_out_of_reach: Environment | None = None
"""Where this process is, if it could not reach the store from there."""
stacks_folder: Path | None = None
"""Where the ranks of a hang write their stacks; None: nowhere."""


def out_of_reach(place: Environment) -> None:
    """Give up the store, which could not be reached: another attempt would only delay the message."""
    global _out_of_reach
    _out_of_reach = place


def watch(place: Environment, timeout: dt.timedelta) -> Causes:
    """Watch for the errors of other ranks from now on; `timeout` limits the wait for the store."""
    global _causes
    close()
    _causes = Causes(place, _client(place, timeout)).watch()
    _causes.announce()
    return _causes


def close() -> None:
    """Stop watching: the run of these ranks is over."""
    global _causes
    if _causes is not None:
        _causes.close()
    _causes = None


def claim(cause: Cause, place: Environment) -> tuple[Cause, Causes | None]:
    """Record `cause` unless another rank was faster; return the first cause and the `Causes` in which it is saved.

    The second is None if the store cannot be reached, which is tried once.
    """
    global _causes
    if _causes is None:
        if _out_of_reach == place:
            return cause, None
        try:
            _causes = Causes(place, _client(place, dt.timedelta(seconds=_PATIENCE), owner=place.rank == 0))
        except (dist.DistError, TimeoutError):
            out_of_reach(place)
            return cause, None
    return _causes.claim(cause), _causes


def of_agent() -> bool:
    """Return whether the store belongs to the agent that started this process; otherwise rank 0 owns it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _client(place: Environment, timeout: dt.timedelta, owner: bool = False) -> dist.TCPStore:
    """Return a separate connection to the store, so that a blocking call on another connection does not delay it."""
    ours = owner and not of_agent()
    return dist.TCPStore(
        place.address, place.port, place.world, is_master=ours, timeout=timeout, wait_for_workers=False,
        multi_tenant=not of_agent(),
    )  # fmt: skip
