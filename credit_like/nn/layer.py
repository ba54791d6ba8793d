"""What a layer declares about itself: what to shard, what to recompute, and what it starts with.

A layer or block that has something to declare derives from `Layer` and sets class attributes; `credit_like.parallel` reads
them. Everything has a default, and any `nn.Module` may set the same attributes without deriving from `Layer`:

    class Mixer(Layer):
        shard_unit = True                 # gathered as one unit by FSDP2, and recomputed as one in backward
        tensor_columns = ("expand",)      # this layer's output features are split over tensor ranks …
        tensor_rows = ("contract",)       # … and this one's input features, after which the ranks' results are summed

        def __init__(self, dim):
            super().__init__()
            self.scale = nn.Parameter(torch.empty(dim))
            self.expand, self.contract = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

        def initial(self, leaf, shape, generator):      # of its own parameters; torch's layers start as torch has them
            return torch.ones(shape)

        def forward(self, x): ...

A layer that mixes rows of latitude also needs a version for domain parallelism in `credit_like.parallel.domain`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from credit_like.errors import UserError
from credit_like.nn.initial_values import torch_default

Recompute = Literal["forward", "kernels", "never"]
_RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)


class Layer(nn.Module):
    """A module with declarations for parallelism and initialisation."""

    shard_unit: ClassVar[bool] = False
    """Whether FSDP2 gathers the parameters of this block, with everything inside, as one unit."""

    recompute: ClassVar[Recompute] = "forward"
    """What activation checkpointing does with a shard unit: "forward" runs its forward again in backward; "kernels" leaves it
    to the layers inside where all of these have fused kernels, which recompute what they need, and is "forward" elsewhere;
    "never" saves everything, for a block whose backward needs its input alone or follows at once."""

    full_precision: bool = False
    """Whether the block computes in the precision of its master weights where the rest computes in bfloat16: for the
    layers at which fields enter and leave the model (see `credit_like.nn.precision`)."""

    tensor_columns: ClassVar[tuple[str, ...]] = ()
    """Paths inside the block to linear layers (or 1 x 1 convolutions) of which each tensor rank has some output features."""

    tensor_rows: ClassVar[tuple[str, ...]] = ()
    """Paths to layers of which each tensor rank has some input features; their results are summed over the ranks."""

    tensor_copies: ClassVar[tuple[str, ...]] = ()
    """Paths to submodules without input from outside whose output all tensor ranks use, such as a position bias."""

    def initial(self, leaf: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return the initial value of the layer's own parameter `leaf`, on the CPU, drawn from `generator` alone.

        The shape is that of the whole parameter whatever this rank holds of it. Raises UserError where a layer with
        parameters of its own neither defines this nor is one of torch's layers (`initial_values.torch_default`).
        """
        return torch_default(self, leaf, shape, generator)

    def reset_buffers(self) -> None:
        """Fill the buffers that are not saved; called once the layer has memory."""


# The names by which CREDIT's models declare the same.
_ALIASES = {
    "shard_unit": "_fsdp2_shard",
    "recompute": "_recompute",
    "tensor_columns": "_tp_col",
    "tensor_rows": "_tp_row",
    "tensor_copies": "_tp_copy",
}


def _declared(module: nn.Module, name: str) -> Any:
    """Return what a module, its class or its instance, declares under this name or its alias; else the default."""
    alias = getattr(module, _ALIASES[name], None)
    return getattr(module, name, getattr(Layer, name)) if alias is None else alias


def is_shard_unit(module: nn.Module) -> bool:
    """Return whether the module declares that it is gathered as a unit."""
    return _declared(module, "shard_unit") is True


def recomputation(module: nn.Module) -> Recompute:
    """Return what activation checkpointing does with the module. Raises UserError for a value that is none of these."""
    value = _declared(module, "recompute")
    if isinstance(value, bool):  # as `_recompute` is
        return "forward" if value else "never"
    if value not in _RECOMPUTE:
        raise UserError(f"{type(module).__name__}.recompute: expected one of {', '.join(_RECOMPUTE)}, got {value!r}")
    choice: Recompute = value
    return choice


@dataclass(frozen=True)
class TensorSplit:
    """The layers of a block that tensor parallelism splits, as paths inside it; see `Layer`."""

    columns: tuple[str, ...]
    rows: tuple[str, ...]
    copies: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.columns or self.rows)


def tensor_split(module: nn.Module) -> TensorSplit:
    """Return what the module declares for tensor parallelism; a single path may be given as a string."""

    def paths(name: str) -> tuple[str, ...]:
        value = _declared(module, name)
        return (value,) if isinstance(value, str) else tuple(value or ())

    return TensorSplit(paths("tensor_columns"), paths("tensor_rows"), paths("tensor_copies"))
