"""What the `physics` entries of an experiment have in common."""

from __future__ import annotations

from pydantic import Field

from credit_like.schema.base import Section


class Correction(Section):
    """A correction of each predicted step."""

    after_epochs: int = Field(default=0, ge=0)
    """Epochs of training without the correction, at the start; forecasts of a trained model always use it."""
