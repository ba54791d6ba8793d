"""One cause for the end of a run of several ranks: the error that came first, reported once, by the rank that had it.

A rank that fails puts its error into the rendezvous store, unless another rank was faster: then its own error is a
consequence, such as a connection that the other one closed, and it ends without a message. A thread in every rank looks
for such an error too, and ends a rank that waits for the others in vain, whatever its backend and launcher do.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch.distributed as dist

from credit_like.errors import RunError, UserError
from credit_like.parallel.environment import Environment

_POLL = 1.0
_PATIENCE = 5.0
"""Seconds to reach the store, and to let the rank with the first error report it."""
_GRACE = 6.0
"""Seconds that a rank has to end by itself once another one has failed."""


@dataclass(frozen=True)
class Cause:
    """Why a run ended: the error, in one message, of the rank that had it first, and its exit status."""

    rank: int
    message: str
    status: int = 1

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.message}"


class Causes:
    """Where the first cause of this start of the run is kept: the rendezvous store."""

    def __init__(self, place: Environment, store: dist.Store) -> None:
        self._place, self._store = place, store
        self._first: Cause | None = None
        self._over = threading.Event()
        # Until all ranks are there, a start is known by torchrun's count: the agent's store outlives the starts.
        self._keys = [f"failed/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"]

    def name_start(self, name: str) -> None:
        """From now on, keep errors under the name that all ranks of this start have in common."""
        self._keys.append(f"failed/{name}")

    def first(self) -> Cause | None:
        """The first cause, if there is one. Raises torch's DistError where the store is gone."""
        for key in list(self._keys):
            if self._first is None and self._store.check([key]):
                self._first = Cause(**json.loads(self._store.get(key)))
        return self._first

    def claim(self, cause: Cause) -> Cause:
        """Make `cause` the first one, unless there is one; returns the first."""
        try:
            if (first := self.first()) is not None:
                return first
            kept = self._store.compare_set(self._keys[-1], "", json.dumps(asdict(cause)))
            self._first = Cause(**json.loads(kept))
        except dist.DistError:
            self._first = self._first or cause
        return self._first

    def reported(self) -> None:
        """Let the other ranks end: this rank has reported the first cause."""
        try:
            self._store.set(f"{self._keys[0]}/reported", "yes")
            if self._place.rank == 0 and not of_agent():  # the store ends with this process
                self._wait_for(lambda: self._store.add(f"{self._keys[0]}/seen", 0) >= self._place.world - 1)
        except dist.DistError:
            return

    def wait_for_report(self) -> None:
        """Return when the rank of the first cause has reported it, or after a while."""
        try:
            self._store.add(f"{self._keys[0]}/seen", 1)
            self._wait_for(lambda: self._store.check([f"{self._keys[0]}/reported"]))
        except dist.DistError:
            return

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.05)

    def watch(self) -> Causes:
        """From a thread, end this process soon after another rank has failed."""
        threading.Thread(target=self._watch, name="blame", daemon=True).start()
        return self

    def close(self) -> None:
        """Watch no longer."""
        self._over.set()

    def _watch(self) -> None:
        try:
            while (cause := self.first()) is None:
                if self._over.wait(_POLL):
                    return
        except dist.DistError:  # the process that held the store has ended, and its connections with it
            return
        if cause.rank != self._place.rank and not self._over.wait(_GRACE):
            self.wait_for_report()
            os._exit(cause.status)


def cause_of(error: BaseException, rank: int, status: int = 1) -> Cause:
    """An error as a cause: known ones by their message, others with their type."""
    known = isinstance(error, (UserError, RunError))
    return Cause(rank, str(error) if known else f"{type(error).__name__}: {error}", status)


_causes: Causes | None = None


def watch(place: Environment, timeout: dt.timedelta) -> Causes:
    """Watch for the errors of other ranks from now on. `timeout` bounds the wait for the store."""
    global _causes
    close()
    _causes = Causes(place, _client(place, timeout)).watch()
    return _causes


def close() -> None:
    """Watch no longer: the run of these ranks is over."""
    global _causes
    if _causes is not None:
        _causes.close()
    _causes = None


def claim(cause: Cause, place: Environment) -> tuple[Cause, Causes | None]:
    """The first cause of this start, which is `cause` unless another rank was faster; and where it is kept.

    None where there is no such place: the store cannot be reached.
    """
    global _causes
    if _causes is None:
        try:
            _causes = Causes(place, _client(place, dt.timedelta(seconds=_PATIENCE), owner=place.rank == 0))
        except (dist.DistError, TimeoutError):
            return cause, None
    return _causes.claim(cause), _causes


def of_agent() -> bool:
    """Whether the agent that started this process has the store; otherwise rank 0 has it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _client(place: Environment, timeout: dt.timedelta, owner: bool = False) -> dist.TCPStore:
    """A connection of its own: what waits on another one does not hold it up."""
    ours = owner and not of_agent()
    return dist.TCPStore(
        place.address, place.port, place.world, is_master=ours, timeout=timeout, wait_for_workers=False,
        multi_tenant=not of_agent(),
    )  # fmt: skip
