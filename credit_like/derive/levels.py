"""Coefficients of hybrid levels: shipped for ERA5's 137 levels, or read from a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from credit_like.errors import UserError, reading
from credit_like.small_files import read_yaml

SHIPPED = {"era5-137": "era5-137.yml"}
"""Name in an experiment → file beside this module."""
_NAMES = (("a_half", "b_half"), ("a", "b"), ("hyai", "hybi"))
_REFERENCE = ("P0", "p0")


@dataclass(frozen=True, eq=False)
class HybridLevels:
    """Interfaces of K levels, p = a + b · p_s with a (K + 1,) in Pa, from the top of the atmosphere to the surface.

    `lev` (K,) has the levels as the file names them, if it does. Raises UserError for interfaces that do not descend from
    the top to the surface.
    """

    a: NDArray[np.float64]
    b: NDArray[np.float64]
    lev: NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        if self.a.ndim != 1 or self.a.shape != self.b.shape or len(self.a) < 3:
            raise UserError(
                f"expected as many coefficients a as b, at least 3, got {self.a.shape} and {self.b.shape}; change them"
            )
        pressure = self.a + self.b * 1e5
        if not (np.isfinite(pressure).all() and (np.diff(pressure) > 0).all()):
            raise UserError(
                "expected interfaces from the top of the atmosphere to the surface, got pressures (at 1000 hPa at the "
                f"surface) from {pressure[0]:g} to {pressure[-1]:g} Pa that do not increase throughout; reverse or mend "
                "the coefficients"
            )

        if self.lev is not None and self.lev.shape != (len(self),):
            object.__setattr__(self, "lev", None)  # of other levels

    def __len__(self) -> int:
        return len(self.a) - 1

    def numbers(self, levels: NDArray[np.float64]) -> NDArray[np.int64] | None:
        """Return the positions of levels given as in the file, by number from 1, or by nominal pressure; None for others."""
        if self.lev is not None and np.isin(levels, self.lev).all():
            return np.abs(levels[:, None] - self.lev).argmin(1)
        whole = np.array_equal(levels, np.rint(levels))
        if whole and levels.min() >= 1 and levels.max() <= len(self):
            return levels.astype(np.int64) - 1
        # Archives round pressures to whole hPa.
        for known, absolute in ((self.lev, 0.0), (self.nominal, 0.5 if whole else 0.0)):
            if known is not None:
                at = np.abs(levels[:, None] - known).argmin(1)
                if len(set(at)) == len(levels) and np.allclose(known[at], levels, rtol=1e-3, atol=absolute):
                    return at
        return None

    @property
    def nominal(self) -> NDArray[np.float64]:
        """Return the pressures in hPa in the middle of the layers over a surface at 1000 hPa."""
        pressure = self.a + self.b * 1e5
        return (pressure[1:] + pressure[:-1]) / 200


def read_levels(where: str | Mapping[Literal["a", "b", "lev"], Sequence[float]]) -> HybridLevels:
    """Return shipped levels by name, those of a file, or those with the coefficients given.

    A netCDF file has `a_half` and `b_half` or, as the history files of CAM, `hyai` and `hybi` with `P0`; a YAML file has
    lists `a` and `b`. Raises UserError for another name or file.
    """
    if not isinstance(where, str):
        if not {"a", "b"} <= where.keys():
            raise UserError(f"expected lists a and b, got {', '.join(where) or 'none'}; give both")
        return HybridLevels(**{name: np.array(values, np.float64) for name, values in where.items()})
    path = Path(__file__).with_name(SHIPPED[where]) if where in SHIPPED else Path(where)
    if not path.is_file():
        raise UserError(
            f"expected {', '.join(SHIPPED)} or a file of coefficients, got {where!r}, which is not there; change it, or leave "
            "the derived fields out (`--set inference.derive=null`)"
        )
    with reading("coefficients of levels", path, "change the file"):
        found = _read_yaml(path) if path.suffix in (".yml", ".yaml") else _read_netcdf(path)
    for a, b in _NAMES:
        if a in found and b in found:
            scale = next((found[name].item() for name in _REFERENCE if name in found), 1e5) if a == "hyai" else 1.0
            return HybridLevels(found[a] * scale, found[b], found.get("lev"))
    names = " or ".join(f"{a} and {b}" for a, b in _NAMES)
    raise UserError(f"expected coefficients {names} in {where}, got {', '.join(sorted(found)) or 'nothing'}; change it")


def _read_yaml(path: Path) -> dict[str, NDArray[np.float64]]:
    content = read_yaml(path)
    if not isinstance(content, dict):
        return {}
    return {str(name): np.array(values, np.float64) for name, values in content.items()}


def _read_netcdf(path: Path) -> dict[str, NDArray[np.float64]]:
    from credit_like.data.files import netcdf_files

    wanted = {name for pair in _NAMES for name in pair} | {"lev", *_REFERENCE}
    with netcdf_files.reading(path) as dataset:
        return {name: np.asarray(v[...], np.float64) for name, v in dataset.variables.items() if name in wanted}
