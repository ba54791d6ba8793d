"""Area means of products of forecasts and truths: the torch definition of MSE, bias, ACC and activity.

Shape suffixes: B batch, C channels, H rows (this rank's), W longitudes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from credit_like.nn.area import AreaMean

SCORES = ("mse", "bias", "acc", "activity")


def area_scores(
    forecast_BCHW: Tensor,
    truth_BCHW: Tensor,
    climatology_CHW: Tensor,
    valid_CHW: Tensor,
    area: AreaMean,
    reduce: Callable[[Tensor], Tensor],
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return (B, scores, C): mean squared error, bias, anomaly correlation and activity of each sample over the globe.

    With e = f − t, anomalies f' and t' from the climatology and ⟨·⟩ the area mean over the points that have data, these
    are ⟨e²⟩, ⟨e⟩, ⟨f't'⟩ / √(⟨f'²⟩⟨t'²⟩) and √⟨f'²⟩ (WeatherBench2, doi:10.1029/2023MS004019). The anomalies of ACC are
    not centred. `reduce` sums the parts of the domain ranks; products are computed in `dtype`.
    """
    error, f, t = (
        torch.where(valid_CHW, x, 0).to(dtype)
        for x in (forecast_BCHW - truth_BCHW, forecast_BCHW - climatology_CHW, truth_BCHW - climatology_CHW)
    )
    parts = torch.stack([area.part(x) for x in (error * error, error, f * t, f * f, t * t)])
    mse, bias, both, ff, tt = reduce(parts)
    # The product of the squares of small anomalies, such as those of trace gases, is below the smallest float32.
    sizes = ff.sqrt() * tt.sqrt()
    acc = torch.where(sizes == 0, 0.0, both / sizes)
    return torch.stack([mse, bias, acc, ff.sqrt()], 1)
