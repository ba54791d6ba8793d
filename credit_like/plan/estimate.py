"""Estimate from simulated ranks whether a layout fits and how long a step takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from credit_like.plan.layouts import Candidate, Illegal
from credit_like.plan.machine import Machine, compute_seconds, launch_seconds, transfer_seconds

if TYPE_CHECKING:
    from credit_like.plan.simulate import Rank


@dataclass(frozen=True)
class Estimate:
    """The estimated time of one optimiser step of one rank, in seconds."""

    compute: float
    launched: float
    """Time in which the device waits for the host to launch operations."""
    waited: float
    """Blocking communication, whose result the next operation needs: that of domain and tensor ranks."""
    hidden: float
    """Communication of FSDP2 and DDP that overlaps with computation."""
    exposed: float
    """Communication of FSDP2 and DDP that exceeds the overlap."""

    @property
    def total(self) -> float:
        return self.compute + self.launched + self.waited + self.exposed


def estimate(machine: Machine, rank: Rank) -> Estimate:
    """Estimate the time of an optimiser step.

    It is the time of computation, of blocking communication, and of the part of the other communication that
    computation (`machine.overlap` of it) cannot hide. Each segment of the computation takes the longer of the device's
    time and that of the host, which launches the operations and can be ahead by one segment.
    """
    devices = [compute_seconds(machine, segment) for segment in rank.segments]
    hosts = [launch_seconds(machine, segment, rank.compiled) for segment in rank.segments]
    compute = sum(devices)
    launched = sum(max(0.0, host - device) for host, device in zip(hosts, devices, strict=True))
    waited = beside = 0.0
    for message, times in rank.messages.items():
        seconds = times * transfer_seconds(machine, message.kind, message.ranks, message.bytes)
        if message.waits:
            waited += seconds
        else:
            beside += seconds
    hidden = min(beside, machine.overlap * compute)
    return Estimate(compute, launched, waited, hidden, beside - hidden)


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

    @property
    def estimate(self) -> Estimate:
        """Estimate of the slowest rank, because all others wait for it."""
        return max((estimate(self.machine, rank) for rank in self.ranks), key=lambda e: e.total)

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
            "replicate": layout.replicate,
            "data": layout.data,
            "fits": self.fits,
            "excess": max(0, round(self.excess)),
            "estimate": {
                "seconds_per_step": self.seconds,
                "samples_per_second": self.samples / self.seconds if self.seconds else None,
                **{
                    name: getattr(self.estimate, name)
                    for name in ("compute", "launched", "waited", "hidden", "exposed")
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
        "operations": sum(sum(segment.values()) for segment in rank.segments),
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
