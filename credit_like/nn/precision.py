"""Layers that keep full precision in a model that computes in bfloat16: where its input enters and its output leaves.

bfloat16 has 8 bits. Rounding a field of geopotential to them costs several m² s⁻² at every step of a forecast; inside the
model the same rounding is of features, of which there are many. Such a layer declares `full_precision = True`: FSDP2 gathers
its weights as they are, and `in_own_precision` calls it outside autocast.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def keeps_full_precision(layer: nn.Module) -> bool:
    """Return whether a layer computes in the precision of its master weights."""
    return getattr(layer, "full_precision", False) is True


def in_own_precision(layer: nn.Module, x: Tensor) -> Tensor:
    """Return layer(x), computed outside autocast in the dtype of its weights where the layer keeps full precision."""
    if not keeps_full_precision(layer):
        result: Tensor = layer(x)
        return result
    x = x.to(next(layer.parameters()).dtype)
    if x.is_meta:  # the meta device has no autocast
        result = layer(x)
        return result
    with torch.autocast(x.device.type, enabled=False):
        result = layer(x)
    return result
