"""Low-rank changes of the weights of linear layers (LoRA; Hu et al., ICLR 2022).

A layer with such a change applies W + s B A, or W/σ(W) + s B A with spectral norm, where W is frozen and so are its
singular vectors: σ is that of W alone. A (rank, in) has random values at first and B (out, rank) is zero, so the layer
starts as it was. s = alpha / rank.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from credit_like.errors import UserError
from credit_like.nn.linear import Linear, Lora

NAMES = "*.lora.*"
"""Pattern of the names of the parameters."""


def add_lora(model: nn.Module, rank: int, match: Sequence[str], scale: float = 1.0) -> None:
    """Add a change to every linear layer whose name matches a pattern, and freeze all other parameters.

    Raises UserError for a pattern that matches no layer, and for a rank that a matched layer's weight cannot have.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Linear)}
    for pattern in match:
        if not fnmatch.filter(layers, pattern):
            raise UserError(
                f"start_from.lora.match: expected patterns of names of layers of credit_like.nn.linear.Linear, such as "
                f"{next(iter(layers), 'none')}, got {pattern}, which matches none; change it"
            )
    model.requires_grad_(False)
    for name in dict.fromkeys(name for pattern in match for name in fnmatch.filter(layers, pattern)):
        layer = layers[name]
        most = min(layer.in_features, layer.out_features)
        if rank > most:
            raise UserError(
                f"start_from.lora.rank: expected at most {most}, the rank of the weight of {name}, got {rank}; change it, or "
                "match other layers"
            )
        layer.lora = Lora(layer.out_features, layer.in_features, rank, scale)
    model.identities = (*getattr(model, "identities", ()), NAMES)  # type: ignore[assignment]


def merged(tensors: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Return the whole tensors of a model with every change added to its weight.

    With spectral norm the weight becomes W/σ + s B A, and v is scaled such that σ = uᵀ W v is 1: the function stays the
    same until a power iteration changes u and v.
    """
    result = {name: tensor for name, tensor in tensors.items() if not fnmatch.fnmatch(name, NAMES)}
    for name in tensors:
        if not name.endswith(".lora.up"):
            continue
        layer = name.removesuffix(".lora.up")
        weight, change = tensors[f"{layer}.weight"], scale * (tensors[name] @ tensors[f"{layer}.lora.down"])
        u, v = (tensors.get(f"{layer}.spectral.{leaf}") for leaf in "uv")
        if u is not None and v is not None:
            weight = weight / torch.dot(u, weight @ v)
            result[f"{layer}.spectral.v"] = v / torch.dot(u, (weight + change) @ v)
        result[f"{layer}.weight"] = weight + change
    return result
