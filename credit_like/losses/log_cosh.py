"""log cosh e: quadratic for small errors, absolute for large ones, and smooth."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from credit_like.losses import LossConfig

if TYPE_CHECKING:
    from torch import Tensor


by_point = True
"""See `credit_like.losses`."""


class Config(LossConfig):
    type: Literal["log-cosh"] = "log-cosh"


def pointwise(config: Config, error: Tensor) -> Tensor:
    """Return log cosh e = |e| + log(1 + exp(−2|e|)) − log 2, which does not overflow."""
    import torch

    return torch.logaddexp(error, -error) - math.log(2.0)
