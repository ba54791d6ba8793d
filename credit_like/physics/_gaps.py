"""Variables with missing points, which some corrections cannot use."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from credit_like.errors import UserError


def refuse_gaps(
    kind: str, names: Sequence[str], where: Sequence[slice], mask: NDArray[np.bool_], rows: bool = False
) -> None:
    """Raise UserError for a variable without data at some points, or in whole rows where the correction needs `rows` alone.

    `where` are the channels of each variable in `mask` (C, H, W), which is True at points that have data.
    """
    for name, channels in zip(names, where, strict=True):
        if not (mask[channels].any(-1) if rows else mask[channels]).all():
            raise UserError(
                f"physics.variables: expected variables with data {'in all rows' if rows else 'at all points'} for {kind}, "
                f"got {name}; remove it"
            )
