"""The speed of a GPU and its network, and the time that a piece of work takes on it. Does not import torch.

Presets hold the vendors' figures: dense tensor-core peaks in bfloat16 and TensorFloat-32, peak of float32 arithmetic
without them, memory and network bandwidth per GPU and direction. Programs achieve a fraction of them, which is
a guess until it is measured, as are the other figures of `RANGES`; each has a range, from which estimates get theirs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

from credit_like.errors import UserError, reason
from credit_like.registry import did_you_mean
from credit_like.small_files import read_yaml

Arithmetic = Literal["half", "tf32", "wide"]
"""bfloat16 or float16; products and convolutions of float32 that may be in TensorFloat-32; float32 and float64."""

Piece = tuple[Arithmetic, int, int]
"""An operation: its arithmetic, its floating-point operations, the bytes it moves."""

Seen = tuple[str, int, int, float]
"""A measured collective: its kind, number of ranks and bytes, and its time in µs."""


@dataclass(frozen=True)
class Machine:
    """The figures of a GPU and its network.

    Memory is in GB (10⁹ bytes), peaks in TFLOP/s, bandwidths in GB/s, latency in µs.
    """

    name: str
    memory: float
    peak: float
    """Peak of bfloat16 and float16 arithmetic."""
    wide_peak: float
    """Peak of float32 arithmetic."""
    bandwidth: float
    """Bandwidth of device memory."""
    intra: float
    """Network bandwidth within a node, per GPU and direction."""
    inter: float
    """Network bandwidth between nodes, per GPU and direction."""
    node: int
    """Number of GPUs per node; consecutive ranks fill a node."""
    latency: float = 14.0
    """Time of a collective that sends next to nothing between two ranks, in µs. This and the hops: NCCL's model of LL128."""
    hop_intra: float = 1.9
    """Time of each further rank within a node that a collective passes through, in µs."""
    hop_inter: float = 4.0
    """Time of each further node that a collective passes through, in µs."""
    links: float = 0.75
    """Fraction of the network bandwidths that collectives achieve."""
    reached: float = 0.5
    """Fraction of the peaks and of the memory bandwidth that programs achieve."""
    launch: float = 6.0
    """Time in which the host launches one operation, in µs; the device waits if its operations are shorter."""
    floor: float = 2.0
    """Time that an operation takes on the device besides its arithmetic or traffic, in µs."""
    fused: float = 0.40
    """Number of launches of a compiled model, relative to its operations one by one."""
    moved: float = 0.64
    """Memory traffic of a compiled model, relative to its operations one by one."""
    spread: float = 0.01
    """Relative standard deviation of the speeds of GPUs; the slowest of a run sets the pace."""
    reading: float = 4.0
    """Speed at which samples are read and brought to a GPU, in GB/s of float32."""
    streams: bool = True
    """Whether the machine is a GPU, where collectives run beside the computation; those of a CPU block it, except DDP's."""
    unit: float = 0.0
    """Time in which the host gathers or reduces for a unit of FSDP2, in µs, besides the collective, `packed` and `copied`."""
    packed: float = 0.0
    """Time in which the host handles each parameter or gradient that a collective of FSDP2 packs, in µs."""
    copied: float = 0.0
    """Time in which the host allocates and copies each MB (10⁶ bytes) that a collective of FSDP2 packs, in µs."""
    collectives: tuple[Seen, ...] = ()
    """Measured collectives, which replace latency, hops and bandwidth for their kinds."""
    doubt: float = 1.0
    """How much of the ranges of `RANGES` applies: 1 for presets, less for a machine that was measured."""
    reserve: float = 0.1
    """Fraction of memory lost to the driver, network buffers and fragmentation."""
    tf32_peak: float = 0.0
    """Peak of products and convolutions of float32 in TensorFloat-32; 0 where there is none, and `wide_peak` applies."""

    def __post_init__(self) -> None:
        for field in ("memory", "peak", "wide_peak", "bandwidth", "intra", "inter", "node", "reading"):
            if not getattr(self, field) > 0:
                raise UserError(f"expected {field} above 0, got {getattr(self, field)}, change it")
        for field in (
            "tf32_peak",
            "latency",
            "hop_intra",
            "hop_inter",
            "launch",
            "floor",
            "spread",
            "doubt",
            "unit",
            "packed",
            "copied",
        ):
            if not getattr(self, field) >= 0:
                raise UserError(f"expected {field} of at least 0, got {getattr(self, field)}, change it")
        for field in ("reached", "links", "fused", "moved"):
            if not 0 < getattr(self, field) <= 1:
                raise UserError(f"expected {field} above 0 and at most 1, got {getattr(self, field)}, change it")
        if not 0 <= self.reserve < 1:
            raise UserError(f"expected reserve from 0 to below 1, got {self.reserve}, change it")

    @property
    def usable(self) -> float:
        """Memory that training may use, in bytes."""
        return self.memory * 1e9 * (1 - self.reserve)

    def pace(self, world: int) -> float:
        """Return the time of computing on the slowest of `world` GPUs relative to the average.

        It is the expected largest of as many normal values, by Blom's approximation.
        """
        quantile = NormalDist().inv_cdf((world - 0.375) / (world + 0.25)) if world > 1 else 0.0
        return 1 + self.spread * quantile

    def bound(self, fast: bool) -> Machine:
        """Return the machine with every figure of `RANGES` at the fast or at the slow end of its range."""
        changed = {}
        for field, (factor, speed) in RANGES.items():
            value = getattr(self, field) * factor ** (self.doubt if speed == fast else -self.doubt)
            changed[field] = min(1.0, value) if field in ("reached", "links", "moved") else value
        factor = RANGES["latency"][0] ** (-self.doubt if fast else self.doubt)
        seen = tuple((kind, ranks, size, factor * took) for kind, ranks, size, took in self.collectives)
        return replace(self, **changed, collectives=seen)

    def assumptions(self) -> dict[str, Any]:
        """Return all figures that an estimate depends on."""
        return asdict(self) | {"collectives": [list(one) for one in self.collectives]}


RANGES = {
    # figure: the factor by which it may be larger or smaller, and whether larger is faster
    "reached": (1.4, True),
    "links": (1.3, True),
    "latency": (2.0, False),
    "hop_intra": (2.0, False),
    "hop_inter": (2.0, False),
    "launch": (1.7, False),
    "floor": (1.7, False),
    "unit": (1.7, False),
    "packed": (1.7, False),
    "copied": (1.7, False),
    "moved": (1.3, False),
    "spread": (3.0, False),
    "reading": (2.0, True),
}

PRESETS = {
    machine.name: machine
    for machine in (
        #       name             GB   bf16   fp32   HBM   intra inter node
        Machine("v100-32gb", 32, 125.0, 15.7, 900, 150, 12.5, 4),
        Machine("a100-40gb", 40, 312.0, 19.5, 1555, 300, 25.0, 4, tf32_peak=156.0),
        Machine("a100-80gb", 80, 312.0, 19.5, 2039, 300, 25.0, 4, tf32_peak=156.0),
        Machine("h100", 80, 989.0, 67.0, 3350, 450, 50.0, 8, tf32_peak=494.7),
        Machine("h200", 141, 989.0, 67.0, 4800, 450, 50.0, 8, tf32_peak=494.7),
        # One of the two dies; PyTorch treats each as a separate GPU.
        Machine("mi250x", 64, 191.5, 23.9, 1638, 50, 12.5, 8),
    )
}


def machine_of(name: str, changes: Mapping[str, Any]) -> Machine:
    """Return a preset, or a machine measured by `credit-like bench`, with some figures replaced.

    Figures that are None in `changes` are kept. Raises UserError for an unknown name, a file that `bench` did not write
    and values out of range.
    """
    if name.endswith((".yml", ".yaml")):
        return replace(_from_file(Path(name)), **{key: value for key, value in changes.items() if value is not None})
    if name not in PRESETS:
        known = list(PRESETS)
        raise UserError(
            f"expected --gpu {', '.join(known)} or a file of `credit-like bench`, got {name!r}{did_you_mean(name, known)}"
        )
    return replace(PRESETS[name], **{key: value for key, value in changes.items() if value is not None})


def _from_file(path: Path) -> Machine:
    try:
        figures = read_yaml(path)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"expected --gpu with a file that `credit-like bench` wrote, got {path}: {reason(error)}; change the path, or let "
            "`credit-like bench` write it"
        ) from error
    wanted = {field.name: field.type for field in fields(Machine)}
    kinds = {"name": str, "collectives": list}
    right = isinstance(figures, dict) and all(
        isinstance(figures.get(key), kinds.get(key, int | float)) for key in wanted
    )
    if not right or set(figures) != set(wanted) or not all(map(_is_seen, figures["collectives"])):
        raise UserError(f"expected {', '.join(wanted)} in {path}, got something else; let `credit-like bench` write it")
    return Machine(**figures | {"collectives": tuple(map(tuple, figures["collectives"]))})


def _is_seen(one: Any) -> bool:
    """Return whether a line of a file is a measured collective."""
    return (
        isinstance(one, list)
        and list(map(type, one)) in ([str, int, int, float], [str, int, int, int])
        and min(one[1] - 1, one[2], one[3]) > 0
    )


_Curve = tuple[tuple[int, float, float], ...]
"""Bytes, latency and time to send, in seconds, by bytes."""


@cache
def _curves(seen: tuple[Seen, ...], kind: str) -> dict[int, _Curve]:
    """Return number of ranks → measurements of a kind of collective. The latency is the time of the smallest message."""
    points: dict[int, list[tuple[int, float]]] = {}
    for which, ranks, size, took in sorted(seen):
        if which == kind:
            points.setdefault(ranks, []).append((size, 1e-6 * took))
    return {
        ranks: tuple((size, some[0][1], took - some[0][1]) for size, took in some) for ranks, some in points.items()
    }


def _as_measured(seen: tuple[Seen, ...], kind: str, n: int, size: int) -> tuple[float, float] | None:
    """Return latency and time to send of a collective of n ranks, in seconds; None if its kind was not measured.

    Between two numbers of ranks that were measured, both are on a straight line. Beyond them, n ranks have as many more
    hops and as much more sent than the nearest number as further ranks make of a ring.
    """
    curves = _curves(seen, kind)
    if not curves:
        return None
    few = max((m for m in curves if m <= n), default=min(curves))
    many = min((m for m in curves if m >= n), default=max(curves))
    latency, sent = _on_curve(curves[few], size)
    if few == many:
        return (n - 1) / (few - 1) * latency, (n - 1) / n * few / (few - 1) * sent
    part = (n - few) / (many - few)
    last = _on_curve(curves[many], size)
    return (1 - part) * latency + part * last[0], (1 - part) * sent + part * last[1]


def _on_curve(curve: _Curve, size: int) -> tuple[float, float]:
    """Return latency and time to send of a size: straight lines between the measured sizes, the last one goes on."""
    for (small, latency, low), (large, _, high) in pairwise(curve):
        if size <= large or large == curve[-1][0]:
            return latency, max(0.0, low + (high - low) * (max(0, size - small) / (large - small)))
    ((_, latency, _),) = curve
    return latency, 0.0


@cache
def _shape(ranks: Sequence[int], node: int) -> tuple[int, int, int]:
    """Return the number of ranks, of nodes, and of ranks on the fullest node."""
    nodes = Counter(rank // node for rank in ranks)
    return len(ranks), len(nodes), max(nodes.values())


def transfer(machine: Machine, kind: str, ranks: Sequence[int], size: int) -> tuple[float, dict[str, float]]:
    """Return the latency of one collective of `size` bytes, and how long it occupies each link, in seconds.

    Of an all-gather or reduce-scatter every rank receives or sends (n − 1)/n of the tensor, of an all-reduce twice that.
    All of it passes through the links within the node. Into a node goes the same once, shared among the network cards of
    its ranks, which is what rings and trees over nodes achieve. Both go on at the same time. A ring has as many hops as
    further ranks; an all-reduce takes a tree over the nodes if that has fewer. An all-to-all sends at once to all. A kind
    that was measured takes what was measured.
    """
    n, nodes, here = _shape(ranks, machine.node)
    if n == 1:
        return 0.0, {}
    if (measured := _as_measured(machine.collectives, kind, n, size)) is not None:
        latency, busy = measured
        return latency, {"network" if nodes > 1 else "node": busy}
    if kind == "reduce-scatter" and not machine.streams:
        kind = "all-reduce"  # which is what gloo does
    ring = n - nodes, nodes - 1
    if kind == "all-to-all":
        near, far = size * (here - 1) / (n - 1), size * (n - here) / (n - 1)
        hops = float(here > 1), float(nodes > 1)
    else:
        sent = {"all-reduce": 2 * size * (n - 1) / n, "broadcast": size}.get(kind, size * (n - 1) / n)
        near, far = sent * (here > 1), sent / here * (nodes > 1)
        hops = ring
        if kind == "all-reduce":
            hops = min((2 * ring[0], 2 * ring[1]), (2 * (here - 1), 2 * math.ceil(math.log2(nodes))), key=sum)
    latency = machine.latency + machine.hop_intra * hops[0] + machine.hop_inter * hops[1]
    links = {
        "node": near / (machine.intra * machine.links * 1e9),
        "network": far / (machine.inter * machine.links * 1e9),
    }
    return latency * 1e-6, {link: seconds for link, seconds in links.items() if seconds}


def transfer_seconds(machine: Machine, kind: str, ranks: Sequence[int], size: int) -> float:
    """Return the time of one collective of `size` bytes that nothing else disturbs, in seconds."""
    latency, links = transfer(machine, kind, tuple(ranks), size)
    return latency + max(links.values(), default=0.0)


def packing_seconds(machine: Machine, packed: int, size: int) -> float:
    """Return the time of the host for a collective of FSDP2, in seconds, which packs so many tensors of `size` bytes in all."""
    return 1e-6 * (machine.unit + machine.packed * packed + machine.copied * 1e-6 * size)


def launches(machine: Machine, operations: int, compiled: bool) -> float:
    """Return how many operations the host launches."""
    return operations * (machine.fused if compiled else 1.0)


def compute_seconds(machine: Machine, work: Mapping[Piece, int], compiled: bool = False) -> float:
    """Return the time of operations that run one after the other, in seconds, by the roofline model.

    Each operation takes the longer of its arithmetic and its memory traffic, after a fixed time for each launch.
    """
    total, moved = 0.0, machine.moved if compiled else 1.0
    peaks = {"half": machine.peak, "tf32": machine.tf32_peak or machine.wide_peak, "wide": machine.wide_peak}
    for (arithmetic, flops, traffic), times in work.items():
        total += times * max(flops / (peaks[arithmetic] * 1e12), moved * traffic / (machine.bandwidth * 1e9))
    return total / machine.reached + machine.floor * 1e-6 * launches(machine, sum(work.values()), compiled)
