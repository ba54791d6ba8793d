"""`credit-like bench`: measure this machine for `credit-like plan --gpu FILE`.

Peaks are measured with large matrix products, bandwidths with a copy and an all-reduce. `reached` is the fraction of them
that a training step of a WXFormer achieves: its roofline time divided by its measured time. On a CPU, whose calls of
small operations cost as much as their work, steps on two grids tell `reached` and the time of a call apart.
"""

from __future__ import annotations

import os
import platform
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import yaml
from torch import nn

from credit_like.checkpoint.files import replace_file
from credit_like.models import wxformer
from credit_like.nn.init import initialise
from credit_like.outputs import begins_with, check_own
from credit_like.parallel.fsdp2 import apply_fsdp2
from credit_like.parallel.runtime import Runtime
from credit_like.plan.machine import Machine, compute_seconds, transfer
from credit_like.plan.meter import Meter
from credit_like.schema.trainer import Parallelism

_HEADER = "# Measured by credit-like bench."
_TURNS = 5
_CHANNELS = 16  # of the timed training steps
_GRIDS = {"cpu": ((32, 64), (128, 256)), "cuda": ((512, 1024),)}  # a GPU must not wait for launches
_DOUBT = 0.4  # of a measured machine
_UNITS = 8  # of the sharded model

Clock = Callable[[], float]


def bench(path: Path | None) -> Machine | None:
    """Measure this machine and write the figures to `path` as YAML.

    Under a launcher all ranks take part; only rank 0 writes and returns the figures, the others return None.

    On a single rank the network cannot be measured, and its figures are those of the memory; on a single node, the
    figure between nodes is that within the node.

    Raises UserError, before anything is measured, if something else is at `path`.
    """
    if path is not None:
        check_own("--output", path, "figures of this command", begins_with(_HEADER))
    runtime = Runtime.start(Parallelism(data="ddp"))
    machine = measure(runtime)
    if path is not None and runtime.is_main:
        figures = yaml.safe_dump(dict(machine.assumptions()), sort_keys=False)
        replace_file(path, f"{_HEADER}\n{figures}".encode())
    runtime.close()
    return machine if runtime.is_main else None


def measure(runtime: Runtime, clock: Clock = time.perf_counter) -> Machine:
    """Measure this rank's device and the network between the ranks, in the seconds of `clock`."""
    device = runtime.device
    node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    bandwidth = _copies(device, clock)
    network, small = _network(runtime, clock)
    within = network if runtime.world <= node else bandwidth
    bare = Machine(
        name=f"{_name(device)}, {socket.gethostname()}",
        memory=_memory(device, node),
        peak=_products(device, torch.bfloat16, clock),
        wide_peak=_products(device, torch.float32, clock),
        bandwidth=bandwidth,
        intra=within or bandwidth,
        inter=network or bandwidth,
        node=node,
        reached=1.0,
        links=1.0,
        launch=_launches(device, clock),
        spread=0.0,
        streams=device.type == "cuda",
        doubt=_DOUBT,
    )
    figures = _collective(bare, runtime, small, clock) | _training(bare, device, clock)
    return Machine(**{**bare.assumptions(), **figures})  # type: ignore[arg-type]


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()


def _memory(device: torch.device, node: int) -> float:
    """Return the memory per rank in GB."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory / 1e9
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9 / node


def _seconds(work: Callable[[], object], device: torch.device, clock: Clock = time.perf_counter) -> float:
    """Return the median time of some repeats of `work` in seconds, after one warm-up."""
    times = []
    for _ in range(_TURNS + 1):
        began = clock()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(clock() - began)
    return statistics.median(times[1:])


def _products(device: torch.device, dtype: torch.dtype, clock: Clock = time.perf_counter) -> float:
    """Return the arithmetic throughput of a large matrix product in TFLOP/s."""
    n = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return 2 * n**3 / _seconds(lambda: a @ b, device, clock) / 1e12


def _launches(device: torch.device, clock: Clock = time.perf_counter) -> float:
    """Return the time of launching one operation in µs; 0 on a CPU, which computes meanwhile what it calls."""
    if device.type != "cuda":
        return 0.0
    x, count = torch.zeros(1, device=device), 1000

    def add() -> None:
        for _ in range(count):
            x.add_(1.0)

    return 1e6 * _seconds(add, device, clock) / count


def _copies(device: torch.device, clock: Clock = time.perf_counter) -> float:
    """Return the memory bandwidth of a copy, read and written bytes together, in GB/s."""
    source = torch.ones(2**28 if device.type == "cuda" else 2**25, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(lambda: target.copy_(source), device, clock) / 1e9


def _network(runtime: Runtime, clock: Clock = time.perf_counter) -> tuple[float | None, float]:
    """Return the bandwidth of one rank in a ring all-reduce, in GB/s (None for one rank), and the time of a small one in µs."""
    if runtime.world == 1:
        return None, Machine.latency
    large, small = torch.ones(2**24, device=runtime.device), torch.ones(1, device=runtime.device)
    latency = _seconds(lambda: [runtime.sum_over_data(small) for _ in range(_TURNS)], runtime.device, clock) / _TURNS
    took = _seconds(lambda: runtime.sum_over_data(large), runtime.device, clock)
    sent = 2 * large.nbytes * (runtime.world - 1) / runtime.world
    return sent / max(took - latency, 1e-9) / 1e9, 1e6 * latency


def _collective(machine: Machine, runtime: Runtime, small: float, clock: Clock) -> dict[str, float]:
    """Return `latency` and the hops, in µs, from the time of a small all-reduce.

    The hops of a GPU are those of its preset, unless the all-reduce was quicker. A CPU's messages cost per hop, and as it
    does nothing meanwhile, so does what a unit of FSDP2 does besides for each collective.
    """
    if runtime.world == 1:
        return {}
    hops, _ = transfer(replace(machine, latency=0.0), "all-reduce", range(runtime.world), 4)
    if machine.streams and small > 1e6 * hops:
        return {"latency": small - 1e6 * hops}
    scale = small / (1e6 * hops)
    figures = {"latency": 0.0, "hop_intra": machine.hop_intra * scale, "hop_inter": machine.hop_inter * scale}
    if not machine.streams:
        quick = Machine(**{**machine.assumptions(), **figures})  # type: ignore[arg-type]
        gather, reduce = (transfer(quick, k, range(runtime.world), 4)[0] for k in ("all-gather", "reduce-scatter"))
        each = _sharded(runtime, clock) - (2 * gather + reduce) / 3
        figures["latency"] = 1e6 * max(0.0, each)
    return figures


def _sharded(runtime: Runtime, clock: Clock) -> float:
    """Return the time of one of the collectives of a step of FSDP2 that computes next to nothing, in seconds."""

    def took(sharded: bool) -> float:
        units = [nn.Linear(_UNITS, _UNITS) for _ in range(_UNITS)]
        for unit in units:
            unit._fsdp2_shard = sharded  # type: ignore[assignment]
        model = nn.Sequential(*units)
        if sharded:
            model = apply_fsdp2(model, None, {"trainer": {}})  # type: ignore[assignment]
        x = torch.ones(1, _UNITS)
        return _seconds(lambda: model(x).sum().backward(), runtime.device, clock)

    return max(0.0, took(True) - took(False)) / (3 * _UNITS)


def _training(machine: Machine, device: torch.device, clock: Clock) -> dict[str, float]:
    """Return `reached`, and on a CPU `floor`, from forward and backward of a small WXFormer, without autocast."""
    seen = [_step(machine, device, grid, clock) for grid in _GRIDS[device.type]]
    if len(seen) == 1:
        ((count, ideal, took),) = seen
        return {"reached": min(1.0, ideal / max(took - count * machine.floor * 1e-6, ideal))}
    (few, light, short), (many, heavy, long) = seen
    reached = (heavy * few - light * many) / max(long * few - short * many, 1e-9)
    reached = min(1.0, max(reached, 0.01))
    return {"reached": reached, "floor": 1e6 * max(0.0, short - light / reached) / few}


def _step(machine: Machine, device: torch.device, grid: tuple[int, int], clock: Clock) -> tuple[int, float, float]:
    """Return the operations of a step, its roofline time and its measured time, in seconds."""
    config = wxformer.Config(dim=(32, 64, 128, 256), depth=(1, 1, 2, 1), dim_head=32, local_window_size=2)
    config = config.model_copy(update={"global_window_size": (4, 2, 1, 1)})
    model = wxformer.build(
        config, in_channels=_CHANNELS, out_channels=_CHANNELS, frames=1, height=grid[0], width=grid[1]
    )
    initialise(model, 0)
    model.to(device)
    x = torch.randn(1, _CHANNELS, 1, *grid, device=device)

    def step() -> None:
        model(x).square().mean().backward()

    step()
    with Meter() as meter:
        step()
    pieces = meter.work.pieces
    return sum(pieces.values()), compute_seconds(replace(machine, floor=0.0), pieces), _seconds(step, device, clock)
