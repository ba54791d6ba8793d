"""Plug-ins by name: `type: wxformer` in YAML is the module `credit_like/models/wxformer`, with no table in between.

A plug-in module has a `Config` (a frozen section whose defaults form a tiny valid instance) and what its kind builds.
Importing a plug-in module never imports torch: a folder keeps its torch code in `model.py`, imported by `build`.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Iterable
from types import ModuleType

from credit_like.errors import UserError

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

    Raises UserError with the closest valid names where there is none.
    """
    if name not in names(kind):
        raise UserError(unknown(kind, name))
    return importlib.import_module(f"{KINDS[kind]}.{name.replace('-', '_')}")


def unknown(kind: str, name: object) -> str:
    """What to say of a name that no plug-in of this kind has."""
    known = names(kind)
    return f"expected one of {', '.join(known)}, got {name!r}{did_you_mean(name, known)}"


def closest(name: object, known: Iterable[str]) -> str | None:
    """The known name most like this one, if any is near; capitals do not count."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(str(name).lower(), by_lower, n=1, cutoff=0.5)
    return by_lower[close[0]] if close else None


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the closest known name, or an empty string."""
    close = closest(name, known)
    return f"; did you mean {close!r}?" if close else ""
