"""Collection of statistics per time into one dataset of scores."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType, ModuleType

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from credit_like.data.aliases import find
from credit_like.data.times import Times, for_xarray
from credit_like.derive.fields import PL
from credit_like.errors import UserError
from credit_like.evaluation.bootstrap import bounds, finished
from credit_like.evaluation.metrics import extra, score
from credit_like.variables import Variable

Array = NDArray[np.float64]
BY_INIT = "_by_init"
"""End of the name of a variable whose values are those of single initial times."""
# Vectors whose squared error is the sum of those of their components.
VECTORS = {
    "wind_vector": ("u_component_of_wind", "v_component_of_wind"),
    "10m_wind_vector": ("10m_u_component_of_wind", "10m_v_component_of_wind"),
}


def vectors(names: Collection[str]) -> Iterator[tuple[str, str, str]]:
    """Yield the name of each vector with those of its components, if both are among `names`."""
    for vector, components in VECTORS.items():
        for end in ("", PL):  # interpolated variables have the model's name, with an end of their own
            there = {name.removesuffix(PL): name for name in names if name.endswith(PL) == bool(end)}
            u, v = (there.get(find(component, there) or "") for component in components)
            if u is not None and v is not None:
                yield vector + end, u, v


class Collected:
    """Statistics (I, L, K, R) by variable, source and metric. Statistics with extra dimensions are summed over time.

    `inits` are the initial times; `events` has the labels of each variable's thresholds.
    """

    def __init__(
        self,
        sources: Sequence[str],
        metrics: Mapping[str, ModuleType],
        inits: Times,
        leads: Sequence[int],
        regions: Sequence[str],
        events: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> None:
        self.sources, self.metrics, self.regions, self.leads = list(sources), metrics, list(regions), list(leads)
        self.inits = inits
        self.events = events
        self.levels: dict[str, tuple[float, ...]] = {}
        self._scalar: dict[tuple[str, str, str, str], Array] = {}
        self._sum: dict[tuple[str, str, str, str], Array] = {}
        self._count: dict[tuple[str, str, str, str], Array] = {}

    def add(
        self,
        variable: Variable,
        levels: Sequence[int],
        init: int,
        first_lead: int,
        part: Mapping[tuple[str, str, str], Array],
    ) -> None:
        """Add the results of one block: (source, metric, statistic) → (leads, K, R[, extra])."""
        self.levels.setdefault(variable.name, tuple(variable.levels[i] for i in levels) if variable.levels else ())
        for (source, metric, statistic), values in part.items():
            key = (variable.name, source, metric, statistic)
            shape = (len(self.leads), *values.shape[1:])
            where = slice(first_lead, first_lead + len(values))
            if not extra(self.metrics[metric]):
                self._scalar.setdefault(key, np.full((len(self.inits), *shape), np.nan))[init, where] = values
            else:
                valid = np.isfinite(values)
                if (known := self._sum.get(key)) is not None and known.shape != shape:
                    raise UserError(
                        f"evaluation.metrics: {metric} in {self.metrics[metric].__file__}: expected as many values of "
                        f"{', '.join(extra(self.metrics[metric]))} at every time, got {shape[3:]} after {known.shape[3:]}; change "
                        "the statistics"
                    )
                self._sum.setdefault(key, np.zeros(shape))[where] += np.where(valid, values, 0)
                self._count.setdefault(key, np.zeros(shape))[where] += valid

    def dataset(self, samples: int, seed: int) -> xr.Dataset:
        """Return (source, metric, region, lead_time[, level]) per variable; `samples` > 0 adds bounds of each metric."""
        self._add_vectors()
        names = [name for name, module in self.metrics.items() if not extra(module)]
        bounded = [label for name in names for label in ((name, f"{name}_low", f"{name}_high") if samples else (name,))]
        lead_time = np.array(self.leads, "timedelta64[s]").astype("timedelta64[ns]")
        texts = {"source": self.sources, "metric": bounded, "region": self.regions}
        coords: dict[str, Sequence[float] | np.ndarray] = {name: np.array(x, str) for name, x in texts.items()}
        coords["lead_time"] = lead_time
        if everywhere := sorted({level for levels in self.levels.values() for level in levels}):
            coords["level"] = everywhere
        result = xr.Dataset(coords=coords, attrs={"Conventions": "CF-1.11", "title": "forecast scores"})
        result.attrs["labels"] = json.dumps({n: m.LABEL for n, m in self.metrics.items() if hasattr(m, "LABEL")})
        result["initial_times"] = ((), len(self.inits), {"long_name": "number of initial times"})
        started = for_xarray(self.inits)
        result = result.assign_coords(init_time=("init_time", started, {"long_name": "initial time"}))
        every_event = list(dict.fromkeys(label for labels in self.events.values() for label in labels))
        statistics = list(dict.fromkeys(key[2:] for key in self._scalar))
        for variable, levels in self.levels.items():
            scores = np.stack([self._scores(variable, source, names, samples, seed) for source in self.sources])
            result[variable] = self._labelled(scores, levels, ("source", "metric", "region", "lead_time"), everywhere)
            result[variable + BY_INIT] = self._by_init(variable, levels, statistics, everywhere)
            for name, module in self.metrics.items():
                last = extra(module)
                if last and (found := self._extra(variable, name)) is not None:
                    dims = ("source", "region", "lead_time")
                    array = self._labelled(found, levels, dims, everywhere, last)
                    labels = {**getattr(module, "LABELS", {}), "threshold": self.events.get(variable, ())}
                    array = array.assign_coords({dim: list(labels[dim]) for dim in last if dim in labels})
                    if "threshold" in last:
                        array = array.reindex(threshold=every_event)
                    result[f"{variable}_{name.replace('-', '_')}"] = array
        return result

    def _scores(self, variable: str, source: str, names: Sequence[str], samples: int, seed: int) -> Array:
        """Return (metric, R, L, K)."""
        shape = (len(self.leads), max(1, len(self.levels[variable])), len(self.regions))
        result = []
        for name in names:
            found = {key[3]: values for key, values in self._scalar.items() if key[:3] == (variable, source, name)}
            finish = partial(score, name, self.metrics[name])
            result.append(finished(found, finish) if found else np.full(shape, np.nan))
            if samples:
                result.extend(bounds(found, finish, samples, seed) if found else [np.full(shape, np.nan)] * 2)
        return np.moveaxis(
            np.reshape(result, (len(result), *shape)), 3, 1
        )  # without any, all metrics have more dimensions

    def _by_init(
        self, variable: str, levels: Sequence[float], labels: Sequence[tuple[str, str]], everywhere: Sequence[float]
    ) -> xr.DataArray:
        """Return the statistics that are averaged over the initial times, labelled `metric.statistic`, in float32."""
        shape = (len(self.inits), len(self.leads), max(1, len(levels)), len(self.regions))
        found = np.full((len(self.sources), len(labels), *shape), np.nan, np.float32)
        for i, source in enumerate(self.sources):
            for j, label in enumerate(labels):
                if (values := self._scalar.get((variable, source, *label))) is not None:
                    with np.errstate(over="ignore"):  # the square of an unstable forecast is infinite in float32
                        found[i, j] = values
        dims = ("source", "statistic", "init_time", "region", "lead_time")
        array = self._labelled(np.moveaxis(found, -1, 3), levels, dims, everywhere)
        return array.assign_coords(statistic=[".".join(label) for label in labels])

    def _extra(self, variable: str, metric: str) -> Array | None:
        """Return (source, R, L, K, extra …), or None if no source has this metric; NaN for what a source lacks."""
        found = {}
        for source in self.sources:
            keys = [key for key in self._sum if key[:3] == (variable, source, metric)]
            means = {
                key[3]: np.divide(
                    self._sum[key],
                    self._count[key],
                    out=np.full_like(self._sum[key], np.nan),
                    where=self._count[key] > 0,
                )
                for key in keys
            }
            if means:
                found[source] = np.moveaxis(score(metric, self.metrics[metric], means), 2, 0)
        if not found:
            return None
        # Sources with fewer members have fewer ranks.
        shape = np.max([values.shape for values in found.values()], 0)
        result = np.full((len(self.sources), *shape), np.nan)
        for number, source in enumerate(self.sources):
            if source in found:
                result[number][tuple(map(slice, found[source].shape))] = found[source]
        return result

    def _labelled(
        self,
        values: NDArray[np.floating],
        levels: Sequence[float],
        dims: tuple[str, ...],
        everywhere: Sequence[float],
        last: tuple[str, ...] = (),
    ) -> xr.DataArray:
        """Return `values` (…, K, *last) as an array over the levels of all variables, or without `level` at the surface."""
        if not levels:
            return xr.DataArray(values.take(0, len(dims)), dims=(*dims, *last))
        array = xr.DataArray(values, dims=(*dims, "level", *last), coords={"level": list(levels)})
        return array.reindex(level=list(everywhere))

    def _add_vectors(self) -> None:
        """Add the squared errors of wind vectors where both components exist on the same levels."""
        for vector, u, v in vectors(list(self.levels)):
            if self.levels[u] != self.levels[v]:
                continue
            self.levels[vector] = self.levels[u]
            for key in [key for key in self._scalar if key[0] == u and key[2] in ("mse", "rmse")]:
                if (of_v := self._scalar.get((v, *key[1:]))) is not None:  # a baseline may have one component alone
                    self._scalar[vector, *key[1:]] = self._scalar[key] + of_v
