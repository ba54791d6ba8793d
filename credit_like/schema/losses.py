"""The kind of an experiment's loss: of single forecasts or of the members of an ensemble."""

from __future__ import annotations

import inspect
from typing import Any

from credit_like import registry


def summands(loss: Any) -> list[Any]:
    """Return the losses that are summed up: those of all terms of a sum, or the loss itself."""
    return [each for term in loss.terms for each in summands(term.loss)] if loss.type == "sum" else [loss]


def scores_members(loss: Any) -> list[bool]:
    """Return whether each loss that is summed up is one of ensembles."""
    return [hasattr(registry.of("loss", each), "of_members") for each in summands(loss)]


def judges_members(loss: Any) -> bool:
    """Return whether the loss is one of ensembles: a plug-in with `of_members`, or a sum of such losses."""
    return all(scores_members(loss))


def shares_members(loss: Any) -> bool:
    """Return whether several ranks can compute the loss of ensembles, each of some of the members."""
    scores = [getattr(registry.of("loss", each), "of_members", None) for each in summands(loss)]
    return all(score is not None and "others" in inspect.signature(score).parameters for score in scores)
