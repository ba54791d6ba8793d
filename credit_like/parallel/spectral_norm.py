"""Spectral normalisation of sharded weights: the same iteration, with each rank using its piece of W."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from credit_like.nn import spectral_norm
from credit_like.nn.spectral_norm import Member, SpectralNorm, Stack
from credit_like.parallel.shards import box, copies, local


@dataclass(frozen=True)
class _Part:
    """Rows and columns of one matrix that this rank holds; share: 1 / the number of ranks that hold the same part."""

    rows: tuple[int, int]
    columns: tuple[int, int]
    share: float
    placement: str = ""  # equal on all ranks, unlike rows and columns; layers are grouped by it


class ShardedSpectralNorm(SpectralNorm):
    """SpectralNorm of a sharded weight: u, v and 1/σ are whole on every rank; products with W are sums over ranks.

    The partial products of all layers are sent together: two all-reduces per iteration, one per refresh or correction.
    Each product is divided by the number of ranks that hold the same part.
    """

    part: _Part

    def _key(self, weight: Tensor) -> tuple[object, ...]:
        return *super()._key(weight), self._part_of(weight).placement

    def _stack(self, members: Sequence[Member]) -> Stack:
        part = self._part_of(members[0][1])
        return Stack(members, slice(*part.rows), slice(*part.columns), part.share, local)

    @classmethod
    def _totals(cls, stacks: Sequence[Stack], parts: list[Tensor], side: str) -> list[Tensor]:
        """Return sums over all ranks, with one message: (layers, length of the buffer `side`) for each stack."""
        if not parts:
            return parts
        shapes = [(len(stack.spectrals), stack.spectrals[0].get_buffer(side).numel()) for stack in stacks]
        flat = parts[0].new_zeros(sum(math.prod(shape) for shape in shapes))
        totals = [x.view(shape) for x, shape in zip(flat.split([math.prod(s) for s in shapes]), shapes, strict=True)]
        for stack, part, total in zip(stacks, parts, totals, strict=True):
            held = {"u": stack.rows, "v": stack.columns}.get(side, slice(None))
            torch.mul(part, stack.share, out=total[:, held])
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(flat)
        return totals

    def _part_of(self, weight: Tensor) -> _Part:
        """Return what this rank holds: the whole matrix while FSDP2 keeps the weight gathered."""
        return self.part if isinstance(weight, DTensor) else _part(weight, self.output_dim)


def _part(weight: Tensor, output_dim: int) -> _Part:
    """Return the position of the local shard in its matrix. Expensive for distributed tensors, hence cached."""
    held = list(box(weight))
    rows = held.pop(output_dim)
    inner = math.prod(weight.shape) // weight.shape[output_dim] // weight.shape[0 if output_dim else 1]
    placement = f"{weight.device_mesh.mesh_dim_names} {weight.placements}" if isinstance(weight, DTensor) else ""
    columns = (held[0].start * inner, held[0].stop * inner)
    return _Part((rows.start, rows.stop), columns, 1.0 / copies(weight), placement)


def shard_spectral_norms(model: nn.Module) -> None:
    """Let every layer whose weight is sharded use the sharded iteration."""
    for _, layer in spectral_norm.layers(model):
        if isinstance(layer.weight, DTensor):
            spectral = layer.spectral
            assert isinstance(spectral, SpectralNorm)
            spectral.__class__ = ShardedSpectralNorm
            spectral.__dict__["part"] = _part(layer.weight, spectral.output_dim)
