"""Comparison of an experiment with a checkpoint from which it is to continue or make forecasts.

Tensors alone do not tell: the order of variables, their statistics, the time step and many keys of a model leave all shapes
as they are, and forecasts would be wrong without an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from credit_like.checkpoint import transfer
from credit_like.checkpoint.errors import reading_metadata
from credit_like.checkpoint.manager import Checkpoint
from credit_like.data.statistics import Statistics
from credit_like.data.store import FieldStore
from credit_like.errors import UserError
from credit_like.schema.experiment import Experiment
from credit_like.variables import Variables

_RTOL = 1e-5
"""Statistics that are fitted again to the same data may differ by this part of a standard deviation."""


def refuse_other(
    checkpoint: Checkpoint,
    experiment: Experiment,
    variables: Variables,
    statistics: Statistics | None,
    store: FieldStore | None = None,
) -> None:
    """Raise UserError where the weights of a checkpoint belong to another model, or other variables, statistics or units.

    Units are those of `store`; without one they are not compared.
    """
    with reading_metadata(checkpoint.folder):
        found = list(_differences(checkpoint.meta, experiment, variables, statistics))
        for name, was, now in [] if store is None else transfer.other_units(checkpoint.meta["normalisation"], store):
            found.append(f"{name} was in {was!r} and is in {now!r}")
    if found:
        raise UserError(
            f"{checkpoint.folder}: expected the experiment of these weights, got another one: {'; '.join(found)}; undo this, or "
            "set another save_loc and start_from"
        )


def _differences(
    meta: Mapping[str, Any], experiment: Experiment, variables: Variables, statistics: Statistics | None
) -> Iterator[str]:
    before, now = meta["experiment"], experiment.to_dict()
    for key, (was, is_now) in transfer.different_keys(before["model"], experiment.model).items():
        yield f"model.{key} was {was!r} and is {is_now!r}"
    for key in ("timestep", "history_len"):
        if before["data"].get(key) != now["data"].get(key):
            yield f"data.{key} was {before['data'].get(key)} and is {now['data'].get(key)}"
    was, is_now = ((each.get("start_from") or {}).get("lora") for each in (before, now))
    if was != is_now:
        yield f"start_from.lora was {was} and is {is_now}"
    described = meta["normalisation"]
    there = transfer.channels_of(described, experiment.data.history_len, before["model"])
    here = transfer.Channels.of(variables, experiment.data.history_len, before["model"].get("predict", "increment"))
    if there != here:
        for side in ("inputs", "outputs"):
            yield from _channels(side, getattr(there, side), getattr(here, side))
    elif statistics is not None:
        yield from _statistics(described, variables, statistics)


def _channels(side: str, was: Sequence[str], is_now: Sequence[str]) -> Iterator[str]:
    if set(was) == set(is_now) and was != is_now:
        yield f"the order of the {side} was {', '.join(was[:4])}, … and is {', '.join(is_now[:4])}, …"
        return
    changes = [*(f"without {name}" for name in was if name not in is_now)]
    changes += [f"with {name}" for name in is_now if name not in was]
    if changes:
        yield f"the {side} are now {', '.join(changes[:4])}{', …' if len(changes) > 4 else ''}"


def _statistics(described: transfer.Normalisation, variables: Variables, statistics: Statistics) -> Iterator[str]:
    """Yield one text where channels have another normalisation."""
    other = []
    for role, about in described.items():
        now = statistics.select(variables.role(role))
        was = [
            np.array([np.nan if x is None else x for x in about[key]], float) for key in ("mean", "std", "change_std")
        ]
        size = np.abs(was[1])
        for i, name in enumerate(about["channels"]):
            if any(not _same(old[i], new[i], size[i]) for old, new in zip(was, now, strict=True)):
                other.append(
                    f"{name} (mean {was[0][i]:.6g}, now {now[0][i]:.6g}; deviation {was[1][i]:.6g}, now {now[1][i]:.6g})"
                )
    if other:
        more = f" and {len(other) - 1} more" if len(other) > 1 else ""
        yield f"the statistics are not those of the training: {other[0]}{more}"


def _same(was: float, is_now: float, size: float) -> bool:
    return bool(abs(was - is_now) <= _RTOL * size) or bool(np.isnan(was) and np.isnan(is_now)) or was == is_now
