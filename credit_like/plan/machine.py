"""The speed of a GPU and its network, and the time that work takes on it by the roofline model. Does not import torch.

Presets hold the vendors' figures: dense tensor-core peak in bfloat16, peak of float32 arithmetic as PyTorch runs it by
default (without TF32), memory and network bandwidth per GPU and direction. Programs achieve the fraction `reached` of
them. Its default is a guess, to be replaced by a measurement; all times that depend on it are estimates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from credit_like.errors import UserError
from credit_like.registry import did_you_mean

GIB = 2**30


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
    """Peak of float32 and float64 arithmetic."""
    bandwidth: float
    """Bandwidth of device memory."""
    intra: float
    """Network bandwidth within a node, per GPU and direction."""
    inter: float
    """Network bandwidth between nodes, per GPU and direction."""
    node: int
    """Number of GPUs per node; consecutive ranks fill a node."""
    latency: float = 20.0
    """Latency of a collective, per doubling of its ranks."""
    reached: float = 0.5
    """Fraction of the peaks and bandwidths that programs achieve."""
    overlap: float = 0.8
    """Fraction of computation that can overlap with the gathering of parameters and the reduction of gradients."""
    launch: float = 6.0
    """Time in which the host launches one operation, in µs; the device waits if its operations are shorter."""
    fused: float = 0.37
    """Number of launches of a compiled model, relative to its operations one by one."""
    reserve: float = 0.1
    """Fraction of memory lost to the driver, network buffers and fragmentation."""

    def __post_init__(self) -> None:
        for field in ("memory", "peak", "wide_peak", "bandwidth", "intra", "inter", "node"):
            if not getattr(self, field) > 0:
                raise UserError(f"expected {field} above 0, got {getattr(self, field)}, change it")
        if not self.launch >= 0:
            raise UserError(f"expected launch of at least 0, got {self.launch}, change it")
        if not 0 < self.fused <= 1:
            raise UserError(f"expected fused above 0 and at most 1, got {self.fused}, change it")
        if not 0 < self.reached <= 1:
            raise UserError(f"expected reached above 0 and at most 1, got {self.reached}, change it")
        for field in ("overlap", "reserve"):
            if not 0 <= getattr(self, field) < 1:
                raise UserError(f"expected {field} from 0 to below 1, got {getattr(self, field)}, change it")

    @property
    def usable(self) -> float:
        """Memory that training may use, in bytes."""
        return self.memory * 1e9 * (1 - self.reserve)

    def assumptions(self) -> dict[str, float | int | str]:
        """Return all figures that an estimate depends on."""
        return asdict(self)


PRESETS = {
    machine.name: machine
    for machine in (
        #       name             GB   bf16   fp32   HBM   intra inter node
        Machine("v100-32gb", 32, 125.0, 15.7, 900, 150, 12.5, 4),
        Machine("a100-40gb", 40, 312.0, 19.5, 1555, 300, 25.0, 4),
        Machine("a100-80gb", 80, 312.0, 19.5, 2039, 300, 25.0, 4),
        Machine("h100", 80, 989.0, 67.0, 3350, 450, 50.0, 8),
        Machine("h200", 141, 989.0, 67.0, 4800, 450, 50.0, 8),
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
        figures = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"expected --gpu with a file that `credit-like bench` wrote, got {path}: {error}") from error
    wanted = {field.name: field.type for field in fields(Machine)}
    if isinstance(figures, dict):  # older files lack these
        figures = {"launch": 0.0, "fused": Machine.fused, **figures}
    numbers = isinstance(figures, dict) and all(
        isinstance(figures.get(key), str if key == "name" else int | float) for key in wanted
    )
    if not numbers or set(figures) != set(wanted):
        raise UserError(f"expected {', '.join(wanted)} in {path}, got something else; let `credit-like bench` write it")
    return Machine(**figures)


def transfer_seconds(machine: Machine, kind: str, ranks: Sequence[int], size: int) -> float:
    """Return the time of one collective of `size` bytes by the ring algorithm, in seconds.

    A rank sends (n − 1)/n of the tensor, twice that for an all-reduce. The slowest link determines the time: the
    network between nodes as soon as the ranks are on more than one.
    """
    n = len(ranks)
    if n == 1:
        return 0.0
    nodes = {rank // machine.node for rank in ranks}
    link = (machine.intra if len(nodes) == 1 else machine.inter) * 1e9 * machine.reached
    sent = {"all-reduce": 2 * size * (n - 1) / n, "all-to-all": size, "broadcast": size}.get(kind, size * (n - 1) / n)
    return machine.latency * 1e-6 * math.ceil(math.log2(n)) + sent / link


def launch_seconds(machine: Machine, work: Mapping[tuple[bool, int, int], int], compiled: bool) -> float:
    """Return the time in which the host launches these operations, in seconds."""
    return sum(work.values()) * machine.launch * 1e-6 * (machine.fused if compiled else 1.0)


def compute_seconds(machine: Machine, work: Mapping[tuple[bool, int, int], int]) -> float:
    """Return the time of operations that run one after the other, in seconds, by the roofline model.

    Each operation takes the longer of its arithmetic and its memory traffic.
    """
    total = 0.0
    for (wide, flops, traffic), times in work.items():
        peak = machine.wide_peak if wide else machine.peak
        total += times * max(flops / (peak * 1e12), traffic / (machine.bandwidth * 1e9))
    return total / machine.reached
