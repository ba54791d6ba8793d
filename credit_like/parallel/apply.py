"""Make a model parallel: all transformations in the only order that works."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from credit_like.errors import UserError
from credit_like.nn import init, spectral_norm
from credit_like.nn.area import identity
from credit_like.nn.attention import PositionTables
from credit_like.nn.spectral_norm import SpectralNorm
from credit_like.parallel import tensor_verify
from credit_like.parallel.ddp import apply_ddp, wrapped_again
from credit_like.parallel.domain.apply import apply_domain_parallel
from credit_like.parallel.domain.manager import get_domain_manager
from credit_like.parallel.fsdp2 import (
    _apply_activation_checkpointing,
    apply_fsdp2,
    free_gathered,
    renew_trained,
    shard_units,
)
from credit_like.parallel.runtime import Runtime
from credit_like.parallel.shards import local, slice_like
from credit_like.parallel.spectral_norm import shard_spectral_norms
from credit_like.parallel.tensor_parallel import apply_tensor_parallel
from credit_like.parallel.unwrap import canonical_name, get_raw_model, named_parameters
from credit_like.schema.trainer import TrainerSection

_RECOMPILE_LIMIT = 256
Replicate = Callable[[nn.Module, DeviceMesh], nn.Module]


def parallelise(model: nn.Module, section: TrainerSection, runtime: Runtime, train: bool = True) -> nn.Module:
    """Apply tensor and domain parallelism, activation checkpointing, compilation, and FSDP2 or DDP, in this order.

    Without `train` the last is omitted: replicas then hold whole models and need not take the same number of steps.
    Parameters that are frozen (`freeze_parameters`) stay so: no rank computes, stores or sends their gradients.

    The model may be on the meta device; `materialise` then allocates and initialises it. Multiply the local loss by
    `runtime.gradient_scale` before backward, so that every gradient is the one of the whole batch. Raises UserError, on
    all ranks, if a degree does not fit the model.
    """
    if "tp" in runtime.submeshes:
        steps = tensor_verify.verify(model, runtime.tensor_size)
        apply_tensor_parallel(model, runtime.submeshes["tp"])
        if steps is not None and all(p.is_meta for p in model.parameters()):
            tensor_verify.verify_part(model, runtime.tensor_size, steps)
    if "domain" in runtime.submeshes:
        apply_domain_parallel(model, runtime.submeshes["domain"], runtime.domain_shape)
    if section.activation_checkpoint:
        _apply_activation_checkpointing(model)
    if is_compiled(section, runtime.device):
        # Units of one class share one compilation cache, which holds graphs with and without gradients, for every batch
        # size and for inputs with and without gradients. Beyond the limit torch would silently continue without
        # compilation.
        torch._dynamo.config.recompile_limit = _RECOMPILE_LIMIT
        torch._dynamo.config.accumulated_recompile_limit = 4 * _RECOMPILE_LIMIT
        # Within DDP torch would split the graph of a unit where a bucket of gradients is full, so that it is sent before the
        # unit's backward has ended. A unit is small, and its parts are fused worse than the whole.
        torch._dynamo.config.optimize_ddp = False
        tables = (module for module in model.modules() if isinstance(module, PositionTables))
        for unit in (*shard_units(model), *tables):
            unit.compile(dynamic=False)
    if section.parallelism.data == "fsdp2" and train:
        mesh = runtime.gradient_mesh
        if mesh is not None:
            apply_fsdp2(model, mesh, {"trainer": section})
    shard_spectral_norms(model)
    if section.parallelism.data != "fsdp2" and train:
        # `none` has one data rank, but its domain ranks still sum their gradients.
        mesh = runtime.flat_gradient_mesh
        if mesh is not None:
            return _replicated(model, mesh)
    return model


def is_compiled(section: TrainerSection, device: torch.device) -> bool:
    """Return whether a run on this device compiles its model: `trainer.compile`, by default on CUDA."""
    return section.compile if section.compile is not None else device.type == "cuda"


def freeze_parameters(model: nn.Module, patterns: Sequence[str], key: str = "start_from.freeze") -> None:
    """Exclude the parameters whose names match one of the patterns, such as `stages.0.*`, from training.

    Call it before `parallelise`. Raises UserError as `unfrozen` does.
    """
    parameters = named_parameters(model)
    trained = unfrozen({name: parameter.requires_grad for name, parameter in parameters.items()}, patterns, key)
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in trained)


def unfrozen(parameters: Mapping[str, bool], patterns: Sequence[str], key: str) -> list[str]:
    """Return the names of the trained parameters (marked True) that match none of the patterns.

    Raises UserError, which begins with `key`, for a pattern that matches no parameter, and where none is left to train.
    """
    trained = [name for name, is_trained in parameters.items() if is_trained]
    for pattern in patterns:
        matched = set(fnmatch.filter(parameters, pattern))
        if not matched:
            raise UserError(
                f"{key}: expected patterns of names of parameters, such as {next(iter(parameters), '')}, got "
                f"{pattern}, which matches none; change it"
            )
        trained = [name for name in trained if name not in matched]
    if patterns and not trained:
        raise UserError(
            f"{key}: expected patterns that leave some parameters to train, got {', '.join(patterns)}, which match all; "
            "change them"
        )
    return trained


def set_trained(model: nn.Module, names: Collection[str]) -> nn.Module:
    """Train the parameters of these names alone from now on, in any layout; return the model to use. Collective.

    No rank computes, stores or sends the gradients of the others. 1/sigma of normalised layers is computed again, as at a
    restart, because it stays as it is in frozen ones.
    """
    free_gathered(model)
    for name, parameter in named_parameters(model).items():
        parameter.requires_grad_(name in names)
    renew_trained(model)
    spectral_norm.refresh(model)
    return wrapped_again(model)


def _replicated(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Average gradients over the mesh; a model on the meta device is wrapped later by `materialise`."""
    if any(p.is_meta for p in model.parameters()):
        model._replicate_over = mesh  # type: ignore[assignment]
        return model
    return _ddp(model, mesh, apply_ddp)


def _ddp(model: nn.Module, mesh: DeviceMesh, replicate: Replicate) -> nn.Module:
    """Wrap the model in DDP and shard its spectral norms.

    With tensor parallelism DDP turns replicated weights into DTensors, so their spectral norms must be converted as
    well.
    """
    wrapped = replicate(model, mesh)
    shard_spectral_norms(wrapped)
    return wrapped


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Initialise a model of any layout with the values of `credit_like.nn.init.initialise`."""
    init.reset_buffers(model)
    for module, leaf, name, parameter in init.own_parameters(get_raw_model(model)):
        name = canonical_name(name)
        full = init.initial_value(module, leaf, name, tuple(parameter.shape), seed).to(parameter.dtype)
        local(parameter).copy_(slice_like(full, parameter))
        spectral = getattr(module, "spectral", None)
        if leaf == "weight" and isinstance(spectral, SpectralNorm):
            generator = init.generator_for(seed, f"{name.removesuffix('.weight')}.spectral.u")
            spectral.start(full.to(spectral.u.device), generator)
    init.refuse_unfilled(model)


def materialise(
    model: nn.Module,
    runtime: Runtime,
    seed: int,
    initialise: Callable[[nn.Module, int], None] = initialise,
    replicate: Replicate = apply_ddp,
) -> nn.Module:
    """Allocate the model on this rank's device, initialise it, apply postponed wrappers, and return the model to use.

    The weights depend on (seed, parameter name) alone: each rank draws the whole parameter from the parameter's own
    generator, on the CPU, and stores its part. No communication. A simulation replaces `initialise` and `replicate`.
    """
    offloaded = any(p.device.type == "cpu" for p in model.parameters()) and runtime.device.type == "cuda"
    if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        init.allocate(model, "cpu" if offloaded else runtime.device)
    initialise(model, seed)
    mesh = model.__dict__.pop("_replicate_over", None)
    return model if mesh is None else _ddp(model, mesh, replicate)


def own_part(model: nn.Module, height: int) -> tuple[slice, slice, Callable[[Tensor], Tensor]]:
    """Return this rank's rows and columns of the image, and a function from its part of a field to its rows with all columns."""
    manager = get_domain_manager(model)
    if manager is None:
        return slice(0, height), slice(None), identity
    return manager.rows, manager.columns, manager.whole_rows
