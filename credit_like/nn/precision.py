"""Layers that keep full precision in a bfloat16 model: where its input enters and its output leaves.

bfloat16 has 8 significant bits. Rounding a geopotential field to 8 bits introduces errors of several m² s⁻² at every
forecast step. Inside the model the rounding affects features, whose errors average out. Such a layer declares
`full_precision = True`: FSDP2 gathers its weights in their own precision, and `in_own_precision` calls it outside
autocast.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn


def keeps_full_precision(layer: nn.Module) -> bool:
    """Return whether a layer computes in the precision of its master weights."""
    return getattr(layer, "full_precision", False) is True


def in_own_precision(layer: nn.Module, x: Tensor) -> Tensor:
    """Return layer(x); a layer that keeps full precision runs outside autocast in the dtype of its weights."""
    if not keeps_full_precision(layer):
        result: Tensor = layer(x)
        return result
    x = x.to(next(layer.parameters()).dtype)
    with outside_autocast(x):
        result = layer(x)
    return result


def outside_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Return a context without autocast on the device of x."""
    # The meta device has no autocast.
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)
