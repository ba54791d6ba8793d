"""The lowest rate of a schedule."""

from __future__ import annotations

from credit_like.errors import UserError


def lowest(min_lr: float, base: float) -> float:
    """Return `min_lr`.

    Raises UserError where it is above the learning rate: a schedule falls from one to the other.
    """
    if min_lr > base:
        raise UserError(
            f"trainer.scheduler.min_lr: expected at most the learning rate {base:g}, got {min_lr:g}; change one of them"
        )
    return min_lr
