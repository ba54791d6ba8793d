"""DDP: replicated parameters and averaged gradients, the simple alternative to FSDP2."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from credit_like.errors import UserError
from credit_like.naming import counted
from credit_like.parallel.fsdp2 import no_view
from credit_like.parallel.mesh import default_mesh
from credit_like.parallel.unwrap import named_parameters


class _FixedBuckets(DistributedDataParallel):
    """DistributedDataParallel that uses the gradient buckets of its second step from the first step on.

    torch arranges the buckets anew after the first backward. The order in which four or more ranks add a number depends on its
    place in a bucket, so that the first step after a restart would differ from the same step of a run that went on. Here the
    parameters are in reverse order of registration, about that in which backward reaches them, and the buckets are arranged
    at once, which communicates.
    """

    def __init__(self, *args: Any, arrange: bool, **options: Any) -> None:
        super().__init__(*args, **options)
        self.options = {**options, "arrange": arrange}
        if arrange:
            self.reducer._push_all_rebuilt_params()
            self.reducer._rebuild_buckets()

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        parameters, sparse = super()._build_params_for_reducer()
        return parameters[::-1], sparse[::-1]


def apply_ddp(model: nn.Module, dp_mesh: DeviceMesh | None, *, compare: bool = True) -> nn.Module:
    """Average gradients over the ranks of a 1-D mesh during backward.

    Returns the model wrapped in DistributedDataParallel. DistributedDataParallel cannot hold parameters that are split
    over tensor ranks; such a model is replicated by hooks of the same effect and returned itself. A model on one rank
    or without parameters is returned unchanged. Without a mesh (None) all ranks form one data-parallel group. `compare`:
    whether the ranks compare their parameters and arrange their buckets; otherwise construction does not communicate.
    """
    dp_mesh = dp_mesh or default_mesh()
    if dp_mesh is None or dp_mesh.size() == 1 or not any(p.requires_grad for p in model.parameters()):
        return model
    if any(isinstance(p, DTensor) for p in model.parameters()):
        model.register_forward_hook(torch.compiler.disable(no_view))
        replicate(model, mesh=dp_mesh)
        return model
    return _FixedBuckets(
        model,
        process_group=dp_mesh.get_group(),
        forward_sync_buffers=False,  # buffers are derived from the weights, which are equal on all ranks
        gradient_as_bucket_view=True,
        init_sync=compare,
        arrange=compare,
    )


def refuse_unused(model: nn.Module) -> None:
    """Raise UserError for parameters without a gradient after backward in a model wrapped by `apply_ddp`; others may have them.

    DistributedDataParallel has not averaged the gradients in the buckets of such parameters.
    """
    if not isinstance(model, _FixedBuckets):
        return
    unused = [name for name, p in named_parameters(model).items() if p.requires_grad and p.grad is None]
    if unused:
        names = ", ".join(unused[:3]) + (f" and {counted(len(unused) - 3, 'other')}" if len(unused) > 3 else "")
        raise UserError(
            f"trainer.parallelism.data: expected gradients of all trained parameters, got none of {names}, which this "
            "rank's samples did not use; remove or freeze them (trainer.freeze), or set data: fsdp2"
        )


def wrapped_again(model: nn.Module) -> nn.Module:
    """Return a model in which other parameters have come to be trained, in a wrapper for these; others are returned as they are.

    DistributedDataParallel waits for the gradients of all parameters that were trained when it was made.
    """
    if not isinstance(model, _FixedBuckets):
        return model
    inner, options = model.module, model.options
    # The hooks on the parameters end with the reducer, which is not to wait for garbage collection.
    del model.reducer, model.logger
    return _FixedBuckets(inner, **options)
