"""Tensor parallelism: pairs of layers whose hidden features are split over ranks.

    x ── copy ──► column layer (some outputs) ── local work ──► row layer (some inputs) ── sum ──► + bias

Forward communicates once, in the sum after the row layer; backward communicates once, in the sum of gradients at the
copy. Tensor ranks have the same samples and the same loss.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from credit_like.errors import UserError
from credit_like.nn.layer import TensorSplit, tensor_split
from credit_like.nn.linear import Lora
from credit_like.parallel.collectives import copy_to_region, reduce_from_region


def to_local(x: Tensor) -> Tensor:
    """Return this rank's part of a sharded parameter, differentiable."""
    return x.to_local() if isinstance(x, DTensor) else x


class _Split(nn.Module):
    """A linear map or 1 × 1 convolution of which each rank holds some rows or columns."""

    _tp_group: ProcessGroup
    weight: Tensor
    bias: Tensor | None

    def effective_weight(self) -> Tensor:
        """Return the local part of W, or of W/σ with the σ of the whole matrix."""
        weight, spectral = to_local(self.weight), getattr(self, "spectral", None)
        weight = weight if spectral is None else spectral(weight)
        lora = getattr(self, "lora", None)
        return weight if lora is None else weight + lora()

    def _map(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if isinstance(self, nn.Conv2d):
            return nn.functional.conv2d(x, self.effective_weight(), bias)
        return nn.functional.linear(x, self.effective_weight(), bias)


class ColumnParallel(_Split):
    """A layer of which each rank computes some of the output features, with their bias."""

    def forward(self, x: Tensor) -> Tensor:
        """Map all input features to this rank's output features."""
        bias = None if self.bias is None else to_local(self.bias)
        return self._map(copy_to_region(x, self._tp_group), bias)


class RowParallel(_Split):
    """A layer of which each rank uses some of the input features; results are summed, then the bias is added once."""

    def forward(self, x: Tensor) -> Tensor:
        """Map this rank's input features to all output features."""
        y = reduce_from_region(self._map(x, None), self._tp_group)
        if self.bias is None:
            return y
        return y + (self.bias[:, None, None] if isinstance(self, nn.Conv2d) else self.bias)


class _ColumnLora(Lora):
    """The change of this rank's output features: its rows of `up`, and `down`, which all ranks have."""

    _tp_group: ProcessGroup

    def forward(self) -> Tensor:
        """Return this rank's rows of the change."""
        return self.scale * (to_local(self.up) @ copy_to_region(self.down, self._tp_group))


class _RowLora(Lora):
    """The change of the weights of this rank's input features: its columns of `down`, and `up`, which all ranks have."""

    _tp_group: ProcessGroup

    def forward(self) -> Tensor:
        """Return this rank's columns of the change."""
        return self.scale * (copy_to_region(self.up, self._tp_group) @ to_local(self.down))


@cache
def _twin(role: type[_Split], serial: type[nn.Module]) -> type[nn.Module]:
    """Return the split version of a layer's class, which keeps the parameters, names and initial values."""
    return type(f"{role.__name__}{serial.__name__}", (role, serial), {})


class _CopyOutput:
    """A forward hook: the output of this submodule, shared by all ranks, enters computations split over them."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def __call__(self, _module: nn.Module, _args: tuple[Any, ...], output: Tensor) -> Tensor:
        return copy_to_region(output, self.group)

    def __deepcopy__(self, memo: dict[int, Any]) -> _CopyOutput:
        return self


def apply_tensor_parallel(model: nn.Module, tp_mesh: DeviceMesh) -> nn.Module:
    """Split, in place, every block that declares `tensor_columns` and `tensor_rows` (see `credit_like.nn.layer`).

    Both are one or several dotted paths inside the block, to layers of type nn.Linear or 1 × 1 nn.Conv2d. Rows of a
    fused qkv weight must be ordered by head first. Raises UserError with the name of the block for other layers, and
    for heads or features that the degree does not divide, with the degrees that work. Apply it before `apply_fsdp2`.
    """
    degree = tp_mesh.size()
    blocks = [(name, block, split) for name, block in model.named_modules() if (split := tensor_split(block))]
    for name, block, split in blocks:
        _check(name, block, split, degree)
    for _, block, split in blocks:
        for path in split.columns:
            _split(block.get_submodule(path), ColumnParallel, tp_mesh, 0)
        for path in split.rows:
            _split(block.get_submodule(path), RowParallel, tp_mesh, 1)
        for path in split.copies:
            if getattr(block, path, None) is not None:
                block.get_submodule(path).register_forward_hook(_CopyOutput(tp_mesh.get_group()))
    return model


def _check(name: str, block: nn.Module, split: TensorSplit, degree: int) -> None:
    """Raise UserError if this block cannot be split."""
    where = f"trainer.parallelism.tensor {degree}: {name or 'the model'} ({type(block).__name__})"
    counts = {}
    for path in (*split.columns, *split.rows):
        layer = block.get_submodule(path)
        plain_conv = isinstance(layer, nn.Conv2d) and set(layer.kernel_size) == {1} and layer.groups == 1
        if not (isinstance(layer, nn.Linear) or plain_conv):
            raise UserError(f"{where}: expected nn.Linear or a 1 × 1 nn.Conv2d at {path}, got {type(layer).__name__}")
        assert isinstance(layer.weight, Tensor)
        counts[path] = layer.weight.shape[0 if path in split.columns else 1]
    heads = _heads(block, split, counts)
    for what, count in {
        **({"heads": heads} if heads else {}),
        **{f"features of {p}": n for p, n in counts.items()},
    }.items():
        if count % degree:
            works = ", ".join(str(d) for d in range(1, count + 1) if count % d == 0)
            raise UserError(
                f"{where}: expected a degree that divides its number of {what}, {count}, got {degree}; degrees that work: "
                f"{works}"
            )


def _heads(block: nn.Module, split: TensorSplit, counts: dict[str, int]) -> int:
    """Return the number of heads of an attention block, 0 for any other block."""
    for key in ("heads", "num_heads"):
        if isinstance(getattr(block, key, None), int):
            return int(getattr(block, key))
    dim_head = getattr(block, "dim_head", None)
    return counts[split.rows[0]] // int(dim_head) if dim_head and split.rows else 0


def _split(layer: nn.Module, role: type[_Split], mesh: DeviceMesh, dim: int) -> None:
    """Replace the weight (and a column layer's bias) by this rank's part of it."""
    layer.__class__ = _twin(role, type(layer))  # type: ignore[arg-type]
    layer.__dict__["_tp_group"] = mesh.get_group()
    names = ["weight"] if role is RowParallel or layer.bias is None else ["weight", "bias"]
    parts = [(layer, name) for name in names]
    if isinstance(lora := getattr(layer, "lora", None), Lora):
        lora.__class__ = _RowLora if role is RowParallel else _ColumnLora
        lora.__dict__["_tp_group"] = mesh.get_group()
        parts.append((lora, "down" if role is RowParallel else "up"))
    for owner, name in parts:
        parameter = getattr(owner, name)
        sharded = distribute_tensor(parameter.detach(), mesh, [Shard(dim)], src_data_rank=None)
        setattr(owner, name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))
    if role is ColumnParallel:
        count = to_local(layer.get_parameter("weight")).shape[0]
        first = mesh.get_local_rank() * count
        layer.__dict__["outputs"] = range(first, first + count)
    spectral = getattr(layer, "spectral", None)
    if spectral is not None:
        spectral.in_backward = False
