"""What a model of others does that makes its numbers depend on how samples are shared, and what it does in vain.

None of it is refused: one process with one micro-batch per step computes as the model is written.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from credit_like import registry
from credit_like.naming import counted
from credit_like.nn.init import own_parameters
from credit_like.nn.initial_values import reset_of
from credit_like.parallel.trace import (
    ForwardMode,
    Operation,
    has_sizes,
    input_shape,
    storage_of,
    tensors_of,
    without_values,
)

log = logging.getLogger(__name__)
_SHOWN = 3
"""Names in a message."""


def is_foreign(module: nn.Module) -> bool:
    """Return whether a module's class is one of a plug-in, or of any other package than this and torch."""
    name = type(module).__module__
    return registry.is_foreign(name) and name.split(".")[0] != "torch"


def warn_of_samples(model: nn.Module) -> None:
    """Log what makes the numbers of a model of others depend on micro-batches and data ranks. The model has no values."""
    if is_foreign(model) and has_sizes(model):
        for text in _Watch(model).found():
            log.warning("the results depend on trainer.micro_batch_size and the number of data ranks: %s", text)


def warn_of_initial_values(model: nn.Module) -> None:
    """Log the parameters of torch's layers to which a model of others gives initial values that are not used."""
    if not is_foreign(model):
        return
    written = {module: _written(module) for module in model.modules()}
    names = [name for module, leaf, name, _ in own_parameters(model) if leaf in written[module]]
    if names:
        more = f" and {counted(len(names) - _SHOWN, 'other')}" if len(names) > _SHOWN else ""
        log.warning(
            "%s%s: the values that the model's constructor gives these and any other parameters are not used, because it is built "
            "without values; layers of torch start as torch has them. Derive a class from the layer whose "
            "`initial(self, leaf, shape, generator)` returns other values",
            ", ".join(names[:_SHOWN]),
            more,
        )


def _written(module: nn.Module) -> set[str]:
    """Return the parameters of one of torch's layers that were written into after the layer had reset them.

    Those of a copy (`copy.deepcopy`) count from 0, as if the layer had not reset them: only writes into the copy are found.
    """
    reset = None if hasattr(module, "initial") else reset_of(module)
    if reset is None:
        return set()
    parameters = dict(module.named_parameters(recurse=False))
    before = {leaf: parameter._version for leaf, parameter in parameters.items()}
    getattr(module, reset)()
    return {leaf for leaf, p in parameters.items() if before[leaf] and p._version - before[leaf] != before[leaf]}


class _Watch(ForwardMode):
    """One forward on the meta device, in the model's mode."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.texts: dict[str, None] = {}
        self.buffers: dict[int, str] = {}

    @torch.no_grad()
    def found(self) -> list[str]:
        """Return one text for each thing found; none where the model cannot be run without values."""
        blank = without_values(self.model)
        self.buffers = {storage_of(blank[name]): name for name, _ in self.model.named_buffers()}
        try:
            self.computed(blank, self.blank_input(input_shape(self.model)))
        except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError) as error:
            log.debug("the model was not run without values: %s", error)
        return list(self.texts)

    @contextmanager
    def _hooks(self) -> Iterator[None]:
        """Maintain the stack of modules."""
        handles = []
        for module in self.names:
            handles.append(module.register_forward_pre_hook(lambda module, _args: self.stack.append(module)))
            handles.append(module.register_forward_hook(lambda _module, _args, _out: self.stack.pop() and None))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        call = Operation.of(func, args, kwargs)
        # An instance norm is a batch norm of one sample that has the channels of all.
        of_batch = "batch_norm" in call.name and len(call.values["input"]) > 1
        if of_batch and (call.values.get("training") or call.values.get("train")):
            self._note(
                "takes mean and variance of the samples of one micro-batch; use nn.LayerNorm or credit_like.nn.norms.GroupNorm"
            )
        elif torch.Tag.nondeterministic_seeded in func.tags:
            self._note(
                f"draws random numbers ({call.name}), which differ on every rank; use credit_like.nn.dropout or "
                "credit_like.nn.noise"
            )
        elif not isinstance(self.module, _BatchNorm):
            for t in tensors_of(call.written):
                if (buffer := self.buffers.get(storage_of(t))) is not None:
                    self._note(f"changes its buffer {buffer} in the forward pass, on every rank from its own samples")
        return func(*args, **(kwargs or {}))

    def _note(self, what: str) -> None:
        name = self.names.get(self.module) or "the model"
        self.texts[f"{name} ({type(self.module).__qualname__}) {what}"] = None
