"""A tiny WXFormer with every part, in fp64, its reference gradients on one process, and the comparison."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from credit_like.models import wxformer
from credit_like.nn import init

HEIGHT, WIDTH, CHANNELS, FRAMES, OUT = 101, 24, 5, 2, 4


def tiny_config(**changes):
    """101 rows padded to 129 (earth): levels of 64, 32, 16, 8 rows, 100 decoded rows resized to 101, every kind of layer."""
    options = {
        "dim": (4, 8, 16, 32),
        "depth": (1, 1, 1, 1),
        "dim_head": 2,
        "cross_embed_kernel_sizes": ((4, 8, 16), (2, 4), (2, 4), (2, 4)),
        "cross_embed_strides": (2, 2, 2, 2),
        "global_window_size": (4, 4, 2, 1),
        "local_window_size": 2,
        "padding_conf": {"activate": True, "mode": "earth", "pad_lat": (14, 14), "pad_lon": (4, 4)},
        "upsample": "pixel_shuffle",
        "use_spectral_norm": True,
    }
    return wxformer.Config.model_validate(options | changes)


def blank_model(width=WIDTH, **changes):
    """Return the tiny model without values."""
    return wxformer.build(
        tiny_config(**changes), in_channels=CHANNELS, out_channels=OUT, frames=FRAMES, height=HEIGHT, width=width
    )


def tiny_model(seed=0, dtype=torch.float64, **changes):
    return init.initialise(blank_model(**changes), seed).to(dtype)


def tiny_batch(batch=1, dtype=torch.float64, seed=1, width=WIDTH):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, CHANNELS, FRAMES, HEIGHT, width, generator=generator, dtype=torch.float64).to(dtype)
    y = torch.randn(batch, OUT, 1, HEIGHT, width, generator=generator, dtype=torch.float64).to(dtype)
    return x, y


def weights(dtype=torch.float64):
    """Return area weights (H, 1) of mean 1."""
    w = torch.cos(torch.linspace(-1.5, 1.5, HEIGHT, dtype=torch.float64))[:, None]
    return (w / w.mean()).to(dtype)


def loss_of(y, target, rows=slice(None), columns=slice(None)):
    """Return this rank's part of the area-weighted mean square error: local sums, global denominators."""
    error = (y - target[..., rows, columns]) ** 2 * weights(y.dtype)[rows]
    return error.sum() / target.numel()


@pytest.fixture
def tiny():
    return SimpleNamespace(
        config=tiny_config,
        blank=blank_model,
        model=tiny_model,
        batch=tiny_batch,
        loss=loss_of,
        weights=weights,
        height=HEIGHT,
        width=WIDTH,
    )
