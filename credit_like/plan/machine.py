"""What a GPU and its network can do, as explicit numbers, and the time that work takes there (roofline). No torch.

Presets hold the makers' figures: dense tensor-core peak in bfloat16, the peak of float32 arithmetic as PyTorch runs it
by default (no TF32), memory and network bandwidth per GPU and direction. What of them a program reaches is `reached`,
a guess to be replaced by a measured figure; every time that follows from it is an estimate.
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
    """memory GB (10⁹ bytes); peak, wide_peak TFLOP/s; bandwidth, intra, inter GB/s; latency µs."""

    name: str
    memory: float
    peak: float
    """bfloat16 and float16 arithmetic."""
    wide_peak: float
    """float32 and float64 arithmetic."""
    bandwidth: float
    """Device memory."""
    intra: float
    """To the other GPUs of the node, per GPU and direction."""
    inter: float
    """To other nodes, per GPU and direction."""
    node: int
    """GPUs in a node; ranks are laid out node by node."""
    latency: float = 20.0
    """Of one collective, per doubling of its ranks."""
    reached: float = 0.5
    """Part of the peaks and bandwidths that programs reach."""
    overlap: float = 0.8
    """Part of the computing time behind which gathering of parameters and reduction of gradients can hide."""
    reserve: float = 0.1
    """Part of the memory that is not ours: the driver, the network's buffers, fragmentation."""

    def __post_init__(self) -> None:
        for field in ("memory", "peak", "wide_peak", "bandwidth", "intra", "inter", "node"):
            if not getattr(self, field) > 0:
                raise UserError(f"expected {field} above 0, got {getattr(self, field)}, change it")
        if not 0 < self.reached <= 1:
            raise UserError(f"expected reached above 0 and at most 1, got {self.reached}, change it")
        for field in ("overlap", "reserve"):
            if not 0 <= getattr(self, field) < 1:
                raise UserError(f"expected {field} from 0 to below 1, got {getattr(self, field)}, change it")

    @property
    def usable(self) -> float:
        """Bytes that a training may fill."""
        return self.memory * 1e9 * (1 - self.reserve)

    def assumptions(self) -> dict[str, float | int | str]:
        """All inputs of an estimate."""
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
        # One of the two dies, which PyTorch sees as a GPU of its own.
        Machine("mi250x", 64, 191.5, 23.9, 1638, 50, 12.5, 8),
    )
}


def machine_of(name: str, changes: Mapping[str, Any]) -> Machine:
    """A preset, or what `credit-like bench` has written, with some figures replaced; None changes nothing.

    Raises UserError for a name that is not there, a file that is not one of these, and for figures that cannot be.
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
    numbers = isinstance(figures, dict) and all(
        isinstance(figures.get(key), str if key == "name" else int | float) for key in wanted
    )
    if not numbers or set(figures) != set(wanted):
        raise UserError(f"expected {', '.join(wanted)} in {path}, got something else; let `credit-like bench` write it")
    return Machine(**figures)


def transfer_seconds(machine: Machine, kind: str, ranks: Sequence[int], size: int) -> float:
    """One collective of `size` bytes by the usual ring: (n − 1)/n of the tensor once, for all-reduce twice.

    The slowest link decides: that between nodes as soon as the ranks are on more than one.
    """
    n = len(ranks)
    if n == 1:
        return 0.0
    nodes = {rank // machine.node for rank in ranks}
    link = (machine.intra if len(nodes) == 1 else machine.inter) * 1e9 * machine.reached
    sent = {"all-reduce": 2 * size * (n - 1) / n, "all-to-all": size, "broadcast": size}.get(kind, size * (n - 1) / n)
    return machine.latency * 1e-6 * math.ceil(math.log2(n)) + sent / link


def compute_seconds(machine: Machine, work: Mapping[tuple[bool, int, int], int]) -> float:
    """Operations one after the other; each takes as long as its arithmetic or its memory traffic, whichever is more."""
    total = 0.0
    for (wide, flops, traffic), times in work.items():
        peak = machine.wide_peak if wide else machine.peak
        total += times * max(flops / (peak * 1e12), traffic / (machine.bandwidth * 1e9))
    return total / machine.reached
