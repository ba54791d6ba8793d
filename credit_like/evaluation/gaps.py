"""Points without a finite forecast, which scores leave out."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from credit_like.naming import hours_text

Array = NDArray[np.float64]


class Gaps:
    """Fractions of points without a finite forecast, by source and variable, at every initial time and lead.

    The smallest of them are points without data, as the land is for sea surface temperature. What is missing beyond that
    belongs to forecasts that overflowed, or to incomplete files: scores of the points that are left then look better than
    the forecasts are.
    """

    def __init__(self, inits: int, leads: list[int]) -> None:
        self.leads = leads
        """Seconds."""
        self._shape = inits, len(leads)
        self._found: dict[tuple[str, str], Array] = {}

    def add(self, source: str, variable: str, init: int, first_lead: int, fractions: Array) -> None:
        """Add the fractions (leads,) of one block; NaN for a lead that the source does not have."""
        found = self._found.setdefault((source, variable), np.full(self._shape, np.nan))
        found[init, first_lead : first_lead + len(fractions)] = fractions

    def messages(self) -> Iterator[str]:
        """Yield a sentence for each source that has gaps, naming the first variables."""
        by_source: dict[str, list[tuple[str, Array]]] = {}
        for (source, variable), found in self._found.items():
            known = found[np.isfinite(found)]
            everywhere = known.min(initial=1.0)
            gaps = np.nan_to_num(found) - (everywhere if everywhere < 1 else 0.0) > 0
            if gaps.any():
                by_source.setdefault(source, []).append((variable, np.where(gaps, found, 0.0)))
        for source, variables in by_source.items():
            largest = max(fractions.max() for _, fractions in variables)
            gaps = np.any([fractions > 0 for _, fractions in variables], 0)
            first = np.timedelta64(self.leads[int(gaps.any(0).argmax())], "s")
            names = [name for name, _ in variables]
            yield (
                f"{source} has no finite values at up to {100 * largest:.3g} % of the points, from "
                f"{int(gaps.any(1).sum())} of {len(gaps)} initial times and from a lead of {hours_text(first)} on, in "
                f"{', '.join(names[:3])}{f' and {len(names) - 3} others' if len(names) > 3 else ''}; scores leave these "
                "points out and look better than the forecasts are"
            )
