"""Find the first module that makes a number infinite or NaN, by computing a skipped step once more.

Nothing is observed in ordinary steps. All ranks of a layout repeat the step together, because its collectives need them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from credit_like.parallel.fsdp2 import free_gathered
from credit_like.parallel.runtime import Runtime
from credit_like.parallel.shards import local
from credit_like.parallel.unwrap import canonical_name
from credit_like.state import Sample
from credit_like.stepper import Stepper


class Step(Protocol):
    """The part of an optimiser step that is repeated: forwards and, with `backward`, backwards of micro-batches."""

    stepper: Stepper
    runtime: Runtime

    def repeat(self, micro_batches: Sequence[Sample], step: int, backward: bool) -> None: ...


def first_module(step: Step, micro_batches: Sequence[Sample], number: int) -> str | None:
    """Repeat a step and return the first module with a number that is not finite, on any rank; None if there is none.

    The forward is repeated first, without gradients, and the backward only where all outputs were finite. Parameters,
    buffers and random numbers are as before when this returns; gradients are None.
    """
    for backward in (False, True):
        found = _Found()
        with _as_before(step.stepper), _observed(step.stepper, found, backward), torch.set_grad_enabled(backward):
            step.repeat(micro_batches, number, backward)
        # The ranks compute the same modules in the same order, and a collective hands a number on to the others.
        earliest = min(step.runtime.gather(found.order if found.text else _NEVER))
        mine = found.text if found.order == earliest else None
        if report := first_of_ranks(mine, step.runtime):
            return report
    return None


_NEVER = 2**62


class _Found:
    """The first finding of a rank, and how many modules were computed before it."""

    def __init__(self) -> None:
        self.text: str | None = None
        self.order = 0

    def look(self, finite: bool) -> bool:
        """Count a module until there is a finding; return whether this one is it."""
        if self.text is None:
            self.order += 1
        return self.text is None and not finite


def first_of_ranks(mine: str | None, runtime: Runtime) -> str | None:
    """Return, on all ranks, what the first rank with a finding has found; None if none has."""
    for rank, finding in enumerate(runtime.gather(mine)):
        if finding is not None:
            return f"{finding} (rank {rank})" if runtime.world > 1 else str(finding)
    return None


@contextmanager
def _observed(stepper: nn.Module, found: _Found, backward: bool) -> Iterator[None]:
    """Set `found` to the first tensor that is not finite, in the order of computation."""
    handles = []
    for name, module in stepper.named_modules():
        shown = f"{canonical_name(name) or 'stepper'} ({type(module).__name__})"
        handles.append(module.register_forward_hook(partial(_seen, found, shown, backward)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _seen(found: _Found, name: str, backward: bool, module: nn.Module, inputs: Any, output: Any) -> None:
    """Check the output of a module, or observe the gradient that arrives there."""
    outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if backward:
        for tensor in outputs:
            if tensor.requires_grad:
                tensor.register_hook(partial(_gradient_seen, found, name))
        return
    if not found.look(found.text is not None or all(map(_finite, outputs))):
        return
    bad = [key for key, value in module.named_parameters(recurse=False) if not _finite(value)]
    if bad:
        reason = f", whose parameter {bad[0]} is not finite"
    elif all(_finite(leaf) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()):
        reason = ", whose input is finite"
    else:
        reason = ", whose input is not finite"
    found.text = f"output of {name}{reason}"


def _gradient_seen(found: _Found, name: str, gradient: Tensor) -> None:
    if found.look(found.text is not None or _finite(gradient)):
        found.text = f"gradient at the output of {name}"


def _finite(x: Tensor) -> bool:
    return bool(torch.isfinite(local(x.detach())).all())


@contextmanager
def _as_before(stepper: nn.Module) -> Iterator[None]:
    """Restore buffers and random numbers, and drop the gradients and gathered parameters."""
    buffers = {name: buffer.detach().clone() for name, buffer in stepper.named_buffers()}
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"):
        try:
            yield
        finally:
            with torch.no_grad():
                for name, buffer in stepper.named_buffers():
                    buffer.copy_(buffers[name])
            free_gathered(stepper)
            for parameter in stepper.parameters():
                parameter.grad = None
