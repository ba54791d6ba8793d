"""Scores of forecasts; `load_scores` and `load_log` return scores and training logs as pandas frames."""

from __future__ import annotations

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

    path = Path(folder)
    return scores_frame(load_results(path / "evaluation" if (path / "evaluation").is_dir() else path))


def load_log(folder: str | Path) -> pandas.DataFrame:
    """Load `log.jsonl` of a run as a frame, one row per optimiser step and per validation.

    Values of a step (loss, learning_rate, …) are NaN in rows of validations and the other way round; scores by variable
    are columns such as `rmse/u@500`. Raises UserError if the run has no log.
    """
    from credit_like.evaluation.frames import log_frame

    return log_frame(Path(folder))
