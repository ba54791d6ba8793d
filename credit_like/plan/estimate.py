"""Estimate from simulated ranks whether a layout fits and how long a step takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from credit_like.plan.events import Times, play
from credit_like.plan.layouts import Candidate, Illegal
from credit_like.plan.machine import Machine

if TYPE_CHECKING:
    from credit_like.plan.simulate import Rank


@dataclass(frozen=True)
class Estimate:
    """The estimated time of one optimiser step, in seconds, and its range."""

    times: Times
    """What the rank that takes longest does meanwhile."""
    low: float
    """The step with every assumption at the fast end of its range (`machine.RANGES`)."""
    high: float
    """The step with every assumption at the slow end of its range."""

    @property
    def total(self) -> float:
        return self.times.total


def estimate(machine: Machine, ranks: Sequence[Rank], world: int = 1) -> Estimate:
    """Estimate the time of an optimiser step by replaying these ranks together, which stand for all of `world`."""
    replayed = [rank.simulated for rank in ranks]
    low, high = (play(machine.bound(fast), replayed, world).total for fast in (True, False))
    return Estimate(play(machine, replayed, world), low, high)


@dataclass(frozen=True)
class PlanRow:
    """A layout with its simulated ranks: the first, an interior and the last band of latitude."""

    layout: Candidate
    ranks: tuple[Rank, ...]
    machine: Machine
    samples: int
    """Number of samples of one optimiser step."""

    @property
    def fullest(self) -> Rank:
        return max(self.ranks, key=lambda rank: rank.peak)

    @cached_property
    def estimate(self) -> Estimate:
        return estimate(self.machine, self.ranks, self.layout.world)

    @property
    def seconds(self) -> float:
        return self.estimate.total

    @property
    def excess(self) -> float:
        """Bytes above the usable memory; negative if the layout fits."""
        return self.fullest.peak - self.machine.usable

    @property
    def fits(self) -> bool:
        return self.excess <= 0

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON data, in bytes, floating-point operations and seconds."""
        layout = self.layout
        return {
            "dp": layout.dp,
            "ensemble": layout.ensemble,
            "tensor": layout.tensor,
            "domain": layout.domain,
            "columns": layout.columns,
            "replicate": layout.replicate,
            "data": layout.data,
            "fits": self.fits,
            "excess": max(0, round(self.excess)),
            "estimate": {
                "seconds_per_step": self.seconds,
                "range": [self.estimate.low, self.estimate.high],
                "samples_per_second": self.samples / self.seconds if self.seconds else None,
                **{
                    name: getattr(self.estimate.times, name)
                    for name in ("compute", "launched", "waited", "hidden", "exposed", "read")
                },
            },
            "accumulation": self.fullest.accumulation,
            "precision": self.fullest.precision,
            "parallelism": layout.parallelism.model_dump(mode="json"),
            "ranks": [_rank_dict(rank) for rank in self.ranks],
        }


def _rank_dict(rank: Rank) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "place": rank.place,
        "peak_memory": rank.peak,
        "memory": rank.parts,
        "flops": rank.flops,
        "memory_traffic": rank.traffic,
        "operations": rank.operations,
        "compiled": rank.compiled,
        "collectives": {k: {"number": n, "bytes": b} for k, (n, b) in sorted(rank.collectives().items())},
        "read_per_sample": rank.read,
        "checkpoint": rank.checkpoint,
    }


@dataclass(frozen=True)
class PlanReport:
    """Every layout of a number of ranks, best first: those that fit by estimated time, then the others."""

    name: str
    world: int
    machine: Machine
    rows: tuple[PlanRow, ...]
    illegal: tuple[Illegal, ...]

    @property
    def recommended(self) -> PlanRow | None:
        """Fastest layout that fits; None if none does."""
        return next((row for row in self.rows if row.fits), None)

    def to_dict(self) -> dict[str, Any]:
        best = self.recommended
        return {
            "experiment": self.name,
            "gpus": self.world,
            "assumptions": self.machine.assumptions(),
            "recommended": best.layout.parallelism.model_dump(mode="json") if best else None,
            "layouts": [row.to_dict() for row in self.rows],
            "illegal": [vars(reason) for reason in self.illegal],
        }


def in_order(rows: list[PlanRow]) -> tuple[PlanRow, ...]:
    """Return the rows sorted: layouts that fit by time, then the others by missing memory; ties by simplicity."""

    def key(row: PlanRow) -> tuple[Any, ...]:
        layout = row.layout
        degrees = layout.ensemble, layout.tensor, layout.domain, layout.replicate
        return (not row.fits, row.seconds if row.fits else row.excess, *degrees)

    return tuple(sorted(rows, key=key))
