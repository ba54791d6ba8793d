"""Functions that bring variables closer to a normal distribution before they are scaled, and their inverses.

Each is odd, smooth and invertible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from credit_like.schema.data import Transform
from credit_like.variables import Variable, Variables


def forward(transform: Transform, x: Any, library: Any) -> Any:
    """Return z = T(x) of an array of `library`, numpy or torch; NaN stays NaN.

    With u = x / scale ≥ 0, T is log(1 + u), √(1 + u) − 1 or asinh u; T(−x) = −T(x).
    """
    u = x / transform.scale
    if transform.type == "asinh":
        return library.arcsinh(u)
    # The two sides are computed of clipped values, so that neither has a NaN, and the slope at 0 is that of the right one.
    below, above = library.clip(u, None, 0.0), library.clip(u, 0.0, None)
    if transform.type == "log1p":
        return library.where(u < 0, -library.log1p(-below), library.log1p(above))
    return library.where(u < 0, 1.0 - library.sqrt(1.0 - below), library.sqrt(1.0 + above) - 1.0)


def inverse(transform: Transform, z: Any, library: Any) -> Any:
    """Return x with T(x) = z."""
    if transform.type == "asinh":
        return library.sinh(z) * transform.scale
    below, above = library.clip(z, None, 0.0), library.clip(z, 0.0, None)
    if transform.type == "log1p":
        return library.where(z < 0, -library.expm1(-below), library.expm1(above)) * transform.scale
    return library.where(z < 0, below * (2.0 - below), above * (above + 2.0)) * transform.scale


class Transforms:
    """The transforms of variables that are stacked in this order; those without one stay as they are."""

    def __init__(self, variables: Sequence[Variable]) -> None:
        slices = Variables.slices(variables)
        self.parts = [(slices[v.name], v.spec.transform) for v in variables if v.spec.transform is not None]

    def __bool__(self) -> bool:
        return bool(self.parts)

    def forward(self, x: Any, library: Any, dim: int = 1) -> Any:
        """Return a transformed array of `library`, whose channels are along `dim`; without transforms, the array itself."""
        return self._apply(forward, x, library, dim)

    def inverse(self, z: Any, library: Any, dim: int = 1) -> Any:
        """Return the array in physical units."""
        return self._apply(inverse, z, library, dim)

    def _apply(self, function: Any, x: Any, library: Any, dim: int) -> Any:
        if not self.parts:
            return x
        result = x.clone() if hasattr(x, "clone") else x.copy()
        for part, transform in self.parts:
            at = (slice(None),) * dim + (part,)
            result[at] = function(transform, x[at], library)
        return result


def names(variables: Sequence[Variable]) -> list[str]:
    """Return the transform of every channel as text, empty for none."""
    return [str(v.spec.transform or "") for v in variables for _ in v.channels]
