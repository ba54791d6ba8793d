"""Partition of image rows over ranks into contiguous bands of whole windows, as equal as whole windows allow.

This module does not import torch.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

Band = tuple[int, int]  # rows [start, stop)


@dataclass(frozen=True)
class Level:
    """An image height that occurs in the model.

    Bands start at multiples of `unit`; `pieces`, unless 0, is a further limit on the number of ranks with rows.
    """

    height: int
    unit: int = 1
    pieces: int = 0
    why: str = ""

    @property
    def most(self) -> int:
        """Return the largest degree that leaves no rank without rows."""
        return min(self.height // self.unit, self.pieces or self.height)


def merge(levels: Iterable[Level]) -> dict[int, Level]:
    """Return one level per height, with a unit that suits every layer there and the smallest `pieces` of any."""
    merged: dict[int, Level] = {}
    for level in levels:
        known = merged.get(level.height, Level(level.height))
        pieces = min((p for p in (known.pieces, level.pieces) if p), default=0)
        why = level.why if level.most <= known.most and level.why else known.why
        merged[level.height] = Level(level.height, math.lcm(known.unit, level.unit), pieces, why)
    return merged


def bands(height: int, unit: int, parts: int) -> list[Band]:
    """Return `parts` contiguous bands of whole units; the first bands get the remainder.

    721 rows on 4 ranks: 181, 180, 180, 180.
    """
    count, rest = divmod(height, unit)
    assert rest == 0, f"{height} rows are not whole units of {unit}"
    each, more = divmod(count, parts)
    starts = [unit * (rank * each + min(rank, more)) for rank in range(parts + 1)]
    return list(itertools.pairwise(starts))


def of_axis(message: str, axis: int) -> str:
    """Return a message about rows as one about columns, for axis 1."""
    return re.sub(r"\brow(s?)\b", r"column\1", message) if axis == 1 else message


def degree_problem(levels: dict[int, Level], degree: int, axis: int = 0) -> str:
    """Return a message that names a level with too few rows and the degrees that work; empty if `degree` works.

    With axis 1 the levels are those of columns.
    """
    tightest = min(levels.values(), key=lambda level: level.most)
    if degree <= tightest.most:
        return ""
    works = ", ".join(str(d) for d in range(1, tightest.most + 1))
    pieces = "is only 1 piece" if tightest.most == 1 else f"are only {tightest.most} pieces"
    message = (
        f"expected a degree that leaves every rank rows, got {degree}: at {tightest.height} rows"
        f"{f' ({tightest.why})' if tightest.why else ''} there {pieces} to share; "
        f"degrees that work: {works}"
    )
    return of_axis(message, axis)
