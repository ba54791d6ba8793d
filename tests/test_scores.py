"""Area scores against sums over points."""

import math

import numpy as np
import torch

from credit_like.nn.area import AreaMean
from credit_like.scores import SCORES, area_scores

B, C, H, W = 2, 3, 4, 5


def by_hand(forecast, truth, climatology, weights):
    """Mean squared error, bias, ACC and activity of one channel, point by point."""
    total = mse = bias = both = ff = tt = 0.0
    for i in range(H):
        for j in range(W):
            w, f, t = weights[i, j], forecast[i, j] - climatology[i, j], truth[i, j] - climatology[i, j]
            if w == 0:
                continue
            total += w
            mse += w * (forecast[i, j] - truth[i, j]) ** 2
            bias += w * (forecast[i, j] - truth[i, j])
            both, ff, tt = both + w * f * t, ff + w * f * f, tt + w * t * t
    return mse / total, bias / total, both / math.sqrt(ff * tt), math.sqrt(ff / total)


def fields():
    rng = np.random.default_rng(3)
    forecast, truth, climatology = (
        rng.normal(size=(B, C, H, W)),
        rng.normal(size=(B, C, H, W)),
        rng.normal(size=(C, H, W)),
    )
    valid = rng.random((C, H, W)) > 0.3
    weights = rng.random((H, 1)) * valid
    truth[:, ~valid] = np.nan
    return forecast, truth, climatology, valid, weights


def test_they_are_the_sums_over_the_points_that_have_data():
    forecast, truth, climatology, valid, weights = fields()
    area = AreaMean(torch.from_numpy(weights))
    tensors = [torch.from_numpy(x) for x in (forecast, truth, climatology, valid)]
    got = area_scores(*tensors, area, lambda x: x, torch.float64).numpy()
    assert SCORES == ("mse", "bias", "acc", "activity")
    for b in range(B):
        for c in range(C):
            expected = by_hand(forecast[b, c], truth[b, c], climatology[c], weights[c])
            np.testing.assert_allclose(got[b, :, c], expected, rtol=1e-12)


def test_bands_of_rows_add_up_to_the_whole():
    forecast, truth, climatology, valid, weights = (torch.from_numpy(x) for x in fields())
    whole = area_scores(forecast, truth, climatology, valid, AreaMean(weights), lambda x: x, torch.float64)
    parts = []

    def keep(x):
        parts.append(x)
        return x

    for rows in (slice(0, 1), slice(1, 4)):
        cut = [x[..., rows, :] for x in (forecast, truth, climatology, valid)]
        area_scores(*cut, AreaMean(weights, rows), keep, torch.float64)
    cut = [x[..., :1, :] for x in (forecast, truth, climatology, valid)]
    total = sum(parts)
    got = area_scores(*cut, AreaMean(weights, slice(0, 1)), lambda _: total, torch.float64)
    torch.testing.assert_close(got, whole, rtol=1e-12, atol=0)


def test_the_correlation_of_small_anomalies_is_one_of_their_pattern():
    """Squares of anomalies of trace gases, and their products, are smaller than the smallest float32."""
    pattern = torch.from_numpy(np.random.default_rng(0).normal(size=(1, 2, H, W)))
    size = torch.tensor([1e-12, 1e-8])[:, None, None]
    other = torch.tensor([1e-12, 1e-16])[:, None, None]
    whole = torch.ones(2, H, W, dtype=torch.bool)
    got = area_scores(
        pattern * size, pattern * other, torch.zeros(2, H, W), whole, AreaMean(torch.ones(H, W)), lambda x: x
    )
    np.testing.assert_allclose(got[0, 2], 1, rtol=1e-5)
    none = area_scores(
        pattern * size, pattern * 0, torch.zeros(2, H, W), whole, AreaMean(torch.ones(H, W)), lambda x: x
    )
    assert (none[0, 2] == 0).all()


def test_no_score_of_a_forecast_that_overflowed_is_a_number():
    forecast, truth, climatology, valid, weights = map(torch.from_numpy, fields())
    forecast[0, 1, 2, 3], valid[1, 2, 3], weights[1, 2, 3] = torch.nan, True, 1.0
    truth = torch.where(valid, torch.nan_to_num(truth), torch.nan)
    found = area_scores(forecast, truth, climatology, valid, AreaMean(weights), lambda x: x)
    assert found[0, :, 1].isnan().all()
    assert found[1].isfinite().all()
