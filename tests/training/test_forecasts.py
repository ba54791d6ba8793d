"""Short forecasts during training: the scores of `evaluate`, in every layout, within their share of the time."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from credit_like import build
from credit_like.checkpoint.export import export
from credit_like.context import Context
from credit_like.data.statistics import fit_statistics
from credit_like.data.store import open_store
from credit_like.evaluation.derived import scored_variables, training_store
from credit_like.evaluation.evaluate import evaluate
from credit_like.evaluation.needs import open_truth
from credit_like.inference.forecast import write_forecasts
from credit_like.inference.paths import forecast_path
from credit_like.layout import domain_shape
from credit_like.models import persistence
from credit_like.parallel.runtime import Runtime
from credit_like.schema.experiment import Experiment
from credit_like.schema.load import load_experiment
from credit_like.schema.trainer import Parallelism
from credit_like.stepper import Stepper
from credit_like.training.forecasts import Allowance, ShortForecasts
from credit_like.training.monitor import JsonLines
from credit_like.training.validation import time_mean
from credit_like.variables import Variables
from tests.derived import everything, make_experiment, make_world
from tests.experiments import DEMO, SHORT, SMALL_MODEL

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "inference"))


def with_monitor(experiment: Experiment, **monitor) -> Experiment:
    """`experiment` with short forecasts of four steps (if nothing else is said) from a valid period of nine days."""
    plain = experiment.to_dict()
    plain["trainer"]["monitor"] = {"every": 1, "init": 3, "lead": 4, **monitor}
    plain["trainer"] |= {"global_batch_size": 2, "micro_batch_size": 2}
    plain["data"]["valid"] = [{"start": "2000-01-03", "end": "2000-01-10"}]
    return Experiment.model_validate(plain)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    import world

    return world.make_data(tmp_path_factory.mktemp("data") / "world.nc", masked=True)


@pytest.fixture(scope="module")
def made(data, tmp_path_factory):
    import world

    experiment = with_monitor(world.make_experiment(data, tmp_path_factory.mktemp("run")))
    context = world.make_context(experiment)
    context.stepper.eval()
    short = ShortForecasts(context, False)
    fields = context.store.read(context.variables.outputs, range(20))
    climatology = torch.from_numpy(np.nan_to_num(fields.mean(0)))
    return context, short, climatology, short(climatology, lambda: False)


def test_initial_times_are_spread_over_the_validation_period(made):
    context, short, _, scores = made
    times = [str(context.store.times[i]) for i in short.init]
    assert times == ["2000-01-03T00:00:00", "2000-01-06T00:00:00", "2000-01-09T00:00:00"]
    assert scores["initial_times"] == 3
    assert scores["lead_hours"] == [6, 12, 18, 24]


def test_rmse_and_bias_are_those_of_evaluate(made):
    context, _, _, scores = made
    init = ["2000-01-03", "2000-01-06", "2000-01-09"]
    plain = context.experiment.to_dict() | {"inference": {"init": init, "lead": 4}}
    experiment = Experiment.model_validate(plain)
    write_forecasts(dataclasses.replace(context, experiment=experiment), "step-0")
    results = evaluate(experiment, forecast_path(experiment), context.store, context.store, context.variables)
    for metric in ("rmse", "bias"):
        for name, values in scores[metric].items():
            variable, _, level = name.partition("@")
            expected = results[variable].sel(source="model", metric=metric, region="global")
            expected = expected.sel(level=float(level)) if level else expected
            scale = float(results[variable].sel(source="model", metric="rmse").max())
            np.testing.assert_allclose(values, expected.values, rtol=1e-4, atol=1e-5 * scale)


def test_acc_and_activity_are_their_formulas(made):
    context, short, climatology, scores = made
    stepper, store, variables = context.stepper, context.store, context.variables
    weights = store.grid.latitude_weights()[:, None] * np.ones((1, store.grid.width))
    acc, activity = np.zeros((2, len(short.init), 4))
    for n, i in enumerate(short.init):
        prognostic = torch.from_numpy(store.read(variables.role("prognostic"), [i])).transpose(0, 1)[None]
        state = stepper.initial(prognostic, torch.tensor([i]))
        for lead in range(4):
            with torch.no_grad():
                state = stepper(state, torch.from_numpy(store.forcing([i + lead], i)).transpose(0, 1)[None])
            truth = store.read(variables.outputs, [i + lead + 1])[0, 4].astype(np.float64)
            there = np.isfinite(truth)
            f = (state.now[0, 4].double().numpy() - climatology[4].numpy())[there]
            t, w = (truth - climatology[4].numpy())[there], weights[there] / weights[there].sum()
            acc[n, lead] = (w * f * t).sum() / np.sqrt((w * f * f).sum() * (w * t * t).sum())
            activity[n, lead] = np.sqrt((w * f * f).sum())
    np.testing.assert_allclose(scores["acc"]["sp"], acc.mean(0), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(scores["activity"]["sp"], activity.mean(0), rtol=1e-3)


def test_a_stop_between_batches_ends_them(made):
    _, short, climatology, _ = made
    answers = iter([False, True])
    assert short(climatology, lambda: next(answers)) is None


@pytest.mark.parametrize(
    ("monitor", "message"),
    [
        ({"lead": "7h"}, "trainer.monitor.lead: expected a whole number of steps of 6h, got 7h"),
        ({"lead": "30d"}, r"trainer.monitor.lead: expected a window of 1 \+ 120 times"),
    ],
)
def test_a_lead_that_cannot_be_is_refused(made, monitor, message):
    context = dataclasses.replace(made[0], experiment=with_monitor(made[0].experiment, **monitor))
    with pytest.raises(ValueError, match=message):
        ShortForecasts(context, False)


class _Largest(TorchDispatchMode):
    """The number of values of the largest tensor that is made."""

    values = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.values = max(self.values, result.numel())
        return result


def _scores_of_a_rank(rank, experiment, parallelism):
    """What one rank of a layout gets from the model that changes nothing (which needs no exchange of rows)."""
    runtime = Runtime.start(Parallelism(**parallelism), torch.device("cpu"), experiment.trainer.timeout)
    variables = Variables(experiment.data)
    store = open_store(experiment.data, variables)
    statistics = fit_statistics(store, variables, experiment.data)
    places = divmod(runtime.domain_rank, runtime.domain_shape[1])
    rows, columns = (
        slice(at * length // size, (at + 1) * length // size)
        for at, length, size in zip(places, (store.grid.height, store.grid.width), runtime.domain_shape, strict=True)
    )
    height, width = rows.stop - rows.start, columns.stop - columns.start
    model = persistence.build(
        persistence.Config(),
        in_channels=variables.in_channels,
        out_channels=variables.out_channels,
        frames=1,
        height=height,
        width=width,
    )
    static = store.static(rows, columns)
    stepper = Stepper(model, variables, statistics, static, "increment", (), rows, columns=columns)
    context = Context(experiment, runtime, variables, store, statistics, stepper, rows, columns)
    short = ShortForecasts(context, False)
    with _Largest() as largest:
        climatology = time_mean(context, store.period(experiment.data.train), short.derived)
    assert climatology.shape == (len(short.derived), height, width)
    if not short.derived.needs_all:
        # Sums and counts of this rank's part, however large the grid is.
        assert largest.values == 2 * climatology.numel()
    result = short(climatology, lambda: False)
    runtime.close()
    return result


@pytest.mark.parametrize(
    "parallelism",
    [{"data": "ddp"}, {"ensemble": 2}, {"domain": 2}, {"data": "ddp", "domain": 2}, {"domain": (2, 2)}],
    ids=str,
)
def test_all_layouts_score_alike(made, run_ranks, parallelism):
    experiment = made[0].experiment
    (serial,) = run_ranks(1, _scores_of_a_rank, experiment, {})
    rows, columns = domain_shape(parallelism.get("domain", 1))
    world = rows * columns * (2 if parallelism.get("data") else 1) * parallelism.get("ensemble", 1)
    for scores in run_ranks(world, _scores_of_a_rank, experiment, parallelism):
        assert scores.keys() == serial.keys()
        for metric in ("rmse", "bias", "acc", "activity"):
            for name, values in serial[metric].items():
                np.testing.assert_allclose(scores[metric][name], values, rtol=1e-6, atol=1e-6)


@pytest.fixture(scope="module")
def derived(tmp_path_factory):
    """An experiment whose evaluation derives every field, with short forecasts."""
    folder = make_world(tmp_path_factory.mktemp("world"))
    experiment = make_experiment(
        folder, folder / "run", evaluation={"derive": everything(folder), "metrics": ["rmse", "bias"]}
    )
    return with_monitor(experiment, lead=2)


@pytest.mark.slow
def test_derived_fields_are_scored_as_by_evaluate(derived):
    import world

    context = world.make_context(derived)
    context.stepper.eval()
    short = ShortForecasts(context, False)
    climatology = time_mean(context, context.store.period(derived.data.train), short.derived)
    assert climatology.shape == (len(short.derived), 9, 16)
    assert bool(climatology.isfinite().all())
    scores = short(climatology, lambda: False)
    init = [str(context.store.times[i]) for i in short.init]
    plain = derived.to_dict() | {"inference": {"init": init, "lead": 2}}
    experiment = Experiment.model_validate(plain)
    write_forecasts(dataclasses.replace(context, experiment=experiment), "step-0")
    truth = open_truth(experiment, context.store)
    variables = scored_variables(context.variables, truth)
    results = evaluate(experiment, forecast_path(experiment), truth, training_store(context.store, truth), variables)
    assert {"geopotential@500", "mean_sea_level_pressure", "vorticity@850", "temperature_pl@250"} <= scores[
        "rmse"
    ].keys()
    for metric in ("rmse", "bias"):
        for name, values in scores[metric].items():
            variable, _, level = name.partition("@")
            expected = results[variable].sel(source="model", metric=metric, region="global")
            expected = expected.sel(level=float(level)) if level else expected
            scale = float(results[variable].sel(source="model", metric="rmse").max())
            np.testing.assert_allclose(values, expected.values, rtol=1e-4, atol=1e-5 * scale, err_msg=name)
    assert 0 < scores["activity"]["wind_speed@500"][0] < 50


@pytest.mark.parametrize("parallelism", [{"domain": 2}, {"data": "ddp", "domain": 2}, {"domain": (1, 2)}], ids=str)
def test_all_layouts_score_derived_fields_alike(derived, run_ranks, parallelism):
    (serial,) = run_ranks(1, _scores_of_a_rank, derived, {})
    assert min(serial["rmse"]["vorticity@850"]) > 0
    for scores in run_ranks(2 * (1 + ("data" in parallelism)), _scores_of_a_rank, derived, parallelism):
        for metric in ("rmse", "bias", "acc", "activity"):
            assert scores[metric].keys() == serial[metric].keys()
            for name, values in serial[metric].items():
                np.testing.assert_allclose(scores[metric][name], values, rtol=1e-9, atol=1e-12, err_msg=name)


@given(st.lists(st.floats(0.1, 50), min_size=1, max_size=60), st.floats(0.01, 5), st.floats(0.005, 0.5))
def test_the_share_is_kept(epochs, cost, share):
    allowance, trained = Allowance(share), 0.0
    for seconds in epochs:
        trained += seconds
        before = allowance.spent
        if allowance.affords(trained, cost):
            allowance.pay(cost)
        else:
            assert before + cost > share * trained
        assert allowance.spent <= share * trained


def test_what_was_dearer_than_thought_is_saved_up_for():
    allowance = Allowance(0.02)
    assert allowance.affords(100, estimate=1.0)
    allowance.pay(10.0)
    assert not allowance.affords(900, estimate=1.0)  # 10 + 10 of 18
    assert allowance.affords(1000, estimate=1.0)


TINY = [
    *SHORT,
    SMALL_MODEL,
    "trainer.epochs=2",
    "trainer.batches_per_epoch=2",
    "trainer.scheduler.warmup_steps=1",
    "trainer.checkpoint.async=false",
]


def trained(folder, *overrides):
    """(rows of the log, weights) of a small run."""
    experiment = load_experiment(DEMO, [*TINY, f"save_loc={folder}", *overrides])
    assert build.train(experiment) == 0
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return rows, load_file(export(folder, folder / "weights.safetensors", "raw"))


@pytest.mark.slow
def test_training_is_the_same_with_and_without(tmp_path, caplog):
    plain, weights = trained(tmp_path / "plain")
    rows, watched = trained(tmp_path / "watched", "trainer.monitor={every: 2, init: 2, lead: 12h, share: 1.0}")
    assert [row["loss"] for row in rows if "loss" in row] == [row["loss"] for row in plain if "loss" in row]
    assert all(torch.equal(weights[name], watched[name]) for name in weights)
    first, second = [row for row in rows if "valid_loss" in row]
    assert "forecast" not in first
    assert second["forecast"]["lead_hours"] == [6, 12]
    assert second["forecast"]["rmse"].keys() == second["rmse"].keys()
    assert all(len(values) == 2 and values[0] > 0 for values in second["forecast"]["rmse"].values())
    curves = b"".join(file.read_bytes() for file in (tmp_path / "watched" / "tensorboard").iterdir())
    assert b"forecast_rmse_12h/u@1" in curves

    caplog.set_level("INFO")
    rows, _ = trained(tmp_path / "thrifty", "trainer.monitor={every: 1, init: 2, lead: 12h, share: 1.0e-6}")
    assert not any("forecast" in row for row in rows)
    assert "short forecasts skipped after epoch 1" in caplog.text


def test_scores_that_are_not_finite_are_null_in_the_log(tmp_path) -> None:
    """Also those of short forecasts, which are lists: a training that diverges goes on to its own end."""
    rows = JsonLines(tmp_path / "log.jsonl")
    rows.write(
        {"step": 2, "valid_loss": math.inf, "forecast": {"rmse": {"u": [1.0, math.nan]}, "lead_hours": (6.0, 12.0)}}
    )
    rows.close()
    (row,) = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    assert row == {"step": 2, "valid_loss": None, "forecast": {"rmse": {"u": [1.0, None]}, "lead_hours": [6.0, 12.0]}}
