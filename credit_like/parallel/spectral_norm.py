"""Spectral normalisation of sharded weights: the same iteration, with each rank using its piece of W."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from credit_like.nn import spectral_norm
from credit_like.nn.spectral_norm import Member, SpectralNorm, as_matrix, from_matrix
from credit_like.parallel.shards import box, copies, local


class ShardedSpectralNorm(SpectralNorm):
    """SpectralNorm of a sharded weight: u, v and 1/σ are whole on every rank; products with W are sums over ranks.

    The partial products of all layers are sent together: two all-reduces per iteration, one per refresh or correction.
    Each product is divided by the number of ranks that hold the same piece.
    """

    @classmethod
    @torch.no_grad()
    def iterate_all(cls, members: Sequence[Member], count: int = 1) -> None:
        """Run v ← norm(Wᵀu), u ← norm(Wv), σ = uᵀWv for all layers."""
        pieces = [_Piece(spectral, weight) for spectral, weight in members]
        for _ in range(count):
            for piece, v in zip(pieces, _summed([p.transposed_product() for p in pieces]), strict=True):
                piece.spectral.v.copy_(nn.functional.normalize(v, dim=0, eps=1e-12))
            for piece, wv in zip(pieces, _summed([p.product() for p in pieces]), strict=True):
                piece.spectral.u.copy_(nn.functional.normalize(wv, dim=0, eps=1e-12))
                piece.spectral.inv_sigma.copy_(1.0 / torch.dot(piece.spectral.u, wv))

    @classmethod
    @torch.no_grad()
    def refresh_all(cls, members: Sequence[Member]) -> None:
        """Compute 1/σ of the current weights without changing u and v."""
        pieces = [_Piece(spectral, weight) for spectral, weight in members]
        for piece, sigma in zip(pieces, _summed([p.sigma() for p in pieces]), strict=True):
            piece.spectral.inv_sigma.copy_(1.0 / sigma[0])

    @classmethod
    @torch.no_grad()
    def correct_all(cls, members: Sequence[Member]) -> None:
        """Subtract ⟨g, W⟩/σ u vᵀ from the gradients that were taken at constant σ."""
        pieces = [_Piece(s, w) for s, w in members if not s.in_backward and w.grad is not None]
        if not pieces:
            return
        for piece, product in zip(pieces, _summed([p.gradient_product() for p in pieces]), strict=True):
            piece.correct(product[0])

    def iterate(self, weight: Tensor, count: int = 1) -> None:
        self.iterate_all([(self, weight)], count)

    def refresh(self, weight: Tensor) -> None:
        self.refresh_all([(self, weight)])


class _Piece:
    """The rows and columns of one matrix that this rank holds."""

    def __init__(self, spectral: SpectralNorm, weight: Tensor) -> None:
        self.spectral, self.weight = spectral, weight
        held = list(box(weight))
        self.rows = held.pop(spectral.output_dim)
        inner = math.prod(weight.shape) // weight.shape[spectral.output_dim]
        inner //= weight.shape[0 if spectral.output_dim else 1]
        self.columns = slice(held[0].start * inner, held[0].stop * inner)
        self.matrix = as_matrix(local(weight), spectral.output_dim).to(spectral.u.dtype)
        self.share = 1.0 / copies(weight)

    def transposed_product(self) -> Tensor:
        """Return this rank's part of Wᵀu."""
        result = torch.zeros_like(self.spectral.v)
        result[self.columns] = torch.mv(self.matrix.t(), self.spectral.u[self.rows]) * self.share
        return result

    def product(self) -> Tensor:
        """Return this rank's part of Wv."""
        result = torch.zeros_like(self.spectral.u)
        result[self.rows] = torch.mv(self.matrix, self.spectral.v[self.columns]) * self.share
        return result

    def sigma(self) -> Tensor:
        """Return this rank's part of uᵀWv, (1,)."""
        wv = torch.mv(self.matrix, self.spectral.v[self.columns])
        return (torch.dot(self.spectral.u[self.rows], wv) * self.share)[None]

    def _gradient(self) -> Tensor:
        assert self.weight.grad is not None
        return local(self.weight.grad)

    def gradient_product(self) -> Tensor:
        """Return this rank's part of ⟨g, W⟩, (1,)."""
        gradient = as_matrix(self._gradient(), self.spectral.output_dim).to(self.matrix.dtype)
        return ((gradient * self.matrix).sum() * self.share)[None]

    def correct(self, product: Tensor) -> None:
        """Apply g ← g − ⟨g, W⟩/σ u vᵀ to the local piece."""
        gradient = self._gradient()
        scale = product * self.spectral.inv_sigma
        outer = torch.outer(self.spectral.u[self.rows] * scale, self.spectral.v[self.columns])
        gradient -= from_matrix(outer.to(gradient.dtype), gradient.shape, self.spectral.output_dim)


def _summed(parts: list[Tensor]) -> list[Tensor]:
    """Return the sums over all ranks, with one message."""
    flat = torch.cat(parts)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(flat)
    return list(flat.split([part.numel() for part in parts]))


def shard_spectral_norms(model: nn.Module) -> None:
    """Let every layer whose weight is sharded use the sharded iteration."""
    for _, layer in spectral_norm.layers(model):
        if isinstance(layer.weight, DTensor):
            layer.spectral.__class__ = ShardedSpectralNorm
