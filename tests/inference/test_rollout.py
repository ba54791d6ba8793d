"""The rollout against stepping by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import xarray as xr
from world import HEIGHT, WIDTH, make_context, make_experiment

from credit_like.data import solar
from credit_like.inference.forecast import forecast
from credit_like.inference.times import initial_times, lead_steps
from credit_like.rollout import rollout
from credit_like.schema.experiment import Experiment


@pytest.fixture
def parts(data, tmp_path):
    context = make_context(make_experiment(data, tmp_path))
    return context.stepper, context.store, context.variables, context.statistics


def by_hand(stepper, store, variables, init, leads):
    prognostic = torch.from_numpy(store.read(variables.role("prognostic"), init))[:, :, None]
    state = stepper.initial(prognostic, torch.tensor(init))
    for lead in range(leads):
        forcing = torch.from_numpy(store.read(variables.role("dynamic_forcing"), [i + lead for i in init]))[:, :, None]
        with torch.no_grad():
            state = stepper(state, forcing)
        yield state


def test_rollout_is_the_stepper_in_a_loop(parts):
    stepper, store, variables, _ = parts
    init = [5, 11]
    expected = list(by_hand(stepper, store, variables, init, 6))
    got = list(rollout(stepper, store, variables, init, 6))
    assert [lead for lead, _ in got] == [1, 2, 3, 4, 5, 6]
    for (lead, state), other in zip(got, expected, strict=True):
        assert torch.equal(state.prognostic, other.prognostic)
        assert torch.equal(state.diagnostic, other.diagnostic)
        assert state.index.tolist() == [i + lead for i in init]


class TwoFrames(torch.nn.Module):
    """A model of all channels of two frames, in numpy too."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.register_buffer(
            "weight", torch.randn(out_channels, 2 * in_channels, generator=torch.Generator().manual_seed(1))
        )

    def forward(self, x_BCTHW):
        y = torch.einsum("oc,bchw->bohw", self.weight, x_BCTHW.flatten(1, 2))
        return y.tanh().roll(1, -1)[:, :, None]

    def by_hand(self, x_CTHW):
        y = np.einsum("oc,chw->ohw", self.weight.double().numpy(), x_CTHW.reshape(-1, HEIGHT, WIDTH))
        return np.roll(np.tanh(y), 1, -1)


@pytest.mark.parametrize(
    ("calendar", "last"), [("standard", (3, 2)), ("noleap", (3, 3)), ("360_day", (3, 1)), ("all_leap", (3, 2))]
)
def test_a_forecast_over_february_is_a_plain_loop_over_the_files(data, tmp_path, calendar, last):
    """In float64 with xarray: analysed frames, a forcing that persists, a climatological year, and insolation at their times."""
    leads, first, day = 12, 5, {"standard": 29, "noleap": 28, "360_day": 30, "all_leap": 29}[calendar]
    with xr.open_dataset(data) as opened:
        fields = opened.load().drop_encoding()
    times = xr.date_range("2000-02-27", periods=48, freq="6h", calendar=calendar, use_cftime=calendar != "standard")
    fields.assign_coords(time=times).to_netcdf(tmp_path / "data.nc")
    days = xr.date_range("1999-01-01T12", periods=365, freq="D", calendar="noleap", use_cftime=True)
    ice = np.array([100 * day.month + day.day for day in days], "f4")[:, None, None].repeat(HEIGHT, 1).repeat(WIDTH, 2)
    grid = {name: fields[name] for name in ("latitude", "longitude")}
    xr.Dataset({"ice": (("time", *grid), ice)}, {"time": days, **grid}).to_netcdf(tmp_path / "year.nc")
    document = make_experiment(tmp_path / "data.nc", tmp_path).model_dump(
        mode="json", by_alias=True, exclude_unset=True
    )
    periods = (("train", "02-27", "03-04"), ("valid", "03-05", "03-06"), ("test", "03-07", "03-08"))
    document["data"] |= {name: [f"2000-{begin}", f"2000-{end}"] for name, begin, end in periods}
    document["data"]["history_len"] = 2
    document["data"]["dynamic_forcing"]["surface"] = [
        {"name": "sst", "fill": "persist"},
        {"name": "ice", "path": str(tmp_path / "year.nc"), "fill": "cyclic"},
        {"name": "sun", "compute": "solar"},
    ]
    context = make_context(Experiment.model_validate(document))
    context.stepper.model = model = TwoFrames(context.variables.in_channels, context.variables.out_channels)
    states = rollout(context.stepper, context.store, context.variables, [first], leads, history_len=2)
    found = [context.stepper.outputs(state)[0].double().numpy() for _, state in states]
    context.store.close()

    def scales(*names):
        """Mean, standard deviation and that of the change of channels, as the program has them."""
        return (
            context.statistics.dataset.sel(channel=list(names))[k].values[:, None, None]
            for k in ("mean", "std", "change_std")
        )

    def forcing(at):
        now = times[at]
        of_day = (now.month, now.day) if (now.month, now.day) in {(d.month, d.day) for d in days} else (2, 28)
        # 30 February is half a day from 1 March, and one and a half from 28 February.
        of_day = (3, 1) if (now.month, now.day) == (2, 30) else of_day
        place = next(i for i, d in enumerate(days) if (d.month, d.day) == of_day)
        sun = solar.insolation(times[[at]].values, calendar, 21600, *(fields[name].values for name in grid))
        return np.stack([fields["sst"].values[min(at, first)], ice[place], sun[0]]).astype(float)

    analysed = np.concatenate([fields["u"], fields["temperature"], fields["sp"].values[:, None]], 1).astype(float)
    mean, std, change = scales("u@500", "u@850", "temperature@500", "temperature@850", "sp")
    forcing_mean, forcing_std, _ = scales("sst", "ice", "sun")
    (rain_mean, rain_std, _), (static_mean, static_std, _) = scales("rain"), scales("oro")
    static = (fields["oro"].values - static_mean) / static_std
    frames = [analysed[first - 1], analysed[first]]
    for lead in range(leads):
        inputs = [
            np.concatenate([(frame - mean) / std, static, (forcing(first + lead - 1 + k) - forcing_mean) / forcing_std])
            for k, frame in enumerate(frames)
        ]
        y = model.by_hand(np.stack(inputs, 1))
        frames = [frames[1], frames[1] + change * y[:5]]
        expected = np.concatenate([frames[1] / change, (rain_mean + rain_std * y[5:]) / rain_std])
        np.testing.assert_allclose(found[lead] / np.concatenate([change, rain_std]), expected, rtol=0, atol=5e-3)
    assert (2, day) in {(time.month, time.day) for time in times[first : first + leads]}
    assert (times[first + leads].month, times[first + leads].day) == last


def test_consumer_is_not_in_inference_mode(parts):
    stepper, store, variables, _ = parts
    for _, state in rollout(stepper, store, variables, [3], 2):
        assert not torch.is_inference_mode_enabled()
        assert torch.is_grad_enabled()
        assert not state.prognostic.requires_grad


def test_reads_one_step_of_forcing_ahead_and_no_more(parts, monkeypatch):
    stepper, store, variables, _ = parts
    asked = []
    forcing = type(store).forcing
    monkeypatch.setattr(
        type(store), "forcing", lambda self, times, **k: asked.append(max(times)) or forcing(self, times, **k)
    )
    running = rollout(stepper, store, variables, [4], 12)
    for lead, _ in itertools.islice(running, 5):
        # The step to this lead started from lead − 1, and the next one's forcing may have been read.
        assert max(asked) <= 4 + lead
    running.close()
    assert len(asked) <= 6


def test_an_abandoned_rollout_ends_its_thread(parts):
    import threading

    stepper, store, variables, _ = parts
    next(running := rollout(stepper, store, variables, [4], 30))
    running.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read-ahead")]


def test_notebook_forecast_has_times_names_and_the_same_numbers(parts):
    stepper, store, variables, _ = parts
    init = ["2000-01-02T00:00:00", "2000-01-03T06:00:00"]
    positions = [store.index(time) for time in init]
    datasets = list(forecast(stepper, store, variables, init, 3))
    for lead, (dataset, state) in enumerate(
        zip(datasets, by_hand(stepper, store, variables, positions, 3), strict=True), start=1
    ):
        assert dataset["time"].values.astype("datetime64[s]").astype(str).tolist() == init
        assert dataset["prediction_timedelta"].values == np.timedelta64(6 * lead, "h")
        np.testing.assert_array_equal(dataset["u"].values[:, 0], state.now[:, :2].numpy())
        np.testing.assert_array_equal(dataset["rain"].values[:, 0], state.diagnostic[:, 0].numpy())
        assert dataset["u"].attrs["units"] == "m s-1"


def times(data, tmp_path, missing=(), **inference):
    experiment = make_experiment(data, tmp_path, **inference)
    store = make_context(experiment).store
    found = initial_times(experiment.inference, store, experiment.data, missing)
    return [str(store.times[i])[5:13] for i in found]


def test_initial_times_by_default_lie_in_the_test_period_and_leave_room(data, tmp_path):
    assert times(data, tmp_path, lead="1d") == ["01-09T00", "01-10T00", "01-11T00"]
    assert times(data, tmp_path, lead="60h") == ["01-09T00", "01-10T00"]


def test_initial_times_of_every_form(data, tmp_path):
    assert times(data, tmp_path, init="2000-01-09T06") == ["01-09T06"]
    assert times(data, tmp_path, init=["2000-01-09", "2000-01-03"]) == ["01-03T00", "01-09T00"]
    assert times(data, tmp_path, init=["2000-01-09", "2000-01-10", "12h"]) == ["01-09T00", "01-09T12", "01-10T00"]


def test_a_range_leaves_out_times_without_fields(data, tmp_path, caplog):
    found = times(data, tmp_path, missing=[34], init=["2000-01-09", "2000-01-10", "12h"])
    assert found == ["01-09T00", "01-10T00"]
    assert "1 of 3 initial times left out" in caplog.text


@pytest.fixture
def gap(data, tmp_path):
    """The data without the three times from 2000-01-10T06 on."""
    with xr.open_dataset(data) as whole:
        whole.isel(time=[i for i in range(whole.sizes["time"]) if not 37 <= i < 40]).to_netcdf(tmp_path / "gap.nc")
    return tmp_path / "gap.nc"


def test_no_forecast_reads_forcing_across_a_gap(gap, tmp_path, caplog):
    # Forcing for n steps ends n - 1 steps after the initial time: 2000-01-10T00 is the last time before the gap.
    assert times(gap, tmp_path, lead="1d", init="2000-01-09T06") == ["01-09T06"]
    for init in ("2000-01-09T12", ["2000-01-09", "2000-01-09T12"]):
        with pytest.raises(ValueError, match=r"inference.init: expected data every 6h .* a gap around 2000-01-09T12"):
            times(gap, tmp_path, lead="1d", init=init)
    assert times(gap, tmp_path, lead="1d") == ["01-09T00", "01-11T00"]  # as without the gap, at the same time of day
    assert times(gap, tmp_path, lead="6h", init=["2000-01-09", "2000-01-12", "12h"]) == [
        "01-09T00", "01-09T12", "01-10T00", "01-11T00", "01-11T12", "01-12T00",
    ]  # fmt: skip
    assert "1 of 7 initial times left out: the data have a gap in time there" in caplog.text


def test_history_and_earlier_starts_are_not_read_across_a_gap(gap, tmp_path):
    lagged = {"members": 2, "perturbations": {"type": "lagged", "lag": "12h"}}
    init = ["2000-01-09", "2000-01-12", "6h"]
    assert "01-11T06" not in times(gap, tmp_path, lead="6h", init=init, ensemble=lagged)
    assert "01-11T12" in times(gap, tmp_path, lead="6h", init=init, ensemble=lagged)


@pytest.mark.parametrize(
    ("inference", "missing", "message"),
    [
        ({"init": "2001-01-01"}, (), "inference.init: expected a time in the data, got 2001-01-01"),
        ({"init": "2000-01-09T03"}, (), "the nearest are 2000-01-09T00:00:00 and 2000-01-09T06:00:00"),
        ({"init": "2000-01-09"}, [32], "whole fields are missing"),
        ({"init": "2000-01-12", "lead": "2d"}, (), r"expected forcing \(sst\) for 8 steps from 2000-01-12T00:00:00"),
        ({"lead": "30d"}, (), "got 120 steps and 13 test times"),
        ({"lead": "7h"}, (), "whole number of steps of 6h"),
        ({"init": ["2000-01-09", "2000-01-10", "7h"]}, (), "inference.init: expected a whole number of steps"),
    ],
)
def test_initial_times_that_cannot_be(data, tmp_path, inference, missing, message):
    with pytest.raises(ValueError, match=message):
        times(data, tmp_path, missing, **inference)


@pytest.mark.parametrize("lead", [0, -4])
def test_lead_of_nothing_is_refused(lead):
    import datetime as dt

    with pytest.raises(ValueError, match="at least one"):
        lead_steps(lead, dt.timedelta(hours=6))
