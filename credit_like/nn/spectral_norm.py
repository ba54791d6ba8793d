"""Spectral normalisation as state: W / sigma, sigma = u^T W v (Miyato et al., arXiv:1802.05957).

A normalised layer owns a `SpectralNorm` child with the singular vectors u, v of the whole matrix (fp32, saved in
checkpoints) and 1/sigma (derived, not saved). `before_step` updates u and v by one power iteration, once per optimiser
step and outside forward, so that forward is a pure function: a recomputed forward (activation checkpointing), a
compiled one and one in bfloat16 use the same sigma.

The gradient is exact. With G = dL/d(W/sigma),

    dL/dW = G/sigma - <G, W>/sigma^2 u v^T,

which the backward of the normalised weight applies if this rank holds the whole matrix (`in_backward`, the default). If
it holds only rows or columns of W, <G, W> needs a sum over ranks: such a layer sets `in_backward` to False, backward
treats sigma as a constant, and the correction is made once after backward (`correct_gradients`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from credit_like import ops
from credit_like.nn.layer import Layer

WARM_UP = 15  # power iterations for a new matrix


def _along_u(grad: Tensor, weight: Tensor, u: Tensor, factor: Tensor) -> Tensor:
    """Return -factor <g, W> u, from the derivative of sigma = u^T W v (v is applied by the caller)."""
    product = torch.dot(grad.reshape(-1).to(u.dtype), weight.reshape(-1).to(u.dtype))
    return (product * -factor * u).to(grad.dtype)


def _scaled(weight: Tensor, inv_sigma: Tensor) -> Tensor:
    """Return W/sigma, rounded once.

    A 1/sigma in bfloat16 would change all weights by the same relative error of up to 0.4 %.
    """
    wide = torch.promote_types(weight.dtype, inv_sigma.dtype)
    return (weight.to(wide) * inv_sigma).to(weight.dtype)


class _Normalised(torch.autograd.Function):
    """W/sigma; backward includes the derivative of sigma = u^T W v."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, u: Tensor, v: Tensor, inv_sigma: Tensor, output_dim: int) -> Tensor:
        ctx.save_for_backward(weight, u, v, inv_sigma)
        ctx.output_dim = output_dim
        return _scaled(weight, inv_sigma)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        weight, u, v, inv_sigma = ctx.saved_tensors
        along_u = _along_u(grad, weight, u, inv_sigma**2)
        corrected = ops.add_outer(as_matrix(grad, ctx.output_dim), inv_sigma, along_u, v.to(grad.dtype))
        return from_matrix(corrected, weight.shape, ctx.output_dim), None, None, None, None


class _GradientOfNormalised(torch.autograd.Function):
    """The identity on W; backward corrects the gradient g for the dependence of sigma on W.

    g was computed at constant sigma; with sigma = u^T W v it becomes g - <g, W>/sigma u v^T.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, u: Tensor, v: Tensor, inv_sigma: Tensor, output_dim: int) -> Tensor:
        ctx.save_for_backward(weight, u, v, inv_sigma)
        ctx.output_dim = output_dim
        return weight.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        weight, u, v, inv_sigma = ctx.saved_tensors
        along_u = _along_u(grad, weight, u, inv_sigma)
        corrected = torch.addr(as_matrix(grad, ctx.output_dim), along_u, v.to(grad.dtype))
        return from_matrix(corrected, weight.shape, ctx.output_dim), None, None, None, None


class SpectralNorm(Layer):
    """The singular vectors of one weight, and the weight divided by its largest singular value.

    u: (rows,), v: (columns,) of the weight seen as a matrix with `output_dim` as rows; inv_sigma: ().
    """

    u: Tensor
    v: Tensor
    inv_sigma: Tensor

    def __init__(self, shape: tuple[int, ...], output_dim: int = 0) -> None:
        super().__init__()
        rows = shape[output_dim]
        columns = torch.Size(shape).numel() // rows
        self.output_dim = output_dim
        self.in_backward = True
        self.register_buffer("u", torch.ones(rows) / rows**0.5)
        self.register_buffer("v", torch.ones(columns) / columns**0.5)
        self.register_buffer("inv_sigma", torch.ones(()), persistent=False)

    def forward(self, weight: Tensor) -> Tensor:
        """Return W/sigma in the shape of W."""
        if self.in_backward:
            normalised: Tensor = _Normalised.apply(weight, self.u, self.v, self.inv_sigma, self.output_dim)
            return normalised
        return _scaled(weight, self.inv_sigma)

    def weight_and_scale(self, weight: Tensor) -> tuple[Tensor, float]:
        """Return W and 1/sigma as a number, so that a kernel can apply the scale instead of materialising W/sigma.

        The gradient is that of W/sigma. For the CPU only: reading 1/sigma synchronises the device.
        """
        if self.in_backward:
            weight = _GradientOfNormalised.apply(weight, self.u, self.v, self.inv_sigma, self.output_dim)
        return weight, float(self.inv_sigma)

    def reset_buffers(self) -> None:
        """Set 1/sigma, which is not saved, to 1 until `refresh` or `before_step` computes it."""
        self.inv_sigma.fill_(1.0)

    @torch.no_grad()
    def refresh(self, weight: Tensor) -> None:
        """Compute 1/sigma of the current weight without changing u and v."""
        matrix = as_matrix(weight, self.output_dim).to(self.u.dtype)
        self.inv_sigma.copy_(1.0 / torch.dot(self.u, torch.mv(matrix, self.v)))

    @torch.no_grad()
    def iterate(self, weight: Tensor, count: int = 1) -> None:
        """Run `count` power iterations v <- norm(W^T u), u <- norm(W v), then compute 1/sigma."""
        matrix = as_matrix(weight, self.output_dim).to(self.u.dtype)
        for _ in range(count):
            self.v.copy_(nn.functional.normalize(torch.mv(matrix.t(), self.u), dim=0, eps=1e-12))
            image = torch.mv(matrix, self.v)
            self.u.copy_(nn.functional.normalize(image, dim=0, eps=1e-12))
        self.inv_sigma.copy_(1.0 / torch.dot(self.u, image))

    @classmethod
    def iterate_all(cls, members: Sequence[Member]) -> None:
        """Run `iterate` for many layers; the sharded version sends one message per product for all of them."""
        for spectral, weight in members:
            spectral.iterate(weight)

    @classmethod
    def refresh_all(cls, members: Sequence[Member]) -> None:
        """Run `refresh` for many layers."""
        for spectral, weight in members:
            spectral.refresh(weight)

    @classmethod
    @torch.no_grad()
    def correct_all(cls, members: Sequence[Member]) -> None:
        """Correct the gradients of many layers that were taken at constant sigma."""
        for spectral, weight in members:
            if spectral.in_backward or weight.grad is None:
                continue
            product = torch.dot(weight.grad.reshape(-1), weight.reshape(-1)) * spectral.inv_sigma
            outer = torch.outer(spectral.u * product, spectral.v).to(weight.grad.dtype)
            weight.grad -= from_matrix(outer, weight.shape, spectral.output_dim)


Member = tuple[SpectralNorm, Tensor]  # the state and its weight


def as_matrix(weight: Tensor, output_dim: int) -> Tensor:
    """Return the weight as a matrix (output, everything else).

    Transposed convolutions have their output in dimension 1.
    """
    return weight.movedim(output_dim, 0).flatten(1)


def from_matrix(matrix: Tensor, shape: torch.Size, output_dim: int) -> Tensor:
    """Reshape a matrix to the weight's shape, the inverse of `as_matrix`."""
    moved = [shape[output_dim], *shape[:output_dim], *shape[output_dim + 1 :]]
    return matrix.reshape(moved).movedim(0, output_dim)


def layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the name and module of every layer that normalises its `weight`."""
    for name, module in model.named_modules():
        if isinstance(getattr(module, "spectral", None), SpectralNorm):
            yield name, module


def _by_class(model: nn.Module) -> Iterator[tuple[type[SpectralNorm], list[Member]]]:
    """Yield the normalised layers grouped by class, because a class may process all of its layers at once."""
    members: dict[type[SpectralNorm], list[Member]] = {}
    for _, layer in layers(model):
        assert isinstance(layer.spectral, SpectralNorm)
        assert isinstance(layer.weight, Tensor)
        members.setdefault(type(layer.spectral), []).append((layer.spectral, layer.weight))
    yield from members.items()


def before_step(model: nn.Module) -> None:
    """Run one power iteration of every normalised weight; call it once per optimiser step, before the forwards."""
    for kind, members in _by_class(model):
        kind.iterate_all(members)


def refresh(model: nn.Module) -> None:
    """Compute 1/sigma of the current weights, as used in evaluation, without changing u and v."""
    for kind, members in _by_class(model):
        kind.refresh_all(members)


def correct_gradients(model: nn.Module) -> None:
    """Subtract <g, W>/sigma u v^T from the gradients that were taken at constant sigma (`in_backward` False)."""
    for kind, members in _by_class(model):
        kind.correct_all(members)


def after_backward(model: nn.Module) -> None:
    """Complete the gradients after backward and before clipping; does nothing if every backward was exact."""
    correct_gradients(model)
