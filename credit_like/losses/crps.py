"""Continuous ranked probability score of the members of an ensemble, fair or almost fair.

With members x_k of an ensemble of K and the truth y,

    CRPS = mean_k |x_k - y| - (1 - ε) / (2 K (K - 1)) Σ_j Σ_k |x_j - x_k|,    ε = (1 - α) / K.

α = 1 is the fair CRPS, whose expectation does not depend on K (Ferro, Q. J. R. Meteorol. Soc. 140, 1917, 2014). α = 0
is the CRPS of the empirical distribution, which K members minimise with too little spread. The almost fair CRPS in
between (Lang et al., arXiv:2412.15832) avoids the degeneracy of the fair one, which K - 1 members equal to the truth
minimise whatever the other member is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from credit_like.losses import LossConfig

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor


by_point = True
"""See `credit_like.losses`."""


class Config(LossConfig):
    type: Literal["crps"] = "crps"
    alpha: float = Field(default=0.95, ge=0, le=1)
    """1 = fair, 0 = the CRPS of the empirical distribution; values just below 1 are almost fair."""


def of_members(config: Config, error_BKCHW: Tensor, others: Iterable[Tensor] = ()) -> Tensor:
    """Return the CRPS at each point, (B, C, h, W), from the errors x_k - y; of one member it is the absolute error.

    Equal members share the gradient of their distance, which is 0, so that an ensemble without spread is no special case.
    """
    import torch

    from credit_like.losses._pairs import pair_score

    return pair_score(config.alpha, error_BKCHW, others, torch.sign)
