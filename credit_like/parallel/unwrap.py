"""Access to the model without its wrappers, and parameter names that do not depend on them."""

from __future__ import annotations

import sys

from torch import nn
from torch.nn.parallel import DistributedDataParallel

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


def get_raw_model(model: nn.Module) -> nn.Module:
    """Return the model inside DistributedDataParallel and torch.compile, however they are nested."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif _is_compiled(model):
            inner = model._orig_mod
            assert isinstance(inner, nn.Module)
            model = inner
        else:
            return model


def _is_compiled(model: nn.Module) -> bool:
    """Return whether torch.compile has wrapped the model, without importing the compiler, which takes a second."""
    compiler = sys.modules.get("torch._dynamo")
    return compiler is not None and isinstance(model, compiler.OptimizedModule)


def canonical_name(name: str) -> str:
    """Return the name in the plain model of a parameter of `get_raw_model`, which may have wrappers inside."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by their names in the plain model."""
    return {canonical_name(name): parameter for name, parameter in get_raw_model(model).named_parameters()}
