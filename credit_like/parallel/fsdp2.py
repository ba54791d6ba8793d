"""FSDP2: parameters, gradients and optimiser state sharded over data ranks (and over domain ranks, if any)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from credit_like import ops
from credit_like.errors import UserError
from credit_like.nn import spectral_norm
from credit_like.nn.attention import PositionTables
from credit_like.nn.layer import is_shard_unit, recomputation
from credit_like.nn.precision import keeps_full_precision
from credit_like.parallel.foreign import is_foreign
from credit_like.parallel.mesh import default_mesh
from credit_like.parallel.shards import local, slice_like, whole
from credit_like.parallel.unwrap import canonical_name, named_parameters

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


_has_fsdp2_shard = is_shard_unit  # the name in the public contract


def _is_shardable(module: nn.Module, ac_enabled: bool) -> bool:
    """Return whether a module becomes a unit.

    With activation checkpointing the wrapper is the unit, and the module inside it is not one as well.
    """
    if isinstance(module, CheckpointWrapper):
        return ac_enabled and _has_fsdp2_shard(module._checkpoint_wrapped_module)
    return _has_fsdp2_shard(module) and not (ac_enabled and _recomputes(module))


def _recomputes(module: nn.Module) -> bool:
    """Return whether activation checkpointing applies to a block."""
    return recomputation(module) != "never"


class _Recomputed(CheckpointWrapper):
    """Activation checkpointing for one block.

    Blocks with fused kernels recompute only what their own backward needs; all others rerun the whole forward.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__(block)
        self._in_kernels = recomputation(block) == "kernels"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        block = self._checkpoint_wrapped_module
        if self._in_kernels and ops.recomputes_itself(block, args[0]):
            with ops.recompute_in_block():
                return block(*args, **kwargs)
        return super().forward(*args, **kwargs)


def _apply_activation_checkpointing(model: nn.Module) -> None:
    """Recompute the shard units in backward (non-reentrant); apply it before sharding."""
    for parent in list(model.modules()):
        if isinstance(parent, CheckpointWrapper):
            continue
        for name, child in parent.named_children():
            if _has_fsdp2_shard(child) and _recomputes(child) and not isinstance(child, CheckpointWrapper):
                setattr(parent, name, _Recomputed(child))


def shard_units(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that are gathered one at a time, in order of registration, which is that of forward."""
    ac_enabled = any(isinstance(m, CheckpointWrapper) for m in model.modules())
    for module in model.modules():
        if module is not model and _is_shardable(module, ac_enabled):
            yield module


def _block(unit: nn.Module) -> nn.Module:
    """Return the block that declares how a unit is treated: the one inside activation checkpointing."""
    return unit._checkpoint_wrapped_module if isinstance(unit, CheckpointWrapper) else unit


def _gathered_ahead(unit: nn.Module) -> bool:
    """Return whether units are used in the order of their registration."""
    return getattr(_block(unit), "gathered_ahead", True)


def _has_own_parameters(model: nn.Module, units: list[nn.Module]) -> bool:
    """Return whether there are parameters outside the units."""
    of_units = {p for unit in units for p in unit.parameters()}
    return any(p not in of_units for p in model.parameters())


def _trainer(conf: Any) -> dict[str, Any]:
    """Return the trainer block of an experiment, given as a mapping or as the schema's sections."""
    conf = conf.model_dump() if hasattr(conf, "model_dump") else conf
    trainer = conf.get("trainer", conf)
    return dict(trainer.model_dump() if hasattr(trainer, "model_dump") else trainer)


def _build_mp_policy(conf: Any) -> MixedPrecisionPolicy | None:
    """Return FSDP2's precision policy for computation and reduction; None for fp32 throughout.

    It is None unless `trainer.amp`; then it is `trainer.fsdp2_mp_policy`, by default bf16 parameters and fp32
    reduction. `output_dtype` applies to the outermost module only (see `apply_fsdp2`).
    """
    trainer = _trainer(conf)
    if not trainer.get("amp", False):
        return None
    explicit = trainer.get("fsdp2_mp_policy") or {}
    return MixedPrecisionPolicy(
        param_dtype=_DTYPES[explicit.get("param_dtype", "bfloat16")],
        reduce_dtype=_DTYPES[explicit.get("reduce_dtype", "float32")],
        output_dtype=_DTYPES[explicit.get("output_dtype", "float32")],
    )


def _fix_spectral_norm_dtype(model: nn.Module) -> None:
    """Store u, v and 1/σ in fp32, or in fp64 for fp64 weights, regardless of the precision in which the layers compute.

    The state is updated outside forward, from the sharded master weights; forward casts 1/σ to the dtype of the weight.
    """
    for _, layer in spectral_norm.layers(model):
        weight = layer.weight
        assert isinstance(weight, Tensor)
        wide = torch.promote_types(weight.dtype, torch.float32)
        for name, buffer in layer.spectral.named_buffers():  # type: ignore[union-attr]
            if buffer.dtype != wide:
                setattr(layer.spectral, name, buffer.to(wide))


class _OwnTensor(torch.autograd.Function):
    """The identity, without a copy, but with an output that autograd does not regard as a view of the input."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        return grad


def no_view(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
    """Replace an output that is a view; a forward hook.

    FSDP2 registers its backward hook on the unit's output, which therefore must not be a view (a permutation).
    """
    return _OwnTensor.apply(output) if isinstance(output, Tensor) and output._base is not None else output


def apply_fsdp2(
    model: nn.Module, dp_mesh: DeviceMesh | None, conf: Any, ignored_params: set[nn.Parameter] | None = None
) -> nn.Module:
    """Shard the model, in place, over a 1-D mesh, or over dimension 1 of a 2-D mesh and replicate it over dimension 0.

    Units: every block that is a `shard_unit`, then the remaining parameters. Each unit prefetches the next one while it
    computes. Gradients are averaged over the mesh. Units that declare `full_precision` are excluded from the precision
    policy. `conf`: the experiment, or its trainer block with `amp`, `fsdp2_mp_policy`, `fsdp2_reshard_after_forward`
    (False keeps parameters gathered between forward and backward, so that only gradients and optimiser state are
    sharded) and `fsdp2_cpu_offload`. `ignored_params` are not sharded. The model is unchanged on a mesh of one rank.
    Without a mesh (None) all ranks form one data-parallel mesh; with one process nothing happens.
    """
    dp_mesh = dp_mesh or default_mesh()
    if dp_mesh is None or dp_mesh.size() == 1 or not any(True for _ in model.parameters()):
        return model
    trainer = _trainer(conf)
    policy = _build_mp_policy(conf)
    pinned = dp_mesh.device_type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=pinned) if trainer.get("fsdp2_cpu_offload", False) else OffloadPolicy()
    options: dict[str, Any] = {
        "mesh": dp_mesh,
        "reshard_after_forward": trainer.get("fsdp2_reshard_after_forward", True),
        "offload_policy": offload,
        "ignored_params": ignored_params,
    }
    units = list(shard_units(model))
    for module in model.modules():
        if isinstance(module, PositionTables):
            module.together = False
    inner = outer = full = MixedPrecisionPolicy()
    if policy is not None:
        inner = MixedPrecisionPolicy(param_dtype=policy.param_dtype, reduce_dtype=policy.reduce_dtype)
        full = MixedPrecisionPolicy(reduce_dtype=policy.reduce_dtype)
        # The model's input is passed to its first unit without a cast, because that unit may keep full precision.
        outer = dataclasses.replace(policy, cast_forward_inputs=_has_own_parameters(model, units))
        _fix_spectral_norm_dtype(model)
    _refuse_unshardable(model, units)
    may_use_parts = any(map(is_foreign, model.modules()))
    for unit in (*units, model):
        # It runs outside the compiled unit and is not worth a separate graph.
        unit.register_forward_hook(torch.compiler.disable(no_view))
    for unit in units:
        fully_shard(unit, mp_policy=full if keeps_full_precision(_block(unit)) else inner, **options)
    fully_shard(model, mp_policy=outer, **options)
    assert isinstance(model, FSDPModule)
    # The ranks' samples may use other parameters of a unit (a mixture of experts); all ranks have to send the same. Our own
    # models use all of them. In a rollout it takes one more message for each unit.
    model.set_reduce_scatter_unused_params(may_use_parts)
    for unit, following in itertools.pairwise(filter(_gathered_ahead, units)):
        assert isinstance(unit, FSDPModule)
        assert isinstance(following, FSDPModule)
        unit.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([unit])
    return model


def _refuse_unshardable(model: nn.Module, units: list[nn.Module]) -> None:
    """Raise UserError for a parameter that two units share, or that is a number and so has no rows to shard."""
    own, units_of = set(units), {"": model}
    paths = {module: canonical_name(name) for name, module in model.named_modules()}
    homes: dict[nn.Parameter, tuple[nn.Module, str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        unit = module if module in own else units_of[path.rpartition(".")[0]]
        units_of[path] = unit
        for leaf, parameter in module.named_parameters(recurse=False):
            name = canonical_name(f"{path}.{leaf}".strip("."))
            if parameter.ndim == 0:
                raise UserError(
                    f"trainer.parallelism.data fsdp2: expected parameters with at least one dimension, got the number {name}; "
                    "give it the shape (1,), or set data: ddp"
                )
            home, first = homes.setdefault(parameter, (unit, name))
            if home is not unit:
                where = [paths[each] or "the rest of the model" for each in (home, unit)]
                raise UserError(
                    f"trainer.parallelism.data fsdp2: expected every parameter in one shard unit, got {first}, which "
                    f"{where[0]} shares as {name} with {where[1]}; declare shard_unit for a block that has both, or for neither, "
                    "or set data: ddp"
                )


def free_gathered(model: nn.Module) -> None:
    """Free the parameters that a forward without a backward has gathered; do nothing in other layouts.

    With `fsdp2_reshard_after_forward: false` the next forward would compute with these copies, whatever the shards hold
    then. What changes the shards outside of a training step, or reads the weights of layers, calls this first.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def renew_trained(model: nn.Module) -> None:
    """Let units reduce the gradients of the parameters that are trained now; nothing happens in other layouts.

    FSDP2 takes the precision of a unit's reductions from its trained parameters before the first forward, when all may be frozen.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            group = module._get_fsdp_state()._fsdp_param_group
            if group is not None:
                group._init_mp_dtypes()


@contextmanager
def full_parameters(model: nn.Module, writeback: bool = False) -> Iterator[dict[str, Tensor]]:
    """Yield every parameter whole, by its name in the plain model, until the block ends; in any layout. Collective.

    Each rank holds a copy of the whole model meanwhile. With `writeback`, the final values are copied into this rank's
    shards, so all ranks must change them identically.
    """
    free_gathered(model)
    full = {name: whole(p.detach()).clone() for name, p in named_parameters(model).items()}
    yield full
    if writeback:
        free_gathered(model)
        with torch.no_grad():
            for name, p in named_parameters(model).items():
                local(p).copy_(slice_like(full[name], p))


Reduce = Callable[[Tensor, Tensor, ProcessGroup, dist.ReduceOp], None]


class _Communication(ReduceScatter):
    """FSDP2's reduce-scatter, replaced by a function."""

    def __init__(self, reduce: Reduce) -> None:
        self.reduce = reduce

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: Any,
        async_op: bool = False,  # noqa: ARG002 -- FSDP2 passes arguments by name
    ) -> None:
        self.reduce(output_tensor, input_tensor, group, op)


def set_gradient_communication(model: nn.Module, reduce: Reduce) -> None:
    """Replace the reduce-scatter of every unit's gradients by `reduce(shard, gradients, group, op)`.

    It fills `shard`, flat, with this rank's part of `gradients`, flat, combined over the group's ranks by `op` (a sum
    or an average). It can be used for compression, or to inspect what is sent.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(_Communication(reduce))


def fsdp2_is_applied(model: nn.Module) -> bool:
    """Return whether the model itself is sharded by FSDP2, regardless of the configuration."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def fsdp2_dtype(model: nn.Module) -> torch.dtype | None:
    """Return the narrowest dtype in which units compute under a precision policy; None if no policy was applied."""
    policies = [m._get_fsdp_state()._mp_policy for m in model.modules() if isinstance(m, FSDPModule)]
    found = {policy.param_dtype for policy in policies if policy.param_dtype is not None}
    return min(found, key=lambda dtype: dtype.itemsize) if found else None


def _full() -> StateDictOptions:
    return StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=dist.is_initialized())


def _main() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def fsdp2_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return the whole state on the CPU of rank 0, under names independent of the layout; {} elsewhere. Collective."""
    state: dict[str, Any] = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    return {name: value.clone() for name, value in state.items()} if _main() else {}


def fsdp2_load_state_dict(model: nn.Module, state_dict: dict[str, Any]) -> None:
    """Load the state of rank 0 into all ranks. Collective. Raises RuntimeError for missing or unexpected names.

    `state_dict` is copied first, because torch would replace its values by this rank's shards.
    """
    set_model_state_dict(model, dict(state_dict), options=_full())


def fsdp2_optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the whole optimiser state by parameter name, on the CPU of rank 0; {} elsewhere. Collective."""
    _initialise_state(optimizer)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    return dict(state) if _main() else {}


def fsdp2_load_optimizer_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
) -> None:
    """Load the optimiser state of rank 0 into all ranks. Collective.

    Parameters that never received a gradient have no state in a plain optimiser; they get zeros.
    """
    _initialise_state(optimizer)
    if _main():
        state_dict = {**state_dict, "state": _with_zeros(model, optimizer, state_dict["state"])}
    set_optimizer_state_dict(model, optimizer, state_dict, options=_full())


def _initialise_state(optimizer: torch.optim.Optimizer) -> None:
    """Create zero state for every parameter that has none, as a step of learning rate zero without decay would."""
    bare = [
        p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and not optimizer.state[p]
    ]
    if not bare:
        return
    kept = {p: p.grad for group in optimizer.param_groups for p in group["params"]}
    rates = [
        (group, {key: group[key] for key in ("lr", "weight_decay") if key in group}) for group in optimizer.param_groups
    ]
    for group, _ in rates:
        for p in group["params"]:
            p.grad = torch.zeros_like(p) if any(p is q for q in bare) else None
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    optimizer.step()
    for group, values in rates:
        for key, value in values.items():
            group[key] = value
    for p, grad in kept.items():
        p.grad = grad
    for p in bare:
        for value in optimizer.state[p].values():
            if isinstance(value, Tensor):
                value.zero_()


def _with_zeros(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return the saved state, with zeros of the right shape for parameters that it lacks."""
    complete = dict(state)
    for name, parameter in named_parameters(model).items():
        own = optimizer.state.get(parameter)
        if own and name not in complete:
            complete[name] = {
                key: torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, Tensor) else value
                for key, value in own.items()
            }
    return complete


def optimizer_state_to_ids(state_dict: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Return an optimiser state keyed by parameter names in the form of plain `torch.optim`, keyed by numbers."""
    number = {name: index for index, name in enumerate(names)}
    groups = [{**g, "params": [number[name] for name in g["params"]]} for g in state_dict["param_groups"]]
    return {"state": {number[name]: value for name, value in state_dict["state"].items()}, "param_groups": groups}


def optimizer_state_to_names(state_dict: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Return the state of a plain `torch.optim` optimiser keyed by names, the inverse of `optimizer_state_to_ids`.

    `names` are in the order of the parameters.
    """
    groups = [{**g, "params": [names[number] for number in g["params"]]} for g in state_dict["param_groups"]]
    return {"state": {names[number]: value for number, value in state_dict["state"].items()}, "param_groups": groups}
