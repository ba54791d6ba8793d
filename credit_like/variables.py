"""The variables of an experiment and the order of their channels.

The channels of one input frame are prognostic, static, dynamic forcing; those of the output are prognostic, diagnostic.
Within a role, variables on levels (all levels of a variable together) come before surface variables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from credit_like.errors import UserError
from credit_like.registry import did_you_mean
from credit_like.schema.data import DataSection, VariableSpec

ROLES = ("prognostic", "diagnostic", "dynamic_forcing", "static")


@dataclass(frozen=True)
class Variable:
    """A variable and its role; `levels` is empty for a surface variable."""

    name: str
    role: str
    levels: tuple[float, ...]
    spec: VariableSpec

    @property
    def channels(self) -> tuple[str, ...]:
        """Channel names: `t2m` at the surface, or `U@500` for each level."""
        return tuple(f"{self.name}@{level:g}" for level in self.levels) if self.levels else (self.name,)

    @property
    def levels_text(self) -> str:
        """Levels as a message lists them."""
        return ", ".join(f"{level:g}" for level in self.levels) or "none"

    def __len__(self) -> int:
        return max(1, len(self.levels))


class Variables:
    """All variables of an experiment, in channel order.

    Raises UserError where a variable on levels has no levels, or a name is used twice.
    """

    def __init__(self, data: DataSection) -> None:
        self._by_role: dict[str, tuple[Variable, ...]] = {}
        for role in ROLES:
            block = getattr(data, role)
            on_levels = [Variable(spec.name, role, spec.levels or data.levels, spec) for spec in block.level]
            self._by_role[role] = (*on_levels, *(Variable(spec.name, role, (), spec) for spec in block.surface))
            for variable in on_levels:
                if not variable.levels:
                    raise UserError(f"expected data.levels for {role} variable {variable.name!r}, got none")
        names = [variable.name for variable in self]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise UserError(f"expected each variable once, got {', '.join(twice)} more than once")
        if not self._by_role["prognostic"]:
            raise UserError("expected at least one prognostic variable, got none")

    def __iter__(self) -> Iterator[Variable]:
        return (variable for role in ROLES for variable in self._by_role[role])

    def role(self, role: str) -> tuple[Variable, ...]:
        """Return the variables of one role, in channel order."""
        return self._by_role[role]

    def __getitem__(self, name: str) -> Variable:
        for variable in self:
            if variable.name == name:
                return variable
        names = [variable.name for variable in self]
        raise UserError(f"expected a variable of the experiment, got {name!r}{did_you_mean(name, names)}")

    @cached_property
    def outputs(self) -> tuple[Variable, ...]:
        """Variables that the model predicts: prognostic, then diagnostic."""
        return self._by_role["prognostic"] + self._by_role["diagnostic"]

    def n(self, role: str) -> int:
        """Return the number of channels of a role."""
        return sum(map(len, self._by_role[role]))

    def with_outputs(self, outputs: Sequence[Variable]) -> Variables:
        """Return these variables with other outputs than the model's channels, as scores have them."""
        result = copy(self)
        result.__dict__["outputs"] = tuple(outputs)
        return result

    def with_units(self, units: Mapping[str, str]) -> Variables:
        """Return these variables with the `units` in which they are read, by name; those without an entry stay as they are."""
        return self._changed(lambda variable: {"units": units.get(variable.name, variable.spec.units)})

    def without_paths(self) -> Variables:
        """Return these variables without files of their own, as other data have them."""
        return self._changed(lambda _: {"path": None})

    def _changed(self, keys: Callable[[Variable], Mapping[str, Any]]) -> Variables:
        """Return these variables with other values of some keys."""
        result = copy(self)
        result.__dict__.pop("outputs", None)
        result._by_role = {
            role: tuple(replace(v, spec=v.spec.model_copy(update=keys(v))) for v in variables)
            for role, variables in self._by_role.items()
        }
        return result

    @property
    def in_channels(self) -> int:
        """Number of channels of one input frame."""
        return self.n("prognostic") + self.n("static") + self.n("dynamic_forcing")

    @property
    def out_channels(self) -> int:
        """Number of output channels."""
        return self.n("prognostic") + self.n("diagnostic")

    @staticmethod
    def slices(variables: Sequence[Variable]) -> dict[str, slice]:
        """Return the channel slice of each variable, for variables stacked in this order."""
        result, start = {}, 0
        for variable in variables:
            result[variable.name] = slice(start, start + len(variable))
            start += len(variable)
        return result

    @staticmethod
    def told_apart_by_files(variables: Iterable[Variable]) -> list[str]:
        """Return the names in the files that belong to several variables, which only their `path` tells apart, not their levels."""
        of_name: dict[str, list[Variable]] = {}
        for variable in variables:
            of_name.setdefault(variable.spec.var or variable.name, []).append(variable)
        result = []
        for name, those in of_name.items():
            levels = [level for v in those for level in v.levels or v.spec.levels or (None,)]
            if len({v.spec.path for v in those}) > 1 and (None in levels or len(set(levels)) < len(levels)):
                result.append(name)
        return result

    @staticmethod
    def channel_names(variables: Sequence[Variable]) -> list[str]:
        """Return the channel names of variables stacked in this order."""
        return [channel for variable in variables for channel in variable.channels]
