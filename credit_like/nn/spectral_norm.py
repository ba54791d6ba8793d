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

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from credit_like import ops
from credit_like.nn.layer import Layer

WARM_UP = 15  # power iterations for a new matrix
_TOGETHER = 2**22  # values of the weights that are processed at once; larger matrices keep a GPU busy alone


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


class _NormalisedTogether(torch.autograd.Function):
    """W/sigma of several matrices, (n, rows, columns); backward includes the derivatives of sigma = u^T W v."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, u: Tensor, v: Tensor, inv_sigma: Tensor) -> Tensor:
        ctx.save_for_backward(weight, u, v, inv_sigma)
        return _scaled(weight, inv_sigma[:, None, None])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        weight, u, v, inv_sigma = ctx.saved_tensors
        wide, factor = grad.to(u.dtype), inv_sigma[:, None, None]
        along_u = (wide * weight.to(u.dtype)).sum((1, 2), keepdim=True) * factor**2 * u[:, :, None]
        return (wide * factor - along_u * v[:, None]).to(grad.dtype), None, None, None


def normalised_together(weight: Tensor, u: Tensor, v: Tensor, inv_sigma: Tensor) -> Tensor:
    """Return W/sigma of small matrices of one shape, (n, rows, columns); the gradients are those of W/sigma."""
    normalised: Tensor = _NormalisedTogether.apply(weight, u, v, inv_sigma)
    return normalised


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
    def start(self, weight: Tensor, generator: torch.Generator) -> None:
        """Draw u and run the first iterations with the whole weight, which gives the same bits in every layout."""
        u = torch.randn(self.u.shape, generator=generator)
        self.u.copy_(u / u.norm())
        SpectralNorm.iterate_all([(self, weight)], WARM_UP)

    # Kernels for single layers are too small for a GPU, which would wait for the host to launch them. Layers with weights
    # of one shape are therefore processed together, and the results are written to all layers at once.

    @classmethod
    @torch.no_grad()
    def iterate_all(cls, members: Sequence[Member], count: int = 1) -> None:
        """Run `count` power iterations v <- norm(W^T u), u <- norm(W v) of many layers, then compute 1/sigma."""
        stacks = cls._stacks(members)
        with _without_tf32():
            matrices = [stack.matrices() for stack in stacks]
            u = _joined(stacks, "u")
            for _ in range(count):
                v = cls._totals(stacks, [s.times_rows(x, m) for s, x, m in zip(stacks, u, matrices, strict=True)], "v")
                v, _ = _normalised(v)
                u = cls._totals(
                    stacks, [s.times_columns(m, x) for s, m, x in zip(stacks, matrices, v, strict=True)], "u"
                )
                u, sigma = _normalised(u)  # u = W v / |W v|, hence u^T W v = |W v|
        _write(stacks, "v", v)
        _write(stacks, "u", u)
        _write(stacks, "inv_sigma", torch._foreach_reciprocal(sigma))

    @classmethod
    @torch.no_grad()
    def refresh_all(cls, members: Sequence[Member]) -> None:
        """Compute 1/sigma of the current weights of many layers without changing u and v."""
        stacks = cls._stacks(members)
        sigma = []
        with _without_tf32():
            for stack, u, v in zip(stacks, _joined(stacks, "u"), _joined(stacks, "v"), strict=True):
                image = stack.times_columns(stack.matrices(), v)
                sigma.append(_dots(u[:, stack.rows], image))
        _write(stacks, "inv_sigma", torch._foreach_reciprocal(cls._totals(stacks, sigma, "inv_sigma")))

    @classmethod
    @torch.no_grad()
    def correct_all(cls, members: Sequence[Member]) -> None:
        """Correct the gradients of many layers that were taken at constant sigma."""
        stacks = cls._stacks([(s, w) for s, w in members if not s.in_backward and w.grad is not None])
        with _without_tf32():
            products = [_dots(stack.gradients().flatten(1), stack.matrices().flatten(1)) for stack in stacks]
            products = cls._totals(stacks, products, "inv_sigma")
            parts = zip(stacks, products, *(_joined(stacks, name) for name in ("inv_sigma", "u", "v")), strict=True)
            for stack, product, inv_sigma, u, v in parts:
                stack.subtract((u * (product * inv_sigma))[:, stack.rows], v[:, stack.columns])

    @classmethod
    def _stacks(cls, members: Sequence[Member]) -> list[Stack]:
        """Return the layers grouped by the shape of their weights, in the same order on all ranks."""
        groups: dict[object, list[Member]] = {}
        for spectral, weight in members:
            groups.setdefault(spectral._key(weight), []).append((spectral, weight))
        return [group[0][0]._stack(part) for group in groups.values() for part in portions(group)]

    def _key(self, weight: Tensor) -> tuple[object, ...]:
        """Return the key of the layers with which this one is stacked; it is the same on all ranks."""
        return weight.shape, self.output_dim, weight.dtype, self.u.dtype

    def _stack(self, members: Sequence[Member]) -> Stack:
        return Stack(members)

    @classmethod
    def _totals(cls, _stacks: Sequence[Stack], parts: list[Tensor], _side: str) -> list[Tensor]:
        """Return the sums over ranks of `parts`, (layers, rows or columns held); here each part is whole already."""
        return parts


Member = tuple[SpectralNorm, Tensor]  # the state and its weight


class NormalisedLayer(Layer):
    """A layer whose weight is divided by its spectral norm, unless `spectral` is None."""

    weight: Tensor
    spectral: SpectralNorm | None

    def effective_weight(self) -> Tensor:
        """Return the weight that is applied: W, or W/sigma."""
        return self.weight if self.spectral is None else self.spectral(self.weight)


def portions(group: Sequence[Member]) -> Iterator[Sequence[Member]]:
    """Yield parts of layers with weights of one shape, of at most `_TOGETHER` values or one weight.

    A single weight is not copied, so the memory beside the weights is bounded.
    """
    count = max(1, _TOGETHER // max(1, group[0][1].numel()))
    for start in range(0, len(group), count):
        yield group[start : start + count]


class Stack:
    """Layers with weights of one shape, and products with their matrices (layers, rows, columns).

    Each matrix is this rank's part. rows, columns: position of the part in the whole matrix; share: the factor of the
    part in sums over ranks; local: returns this rank's part of a tensor.
    """

    def __init__(
        self,
        members: Sequence[Member],
        rows: slice = slice(None),
        columns: slice = slice(None),
        share: float = 1.0,
        local: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> None:
        self.spectrals = [spectral for spectral, _ in members]
        self.weights = [weight for _, weight in members]
        self.rows, self.columns, self.share, self.local = rows, columns, share, local
        self.output_dim = self.spectrals[0].output_dim

    def matrices(self) -> Tensor:
        """Return the weights in the precision of u and v."""
        return self._stacked([self.local(weight) for weight in self.weights])

    def gradients(self) -> Tensor:
        """Return the gradients of the weights."""
        return self._stacked([self.local(w.grad) for w in self.weights if w.grad is not None])

    def _stacked(self, tensors: list[Tensor]) -> Tensor:
        together = torch.stack(tensors) if len(tensors) > 1 else tensors[0][None]
        stacked = together.movedim(1 + self.output_dim, 1).flatten(2)
        return stacked.to(self.spectrals[0].u.dtype)

    def times_rows(self, u: Tensor, matrices: Tensor) -> Tensor:
        """Return u^T W, (layers, columns held)."""
        return torch.bmm(u[:, None, self.rows], matrices)[:, 0]

    def times_columns(self, matrices: Tensor, v: Tensor) -> Tensor:
        """Return W v, (layers, rows held)."""
        return torch.bmm(matrices, v[:, self.columns, None])[..., 0]

    def subtract(self, u: Tensor, v: Tensor) -> None:
        """Subtract u v^T from the gradients."""
        gradients = [self.local(w.grad) for w in self.weights if w.grad is not None]
        outer = torch.bmm(u[:, :, None], v[:, None]).to(gradients[0].dtype)
        shape = gradients[0].shape
        torch._foreach_sub_(gradients, [from_matrix(matrix, shape, self.output_dim) for matrix in outer.unbind()])


def _joined(stacks: Sequence[Stack], name: str) -> list[Tensor]:
    """Return one buffer of all layers, as (layers, length) for each stack."""
    states = [[spectral.get_buffer(name) for spectral in stack.spectrals] for stack in stacks]
    if not states:
        return []
    flat = torch.cat([x.reshape(-1) for group in states for x in group])
    sizes = [len(group) * group[0].numel() for group in states]
    return [x.view(len(group), -1) for x, group in zip(flat.split(sizes), states, strict=True)]


def _write(stacks: Sequence[Stack], name: str, values: Sequence[Tensor]) -> None:
    """Set one buffer of all layers from (layers, length) for each stack."""
    states = [spectral.get_buffer(name) for stack in stacks for spectral in stack.spectrals]
    rows = [row.view(state.shape) for row, state in zip((r for x in values for r in x.unbind()), states, strict=True)]
    if states:
        torch._foreach_copy_(states, rows)


def _normalised(vectors: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the rows divided by their norms, and the norms, (layers, 1), at least 1e-12."""
    lengths = [torch.linalg.vector_norm(x, dim=1, keepdim=True) for x in vectors]
    if lengths:
        torch._foreach_clamp_min_(lengths, 1e-12)
    return [x / length for x, length in zip(vectors, lengths, strict=True)], lengths


def _dots(x: Tensor, y: Tensor) -> Tensor:
    """Return the dot products of the rows, (layers, 1)."""
    return torch.bmm(x[:, None], y[:, :, None])[..., 0]


@contextmanager
def _without_tf32() -> Iterator[None]:
    """Compute matrix products in full precision: an error of 0.1 % in sigma would affect all outputs of a layer."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


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


def _by_class(model: nn.Module, trained: bool = False) -> Iterator[tuple[type[SpectralNorm], list[Member]]]:
    """Yield the normalised layers (with `trained`, those whose weights are not frozen) grouped by class.

    A class may process all of its layers at once.
    """
    members: dict[type[SpectralNorm], list[Member]] = {}
    for _, layer in layers(model):
        assert isinstance(layer.spectral, SpectralNorm)
        assert isinstance(layer.weight, Tensor)
        if trained and not layer.weight.requires_grad:
            continue
        members.setdefault(type(layer.spectral), []).append((layer.spectral, layer.weight))
    yield from members.items()


def before_step(model: nn.Module) -> None:
    """Run one power iteration of every normalised weight; call it once per optimiser step, before the forwards.

    Frozen weights keep their sigma, so that the function of a frozen layer does not change.
    """
    for kind, members in _by_class(model, trained=True):
        kind.iterate_all(members)


def refresh(model: nn.Module) -> None:
    """Compute 1/sigma of the current weights, as used in evaluation, without changing u and v."""
    for kind, members in _by_class(model):
        kind.refresh_all(members)


def correct_gradients(model: nn.Module) -> None:
    """Subtract <g, W>/sigma u v^T from the gradients that were taken at constant sigma (`in_backward` False).

    It is called after backward and before clipping, and does nothing if every backward was exact.
    """
    for kind, members in _by_class(model):
        kind.correct_all(members)
