"""Every score against its formula written out in plain NumPy, and against other packages where they define the same."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_like import registry
from credit_like.errors import UserError
from credit_like.evaluation.fields import Fields, Regions
from credit_like.evaluation.metrics import extra, needs
from credit_like.evaluation.needs import possible_metrics
from credit_like.grid import Grid
from credit_like.schema.inference import Box

TIMES = 4


def score(name, many):
    """The finished score (L, K, R[, extra]) of several initial times."""
    module = registry.module("metric", name)
    per_time = [module.per_time(fields) for fields in many]
    return module.finish({key: np.mean([part[key] for part in per_time], 0) for key in per_time[0]})


def weights_of(grid):
    """WeatherBench2: from the bounds of the cells, written out."""
    latitude = np.sort(np.deg2rad(grid.latitude))
    bounds = np.concatenate([[-np.pi / 2], (latitude[1:] + latitude[:-1]) / 2, [np.pi / 2]])
    rows = np.sin(bounds[1:]) - np.sin(bounds[:-1])
    rows = rows / rows.mean()
    return np.repeat((rows if grid.latitude[0] < grid.latitude[-1] else rows[::-1])[:, None], grid.width, 1)


def area(x, weights, where=None):
    """Weighted mean of one field over the points that have data, point by point."""
    total = weight = 0.0
    for i, j in np.ndindex(x.shape):
        if np.isfinite(x[i, j]) and (where is None or where[i, j]):
            total += weights[i, j] * x[i, j]
            weight += weights[i, j]
    return total / weight


def each(fields, function):
    """function(members (M, H, W), truth, climatology) of every lead and level."""
    result = np.empty(fields.truth.shape[:2])
    for lead, level in np.ndindex(result.shape):
        hidden = ~(np.isfinite(fields.truth[lead, level]) & np.isfinite(fields.forecast[:, lead, level]).all(0))
        one = [np.where(hidden, np.nan, x[lead, level]) for x in (fields.truth, fields.climatology)]
        members = np.where(hidden, np.nan, fields.forecast[:, lead, level])
        result[lead, level] = function(members, *one)
    return result


def crps_pairs(x, y):
    """By definition: over all pairs of members."""
    skill = np.abs(x - y).mean(0)
    pairs = np.abs(x[:, None] - x[None])
    return skill, pairs.mean((0, 1)), pairs.sum((0, 1)) / (len(x) * (len(x) - 1))


def formulas(grid):
    w = weights_of(grid)

    def acc(x, y, c):
        f, o = x.mean(0) - c, y - c
        return area(f * o, w) / np.sqrt(area(f * f, w) * area(o * o, w))

    def crps(x, y, c):
        skill, spread, _ = crps_pairs(x, y)
        return area(skill - spread / 2, w)

    def fair(x, y, c):
        skill, _, spread = crps_pairs(x, y)
        return area(skill - spread / 2, w)

    return {
        "mse": (lambda x, y, c: area((x.mean(0) - y) ** 2, w), lambda m: m),
        "rmse": (lambda x, y, c: area((x.mean(0) - y) ** 2, w), np.sqrt),
        "bias": (lambda x, y, c: area(x.mean(0) - y, w), lambda m: m),
        "mae": (lambda x, y, c: area(np.abs(x.mean(0) - y), w), lambda m: m),
        "acc": (acc, lambda m: m),
        "activity": (lambda x, y, c: np.sqrt(area((x.mean(0) - c) ** 2, w)), lambda m: m),
        "crps": (crps, lambda m: m),
        "fair-crps": (fair, lambda m: m),
        "spread": (lambda x, y, c: area(x.var(0, ddof=1), w), np.sqrt),
    }


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", sorted(formulas(Grid(np.array([45.0, -45.0]), np.array([0.0, 180.0])))))
def test_scores_are_the_formulas(make_fields, grid, name, masked):
    many = [make_fields(masked=masked, seed=seed) for seed in range(TIMES)]
    per_time, finish = formulas(grid)[name]
    expected = finish(np.mean([each(fields, per_time) for fields in many], 0))
    got = score(name, many)[..., many[0].regions.names.index("global")]
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_spread_skill_ratio(make_fields, grid):
    many, w = [make_fields(seed=seed) for seed in range(TIMES)], weights_of(grid)
    variance = np.mean([each(f, lambda x, y, c: area(x.var(0, ddof=1), w)) for f in many], 0)
    error = np.mean(
        [each(f, lambda x, y, c: area((x.mean(0) - y) ** 2 - x.var(0, ddof=1) / len(x), w)) for f in many], 0
    )
    np.testing.assert_allclose(score("spread-skill", many)[..., 0], np.sqrt(variance / error), rtol=1e-12)


def test_spread_skill_of_a_reliable_ensemble_is_one(make_fields):
    """Truth and members drawn from the same distribution: 1 for any number of members, by both definitions."""
    rng = np.random.default_rng(0)
    for members in (2, 10):
        many = []
        for _ in range(60):
            signal = rng.standard_normal((3, 2, 9, 16))
            forecast = signal + rng.standard_normal((members, 3, 2, 9, 16))
            many.append(make_fields(forecast=forecast, truth=signal + rng.standard_normal(signal.shape)))
        # 60 · 6 · 144 draws, of unequal weight: within a few percent.
        for name in ("spread-skill", "spread-error"):
            assert abs(float(score(name, many)[..., 0].mean()) - 1) < 0.03


def test_rank_histogram(make_fields, grid):
    fields = make_fields()
    fields.truth[0, 0, 4] = fields.forecast[1, 0, 0, 4]  # ties
    w, expected = weights_of(grid), np.zeros((3, 2, 6))
    for lead, level, i, j in np.ndindex(3, 2, *w.shape):
        x, y = fields.forecast[:, lead, level, i, j], fields.truth[lead, level, i, j]
        low, high = (x < y).sum(), (x <= y).sum()
        for rank in range(low, high + 1):
            expected[lead, level, rank] += w[i, j] / (high - low + 1)
    got = score("rank-histogram", [fields])[..., 0, :]
    np.testing.assert_allclose(got, expected / w.sum(), rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(got.sum(-1), 1)


def test_spectrum_has_the_energy_of_the_field(make_fields, grid):
    """Parseval: the sum over wavenumbers is the mean square along a circle of latitude, times its length."""
    fields = make_fields(members=1)
    w = fields.regions.weights[0]
    length = 2 * np.pi * 6.371e6 * np.cos(np.deg2rad(grid.latitude))[:, None]
    # The Nyquist wavenumber has no twin, but is doubled by the definition like every other one.
    nyquist = np.abs(np.fft.rfft(fields.forecast[0], axis=-1)[..., -1:] / grid.width) ** 2
    expected = (w * length * (fields.forecast[0] ** 2 + nyquist)).sum((-2, -1)) / w.sum()
    np.testing.assert_allclose(score("spectrum", [fields])[..., 0, :].sum(-1), expected, rtol=1e-12)


def test_spectrum_of_one_wave(make_fields, grid):
    wave = np.broadcast_to(3 * np.cos(5 * np.deg2rad(grid.longitude)), (1, 3, 2, 9, 16))
    spectrum = score("spectrum", [make_fields(forecast=wave.copy())])[0, 0, 0]
    assert np.argmax(spectrum) == 5
    np.testing.assert_allclose(np.delete(spectrum, 5), 0, atol=1e-6)


def seeps_fields(make_fields, forecast, truth, dry, heavy):
    return make_fields(forecast=forecast, truth=truth, thresholds=(dry, heavy))


def test_seeps(make_fields, grid):
    rng = np.random.default_rng(0)
    shape = (3, 2, 9, 16)
    truth, forecast = (np.maximum(0, rng.gamma(0.5, 4, s) - 0.5) for s in (shape, (1, *shape)))
    dry, heavy = rng.uniform(0.05, 0.95, shape[2:]), rng.uniform(2, 6, shape[2:])
    expected, w = np.zeros(shape[:2]), weights_of(grid) * ((dry >= 0.1) & (dry <= 0.85))
    for lead, level, i, j in np.ndindex(shape):
        if w[i, j] == 0:
            continue
        p = dry[i, j]
        matrix = [[0, 1 / (1 - p), 4 / (1 - p)], [1 / p, 0, 3 / (1 - p)], [1 / p + 3 / (2 + p), 3 / (2 + p), 0]]
        f, o = (
            0 if x <= 0.25 else 1 if x <= heavy[i, j] else 2
            for x in (forecast[0, lead, level, i, j], truth[lead, level, i, j])
        )
        expected[lead, level] += w[i, j] * matrix[f][o] / 2
    got = score("seeps", [seeps_fields(make_fields, forecast, truth, dry, heavy)])[..., 0]
    np.testing.assert_allclose(got, expected / w.sum(), rtol=1e-12)


@pytest.mark.parametrize("constant", [0.0, 1.0, 50.0])
def test_seeps_of_a_constant_forecast_is_one(make_fields, constant):
    """Equitable: over a climate with exactly the assumed frequencies."""
    p, shape = 0.4, (1, 1, 9, 16)
    dry, heavy = np.full(shape[2:], p), np.full(shape[2:], 5.0)
    cases = [0.0] * 2 + [1.0] * 2 + [50.0]  # 40 % dry, and of the rest two thirds light
    many = [
        seeps_fields(make_fields, np.full((1, *shape), constant), np.full(shape, case), dry, heavy) for case in cases
    ]
    np.testing.assert_allclose(score("seeps", many), 1, rtol=1e-12)


def events_of(fields):
    """Three thresholds that differ from point to point, one of them without a value at some points."""
    rng = np.random.default_rng(7)
    events = 280 + 10 * rng.standard_normal((3, 2, 9, 16))
    events[1, :, 3:5, 2:9] = np.nan
    return events


def of_events(fields, grid, function, number):
    """function(p, o) of every point, averaged over the area; p and o counted member by member."""
    w, expected = weights_of(grid), np.zeros(fields.truth.shape[:2])
    for lead, level in np.ndindex(expected.shape):
        total = weight = 0.0
        for i, j in np.ndindex(w.shape):
            x, y = fields.forecast[:, lead, level, i, j], fields.truth[lead, level, i, j]
            threshold = fields.events[number, level, i, j]
            if np.isfinite([*x, y, threshold]).all():
                p = sum(float(member > threshold) for member in x) / len(x)
                total += w[i, j] * function(p, float(y > threshold))
                weight += w[i, j]
        expected[lead, level] = total / weight
    return expected


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("members", [1, 5])
def test_brier_scores(make_fields, grid, members, masked):
    many = [make_fields(members=members, masked=masked, seed=seed) for seed in range(2)]
    for fields in many:
        fields.events = events_of(fields)
    plain, fair = score("brier", many), score("fair-brier", many)
    for number in range(3):
        for got, correction in ((plain, 0.0), (fair, 1 / max(1, members - 1))):
            each_time = [
                of_events(f, grid, lambda p, o, c=correction: (p - o) ** 2 - c * p * (1 - p), number) for f in many
            ]
            np.testing.assert_allclose(got[..., 0, number], np.mean(each_time, 0), rtol=1e-12)


def test_the_fair_brier_score_is_that_of_an_infinite_ensemble(make_fields):
    """Members of a known distribution: its expectation does not depend on their number."""
    rng = np.random.default_rng(0)
    expected = {"brier": [], "fair-brier": []}
    for members in (2, 20):
        many = []
        for _ in range(40):
            fields = make_fields(
                forecast=rng.standard_normal((members, 3, 2, 9, 16)), truth=rng.standard_normal((3, 2, 9, 16))
            )
            fields.events = np.zeros((1, 2, 9, 16))
            many.append(fields)
        for name, found in expected.items():
            found.append(float(score(name, many)[..., 0, 0].mean()))
    # p = 1/2: an infinite ensemble has 1/4, and K members (1 + 1/K)/4. The standard error is below 0.002.
    np.testing.assert_allclose(expected["fair-brier"], 0.25, atol=0.01)
    np.testing.assert_allclose(expected["brier"], [0.375, 0.2625], atol=0.01)


@pytest.mark.parametrize("masked", [False, True])
def test_reliability(make_fields, grid, masked):
    many = [make_fields(members=7, masked=masked, seed=seed) for seed in range(2)]
    for fields in many:
        fields.events = events_of(fields)
    got = score("reliability", many)[..., 0, :, :, :]
    assert got.shape == (3, 2, 3, 11, 3)
    for number in range(3):
        sums = []
        for bin_ in range(11):
            inside = lambda p, b=bin_: float(abs(p - b / 10) < 0.05)  # noqa: E731, sevenths never lie half-way
            functions = (
                inside,
                lambda p, i=inside: i(p) * p,
            )
            parts = [
                np.mean([of_events(f, grid, lambda p, o, g=function: g(p), number) for f in many], 0)
                for function in functions
            ]
            parts.append(np.mean([of_events(f, grid, lambda p, o, i=inside: i(p) * o, number) for f in many], 0))
            sums.append(parts)
        for bin_, (share, probability, frequency) in enumerate(sums):
            np.testing.assert_allclose(got[:, :, number, bin_, 0], share, rtol=1e-12, atol=1e-15)
            with np.errstate(invalid="ignore"):
                np.testing.assert_allclose(got[:, :, number, bin_, 1], probability / share, rtol=1e-12)
                np.testing.assert_allclose(got[:, :, number, bin_, 2], frequency / share, rtol=1e-12)
    np.testing.assert_allclose(got[..., 0].sum(-1), 1)


@pytest.mark.parametrize("members", [2, 4, 10, 20])
def test_every_probability_has_a_bin(make_fields, members):
    """A probability half-way between two centres lies in the upper bin, whatever its rounding."""
    forecast = np.zeros((members, 3, 2, 9, 16))
    for above in range(members + 1):
        forecast[:above] = 2.0
        fields = make_fields(forecast=forecast.copy(), truth=np.full((3, 2, 9, 16), 2.0))
        fields.events = np.ones((1, 2, 9, 16))
        share, probability, frequency = np.moveaxis(score("reliability", [fields])[0, 0, 0, 0], -1, 0)
        bin_ = (20 * above + members) // (2 * members)  # in whole numbers
        np.testing.assert_allclose(share, np.eye(11)[bin_], atol=1e-12)
        assert probability[bin_] == pytest.approx(above / members)
        assert frequency[bin_] == pytest.approx(1)


def test_spread_error_ratio(make_fields, grid):
    many, w = [make_fields(seed=seed) for seed in range(TIMES)], weights_of(grid)
    variance = np.mean([each(f, lambda x, y, c: area(x.var(0, ddof=1), w)) for f in many], 0)
    error = np.mean([each(f, lambda x, y, c: area((x.mean(0) - y) ** 2, w)) for f in many], 0)
    np.testing.assert_allclose(score("spread-error", many)[..., 0], np.sqrt(6 / 5 * variance / error), rtol=1e-12)


@pytest.mark.parametrize("name", ["fair-crps", "crps", "spread", "spread-error", "rank-histogram", "brier"])
def test_a_missing_member_hides_its_points_only(make_fields, grid, name):
    """Points where one member lacks data do not count; the score is that of the other points."""
    fields = make_fields()
    hidden, where = fields.forecast.copy(), np.s_[..., 2:5, 3:9]
    hidden[2][where] = np.nan
    truth = fields.truth.copy()
    truth[where] = np.nan
    events = np.full((1, 2, 9, 16), 280.0)
    member, target = (
        Fields(x, y, fields.climatology, fields.regions, grid, events=events)
        for x, y in ((hidden, fields.truth), (fields.forecast, truth))
    )
    np.testing.assert_array_equal(score(name, [member]), score(name, [target]))
    fields.events = events
    assert not np.array_equal(score(name, [member]), score(name, [fields]))


def labelled(fields):
    dims = ("number", "lead", "level", "latitude", "longitude")
    return xr.DataArray(fields.forecast, dims=dims), xr.DataArray(fields.truth, dims=dims[1:])


@pytest.mark.parametrize("masked", [False, True])
def test_agrees_with_xskillscore(make_fields, grid, masked):
    with warnings.catch_warnings():  # of that package's own making, as it is imported
        warnings.simplefilter("ignore")
        xs = pytest.importorskip("xskillscore", reason="the package xskillscore is not installed")
    fields = make_fields(masked=masked)
    x, y = labelled(fields)
    weights = xr.DataArray(weights_of(grid), dims=("latitude", "longitude"))
    dims = ["latitude", "longitude"]
    for name in ("mse", "rmse", "mae"):
        theirs = getattr(xs, name)(x.mean("number"), y, dim=dims, weights=weights, skipna=True)
        np.testing.assert_allclose(score(name, [fields])[..., 0], theirs, rtol=1e-6)
    theirs = xs.me(x.mean("number"), y, dim=dims, weights=weights, skipna=True)
    np.testing.assert_allclose(score("bias", [fields])[..., 0], theirs, rtol=1e-6)


def test_scores_of_members_agree_with_xskillscore(make_fields, grid):
    """What that package does not weight by area it computes for each row, of which the mean is taken here."""
    with warnings.catch_warnings():  # of that package's own making, as it is imported
        warnings.simplefilter("ignore")
        xs = pytest.importorskip("xskillscore", reason="the package xskillscore is not installed")
    fields = make_fields(members=5)
    fields.events = 280 + 10 * np.random.default_rng(7).standard_normal((1, 2, 9, 16))
    x, y = labelled(fields)
    weights = xr.DataArray(weights_of(grid), dims=("latitude", "longitude"))
    dims, rows = ["latitude", "longitude"], weights.isel(longitude=0)
    theirs = xs.crps_ensemble(y, x, member_dim="number", dim=dims, weights=weights)
    np.testing.assert_allclose(score("crps", [fields])[..., 0], theirs, rtol=1e-6)
    ranks = xs.rank_histogram(y, x, dim="longitude", member_dim="number") / grid.width
    np.testing.assert_allclose(
        score("rank-histogram", [fields])[..., 0, :], ranks.weighted(rows).mean("latitude"), rtol=1e-6
    )
    threshold = xr.DataArray(fields.events[0], dims=("level", "latitude", "longitude"))
    occurred, forecast = (y > threshold).astype(float), (x > threshold).astype(float)
    for name, fair in (("brier", False), ("fair-brier", True)):
        theirs = xs.brier_score(occurred, forecast, member_dim="number", fair=fair, dim=dims, weights=weights)
        np.testing.assert_allclose(score(name, [fields])[..., 0, 0], theirs, rtol=1e-6)
    edges = np.linspace(-0.05, 1.05, 12)
    found = xs.reliability(y > threshold, forecast.mean("number"), dim="longitude", probability_bin_edges=edges)
    events, all_ = ((x * found["samples"]).fillna(0) for x in (found, xr.ones_like(found)))
    share, _, frequency = np.moveaxis(score("reliability", [fields])[..., 0, 0, :, :], -1, 0)
    events, all_ = (x.weighted(rows).mean("latitude") / grid.width for x in (events, all_))
    np.testing.assert_allclose(share, all_, rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(frequency, events / all_, rtol=1e-6)


@pytest.mark.parametrize("masked", [False, True])
def test_agrees_with_scores(make_fields, grid, masked):
    pytest.importorskip("scores", reason="the package scores is not installed")
    from scores.continuous import additive_bias, mae, mse, rmse
    from scores.probability import crps_for_ensemble

    fields = make_fields(masked=masked)
    x, y = labelled(fields)
    weights = xr.DataArray(weights_of(grid), dims=("latitude", "longitude"))
    keep = {"preserve_dims": ["lead", "level"], "weights": weights}
    for name, theirs in (("mse", mse), ("rmse", rmse), ("mae", mae), ("bias", additive_bias)):
        expected = theirs(x.mean("number"), y, **keep)
        np.testing.assert_allclose(score(name, [fields])[..., 0], expected, rtol=1e-6)
    for name, method in (("crps", "ecdf"), ("fair-crps", "fair")):
        expected = crps_for_ensemble(x, y, "number", method=method, **keep)
        np.testing.assert_allclose(score(name, [fields])[..., 0], expected, rtol=1e-6)


SCORES = ["mse", "rmse", "bias", "mae", "acc", "activity", "crps", "fair-crps", "spread", "rank-histogram", "spectrum"]


@given(seed=st.integers(0, 1000), shift=st.integers(0, 15), masked=st.booleans())
@settings(max_examples=15, deadline=None)
def test_no_score_depends_on_where_longitude_begins(seed, shift, masked):
    grid = Grid(np.linspace(80, -80, 9), np.arange(16) * 22.5)
    rng = np.random.default_rng(seed)
    truth, climatology = rng.standard_normal((2, 1, 1, 9, 16))
    forecast = rng.standard_normal((4, 1, 1, 9, 16))
    if masked:
        truth[..., rng.random((9, 16)) < 0.2] = np.nan
    one = Fields(forecast, truth, climatology, Regions(grid, {}), grid)
    other = Fields(*(np.roll(x, shift, -1) for x in (forecast, truth, climatology)), Regions(grid, {}), grid)
    for name in SCORES:
        np.testing.assert_allclose(score(name, [one]), score(name, [other]), rtol=1e-9, atol=1e-9)


@given(bias=st.floats(-50, 50), seed=st.integers(0, 100))
@settings(max_examples=15, deadline=None)
def test_a_constant_error(bias, seed):
    grid = Grid(np.linspace(80, -80, 9), np.arange(16) * 22.5)
    truth = np.random.default_rng(seed).standard_normal((2, 1, 9, 16))
    fields = Fields((truth + bias)[None], truth, truth * 0, Regions(grid, {}), grid)
    np.testing.assert_allclose(score("bias", [fields]), bias, atol=1e-12)
    for name in ("mae", "rmse", "crps"):
        np.testing.assert_allclose(score(name, [fields]), abs(bias), atol=1e-12)


@given(seed=st.integers(0, 100), masked=st.booleans())
@settings(max_examples=10, deadline=None)
def test_a_perfect_forecast(seed, masked):
    grid = Grid(np.linspace(80, -80, 9), np.arange(16) * 22.5)
    rng = np.random.default_rng(seed)
    truth, climatology = rng.standard_normal((2, 2, 1, 9, 16))
    if masked:
        truth[..., 1:3, 4:9] = np.nan
    fields = Fields(np.stack([truth] * 3), truth, climatology, Regions(grid, {}), grid)
    for name in ("mse", "rmse", "bias", "mae", "crps", "fair-crps", "spread"):
        np.testing.assert_allclose(score(name, [fields]), 0, atol=1e-7)
    np.testing.assert_allclose(score("acc", [fields]), 1)
    np.testing.assert_allclose(score("rank-histogram", [fields]), 0.25)


def test_one_member_and_identical_members(make_fields):
    single = make_fields(members=1)
    twins = make_fields(forecast=np.repeat(single.forecast, 4, 0), truth=single.truth)
    for name in ("crps", "fair-crps", "mae"):
        np.testing.assert_allclose(score(name, [single]), score("mae", [twins]), rtol=1e-12)
    for name in ("crps", "fair-crps"):
        np.testing.assert_allclose(score(name, [twins]), score("mae", [twins]), rtol=1e-12)
    np.testing.assert_allclose(score("spread", [twins]), 0, atol=1e-7)
    np.testing.assert_allclose(score("rmse", [twins]), score("rmse", [single]), rtol=1e-12)


def test_hidden_points_do_not_count_as_zero_errors(make_fields, grid):
    """The score over a masked field is the score over its other points."""
    fields = make_fields(members=1)
    whole = fields.truth.copy()
    fields.truth[..., :, 8:] = np.nan
    masked = Fields(fields.forecast, fields.truth, fields.climatology, Regions(grid, {}), grid)
    half = Fields(
        np.tile(fields.forecast[..., :8], 2),
        np.tile(whole[..., :8], 2),
        np.tile(fields.climatology[..., :8], 2),
        Regions(grid, {}),
        grid,
    )
    for name in ("mse", "bias", "mae", "acc", "activity", "crps"):
        np.testing.assert_allclose(score(name, [masked]), score(name, [half]), rtol=1e-12)


def test_a_region_without_data_has_no_score(make_fields, grid):
    fields = make_fields(members=1)
    fields.truth[..., grid.latitude >= 20, :] = np.nan
    fields = Fields(fields.forecast, fields.truth, fields.climatology, Regions(grid, {}), grid)
    scores = score("rmse", [fields])
    north = fields.regions.names.index("northern-hemisphere")
    assert np.isnan(scores[..., north]).all()
    assert np.isfinite(np.delete(scores, north, -1)).all()


def test_regions(make_fields, grid):
    boxes = {
        "pacific": Box(south=-40, north=40, west=150, east=-100),
        "europe": Box(south=35, north=75, west=-12.5, east=42.5),
    }
    fields = make_fields(boxes=boxes)
    latitude, longitude = np.meshgrid(grid.latitude, grid.longitude, indexing="ij")
    inside = {
        "tropics": np.abs(latitude) <= 20,
        "northern-hemisphere": latitude >= 20,
        "southern-hemisphere": latitude <= -20,
        "pacific": (np.abs(latitude) <= 40) & (longitude >= 150) & (longitude <= 260),
        "europe": (latitude >= 35) & (latitude <= 75) & ((longitude >= 347.5) | (longitude <= 42.5)),
    }
    got = score("mse", [fields])
    for name, where in inside.items():
        expected = each(fields, lambda x, y, c, where=where: area((x.mean(0) - y) ** 2, weights_of(grid), where))
        np.testing.assert_allclose(got[..., fields.regions.names.index(name)], expected, rtol=1e-12)


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_points_on_the_edges_of_a_region_are_inside_whatever_their_rounding(kind):
    """Latitudes that were added up in steps, and coordinates in single precision, miss the edges."""
    latitude, longitude = np.arange(90, -90.05, -0.1).astype(kind), (np.arange(3600) * 0.1).astype(kind)
    regions = Regions(Grid(latitude, longitude), {"box": Box(south=10.3, north=10.7, west=359.2, east=359.6)})
    inside = dict(zip(regions.names, regions.weights > 0, strict=True))
    rows = {name: int(mask.any(1).sum()) for name, mask in inside.items()}
    assert rows == {"global": 1801, "tropics": 401, "northern-hemisphere": 701, "southern-hemisphere": 701, "box": 5}
    assert inside["box"].any(0).sum() == 5


def test_points_on_the_edges_of_a_box_are_inside():
    grid = Grid(np.round(np.linspace(-9.9, 9.9, 199), 1), np.arange(3600) * 0.1)
    for west, east, columns in [(-0.3, 0.3, 7), (0.1, 0.7, 7), (179.9, 180.3, 5), (359.7, 360.3, 7), (-180, 180, 3600)]:
        regions = Regions(grid, {"box": Box(south=-0.3, north=0.3, west=west, east=east)})
        inside = regions.weights[regions.names.index("box")] > 0
        assert (inside.sum(0).max(), inside.sum(1).max()) == (7, columns), (west, east)


def test_metrics_of_whole_circles_are_left_out_on_a_part_of_the_globe(grid, caplog):
    metrics = {name: registry.module("metric", name) for name in ("rmse", "spectrum")}
    part = Grid(np.linspace(30, 60, 4), np.arange(10) * 2.5)
    assert possible_metrics(metrics, grid) == metrics
    assert list(possible_metrics(metrics, part)) == ["rmse"]
    assert "metrics left out: spectrum, which need whole circles" in caplog.text
    with pytest.raises(UserError, match=r"evaluation.metrics: expected a metric .* got spectrum"):
        possible_metrics({"spectrum": metrics["spectrum"]}, part)


def test_a_box_between_the_points_is_refused(grid):
    with pytest.raises(ValueError, match=r"evaluation.regions.tiny: expected a box with points"):
        Regions(grid, {"tiny": Box(south=1, north=2, west=1, east=2)})


@pytest.mark.parametrize("name", registry.names("metric"))
def test_every_metric_keeps_the_contract(make_fields, name):
    module = registry.module("metric", name)
    assert {"members", "ensemble", "climatology", "precipitation", "thresholds", "circles"} >= needs(module)
    fields = make_fields(thresholds=(np.full((9, 16), 0.5), np.full((9, 16), 281.0)))
    fields.events = np.full((2, 2, 9, 16), 280.0)
    statistics = module.per_time(fields)
    for values in statistics.values():
        assert values.shape[:3] == (3, 2, 4)
        assert values.ndim == 3 + len(extra(module))
    assert module.finish(statistics).shape[:3] == (3, 2, 4)
