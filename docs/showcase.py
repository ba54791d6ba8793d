"""Make the pictures and the tables of results from a finished run: `python docs/showcase.py SAVE_LOC`.

The run is that of `credit-like demo`, or one of config/gcm-t21.yml with forecasts of five days. A table is the RMSE of the model
as a fraction of that of persistence and of climatology; a picture has the curves of the training, and another, of the
demonstration alone, is a map of its first forecast.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from credit_like.data.store import open_store
from credit_like.evaluation import load_log, load_scores
from credit_like.evaluation.maps import Choice, plot_maps
from credit_like.inference.paths import forecast_path
from credit_like.schema.load import load_experiment
from credit_like.variables import Variables

ROOT = Path(__file__).parents[1]
HOURS = (24, 72, 120)
BEGIN, END = "<!-- results of {}: made by docs/showcase.py -->", "<!-- end of results -->"


def table(scores: pd.DataFrame, hours: tuple[int, ...] = HOURS) -> str:
    """Return a Markdown table of the model's RMSE divided by that of persistence and climatology at some leads."""
    rmse = scores[(scores["metric"] == "rmse") & (scores["region"] == "global") & scores["lead_hours"].isin(hours)]
    wide = rmse.pivot_table(index=["variable", "level", "lead_hours"], columns="source", values="value", dropna=False)
    ratios = {name: wide["model"] / wide[name] for name in ("persistence", "climatology")}
    heads = [f"{name}, {hour} h" for name in ratios for hour in hours]
    lines = ["| variable | " + " | ".join(heads) + " |", "|---|" + "---|" * len(heads)]
    for variable, level in dict.fromkeys(zip(rmse["variable"], rmse["level"].fillna(-1.0), strict=True)):
        cells = []
        for values in ratios.values():
            for hour in hours:
                of = values.xs(variable, level="variable").xs(float(hour), level="lead_hours")
                levels = of.index.to_series().fillna(-1.0)
                cells.append(f"{float(of[levels.to_numpy() == level].iloc[0]):.2f}")
        name = str(variable) if level == -1.0 else f"{variable}, level {level:g}"
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def curves(log: pd.DataFrame) -> plt.Figure:
    """Draw what a training logs: losses, gradient norm, learning rate and speed."""
    steps, validations = log.dropna(subset=["loss"]), log.dropna(subset=["valid_loss"])
    figure, axes = plt.subplots(2, 2, figsize=(9, 5), sharex=True, layout="constrained")
    (loss, norm), (rate, wait) = axes
    loss.semilogy(steps["step"], steps["loss"], lw=0.7, label="loss")
    loss.semilogy(validations["step"], validations["valid_loss"], "ko-", ms=4, lw=1, label="valid_loss")
    loss.legend()
    norm.semilogy(steps["step"], steps["grad_norm"], lw=0.7)
    rate.plot(steps["step"], steps["learning_rate"])
    wait.plot(steps["step"], 100 * steps["data_wait"], lw=0.7)
    for axis, title in ((loss, "loss"), (norm, "grad_norm"), (rate, "learning_rate"), (wait, "data_wait, % of a step")):
        axis.set_title(title, loc="left", fontsize=10)
        axis.grid(alpha=0.3)
    for axis in axes[1]:
        axis.set_xlabel("optimiser step")
    return figure


def between(text: str, new: str, name: str = "demo") -> str:
    """Return the text with the results of an experiment replaced, which are between two marks.

    Raises ValueError if a mark is absent.
    """
    begin = BEGIN.format(name)
    start = text.index(begin) + len(begin)
    end = text.index(END, start)
    return f"{text[:start]}\n\n{new}\n\n{text[end:]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("save_loc", type=Path)
    parser.add_argument("--variable", default="column_water")
    parser.add_argument("--lead", type=int, default=72, help="hours")
    arguments = parser.parse_args()
    experiment = load_experiment(arguments.save_loc / "experiment.yml")
    readme = ROOT / "README.md"
    readme.write_text(between(readme.read_text(), table(load_scores(arguments.save_loc)), experiment.name))
    curves(load_log(arguments.save_loc)).savefig(ROOT / "docs" / "images" / f"healthy-{experiment.name}.png", dpi=100)
    if experiment.name != "demo":
        return
    variables = Variables(experiment.data)
    store = open_store(experiment.data, variables)
    choice = Choice(arguments.variable, None, arguments.lead * 3600)
    (made,) = plot_maps(forecast_path(experiment), store, variables, ROOT / "docs" / "images", choice=choice)
    made.replace(made.with_name("forecast.png"))


if __name__ == "__main__":
    main()
