"""Put the sharded twin of every space-mixing layer in place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from credit_like.errors import UserError
from credit_like.nn import attention, conv, cross_embed, feed_forward, norms, padding, resize, spectral_norm
from credit_like.parallel.domain import partition
from credit_like.parallel.domain.attention import DomainLongAttention, DomainShortAttention
from credit_like.parallel.domain.conv import DomainConv2d, DomainConvTranspose2d
from credit_like.parallel.domain.cross_embed import DomainCrossEmbed
from credit_like.parallel.domain.manager import DomainManager
from credit_like.parallel.domain.norms import DomainGroupNorm
from credit_like.parallel.domain.padding import DomainPad, DomainUnpad
from credit_like.parallel.domain.partition import Level
from credit_like.parallel.domain.resize import DomainBilinearResize
from credit_like.parallel.domain.twin import Twin

TWINS: dict[type[nn.Module], type[Twin]] = {
    padding.Pad: DomainPad,
    padding.Unpad: DomainUnpad,
    conv.Conv2d: DomainConv2d,
    conv.ConvTranspose2d: DomainConvTranspose2d,
    cross_embed.CrossEmbed: DomainCrossEmbed,
    attention.ShortAttention: DomainShortAttention,
    attention.LongAttention: DomainLongAttention,
    norms.GroupNorm: DomainGroupNorm,
    resize.BilinearResize: DomainBilinearResize,
}
# Layers whose output at a point depends on that point alone, or on no point at all.
POINTWISE: tuple[type[nn.Module], ...] = (
    nn.Linear,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.Identity,
    nn.Dropout,
    nn.GELU,
    nn.SiLU,
    nn.ReLU,
    nn.LeakyReLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.Softplus,
    nn.Embedding,
    norms.ChannelNorm,
    feed_forward.FeedForward,
    attention.PositionBias,
    cross_embed.Branch,
    spectral_norm.SpectralNorm,
)
# Operations that mix points when a composite module calls them by itself.
_MIXING = (
    "convolution",
    "roll",
    "flip",
    "upsample",
    "pool",
    "native_group_norm",
    "native_batch_norm",
    "reflection_pad",
    "replication_pad",
    "constant_pad",
    "pixel_shuffle",
    "pixel_unshuffle",
    "im2col",
    "col2im",
    "grid_sampler",
    "_fft",
    "cumsum",
)


def is_pointwise(module: nn.Module) -> bool:
    """Whether a layer works on rows independently: known ones, 1 × 1 convolutions, and classes that say `_pointwise`."""
    if isinstance(module, POINTWISE) or getattr(type(module), "_pointwise", False):
        return True
    if isinstance(module, nn.Conv2d):
        return set(module.kernel_size) == {1} and set(module.stride) == {1} and set(module.padding) <= {0}
    container = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential | nn.ParameterList)
    own = any(True for _ in module.parameters(recurse=False))
    composite = any(True for _ in module.children()) and not own and not type(module).__module__.startswith("torch.nn")
    return container or composite


def check_twins(model: nn.Module) -> None:
    """Raise UserError that names every layer that has neither a twin nor independent rows."""
    missing = [
        f"{name or 'the model itself'} ({type(module).__module__}.{type(module).__qualname__})"
        for name, module in model.named_modules()
        if type(module) not in TWINS and not isinstance(module, Twin) and not is_pointwise(module)
    ]
    if missing:
        raise UserError(
            "trainer.parallelism.domain: expected layers with a sharded twin, got " + "; ".join(missing) + ". "
            "Use the layers of credit_like.nn, or set `_pointwise = True` on a class whose rows are independent"
        )


class _Watch(TorchDispatchMode):
    """Refuses operations that mix points outside a layer that has a twin."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: list[nn.Module] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func.__name__.split(".")[0]
        if not self.inside and any(name.startswith(op) or (op in name and op == "pool") for op in _MIXING):
            is_one_by_one = name == "convolution" and tuple(args[1].shape[2:]) == (1,) * (args[1].ndim - 2)
            if not is_one_by_one:
                raise UserError(
                    f"trainer.parallelism.domain: the model calls {name} outside the layers of credit_like.nn; "
                    "rows of other ranks would be missing there"
                )
        return func(*args, **(kwargs or {}))


@contextmanager
def _hooks(model: nn.Module, watch: _Watch, calls: dict[nn.Module, tuple[int, int, int]]) -> Iterator[None]:
    """Record (height in, height out, width in) of every layer that has a twin."""

    def enter(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        watch.inside.append(module)

    def leave(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        watch.inside.pop()
        dim = TWINS[type(module)].row_dim
        sizes = (args[0].shape[dim], out.shape[dim], args[0].shape[dim + 1])
        if calls.setdefault(module, sizes) != sizes:
            raise UserError(
                f"{type(module).__name__} is used at two sizes, {calls[module]} and {sizes}; use one layer for each"
            )

    handles = []
    for module in model.modules():
        if type(module) in TWINS:
            handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def trace_heights(model: nn.Module) -> dict[nn.Module, tuple[int, int, int]]:
    """(height in, height out, width in) of every layer that has a twin, from a forward of shapes alone.

    The model tells its input by `in_channels`, `frames`, `height`, `width`.
    """
    missing = [key for key in ("in_channels", "frames", "height", "width") if not hasattr(model, key)]
    if missing:
        raise UserError(
            f"{type(model).__name__}: expected attributes in_channels, frames, height and width for domain parallelism; "
            f"it has no {', '.join(missing)}"
        )
    shape = tuple(int(n) for n in (1, *(getattr(model, name) for name in ("in_channels", "frames", "height", "width"))))
    tensors = {
        name: torch.empty(value.shape, dtype=value.dtype, device="meta")
        for name, value in (*model.named_parameters(), *model.named_buffers())
    }
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    watch, calls = _Watch(), {}  # type: ignore[var-annotated]
    with _hooks(model, watch, calls), watch:
        torch.func.functional_call(model, tensors, (torch.empty(shape, dtype=dtype, device="meta"),))
    return calls


def image_size(model: nn.Module) -> tuple[int, int]:
    """(rows, columns) of the image that the model was built for."""
    height, width = getattr(model, "height", None), getattr(model, "width", None)
    assert isinstance(height, int)
    assert isinstance(width, int)
    return height, width


def domain_levels(model: nn.Module, calls: dict[nn.Module, tuple[int, int, int]]) -> dict[int, Level]:
    """Every height in the model with what its layers ask of the bands there."""
    found = [Level(image_size(model)[0], why="the image")]
    for module, (height_in, height_out, _) in calls.items():
        found += [Level(height_in), Level(height_out)]
        found += TWINS[type(module)].levels(module, height_in, height_out)  # type: ignore[arg-type]
    return partition.merge(found)


def apply_domain_parallel(model: nn.Module, domain_mesh: DeviceMesh) -> nn.Module:
    """Make the model map this rank's rows (B, C, T, h, W) to this rank's rows, with the numbers of the whole.

    In place: every space-mixing layer becomes its twin; the manager with the bands of every level is attached
    (`get_domain_manager`). Apply it before sharding parameters over data ranks. Raises UserError, on all ranks, for a layer
    without a twin (named) and for a degree that leaves a rank without rows (with the degrees that work).
    """
    check_twins(model)
    calls = trace_heights(model)
    manager = DomainManager(domain_mesh, domain_levels(model, calls), *image_size(model))
    unused = [name for name, module in model.named_modules() if type(module) in TWINS and module not in calls]
    if unused:
        raise UserError(f"trainer.parallelism.domain: the forward never calls {', '.join(unused)}; remove these layers")
    for module, sizes in calls.items():
        module.__class__ = TWINS[type(module)]
        assert isinstance(module, Twin)
        module.bind(manager, *sizes)
    model._domain_manager = manager  # type: ignore[assignment]
    return model
