"""Plug-ins by name: `type: wxformer` in YAML is the module `credit_like/models/wxformer`, with no table in between.

A plug-in module has a `Config` (a frozen section whose defaults form a tiny valid instance) and what its kind builds.
Importing a plug-in module never imports torch: a folder keeps its torch code in `model.py`, imported by `build`.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from types import ModuleType

KINDS = {
    "source": "credit_like.data.sources",
    "model": "credit_like.models",
    "loss": "credit_like.losses",
    "physics": "credit_like.physics",
    "optimizer": "credit_like.training.optimizers",
    "scheduler": "credit_like.training.schedulers",
    "metric": "credit_like.evaluation.metrics",
    "writer": "credit_like.inference.writers",
}


def names(kind: str) -> list[str]:
    """The names of all plug-ins of a kind as YAML spells them: modules without a leading underscore, `_` as `-`."""
    package = importlib.import_module(KINDS[kind])
    return sorted(info.name.replace("_", "-") for info in pkgutil.iter_modules(package.__path__) if info.name[0] != "_")


def module(kind: str, name: str) -> ModuleType:
    """The plug-in module of this kind and name.

    Raises ValueError with the closest valid names where there is none.
    """
    known = names(kind)
    if name not in known:
        raise ValueError(f"expected one of {', '.join(known)}, got {name!r}{did_you_mean(name, known)}")
    return importlib.import_module(f"{KINDS[kind]}.{name.replace('-', '_')}")


def did_you_mean(name: object, known: list[str]) -> str:
    """`; did you mean 'x'?` for the closest known name, or an empty string."""
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
