"""The open store with the axes that checks use, and the conversion of errors to findings."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from credit_like.errors import UserError
from credit_like.layout import Finding
from credit_like.schema.data import Period
from credit_like.schema.errors import Path
from credit_like.schema.experiment import Experiment
from credit_like.variables import Variables

if TYPE_CHECKING:
    from credit_like.data.store import FieldStore


# What the libraries behind a store raise for files that are not there, not whole or not what they should be.
UNREADABLE = (OSError, ValueError, KeyError, RuntimeError, TypeError, IndexError, OverflowError)
_KEY = re.compile(r"(\w+(?:\.[\w-]+)*): ")


@dataclass
class Store:
    """An open store, with the queries that the checks make of its time axis."""

    fields: FieldStore
    variables: Variables
    experiment: Experiment

    @property
    def seconds(self) -> NDArray[np.int64]:
        """Times of the store (T,), in seconds since 1970 in their own calendar."""
        return self.fields.seconds

    @property
    def calendar(self) -> str:
        """Calendar of the store's times."""
        return self.fields.calendar

    @property
    def timestep(self) -> int:
        """Time step in seconds."""
        return self.fields.step_seconds

    def parse(self, text: str) -> int:
        """Return an ISO time in seconds since 1970.

        Raises UserError for a day that the calendar does not have.
        """
        from credit_like.data.times import parse

        return parse(text, self.calendar)

    def text(self, seconds: int) -> str:
        """Return a time in seconds since 1970 as ISO text."""
        from credit_like.data.times import one_time, to_text

        return to_text(one_time(seconds, self.calendar))

    def inside(self, period: Period) -> NDArray[np.int64]:
        """Return the store's times in a period, in seconds since 1970."""
        start, end = self.parse(period.start), self.parse(period.end)
        return self.seconds[(self.seconds >= start) & (self.seconds <= end)]

    def samples(self, split: str, forecast_len: int | None = None) -> int:
        """Return the number of windows (history and forecast) in a split, including those with missing fields.

        A window lies within one period.
        """
        data = self.experiment.data
        length = data.history_len + (forecast_len or data.forecast_len)
        if length > len(self.seconds):
            return 0
        steps = (np.arange(length) * self.timestep)[:, None]
        inside = [self.inside(period) for period in getattr(data, split)]
        return sum(int(np.isin(at[None] + steps, at).all(0).sum()) for at in inside if len(at))


def refusal(place: Path, function: Callable[..., object], *arguments: Any) -> Iterator[Finding]:
    """Yield what a function refuses, at the key that its message begins with, or at `place`."""
    try:
        function(*arguments)
    except UNREADABLE as error:
        for message in str(error).splitlines() if isinstance(error, UserError) else [one_line(error)]:
            match = _KEY.match(message)
            if match and match[1].split(".")[0] in Experiment.model_fields:
                yield tuple(match[1].split(".")), message[match.end() :]
            else:
                yield place, message


def one_line(error: BaseException | str) -> str:
    """Return the message of an error in one line, or its kind where it has none."""
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return " ".join(text.split()) or type(error).__name__
