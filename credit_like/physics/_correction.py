"""The base of the `physics` entries of an experiment."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, Field

from credit_like.errors import UserError
from credit_like.schema.base import Section

if TYPE_CHECKING:
    from credit_like.data.store import FieldStore


def _each_once(names: tuple[str, ...]) -> tuple[str, ...]:
    if repeated := [name for name, times in Counter(names).items() if times > 1]:
        raise ValueError(f"expected each variable once, got {', '.join(repeated)} more often; change it")
    return names


Names = Annotated[tuple[str, ...], AfterValidator(_each_once)]
"""Variables that a correction changes, each of them once."""


class Correction(Section):
    """A correction of each predicted step."""

    after_epochs: int = Field(default=0, ge=0)
    """Epochs of training without the correction, at the start; forecasts of a trained model always use it."""


def require_circle(kind: str, store: FieldStore) -> None:
    """Raise UserError for a grid that does not cover the full circle of longitude, for a correction of this kind."""
    if not store.grid.is_periodic:
        raise UserError(
            f"physics.type: expected a grid that covers the full circle of longitude for {kind}, got a part of it; remove it"
        )
