"""Report one cause when a run of several ranks fails: the first error, reported once, by the rank that raised it.

A rank that fails writes its error to the rendezvous store, unless another rank has done so before. In that case its own
error is a consequence, such as a connection closed by the other rank, and it exits without a message. A thread in every
rank polls for such an error too and ends a rank that waits for the others in vain, independent of backend and launcher.
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

from credit_like.errors import known_message
from credit_like.parallel.environment import Environment

_POLL = 1.0
_PATIENCE = 5.0
"""Seconds to reach the store, and to let the rank with the first error report it."""
_GRACE = 6.0
"""Seconds that a rank has to exit by itself after another one has failed."""


@dataclass(frozen=True)
class Cause:
    """The reason why a run ended: rank, one-line message and exit status of the first error."""

    rank: int
    message: str
    status: int = 1

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.message}"


class Causes:
    """Access to the first cause of failure of this start of the run, which is saved in the rendezvous store."""

    def __init__(self, place: Environment, store: dist.Store) -> None:
        self._place, self._store = place, store
        self._first: Cause | None = None
        self._over = threading.Event()
        # Until all ranks are present, the start is identified by torchrun's restart count, because the agent's store
        # outlives the start.
        self._keys = [f"failed/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"]

    def name_start(self, name: str) -> None:
        """Save errors under the name shared by all ranks of this start from now on."""
        self._keys.append(f"failed/{name}")

    def first(self) -> Cause | None:
        """Return the first cause, or None. Raises torch's DistError if the store is gone."""
        for key in list(self._keys):
            if self._first is None and self._store.check([key]):
                self._first = Cause(**json.loads(self._store.get(key)))
        return self._first

    def claim(self, cause: Cause) -> Cause:
        """Record `cause` as the first one unless there is one already; return the first."""
        try:
            if (first := self.first()) is not None:
                return first
            kept = self._store.compare_set(self._keys[-1], "", json.dumps(asdict(cause)))
            self._first = Cause(**json.loads(kept))
        except dist.DistError:
            self._first = self._first or cause
        return self._first

    def reported(self) -> None:
        """Announce that this rank has reported the first cause, so that the other ranks may exit."""
        try:
            self._store.set(f"{self._keys[0]}/reported", "yes")
            if self._place.rank == 0 and not of_agent():  # the store ends with this process
                self._wait_for(lambda: self._store.add(f"{self._keys[0]}/seen", 0) >= self._place.world - 1)
        except dist.DistError:
            return

    def wait_for_report(self) -> None:
        """Wait until the rank of the first cause has reported it, at most `_PATIENCE` seconds."""
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
        if cause.rank != self._place.rank and not self._over.wait(_GRACE):
            self.wait_for_report()
            os._exit(cause.status)


def cause_of(error: BaseException, rank: int, status: int = 1) -> Cause:
    """Return an error as a cause: known errors by their message, others with their type."""
    return Cause(rank, known_message(error) or f"{type(error).__name__}: {error}", status)


_causes: Causes | None = None


def watch(place: Environment, timeout: dt.timedelta) -> Causes:
    """Watch for the errors of other ranks from now on; `timeout` limits the wait for the store."""
    global _causes
    close()
    _causes = Causes(place, _client(place, timeout)).watch()
    return _causes


def close() -> None:
    """Stop watching: the run of these ranks is over."""
    global _causes
    if _causes is not None:
        _causes.close()
    _causes = None


def claim(cause: Cause, place: Environment) -> tuple[Cause, Causes | None]:
    """Record `cause` unless another rank was faster; return the first cause and the `Causes` in which it is saved.

    The second is None if the store cannot be reached.
    """
    global _causes
    if _causes is None:
        try:
            _causes = Causes(place, _client(place, dt.timedelta(seconds=_PATIENCE), owner=place.rank == 0))
        except (dist.DistError, TimeoutError):
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
