"""Scaler files of CREDIT's second generation, as its package bridgescaler writes them.

A file is JSON: `input` or `target` → source → variable (`SOURCE/ROLE/3d/NAME`) → a scaler, which is JSON in a string: its `type`
and its fitted values, arrays in base64 (`__numpy__`, `dtype`, `shape`) or as lists. Standard and min-max scalers are of the form
(x − mean) / std; quantile scalers are not.
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from credit_like.errors import UserError
from credit_like.small_files import read_small


@dataclass(frozen=True)
class Scaler:
    """A fitted scaler: (x − mean) / std for each level, both None for another kind of function."""

    type: str
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None


def read_scalers(path: Path) -> dict[str, Scaler]:
    """Return variable → scaler; that of the input where a variable is in input and target.

    Raises UserError for a file of another kind.
    """
    try:
        content = json.loads(read_small(path))
        found: dict[str, Scaler] = {}
        for part in ("input", "target"):
            for variables in content.get(part, {}).values():
                for name, text in variables.items():
                    found.setdefault(name, _scaler(json.loads(text) if isinstance(text, str) else text))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{path}: expected a scaler file of CREDIT's second generation, got {error!r}; give the file or remove it"
        ) from error
    if not found:
        raise UserError(f"{path}: expected scalers of `input` or `target`, got none; give the file of a fitted scaler")
    return found


def _scaler(values: Mapping[str, Any]) -> Scaler:
    kind = str(values["type"])
    name = kind.removesuffix("Tensor")
    if name == "DStandardScaler":
        mean, std = _array(values["mean_x_"]), np.sqrt(_array(values["var_x_"]))
    elif name == "DMinMaxScaler":
        mean = _array(values["min_x_"])
        std = _array(values["max_x_"]) - mean
    else:
        return Scaler(kind)
    return Scaler(kind, tuple(mean.tolist()), tuple(std.tolist()))


def _array(value: Any) -> NDArray[np.float64]:
    """Return a stored array, of at least one dimension."""
    if isinstance(value, dict) and "__numpy__" in value:
        value = np.frombuffer(b64decode(value["__numpy__"]), np.dtype(value["dtype"]))
    elif isinstance(value, dict):
        value = value["data"]
    return np.asarray(value, np.float64).ravel()
