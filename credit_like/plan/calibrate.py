"""`credit-like bench`: measure this machine for `credit-like plan --gpu FILE`.

Peaks are measured with large matrix products, bandwidths with a copy and an all-reduce. `reached` is the fraction of
them that a training step of a small WXFormer achieves: its roofline time divided by its measured time.
"""

from __future__ import annotations

import math
import os
import platform
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import yaml

from credit_like.checkpoint.files import replace_file
from credit_like.models import wxformer
from credit_like.nn.init import initialise
from credit_like.parallel.runtime import Runtime
from credit_like.plan.machine import Machine, compute_seconds
from credit_like.plan.meter import Meter
from credit_like.schema.trainer import Parallelism

_TURNS = 5
_GRIDS, _CHANNELS = {"cpu": (64, 128), "cuda": (512, 1024)}, 16  # of the timed training step


def bench(path: Path | None) -> Machine | None:
    """Measure this machine and write the figures to `path` as YAML.

    Under a launcher all ranks take part; only rank 0 writes and returns the figures, the others return None.

    On a single rank the network cannot be measured, and its figures are those of the memory; on a single node, the
    figure between nodes is that within the node.
    """
    runtime = Runtime.start(Parallelism(data="ddp"))
    machine = measure(runtime)
    if path is not None and runtime.is_main:
        replace_file(path, yaml.safe_dump(dict(machine.assumptions()), sort_keys=False).encode())
    runtime.close()
    return machine if runtime.is_main else None


def measure(runtime: Runtime) -> Machine:
    """Measure this rank's device and the network between the ranks."""
    device = runtime.device
    node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    bandwidth = _copies(device)
    network, latency = _network(runtime)
    within = network if runtime.world <= node else bandwidth
    bare = Machine(
        name=f"{_name(device)}, {socket.gethostname()}",
        memory=_memory(device, node),
        peak=_products(device, torch.bfloat16),
        wide_peak=_products(device, torch.float32),
        bandwidth=bandwidth,
        intra=within or bandwidth,
        inter=network or bandwidth,
        node=node,
        latency=latency,
        reached=1.0,
        launch=_launches(device),
    )
    return Machine(**{**bare.assumptions(), "reached": _reached(bare, device)})  # type: ignore[arg-type]


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()


def _memory(device: torch.device, node: int) -> float:
    """Return the memory per rank in GB."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory / 1e9
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9 / node


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the median time of some repeats of `work` in seconds, after one warm-up."""
    times = []
    for _ in range(_TURNS + 1):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def _products(device: torch.device, dtype: torch.dtype) -> float:
    """Return the arithmetic throughput of a large matrix product in TFLOP/s."""
    n = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return 2 * n**3 / _seconds(lambda: a @ b, device) / 1e12


def _launches(device: torch.device) -> float:
    """Return the time of launching one operation in µs; 0 on a CPU, which computes meanwhile what it calls."""
    if device.type != "cuda":
        return 0.0
    x, count = torch.zeros(1, device=device), 1000

    def add() -> None:
        for _ in range(count):
            x.add_(1.0)

    return 1e6 * _seconds(add, device) / count


def _copies(device: torch.device) -> float:
    """Return the memory bandwidth of a copy, read and written bytes together, in GB/s."""
    source = torch.ones(2**28 if device.type == "cuda" else 2**25, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(lambda: target.copy_(source), device) / 1e9


def _network(runtime: Runtime) -> tuple[float | None, float]:
    """Return the bandwidth and the latency of an all-reduce.

    The bandwidth is that of one rank in a ring all-reduce, in GB/s (None for one rank); the latency is that of a small
    all-reduce, in µs per doubling of the ranks.
    """
    if runtime.world == 1:
        return None, Machine.latency
    large, small = torch.ones(2**24, device=runtime.device), torch.ones(1, device=runtime.device)
    latency = _seconds(lambda: runtime.sum_over_data(small), runtime.device)
    took = _seconds(lambda: runtime.sum_over_data(large), runtime.device)
    sent = 2 * large.nbytes * (runtime.world - 1) / runtime.world
    return sent / max(took - latency, 1e-9) / 1e9, 1e6 * latency / math.ceil(math.log2(runtime.world))


def _reached(machine: Machine, device: torch.device) -> float:
    """Return the roofline time divided by the measured time of forward and backward, without autocast."""
    grid = _GRIDS[device.type]  # a GPU must not wait for launches
    config = wxformer.Config(dim=(32, 64, 128, 256), depth=(1, 1, 2, 1), dim_head=32)
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
    ideal = compute_seconds(machine, meter.work.pieces)
    return min(1.0, ideal / _seconds(step, device))
