"""Access to the model without its wrappers, and parameter names that do not depend on them."""

from __future__ import annotations

from torch import nn
from torch._dynamo import OptimizedModule
from torch.nn.parallel import DistributedDataParallel

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


def get_raw_model(model: nn.Module) -> nn.Module:
    """Return the model inside DistributedDataParallel and torch.compile, however they are nested."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(model, OptimizedModule):
            model = model._orig_mod
        else:
            return model


def canonical_name(name: str) -> str:
    """Return a parameter's name in the plain model."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")
