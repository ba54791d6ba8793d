"""The layouts that are possible for a number of ranks, and why others are not. Does not import torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from credit_like.layout import domain_text
from credit_like.schema.checks import layout_findings, shares_members
from credit_like.schema.experiment import Experiment
from credit_like.schema.phases import phases
from credit_like.schema.trainer import Parallelism


@dataclass(frozen=True)
class Candidate:
    """A layout of world = dp × ensemble × tensor × domain ranks; `replicate`, a divisor of dp, counts the sharded copies."""

    dp: int
    tensor: int = 1
    domain: int = 1
    replicate: int = 1
    data: str = "fsdp2"
    ensemble: int = 1
    columns: int = 1
    """Ranks along the columns of the grid, a divisor of `domain`."""

    @property
    def world(self) -> int:
        return self.dp * self.ensemble * self.tensor * self.domain

    @property
    def shards(self) -> int:
        """Number of ranks over which parameters are sharded that are not split by tensor parallelism."""
        return self.dp * self.ensemble * self.domain // self.replicate if self.data == "fsdp2" else 1

    @property
    def parallelism(self) -> Parallelism:
        """Section `trainer.parallelism` of this layout."""
        degrees = {name: getattr(self, name) for name in ("tensor", "replicate", "ensemble")}
        return Parallelism.model_validate({"data": self.data, "domain": self.shape, **degrees})

    @property
    def shape(self) -> tuple[int, int]:
        """Return the ranks along the rows and along the columns of the grid."""
        return self.domain // self.columns, self.columns

    def __str__(self) -> str:
        members = f" × ensemble {self.ensemble}" if self.ensemble > 1 else ""
        domain = f"({domain_text(self.shape)})" if self.columns > 1 else self.domain
        return f"dp {self.dp}{members} × tensor {self.tensor} × domain {domain}" + (
            f", {self.replicate} copies" if self.replicate > 1 else ""
        )


@dataclass(frozen=True)
class Illegal:
    """A degree that is not possible, and why; `degree` is tensor, domain, dp, or `layout` for a whole layout."""

    degree: str
    value: int | str
    reason: str


def with_layout(experiment: Experiment, layout: Candidate) -> Experiment:
    """Return the experiment with another layout."""
    trainer = experiment.trainer.model_copy(update={"parallelism": layout.parallelism})
    return experiment.model_copy(update={"trainer": trainer})


def layouts(experiment: Experiment, world: int, height: int, width: int) -> tuple[list[Candidate], list[Illegal]]:
    """Return every layout of `world` ranks that training accepts, and the degrees that it refuses with their reasons.

    The reasons are those of the checks before a run; the model may refuse further layouts when it is built. The data
    mode is the experiment's, except that `none`, which allows one replica only, is planned as fsdp2 on several ranks.
    """
    data = experiment.trainer.parallelism.data
    if data == "none" and world > 1:
        data = "fsdp2"
    refused: dict[tuple[str, int], str] = {}
    columns: dict[int, int] = {}
    for degree in divisors(world):
        if reason := _model_refuses(experiment, height, width, tensor=degree):
            refused["tensor", degree] = reason
        # Bands of rows are simplest; columns are shared where there are not enough rows, and as few as possible.
        shapes = ((degree // share, share) for share in divisors(degree))
        fits = (c for r, c in shapes if not _model_refuses(experiment, height, width, rows=r, columns=c))
        columns[degree] = next(fits, 0)
        if not columns[degree]:
            refused["domain", degree] = _model_refuses(experiment, height, width, rows=degree)
    legal = []
    for ensemble, tensor, domain in _inner(experiment, world):
        dp = world // (ensemble * tensor * domain)
        if ("tensor", tensor) in refused or ("domain", domain) in refused:
            continue
        # ddp and fsdp2 differ only in what they shard; with one replica and one band, fsdp2 shards nothing.
        layout = Candidate(dp, tensor, domain, data=data, ensemble=ensemble, columns=columns[domain])
        if reason := _refuses(with_layout(experiment, layout), world):
            refused.setdefault(("dp", dp), reason)
        elif reason := _model_refuses(experiment, height, width, tensor, *layout.shape):
            refused["tensor × domain", tensor * domain] = reason
        else:
            copies = divisors(dp) if data == "fsdp2" else [1]
            legal += [replace(layout, replicate=r) for r in copies]
    return legal, [Illegal(*key, reason) for key, reason in refused.items()]


def divisors(number: int) -> list[int]:
    """Return the divisors of a number in ascending order."""
    return [d for d in range(1, number + 1) if number % d == 0]


def _inner(experiment: Experiment, world: int) -> Iterator[tuple[int, int, int]]:
    """Yield the degrees of ensemble, tensor and domain; the first divides the members of every phase."""
    parts = [phase.experiment for phase in phases(experiment)]
    members = math.gcd(*(part.trainer.members if shares_members(part) else 1 for part in parts))
    for tensor in divisors(world):
        for domain in divisors(world // tensor):
            for ensemble in divisors(math.gcd(members, world // (tensor * domain))):
                yield ensemble, tensor, domain


def _refuses(experiment: Experiment, world: int) -> str:
    findings = (found for phase in phases(experiment) for found in layout_findings(phase.experiment.trainer, world))
    return "; ".join(dict.fromkeys(message for _, message in findings))


def _model_refuses(
    experiment: Experiment, height: int, width: int, tensor: int = 1, rows: int = 1, columns: int = 1
) -> str:
    check: Any = getattr(experiment.model, "check_parallel", None)
    if check is None:
        return ""
    shared = {"columns": columns} if columns > 1 else {}
    return "; ".join(message for _, message in check(height, width, tensor=tensor, domain=rows, **shared))
