"""Scores of forecasts as pandas frames, with the significance of differences, and training logs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas


def load_scores(folder: str | Path) -> pandas.DataFrame:
    """Load the scores of a run as a tidy frame, one row per number.

    `folder` is the run's `save_loc` or its folder of scores. Columns: source, variable, level (NaN at the surface),
    metric, region, lead_hours, value, units (of the variable). Raises UserError if there are no scores.
    """
    from credit_like.evaluation.frames import scores_frame
    from credit_like.evaluation.results import load_results

    return scores_frame(load_results(_scores_folder(folder)))


def load_scores_by_init(
    folder: str | Path, metric: str = "rmse", source: str = "model", region: str = "global"
) -> pandas.DataFrame:
    """Load what every initial time contributes to a metric of one source of forecasts, as a tidy frame.

    Columns: those of `load_scores`, `init_time`, and `statistic`, the name of what is averaged over the initial times
    before the score is computed from it: for `rmse` that is `mse`, in squared units. Raises UserError if the scores are
    of a version without, or of other metrics, sources or regions.
    """
    from credit_like.evaluation.frames import by_init_frame
    from credit_like.evaluation.results import load_results

    return by_init_frame(load_results(_scores_folder(folder)), source, metric, region)


def compare_scores(first: pandas.DataFrame, second: pandas.DataFrame, plugins: Sequence[str] = ()) -> pandas.DataFrame:
    """Compare two frames of `load_scores_by_init`, with the significance of the differences.

    The differences are paired by initial time, and the correlation of successive forecasts is taken into account. One row
    per variable, level, metric, region and lead. Columns: these, units, `times` (the number of initial times that both
    have), `first` and `second` (the scores), `difference` (the second minus the first), `low` and `high` (its 95 %
    interval) and `significant` (whether the interval leaves out zero). `plugins` are the folders or packages with metrics of
    your own, as in an experiment. Raises UserError for frames of several sources, for a variable in different units, and for an
    unknown metric.
    """
    from credit_like.evaluation.significance import score_differences

    return score_differences(first, second, [os.path.abspath(one) if os.path.isdir(one) else one for one in plugins])


def _scores_folder(folder: str | Path) -> Path:
    path = Path(folder)
    return path / "evaluation" if (path / "evaluation").is_dir() else path


def load_log(folder: str | Path) -> pandas.DataFrame:
    """Load `log.jsonl` of a run as a frame, one row per optimiser step and per validation.

    Values of a step (loss, learning_rate, …) are NaN in rows of validations and the other way round; scores by variable
    are columns such as `rmse/u@500`. Raises UserError if the run has no log.
    """
    from credit_like.evaluation.frames import log_frame

    return log_frame(Path(folder))
