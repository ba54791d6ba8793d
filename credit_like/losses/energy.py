"""Energy score of the members of an ensemble along each circle of latitude, fair or almost fair.

It is the CRPS with |x - y| replaced by the root mean square of the difference along the row (Gneiting and Raftery, J. Am.
Stat. Assoc. 102, 359, 2007, equation 22), so it also judges how the members vary from point to point.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from credit_like.losses import LossConfig

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor


takes_valid = True
"""See `credit_like.losses`."""


class Config(LossConfig):
    type: Literal["energy"] = "energy"
    alpha: float = Field(default=0.95, ge=0, le=1)
    """1 = fair, 0 = the score of the empirical distribution; values just below 1 are almost fair."""


def of_members(
    config: Config, error_BKCHW: Tensor, others: Iterable[Tensor] = (), valid: Tensor | None = None
) -> Tensor:
    """Return values (B, C, h, W) whose mean along a row is its energy score, from the errors x_k - y.

    Rows that are equal in two members share the gradient of their distance, which is 0. The means are over the points that
    have data (`valid`); at the others the error has to be 0.
    """
    from credit_like.losses._pairs import pair_score

    score = pair_score(config.alpha, error_BKCHW, others, _direction)
    # The root mean square over all points of a row, of which a share has data, is that over these times the root of the share.
    return score if valid is None else score * valid.to(score.dtype).mean(-1, keepdim=True).sqrt()


def _direction(difference: Tensor) -> Tensor:
    """Return the difference divided by its root mean square along the row; 0 where it is 0."""
    import torch

    size = difference.square().mean(-1, keepdim=True).sqrt()
    return difference / size.clamp_min(torch.finfo(size.dtype).tiny)
