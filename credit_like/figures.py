"""Figures of an experiment's scores and forecasts; needs no torch, whose import takes longer than drawing some of them."""

from __future__ import annotations

from credit_like.data.store import open_store
from credit_like.evaluation.charts import Style
from credit_like.evaluation.derived import scored_variables
from credit_like.evaluation.maps import Choice, plot_maps
from credit_like.evaluation.needs import open_truth
from credit_like.evaluation.plots import plot_ensemble, plot_scores
from credit_like.evaluation.results import evaluation_folder, load_results
from credit_like.inference.paths import forecast_path
from credit_like.schema.experiment import Experiment
from credit_like.variables import Variables


def plot(experiment: Experiment, choice: Choice = Choice(), style: Style = Style()) -> int:  # noqa: B008, frozen
    """Draw score curves, and maps of truth, forecast and error; only the chosen map if there is a choice."""
    variables = Variables(experiment.data)
    store = open_store(experiment.data, variables)
    folder = evaluation_folder(experiment)
    if choice.is_default:
        results = load_results(folder)
        plot_scores(results, folder)
        plot_ensemble(results, folder)
    truth = open_truth(experiment, store)
    variables = scored_variables(variables, truth)
    plot_maps(forecast_path(experiment), truth, variables, folder, choice, style)
    return 0
