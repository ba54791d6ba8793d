"""Declarations of a layer: what to shard, what to recompute, and how to initialise its parameters.

A layer or block with declarations derives from `Layer` and sets class attributes, which `credit_like.parallel` reads.
Everything has a default, and any `nn.Module` may set the same attributes without deriving from `Layer`:

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
    """Whether FSDP2 gathers the parameters of this block and of everything inside it as one unit."""

    gathered_ahead: ClassVar[bool] = True
    """Whether the parameters of a shard unit are gathered while the unit registered before it computes.

    False suits a small unit that is not used in the order of registration.
    """

    recompute: Recompute = "forward"
    """How activation checkpointing treats a shard unit.

    "forward" reruns its forward in backward. "kernels" leaves recomputation to the layers inside if all of them have
    fused kernels, which recompute only what they need, and equals "forward" otherwise. "never" saves everything; it
    suits a block whose backward needs only its input or follows immediately.
    """

    full_precision: bool = False
    """Whether the block computes in the precision of its master weights while the rest computes in bfloat16.

    It is meant for the layers where fields enter and leave the model (see `credit_like.nn.precision`).
    """

    tensor_columns: ClassVar[tuple[str, ...]] = ()
    """Paths in the block to linear layers (or 1 x 1 convolutions) whose output features are split over tensor ranks."""

    tensor_rows: ClassVar[tuple[str, ...]] = ()
    """Paths to layers whose input features are split; their results are summed over the ranks."""

    tensor_copies: ClassVar[tuple[str, ...]] = ()
    """Paths to submodules without external input whose output all tensor ranks use, such as a position bias."""

    def initial(self, leaf: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return the initial value of the layer's own parameter `leaf`, on the CPU, drawn from `generator` alone.

        The shape is that of the whole parameter, whichever slice this rank holds. Raises UserError if a layer with
        parameters of its own neither defines this method nor is a torch layer (`initial_values.torch_default`).
        """
        return torch_default(self, leaf, shape, generator)

    def reset_buffers(self) -> None:
        """Fill the buffers that are not saved; called after the layer's memory was allocated."""


# CREDIT's models use these names for the same declarations.
_ALIASES = {
    "shard_unit": "_fsdp2_shard",
    "recompute": "_recompute",
    "tensor_columns": "_tp_col",
    "tensor_rows": "_tp_row",
    "tensor_copies": "_tp_copy",
}


def _declared(module: nn.Module, name: str) -> Any:
    """Return what a module (its class or instance) declares under this name or its alias, else the default."""
    alias = getattr(module, _ALIASES[name], None)
    return getattr(module, name, getattr(Layer, name)) if alias is None else alias


def is_shard_unit(module: nn.Module) -> bool:
    """Return whether the module declares that it is gathered as one unit."""
    return _declared(module, "shard_unit") is True


def recomputation(module: nn.Module) -> Recompute:
    """Return how activation checkpointing treats the module. Raises UserError for an unknown value."""
    value = _declared(module, "recompute")
    if isinstance(value, bool):  # `_recompute` is a boolean
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
    """Return the module's declarations for tensor parallelism; a single path may be given as a string."""

    def paths(name: str) -> tuple[str, ...]:
        value = _declared(module, name)
        return (value,) if isinstance(value, str) else tuple(value or ())

    return TensorSplit(paths("tensor_columns"), paths("tensor_rows"), paths("tensor_copies"))
