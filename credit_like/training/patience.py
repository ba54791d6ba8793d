"""Validation losses that no longer fall."""

from __future__ import annotations

from collections.abc import Sequence


def stalls(losses: Sequence[float | None], patience: int, min_change: float) -> int:
    """Return how often `patience` validations in a row were no better than the best before them.

    Better is lower by at least the fraction `min_change`. After each stall the count begins anew. None is a loss that is
    not finite.
    """
    best: float | None = None
    waited = found = 0
    for loss in losses:
        if loss is not None and (best is None or loss < best - min_change * abs(best)):
            best, waited = loss, 0
            continue
        waited += 1
        if waited == patience:
            found, waited = found + 1, 0
    return found
