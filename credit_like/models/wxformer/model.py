"""WXFormer: a CrossFormer encoder in four stages (arXiv:2108.00154), a convolutional decoder, and skips between them.

    x (B, C, T, H, W)
    │ pad, frames folded into channels
    ├─ stage 0: cross-embed, layers ── e0 ─────────────────────┐
    ├─ stage 1: cross-embed, layers ── e1 ──────────────┐      │
    ├─ stage 2: cross-embed, layers ── e2 ───────┐      │      │
    └─ stage 3: cross-embed, layers ── e3 ─ up 1 ┴ up 2 ┴ up 3 ┴ head ─ unpad, resize ─ y (B, C_out, 1, H, W)

Between padding and unpadding every tensor is (B, H, W, C). With `noise`, random numbers enter before each block of the
decoder (up 1 to head), or in the norms of the feed-forward blocks of the layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from credit_like import ops
from credit_like.models import ChannelAxis
from credit_like.models.wxformer import Config
from credit_like.nn import spectral_norm
from credit_like.nn.attention import LongAttention, PositionBias, PositionTables, ShortAttention, position_tables
from credit_like.nn.cross_embed import CrossEmbed
from credit_like.nn.dropout import FIRST_SITE, gain, path_factors
from credit_like.nn.feed_forward import FeedForward
from credit_like.nn.layer import Layer, Recompute
from credit_like.nn.noise import Noise, NormNoise, absorb, innovation_weights, innovations, recomputing
from credit_like.nn.padding import Pad, Unpad
from credit_like.nn.precision import in_own_precision
from credit_like.nn.resize import BilinearResize
from credit_like.nn.upblock import UpBlock, UpHead

NORM_LEVELS = (8, 9)
"""The numbers that distinguish the noise of a layer's two norms; smaller ones are the sites of its dropout."""


def norm_noise(config: Config, stage: int, level: int) -> NormNoise | None:
    """Return the noise of a norm, if there is any in this stage."""
    noise = config.noise
    if noise is None or noise.type != "conditional-norm" or not noise.scales[stage]:
        return None
    return NormNoise(config.dim[stage], noise.channels, noise.scales[stage], level, noise.correlation)


class TransformerLayer(Layer):
    """Short attention, feed-forward, long attention, feed-forward: four residual blocks."""

    shard_unit = True
    recompute: Recompute = "kernels"

    def __init__(self, config: Config, stage: int, layer: int) -> None:
        super().__init__()
        dim, normalised = config.dim[stage], config.use_spectral_norm
        self.drop_path = config.drop_path * (sum(config.depth[:stage]) + layer) / (sum(config.depth) - 1)
        noise = [norm_noise(config, stage, level) for level in NORM_LEVELS]
        if config.attn_dropout or config.ff_dropout or any(noise):
            self.recompute = "forward"  # fused kernels have neither dropout nor noise
        self.short = ShortAttention(
            dim,
            config.local_window_size,
            dim_head=config.dim_head,
            position_index=config.position_index,
            spectral_norm=normalised,
            dropout=config.attn_dropout,
            site=0,
        )
        self.short_ff = FeedForward(dim, spectral_norm=normalised, dropout=config.ff_dropout, site=1, noise=noise[0])
        self.long = LongAttention(
            dim,
            config.global_window_size[stage],
            dim_head=config.dim_head,
            position_index=config.position_index,
            spectral_norm=normalised,
            dropout=config.attn_dropout,
            site=2,
        )
        self.long_ff = FeedForward(dim, spectral_norm=normalised, dropout=config.ff_dropout, site=3, noise=noise[1])

    @property
    def biases(self) -> tuple[PositionBias | None, PositionBias | None]:
        """Return the position biases of short and long attention; a window of one token has none."""
        return self.short.bias, self.long.bias

    def forward(
        self,
        x_BHWC: Tensor,
        key_B: Tensor | None = None,
        noise_BJ: Tensor | None = None,
        tables: tuple[Tensor | None, ...] | None = None,
    ) -> Tensor:
        """Apply the layer to (B, H, W, C); the shape stays the same.

        `key_B` selects what dropout drops, `noise_BJ` the noise in the norms. `tables` are those of `biases`, if they are
        computed already.
        """
        short_N, long_N = position_tables(*self.biases) if tables is None else tables
        x_BHWC = self._residual(0, self.short, x_BHWC, key_B, table_N=short_N)  # x + attention among neighbours
        x_BHWC = self._residual(1, self.short_ff, x_BHWC, key_B, noise_BJ=noise_BJ)  # x + mlp(norm(x))
        x_BHWC = self._residual(2, self.long, x_BHWC, key_B, table_N=long_N)  # x + attention across the image
        return self._residual(3, self.long_ff, x_BHWC, key_B, noise_BJ=noise_BJ)  # x + mlp(norm(x))

    def _residual(
        self, number: int, block: nn.Module, x_BHWC: Tensor, key_B: Tensor | None, **more: Tensor | None
    ) -> Tensor:
        """Return the block's output; with stochastic depth, the input of samples that skip it."""
        given = {name: value for name, value in {"key_B": key_B, **more}.items() if value is not None}
        y_BHWC: Tensor = block(x_BHWC, **given)
        if key_B is None or not self.drop_path:
            return y_BHWC
        factors = path_factors(key_B, 4 + number, self.drop_path, y_BHWC.dtype)
        return x_BHWC + factors * (y_BHWC - x_BHWC) * gain(self.drop_path)


class Stage(nn.Module):
    """A cross-embedding, which coarsens the grid, and `depth` transformer layers."""

    def __init__(self, config: Config, stage: int, in_channels: int) -> None:
        super().__init__()
        self.embed = CrossEmbed(
            in_channels,
            config.dim[stage],
            config.cross_embed_kernel_sizes[stage],
            config.cross_embed_strides[stage],
            spectral_norm=config.use_spectral_norm,
        )
        self.embed.full_precision = stage == 0
        self.first_site = FIRST_SITE + sum(config.depth[:stage])
        self.layers = nn.ModuleList(TransformerLayer(config, stage, layer) for layer in range(config.depth[stage]))
        self.tables = PositionTables()

    def forward(self, x_BHWC: Tensor, **keys: Tensor) -> Tensor:
        """Map (B, H, W, C) to (B, H/s, W/s, dim). `keys` are those of dropout and noise, as for `TransformerLayer`."""
        x_BHWC = in_own_precision(self.embed, x_BHWC)
        tables = self.tables(*(bias for layer in self.layers for bias in cast("TransformerLayer", layer).biases))
        for i, layer in enumerate(self.layers):
            # Each layer gets keys of its own, so that equal layers share one compiled graph.
            given: dict[str, Any] = {name: absorb(key, self.first_site + i) for name, key in keys.items()}
            own = tuple(tables[2 * i : 2 * i + 2])
            if any(table_N is not None for table_N in own):
                given["tables"] = own
            x_BHWC = layer(x_BHWC, **given)
        return x_BHWC


class WXFormer(nn.Module):
    """WXFormer for one grid and one set of channels; the module docstring shows its structure."""

    identities = ("noise.*", "stages.*.noise.weight")

    def __init__(
        self, config: Config, *, in_channels: int, out_channels: int, frames: int, height: int, width: int
    ) -> None:
        super().__init__()
        self.config = config
        self.in_channels, self.out_channels, self.frames = in_channels, out_channels, frames
        self.height, self.width = height, width
        pad_lat, pad_lon = config.pads
        padded = any((*pad_lat, *pad_lon))
        self.pad = Pad(config.padding_conf.mode, pad_lat, pad_lon) if padded else nn.Identity()
        widths = [in_channels * frames, *config.dim[:3]]
        self.stages = nn.ModuleList(Stage(config, stage, channels) for stage, channels in enumerate(widths))
        d0, d1, d2, d3 = config.dim
        groups, upsample, normalised = d0, config.upsample, config.use_spectral_norm
        self.up1 = UpBlock(d3, d3 // 2, groups, upsample=upsample, spectral_norm=normalised)
        self.up2 = UpBlock(d3 // 2 + d2, d3 // 4, groups, upsample=upsample, spectral_norm=normalised)
        self.up3 = UpBlock(d3 // 4 + d1, d3 // 8, groups, upsample=upsample, spectral_norm=normalised)
        self.head = UpHead(
            d3 // 8 + d0, out_channels, hidden=config.head_channels, upsample=upsample, spectral_norm=normalised
        )
        self.noise = nn.ModuleDict()
        noise = config.noise
        self.innovations = 0 if noise is None else len(innovation_weights(noise.correlation))
        if noise is not None and noise.type == "decoder":
            for level, features in enumerate((d3, d3 // 2 + d2, d3 // 4 + d1, d3 // 8 + d0)):
                if scale := noise.scales[level]:
                    self.noise[str(level)] = Noise(features, noise.channels, scale, level, noise.correlation)
        self.unpad = Unpad(pad_lat, pad_lon) if padded else nn.Identity()
        self.resize = BilinearResize(height, width) if config.interp else nn.Identity()

    def forward(self, x_BCTHW: Tensor, key_B: Tensor | None = None) -> Tensor:
        """Map (B, in_channels, frames, H, W) to (B, out_channels, 1, H, W), both in normalised units.

        `key_B` (B,) int64 selects the noise of each sample (`nn.noise`), and in training what dropout drops; without it
        there is neither.
        """
        x_BHWC = ops.channels_last(self.pad(x_BCTHW.flatten(1, 2)))
        noise_BJ = innovations(key_B, self.innovations) if key_B is not None and self.innovations else None
        keys = {"noise_BJ": noise_BJ} if noise_BJ is not None and not self.noise else {}
        if key_B is not None and self.training and self.config.drops:
            keys["key_B"] = key_B
        skips = []
        for stage in self.stages:
            x_BHWC = stage(x_BHWC, **keys)
            skips.append(x_BHWC)
        e0, e1, e2, e3 = skips
        y = self._decoded(0, self.up1, e3, noise_BJ)
        y = self._decoded(1, self.up2, torch.cat([y, e2], dim=-1), noise_BJ)
        y = self._decoded(2, self.up3, torch.cat([y, e1], dim=-1), noise_BJ)
        y_BHWC = self._decoded(3, self.head, torch.cat([y, e0], dim=-1), noise_BJ)
        y_BCHW = self.resize(self.unpad(ops.channels_first(y_BHWC)))
        return y_BCHW.unsqueeze(2)

    def channel_axes(self) -> dict[str, tuple[ChannelAxis, ...]]:
        """Return the tensors of the first and last layers that have entries for channels, by name.

        New outputs start at zero in the last convolution; the channels before it have their initial values, so that it
        gets gradients.
        """
        inputs, outputs = ChannelAxis(1, "inputs"), ChannelAxis(0, "outputs")
        hidden = ChannelAxis(1, "hidden", key="model.head_channels")
        axes: dict[str, tuple[ChannelAxis, ...]] = {}
        for i, kernel in enumerate(sorted(self.config.cross_embed_kernel_sizes[0])):
            axes[f"stages.0.embed.convs.{i}.weight"] = (inputs,)
            axes[f"stages.0.embed.convs.{i}.spectral.v"] = (replace(inputs, dim=0, repeat=kernel**2),)
        if self.config.upsample == "transpose":
            axes["head.up.weight"] = (replace(outputs, dim=1),)
            return axes | {"head.up.bias": (outputs,), "head.up.spectral.u": (outputs,)}
        phases = replace(hidden, dim=0, repeat=4, added="initial")
        taps = self.head.last.weight.shape[2:].numel()
        return axes | {
            "head.up.weight": (phases,),
            "head.up.bias": (phases,),
            "head.up.spectral.u": (replace(phases, added="zero"),),
            "head.last.weight": (outputs, hidden),
            "head.last.bias": (outputs,),
            "head.last.spectral.u": (outputs,),
            "head.last.spectral.v": (replace(hidden, dim=0, repeat=taps),),
        }

    def _decoded(self, level: int, block: nn.Module, x_BHWC: Tensor, key_BJ: Tensor | None) -> Tensor:
        """Apply a block of the decoder, to its input with noise if there is any at this resolution."""
        if str(level) not in self.noise:
            return in_own_precision(block, x_BHWC)
        noisy: Tensor = self.noise[str(level)](x_BHWC, key_BJ=key_BJ)
        with recomputing(noisy):
            return in_own_precision(block, noisy)

    def train(self, mode: bool = True) -> Self:
        """Set the mode as nn.Module.train does; entering evaluation recomputes sigma from the current weights."""
        super().train(mode)
        if not mode and not next(self.parameters()).is_meta:
            spectral_norm.refresh(self)
        return self
