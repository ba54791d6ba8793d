"""Import everything that a command may import, so that a process forked from here starts with it; no thread may start."""

import importlib
import pkgutil

import torch.utils.tensorboard  # noqa: F401 - a training imports it late
import xarray  # noqa: F401

import credit_like

for module in pkgutil.walk_packages(credit_like.__path__, "credit_like."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
