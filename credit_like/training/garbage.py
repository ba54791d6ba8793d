"""Garbage collection between steps, after the same step on all ranks."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY = 50
"""Steps between two collections."""
_FEW = 1000
"""More objects than Python 3.12 freezes by itself at its start, and far fewer than a process has that has loaded torch."""


@contextmanager
def collected_between_steps() -> Iterator[Callable[[int], None]]:
    """Stop automatic collection of cycles; yield a function that collects where a number of steps is due.

    A collection takes tens of milliseconds, and by itself Python begins it at another moment in every process: each
    collective then waits for the rank whose turn it is. Objects that exist at the start are not looked at again. What the
    caller has frozen stays frozen, such as the objects of the process that this one was forked from.
    """
    enabled, frozen = gc.isenabled(), gc.get_freeze_count() > _FEW
    gc.collect()
    if not frozen:
        gc.freeze()
    gc.disable()

    def collect(step: int) -> None:
        if step % EVERY == 0:
            gc.collect()

    try:
        yield collect
    finally:
        if not frozen:
            gc.unfreeze()
        if enabled:
            gc.enable()


@contextmanager
def automatic() -> Iterator[None]:
    """Enable automatic collection in this context, for work other than steps."""
    enabled = gc.isenabled()
    gc.enable()
    try:
        yield
    finally:
        if not enabled:
            gc.disable()
