"""Window assembly against plain xarray indexing."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from credit_like.data.loading.windows import Windows
from credit_like.data.store import open_store
from credit_like.variables import Variables


def frames(ds, variables, times, rows, columns):
    """(C, T, H, W) by xarray."""
    fields = []
    for variable in variables:
        field = ds[variable.name].isel(time=times, latitude=rows, longitude=columns)
        if variable.levels:
            fields += [field.sel(level=level).values for level in variable.levels]
        else:
            fields.append(field.values)
    return np.stack(fields)


@pytest.fixture(scope="module")
def stores(tmp_path_factory, dataset, data_section):
    folder = tmp_path_factory.mktemp("windows")
    result = []
    for i, (calendar, ascending) in enumerate((("standard", False), ("noleap", True), ("360_day", False))):
        gap = [t for t in range(40) if t not in (11, 12, 25)]
        ds = dataset(calendar=calendar, ascending=ascending).isel(time=gap)
        path = folder / f"{i}.zarr"
        encoding = {n: {"chunks": (1 + 2 * i, *v.shape[1:])} for n, v in ds.items() if "time" in v.dims}
        ds.to_zarr(path, encoding=encoding, consolidated=False)
        data = data_section(path, dynamic_forcing={"surface": ["sst"]})
        variables = Variables(data)
        result.append((ds, variables, open_store(data, variables)))
    return result


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_windows_are_those_of_xarray(stores, data_section, data):
    ds, variables, store = data.draw(st.sampled_from(stores))
    history, leads = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    missing = data.draw(st.sets(st.integers(0, len(store) - 1), max_size=3))
    days = sorted(data.draw(st.lists(st.integers(1, 10), min_size=2, max_size=4, unique=True)))
    periods = [[f"2001-01-{a:02d}", f"2001-01-{b:02d}T12"] for a, b in zip(days[::2], days[1::2], strict=False)]
    periods = data_section("", train=periods).train
    rows = data.draw(st.sampled_from([slice(None), slice(0, 4), slice(4, 9)]))
    columns = data.draw(st.sampled_from([slice(None), slice(0, 7), slice(7, 16)]))
    step = 6 * 3600
    expected = []
    for t in range(len(store)):
        window = range(t - history + 1, t + leads + 1)
        if window[0] < 0 or window[-1] >= len(store) or missing & set(window):
            continue
        since = store.seconds[list(window)]
        inside = any(set(window) <= set(store.period((p,)).tolist()) for p in periods)
        if inside and np.all(np.diff(since) == step):
            expected.append(t)

    def make():
        return Windows(
            store,
            variables,
            periods,
            history_len=history,
            forecast_len=leads,
            missing_times=missing,
            rows=rows,
            columns=columns,
        )

    if not expected:
        with pytest.raises(ValueError, match="expected a window"):
            make()
        return
    windows = make()
    assert windows.starts.tolist() == expected
    chosen = data.draw(st.lists(st.integers(0, len(windows) - 1), min_size=1, max_size=3))
    sample = windows.batch(chosen)
    for b, i in enumerate(chosen):
        now = expected[i]
        past, future = range(now - history + 1, now + 1), range(now + 1, now + leads + 1)
        prognostic = frames(ds, variables.role("prognostic"), past, rows, columns)
        np.testing.assert_array_equal(sample.prognostic[b].numpy(), prognostic)
        np.testing.assert_array_equal(sample.target[b].numpy(), frames(ds, variables.outputs, future, rows, columns))
        forcing = frames(ds, variables.role("dynamic_forcing"), [*past, *future][:-1], rows, columns)
        np.testing.assert_array_equal(sample.forcing[b].numpy(), forcing)
        assert sample.index[b] == now
    for x in (sample.prognostic, sample.forcing, sample.target):
        assert x.is_contiguous()
        assert x.dtype == torch.float32


def test_what_is_left_out_is_told_once(stored, caplog):
    _, data, variables, store = stored()
    with caplog.at_level("INFO"):
        windows = Windows(store, variables, data.train, history_len=2, forecast_len=1, missing_times={5, 6})
    assert len(windows) == 22 - 4
    assert "18 windows, 0 left out for gaps in time and 4 for missing fields" in caplog.text


def test_a_value_that_has_gone_missing_names_time_and_variable(stored, dataset):
    ds = dataset()
    ds["t"][..., 0, 0] = np.nan
    ds["t"][8, 2, 3, 3] = np.nan
    _, data, variables, store = stored(ds)
    mask = np.ones((variables.out_channels, 9, 12), bool)
    mask[2:4, 0, 0] = False
    windows = Windows(store, variables, data.train, history_len=1, forecast_len=1, mask=mask)
    assert torch.isnan(windows[3].prognostic).sum() == 2
    for i in (7, 8):
        with pytest.raises(ValueError, match=r"expected data of t@850 at 2001-01-03T00:00:00, got 1 missing of 108"):
            windows[i]


def test_persisted_forcing_is_held_in_targets_too(stored):
    forcing = {"surface": [{"name": "sst", "fill": "persist"}]}
    ds, data, variables, store = stored(dynamic_forcing=forcing)
    sample = Windows(store, variables, data.train, history_len=2, forecast_len=3)[4]
    got = sample.forcing[0, 0].numpy()
    now = int(sample.index[0])
    for field, t in zip(got, (now - 1, now, now, now), strict=True):
        np.testing.assert_array_equal(field, ds["sst"].values[t])
