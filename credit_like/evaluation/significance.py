"""Significance of the difference between the scores of two runs over the same initial times.

Differences are paired by initial time, because both runs forecast the same weather (Geer 2016, Tellus A 68, 30229,
doi:10.3402/tellusa.v68.30229). Successive forecasts are correlated, so that the variance of their mean is estimated from
the lowest frequencies of the series alone (`standard_error`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import pandas as pd
import scipy.fft
import scipy.stats
from numpy.typing import NDArray

from credit_like import registry
from credit_like.data import units
from credit_like.errors import UserError
from credit_like.evaluation.metrics import score

Array = NDArray[np.float64]
Finish = Callable[[dict[str, Array]], Array]
CONFIDENCE = 0.95
KEYS = ["variable", "level", "metric", "region", "lead_hours"]
COLUMNS = (*KEYS, "units", "times", "first", "second", "difference", "low", "high", "significant")


def standard_error(values: Array) -> tuple[float, int]:
    """Return the standard error of the mean of a correlated series (I,), and its degrees of freedom.

    The long-run variance is the mean square of the first ν cosine transforms, ν = 0.4 I^(2/3), and the mean over its
    error has Student's t distribution with ν degrees of freedom (Lazarus, Lewis, Stock & Watson 2018, J. Bus. Econ.
    Stat. 36, 541-559, doi:10.1080/07350015.2018.1506926). No form of the correlation is assumed, but equal spacing.
    """
    number = len(values)
    freedom = max(1, int(0.4 * number ** (2 / 3)))
    waves = scipy.fft.dct(values, type=2, norm="ortho")[1 : freedom + 1]
    return float(np.sqrt(np.mean(waves**2) / number)), freedom


def contributions(statistics: Mapping[str, Array], finish: Finish) -> Array:
    """Return what every initial time contributes to a score of statistics (I,), as pseudo-values of the jackknife.

    For a mean they are its terms. For a root or a ratio of means they are linear in the terms to first order, so that
    the error of their mean is that of the score (Efron & Stein 1981, doi:10.1214/aos/1176345462).
    """
    number = len(next(iter(statistics.values())))
    whole = finish({name: np.asarray(values.mean()) for name, values in statistics.items()})
    with np.errstate(invalid="ignore"):  # infinite terms have no difference
        others = finish({name: (values.sum() - values) / (number - 1) for name, values in statistics.items()})
        return np.asarray(number * whole - (number - 1) * others)


def refuse_other_units(variable: str, first: str, second: str) -> None:
    """Raise UserError where the scores of two runs are in different units, as far as these are known.

    An offset, as between K and °C, changes no error.
    """
    try:
        found = units.between(first, second)
    except UserError:
        found = (math.nan, 0.0)
    if found is not None and not math.isclose(found[0], 1):
        raise UserError(
            f"expected scores of {variable} in the same units, got {first!r} and {second!r}; evaluate one of the runs again with "
            "the units of the other (`units` of the variable or of `evaluation.truth`)"
        )


def score_differences(first: pd.DataFrame, second: pd.DataFrame, plugins: Sequence[str] = ()) -> pd.DataFrame:
    """Compare two frames of `load_scores_by_init`: a row per variable, level, metric, region and lead.

    Only initial times that both have are used; their number is `times`. Columns `first` and `second` are the scores,
    `difference` is the second minus the first with its 95 % interval `low` to `high`, all in the units of the metric;
    `significant` says whether the interval leaves out zero. With fewer than 3 common times there is no interval (NaN).
    `plugins` are the folders (absolute paths) or packages of metrics of one's own. Raises UserError if a frame has forecasts of
    several sources, for a variable in different units, and for an unknown metric.
    """
    for frame in (first, second):
        if (sources := frame["source"].unique()).size > 1:
            raise UserError(f"expected scores of one source, got {', '.join(sources)}; select one")
    on = [*KEYS, "statistic", "init_time"]
    pairs = first.merge(second[[*on, "value", "units"]], on=on, suffixes=("_first", "_second")).sort_values(
        "init_time", kind="stable"
    )
    for row in pairs[["variable", "units_first", "units_second"]].drop_duplicates().itertuples(index=False):
        refuse_other_units(*map(str, row))
    with registry.searching(plugins):
        finishes = {name: partial(score, name, registry.module("metric", name)) for name in pairs["metric"].unique()}
    rows = []
    for key, group in pairs.groupby(KEYS, dropna=False, sort=False):
        names = group["statistic"].unique()
        if len(names) > 1:
            group = group[group.groupby("init_time")["statistic"].transform("size") == len(names)]
        sides = [
            {name: group.loc[group["statistic"] == name, side].to_numpy(np.float64) for name in names}
            for side in ("value_first", "value_second")
        ]
        if times := len(group) // len(names):
            rows.append((*key, group["units_first"].iloc[0], times, *_difference(sides[0], sides[1], finishes[key[2]])))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _difference(
    first: Mapping[str, Array], second: Mapping[str, Array], finish: Finish
) -> tuple[float, float, float, float, float, bool]:
    """Return the values of the columns from `first` on."""
    a, b = (float(finish({name: np.asarray(values.mean()) for name, values in one.items()})) for one in (first, second))
    if len(next(iter(first.values()))) < 3:
        return a, b, b - a, np.nan, np.nan, False
    error, freedom = standard_error(contributions(second, finish) - contributions(first, finish))
    half = error * float(scipy.stats.t.ppf((1 + CONFIDENCE) / 2, freedom))
    return a, b, b - a, b - a - half, b - a + half, bool(abs(b - a) > half)
