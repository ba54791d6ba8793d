"""From what the ranks of a layout do to whether it fits and how long a step takes, by the stated model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from credit_like.plan.layouts import Illegal, Layout
from credit_like.plan.machine import Machine, compute_seconds, transfer_seconds

if TYPE_CHECKING:
    from credit_like.plan.simulate import Rank


@dataclass(frozen=True)
class Estimate:
    """Seconds of one optimiser step of one rank."""

    compute: float
    waited: float
    """Communication that the next operation needs at once: domain and tensor ranks."""
    hidden: float
    """Communication beside the computing that takes no more time than that."""
    exposed: float
    """What is left of it: FSDP2 and DDP."""

    @property
    def total(self) -> float:
        return self.compute + self.waited + self.exposed


def estimate(machine: Machine, rank: Rank) -> Estimate:
    """Computing, plus all communication that is waited for, plus what the rest exceeds the hiding part of computing by."""
    compute = compute_seconds(machine, rank.work)
    waited = beside = 0.0
    for message, times in rank.messages.items():
        seconds = times * transfer_seconds(machine, message.kind, message.ranks, message.bytes)
        if message.waits:
            waited += seconds
        else:
            beside += seconds
    hidden = min(beside, machine.overlap * compute)
    return Estimate(compute, waited, hidden, beside - hidden)


@dataclass(frozen=True)
class Row:
    """A layout with its simulated ranks: those of the first, an interior and the last band."""

    layout: Layout
    ranks: tuple[Rank, ...]
    machine: Machine
    samples: int
    """Of one optimiser step."""

    @property
    def fullest(self) -> Rank:
        return max(self.ranks, key=lambda rank: rank.peak)

    @property
    def estimate(self) -> Estimate:
        """Of the slowest rank, for which the others wait."""
        return max((estimate(self.machine, rank) for rank in self.ranks), key=lambda e: e.total)

    @property
    def seconds(self) -> float:
        return self.estimate.total

    @property
    def excess(self) -> float:
        """Bytes above what may be filled; negative where it fits."""
        return self.fullest.peak - self.machine.usable

    @property
    def fits(self) -> bool:
        return self.excess <= 0

    def to_dict(self) -> dict[str, Any]:
        """For JSON: bytes, floating-point operations, seconds."""
        layout = self.layout
        return {
            "dp": layout.dp,
            "tensor": layout.tensor,
            "domain": layout.domain,
            "replicate": layout.replicate,
            "data": layout.data,
            "fits": self.fits,
            "excess": max(0, round(self.excess)),
            "estimate": {
                "seconds_per_step": self.seconds,
                "samples_per_second": self.samples / self.seconds if self.seconds else None,
                **{name: getattr(self.estimate, name) for name in ("compute", "waited", "hidden", "exposed")},
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
        "collectives": {k: {"number": n, "bytes": b} for k, (n, b) in sorted(rank.collectives().items())},
        "read_per_sample": rank.read,
        "checkpoint": rank.checkpoint,
    }


@dataclass(frozen=True)
class Report:
    """Every layout of a number of ranks, the best first: those that fit by estimated time, then those that do not."""

    name: str
    world: int
    machine: Machine
    rows: tuple[Row, ...]
    illegal: tuple[Illegal, ...]

    @property
    def recommended(self) -> Row | None:
        """The fastest layout that fits."""
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


def in_order(rows: list[Row]) -> tuple[Row, ...]:
    """What fits, by time; then what does not, by what is missing. Equal ones: the simpler layout first."""

    def key(row: Row) -> tuple[Any, ...]:
        layout = row.layout
        return (not row.fits, row.seconds if row.fits else row.excess, layout.tensor, layout.domain, layout.replicate)

    return tuple(sorted(rows, key=key))
