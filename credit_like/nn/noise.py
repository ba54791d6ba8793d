"""Noise that is a function of its place alone: of seed, member, initial time, lead, resolution and global position.

A member of an ensemble is therefore the same on any number of ranks, in any batch and after any restart. The numbers
come from hashing a counter with integers (SplitMix64; Steele, Lea and Flood, OOPSLA 2014), on the device of the fields
and without a generator's state. int64 wraps around as unsigned arithmetic does; shifts to the right are made logical.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from credit_like import ops
from credit_like.nn.layer import Layer
from credit_like.nn.place import WHOLE, Place, points
from credit_like.nn.precision import outside_autocast


def _signed(value: int) -> int:
    """Return the number below 2^63 that has the same 64 bits."""
    return value - (1 << 64) if value >> 63 else value


GAMMA = _signed(0x9E3779B97F4A7C15)
"""The increment of SplitMix64's counter."""
_LEFT_OUT = 0.01
"""Fraction of the variance of correlated noise in innovations that are so old that they are left out."""
_AT_ONCE = 1 << 16
"""Numbers of a layer's innovations that are made in one go."""


def _shifted(x: Tensor, bits: int) -> Tensor:
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """Return the 64 mixed bits of each int64: the finaliser of SplitMix64."""
    # In place: the numbers of a field are many, and memory that is new costs more than the arithmetic.
    x = _shifted(x, 30).bitwise_xor_(x).mul_(_signed(0xBF58476D1CE4E5B9))
    x = _shifted(x, 27).bitwise_xor_(x).mul_(_signed(0x94D049BB133111EB))
    return _shifted(x, 31).bitwise_xor_(x)


def absorb(key: Tensor, value: Tensor | int) -> Tensor:
    """Return a key that depends on `key` and on `value`, both int64."""
    return mix((key ^ value) + GAMMA)


def standard_normal(
    key_B: Tensor, shape: tuple[int, int], channels: int, dtype: torch.dtype, places: tuple[Place, Place] = WHOLE
) -> Tensor:
    """Return independent normal numbers (B, H, W, channels).

    shape: (H, W). places: of these rows and columns in the whole image; a point has the same numbers in any part of it.
    Each hash gives two numbers (Box and Muller, Ann. Math. Statist. 29, 610, 1958), from 32 bits each.
    """
    pairs, device = (channels + 1) // 2, key_B.device
    counter = (points(places, shape, device)[..., None] * pairs + torch.arange(pairs, device=device)).flatten()
    # The key comes first: torch's compiler computes with bare positions in unbounded integers.
    bits = mix((key_B[:, None] ^ counter).mul_(GAMMA)).unflatten(1, (*shape, pairs))
    radius = (bits & 0xFFFFFFFF).to(dtype).add_(0.5).mul_(2.0**-32).log_().mul_(-2).sqrt_()
    angle = _shifted(bits, 32).to(dtype).mul_(2 * math.pi * 2.0**-32)
    return torch.cat([angle.cos().mul_(radius), angle.sin_().mul_(radius)], -1)[..., :channels]


def innovation_weights(correlation: float) -> tuple[float, ...]:
    """Return the weights w_0, w_1, … of the noise of a lead, Σ_j w_j ε(lead − j), of independent normal fields ε.

    w_j is proportional to ρ^j, with ρ the correlation of the noise of successive leads, and Σ_j w_j² = 1. This is the stationary
    autoregressive process of first order, without the oldest terms, which together have 1 % of its variance; correlations differ
    by less than 0.1 from ρ^k. Since ε of negative leads is as well defined as that of others, no lead is special, and nothing
    has to be carried from lead to lead.
    """
    count = 1 if correlation == 0 else math.ceil(math.log(_LEFT_OUT) / (2 * math.log(correlation)))
    powers = [correlation**j for j in range(count)]
    size = math.hypot(*powers)
    return tuple(power / size for power in powers)


def innovations(key_B: Tensor, count: int) -> Tensor:
    """Return the keys (B, count) of the steps with the keys `key_B`, of the steps before them, and so on."""
    return key_B[:, None] - torch.arange(count, device=key_B.device) * GAMMA


def _mixed(x_BHWC: Tensor, z_BHWN: Tensor, weight: Tensor) -> Tensor:
    """Return x + x · (z A) + z B with the weight (A, B)."""
    factor, offset = nn.functional.linear(z_BHWN, weight).to(x_BHWC.dtype).chunk(2, -1)
    return x_BHWC + (x_BHWC * factor + offset)


class _Mix(torch.autograd.Function):
    """`_mixed`, which saves x and the keys of z for backward and recomputes z.

    The weight, which is small, is copied: FSDP2 frees its own where `recomputing` still needs it.
    """

    @staticmethod
    def forward(ctx: Any, x_BHWC: Tensor, key_BJ: Tensor, weight: Tensor, noise: Noise) -> Tensor:
        ctx.save_for_backward(x_BHWC, key_BJ, weight.detach().clone())
        ctx.noise = noise
        ctx.recomputed = None if ops.is_checkpointed() else []
        with outside_autocast(x_BHWC):  # as backward is
            return _mixed(x_BHWC, noise.numbers(x_BHWC, key_BJ, weight.dtype), weight)

    @staticmethod
    def backward(ctx: Any, grad_BHWC: Tensor) -> tuple[Tensor, None, Tensor, None]:
        x_BHWC, key_BJ, weight = ctx.saved_tensors
        z_BHWN = ctx.recomputed.pop() if ctx.recomputed else ctx.noise.numbers(x_BHWC, key_BJ, weight.dtype)
        factor = nn.functional.linear(z_BHWN, weight[: len(weight) // 2]).to(grad_BHWC.dtype)
        of_mixed = torch.cat([grad_BHWC * x_BHWC, grad_BHWC], -1).to(z_BHWN.dtype)
        return grad_BHWC + grad_BHWC * factor, None, of_mixed.flatten(0, -2).mT @ z_BHWN.flatten(0, -2), None


@contextmanager
def recomputing(y: Tensor) -> Iterator[None]:
    """Recompute y, an output of `Noise`, in backward where an operation in this context would save it.

    `Noise` has saved its input, so y would be a second tensor of that size. The noise that y is recomputed with is passed
    on to the backward of `Noise`, which follows.
    """
    mix: Any = y.grad_fn
    # There is no noise or no gradient, or the compiler or activation checkpointing has chosen what is saved.
    if getattr(mix, "recomputed", None) is None:
        yield
        return
    x_BHWC, key_BJ, weight = (saved.detach() for saved in mix.saved_tensors)
    noise, recomputed = mix.noise, mix.recomputed
    shape, stride, storage = y.shape, y.stride(), y.untyped_storage()._cdata
    del y, mix

    def pack(saved: Tensor) -> Tensor | Callable[[], Tensor]:
        is_y = saved.untyped_storage()._cdata == storage and saved.shape == shape and saved.stride() == stride
        return recompute if is_y else saved

    def recompute() -> Tensor:
        recomputed[:] = [noise.numbers(x_BHWC, key_BJ, weight.dtype)]
        return _mixed(x_BHWC, recomputed[0], weight)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved() if callable(saved) else saved):
        yield


class Noise(Layer):
    """x + x · (z A) + z B with normal noise z at each point, and A and B zero at first: the layer starts as the identity.

    z (B, H, W, channels) depends on the key of the sample, on the layer's `level` and on the position in the image. The
    first term lets the size of the noise depend on the flow. `correlation` is that of z in successive steps.
    """

    shard_unit = True
    gathered_ahead = False  # it is registered after the blocks of the decoder and used before each
    recompute = "never"  # backward needs nothing but the input

    def __init__(self, features: int, channels: int, scale: float, level: int, correlation: float = 0.0) -> None:
        super().__init__()
        self.channels, self.scale, self.level = channels, scale, level
        self.weights = innovation_weights(correlation)
        self.places = WHOLE
        """The rows and columns that the input has, in the whole image."""
        self.weight = nn.Parameter(torch.empty(2 * features, channels))

    def initial(self, _leaf: str, shape: tuple[int, ...], _generator: torch.Generator) -> Tensor:
        """Return zeros, with which the layer is the identity."""
        return torch.zeros(shape)

    def forward(self, x_BHWC: Tensor, key_BJ: Tensor | None = None) -> Tensor:
        """Add noise to (B, H, W, C) by the keys of each sample, `innovations`; without keys return the input."""
        if key_BJ is None:
            return x_BHWC
        # The compiler itself chooses what is saved; to trace the function, it makes an instance of it, which is deprecated.
        if torch.compiler.is_compiling():
            return _mixed(x_BHWC, self.numbers(x_BHWC, key_BJ, self.weight.dtype), self.weight)
        mixed: Tensor = _Mix.apply(x_BHWC, key_BJ, self.weight, self)
        return mixed

    def numbers(self, x_BHWC: Tensor, key_BJ: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the noise z (B, H, W, channels) at the points of x."""
        wide = torch.promote_types(x_BHWC.dtype, torch.float32)
        batch, height, width, _ = x_BHWC.shape
        # Small fields are made together, because each operation costs more than its arithmetic; large ones one after the other.
        at_once = max(1, _AT_ONCE // (batch * height * width * self.channels))
        weights, total = iter(self.weights), None
        for key_BI in absorb(key_BJ, self.level).split(at_once, 1):
            new = standard_normal(key_BI.flatten(), (height, width), self.channels, wide, self.places)
            for part in new.unflatten(0, key_BI.shape).unbind(1):
                weighted = part * next(weights)
                total = weighted if total is None else total.add_(weighted)
        assert total is not None
        return total.mul_(self.scale).to(dtype)


class NormNoise(Noise):
    """Noise of a norm, which makes its scale and shift functions of the position: norm(x) · (1 + z A) + z B."""

    shard_unit = False  # it is part of a layer that is gathered as one


class NoiseKeys(nn.Module):
    """Keys of the noise of forecasts from the times `seconds` (since 1970), one for each position of the data."""

    seconds: Tensor

    def __init__(self, seconds: NDArray[np.int64], *seed: int | str) -> None:
        super().__init__()
        self.register_buffer("seconds", torch.tensor(seconds, dtype=torch.int64), persistent=False)
        self.base = seed
        self.reseed()

    def reseed(self, *more: int | str) -> None:
        """Make all further keys a function of the seed and of these numbers and words."""
        digest = hashlib.sha256("/".join(map(str, (*self.base, *more))).encode()).digest()
        self.seed = int.from_bytes(digest[:8], "big", signed=True)

    def forward(self, index_B: Tensor, member_B: Tensor) -> Tensor:
        """Return the key (B,) of the first step of each forecast, from its initial position and its member."""
        return absorb(absorb(member_B, self.seed), self.seconds[index_B])

    @staticmethod
    def after(key_B: Tensor) -> Tensor:
        """Return the keys of the step that follows."""
        return key_B + GAMMA
