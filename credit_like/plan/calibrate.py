"""`credit-like bench`: measure this machine for `credit-like plan --gpu FILE`.

Peaks are measured with large matrix products, bandwidths with a copy and an all-reduce. `reached` is the fraction of them
that a training step of a WXFormer achieves, from the power iterations of its spectral norms to the average of its weights:
its roofline time divided by its measured time, on a grid whose steps do not wait for launches. On a GPU, a step on a small
grid, which does, tells the time of a launch. On a CPU, whose calls of small operations cost as much as their work, steps on
two grids tell `reached` and the time of a call apart.

Between CPUs, a collective amid the computation takes two or three times as long as one of many in a row, which find
everything in the caches. What sending costs is therefore what steps of the model that send something after every second
layer, forward and backward, take longer than those of a model with the same hooks that send nothing. That contains what the
computation loses, and the few collectives that take ten times as long as most. Each such step sends one size, because a
small collective costs the computation as much as a large one. What FSDP2 does besides for each unit, each parameter and
each byte is what is left of the steps of three sharded models: a small one of many units, the same as a single unit, and one
of as many units and parameters that are larger.
"""

from __future__ import annotations

import itertools
import logging
import os
import platform
import socket
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from torch import Tensor, nn

from credit_like.checkpoint.files import replace_file
from credit_like.errors import UserError
from credit_like.models import wxformer
from credit_like.nn import spectral_norm
from credit_like.nn.init import initialise
from credit_like.nn.layer import is_shard_unit
from credit_like.ops.cpu.matrix import product
from credit_like.outputs import begins_with, check_own
from credit_like.parallel.device import set_precision
from credit_like.parallel.fsdp2 import apply_fsdp2
from credit_like.parallel.runtime import Runtime
from credit_like.parallel.trials import Trial, reducing, trials
from credit_like.plan.events import Start, Trace
from credit_like.plan.machine import Machine, Seen, compute_seconds, transfer, transfer_seconds
from credit_like.plan.meter import Meter
from credit_like.schema.trainer import Parallelism
from credit_like.training.ema import Ema
from credit_like.training.optimizers import adamw
from credit_like.training.optimizers._adamw import AdamW

log = logging.getLogger(__name__)

_HEADER = "# Measured by credit-like bench."
_TURNS = 5
_CHANNELS = 16  # of the timed training steps
_GRIDS = {"cpu": ((32, 64), (128, 256)), "cuda": ((32, 64), (512, 1024))}
_UNHURRIED = 1.1  # of the time of launching, from which on a step is as long as the device computes
_TRAINED = "high"  # the precision in which trainings multiply float32 by default
_DOUBT = 0.4  # of a measured machine
_WIDTH, _NARROW = 32, 16  # of the models: the usual, and the small ones that FSDP2 shards
_REDUCED = 2**26  # bytes of the all-reduce by which the network is measured
_SIZES = (2**8, 2**17, 2**20, 2**22)  # bytes of the measured collectives

Clock = Callable[[], float]


def bench(path: Path | None) -> Machine | None:
    """Measure this machine and write the figures to `path` as YAML.

    Under a launcher all ranks take part; only rank 0 writes and returns the figures, the others return None.

    On a single rank the network cannot be measured, and its figures are those of the memory; on a single node, the
    figure between nodes is that within the node. With one rank on each node, the figure within a node is that of the memory.

    Raises UserError, before anything is measured, if something else is at `path`, and where the ranks of a node are not
    consecutive.
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
    network = _network(runtime, clock)
    bandwidth = _copies(device, clock)
    bare = Machine(
        name=f"{_name(device)}, {socket.gethostname()}",
        memory=_memory(device, network.node),
        peak=_products(device, torch.bfloat16, clock),
        wide_peak=_products(device, torch.float32, clock),
        tf32_peak=_products(device, torch.float32, clock, _TRAINED) if device.type == "cuda" else 0.0,
        bandwidth=bandwidth,
        intra=network.intra or bandwidth,
        inter=network.inter or bandwidth,
        node=network.node,
        reached=1.0,
        links=1.0,
        launch=0.0,  # a CPU computes meanwhile what it calls
        spread=0.0,
        streams=device.type == "cuda",
        doubt=_DOUBT,
    )
    machine = replace(bare, **_collective(bare, runtime, network.small), **_training(bare, device, clock))
    return machine if machine.streams or runtime.world == 1 else _between_cpus(machine, device, clock)


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


def _products(
    device: torch.device, dtype: torch.dtype, clock: Clock = time.perf_counter, precision: str = "highest"
) -> float:
    """Return the arithmetic throughput of a large matrix product in TFLOP/s, on a CPU by the library that models use.

    `precision` is that of `trainer.matmul_precision`, which stays set.
    """
    if device.type == "cuda":
        set_precision(precision)
    n = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    multiply: Callable[[Tensor, Tensor], Tensor] = product if device.type == "cpu" else torch.matmul
    return 2 * n**3 / _seconds(lambda: multiply(a, b), device, clock) / 1e12


def _copies(device: torch.device, clock: Clock = time.perf_counter) -> float:
    """Return the memory bandwidth of a copy, read and written bytes together, in GB/s."""
    source = torch.ones(2**28 if device.type == "cuda" else 2**25, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(lambda: target.copy_(source), device, clock) / 1e9


class _Network(NamedTuple):
    """What was measured of all-reduces: bandwidths in GB/s as `transfer` counts them, None where nothing is sent."""

    node: int
    """Ranks of the fullest node."""
    intra: float | None
    inter: float | None
    small: float
    """Time of a small all-reduce of all ranks, in µs."""


def _network(runtime: Runtime, clock: Clock = time.perf_counter) -> _Network:
    """Measure all-reduces of all ranks, and within each node.

    Raises UserError, on all ranks, where those of a node are not consecutive.
    """
    hosts = runtime.gather(socket.gethostname())
    node = max(Counter(hosts).values())
    if runtime.world == 1:
        return _Network(node, None, None, Machine.latency)
    nodes = [list(ranks) for _, ranks in itertools.groupby(range(runtime.world), hosts.__getitem__)]
    if len(nodes) > len(set(hosts)):
        raise UserError(
            f"expected consecutive ranks on each node, got {', '.join(hosts[:4])}, …; change how the launcher places them, as with "
            "srun --distribution=block"
        )
    took, latency = _all_reduce([range(runtime.world)], runtime.device, clock)
    together = _sent(runtime.world) / took
    if len(nodes) == 1:
        return _Network(node, together, together, latency)
    intra = None
    if node > 1:
        took, _ = _all_reduce(nodes, runtime.device, clock)
        (own,) = (len(ranks) for ranks in nodes if runtime.rank in ranks)
        intra = _sent(own) / took if own > 1 else None
    # What comes into a node is shared among the network cards of its ranks.
    return _Network(node, intra, together / node, latency)


def _all_reduce(parts: Sequence[Sequence[int]], device: torch.device, clock: Clock) -> tuple[float, float]:
    """Time all-reduces of each of these parts of the ranks.

    Return the seconds of one of `_REDUCED` bytes beyond those of a small one, and the latter's time in µs.
    """
    reduce = reducing(parts)
    large, small = torch.zeros(_REDUCED // 4, device=device), torch.zeros(1, device=device)
    latency = _seconds(lambda: [reduce(small) for _ in range(_TURNS)], device, clock) / _TURNS
    return max(_seconds(lambda: reduce(large), device, clock) - latency, 1e-9), 1e6 * latency


def _sent(ranks: int) -> float:
    """Return the GB that a rank sends in an all-reduce of `_REDUCED` bytes."""
    return 2e-9 * _REDUCED * (ranks - 1) / ranks


def _collective(machine: Machine, runtime: Runtime, small: float) -> dict[str, Any]:
    """Return `latency` and the hops, in µs, from the time of a small all-reduce.

    The hops of a GPU are those of its preset, unless the all-reduce was quicker. A CPU's messages cost per hop.
    """
    if runtime.world == 1:
        return {}
    hops, _ = transfer(replace(machine, latency=0.0), "all-reduce", range(runtime.world), 4)
    if machine.streams and small > 1e6 * hops:
        return {"latency": small - 1e6 * hops}
    scale = small / (1e6 * hops)
    return {"latency": 0.0, "hop_intra": machine.hop_intra * scale, "hop_inter": machine.hop_inter * scale}


class _Sending(torch.autograd.Function):
    """The identity, which sends something forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, send: Callable[[], None]) -> Tensor:
        ctx.send = send
        send()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.send()
        return grad, None


class _Timed:
    """Issues one of the collectives of training of one size after the other and times it."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.works = dict(trials(_SIZES))
        self.taken: dict[Trial, list[float]] = {key: [] for key in self.works}
        self._next: Iterator[Trial] = iter(())

    def begin(self, size: int) -> None:
        """Begin a step that sends `size` bytes at a time, the same kinds in the same order as every other."""
        self._next = itertools.cycle([key for key in self.works if key[2] == size])

    def __call__(self) -> None:
        key = next(self._next)
        began = self.clock()
        self.works[key]()
        self.taken[key].append(self.clock() - began)

    def clear(self) -> None:
        """Discard the timings."""
        for taken in self.taken.values():
            taken.clear()


def _between_cpus(machine: Machine, device: torch.device, clock: Clock) -> Machine:
    """Return the machine with the times of collectives within a step (of all ranks and of pairs) and of FSDP2."""
    machine = replace(machine, collectives=_amid_steps(device, clock))
    # The small model as it is, sharded in many units and as a single unit; the larger one as it is and in many units.
    widths = _NARROW, _NARROW, _NARROW, _WIDTH, _WIDTH
    _, many, single, _, large = models = [_model(_GRIDS["cpu"][0], device, width) for width in widths]
    for module in single[0].modules():
        if is_shard_unit(module):
            module._fsdp2_shard = False  # type: ignore[assignment]
    for model, _ in (many, single, large):
        apply_fsdp2(model, None, {"trainer": {}})
    works = [partial(_forward_backward, *made) for made in models]
    traces = [_trace(work) for work in works]
    times = [statistics.median(taken) for taken in _in_turn(works, clock, 3 * _TURNS)]  # quick, and all of it counts

    def beyond(sharded: int, plain: int) -> _Beyond:
        return _beyond(machine, times[sharded] - times[plain], traces[plain], traces[sharded])

    return replace(machine, **_of_fsdp2(beyond(1, 0), beyond(2, 0), beyond(4, 3)))


def _amid_steps(device: torch.device, clock: Clock) -> tuple[Seen, ...]:
    """Return the collectives of training with their times in µs."""
    timed = _Timed(clock)
    sizes = sorted({size for _, _, size in timed.works})
    silent, sending = (_model(_GRIDS["cpu"][0], device) for _ in range(2))
    _after_layers(silent[0], lambda: None)
    _after_layers(sending[0], timed)

    def send(size: int) -> None:
        timed.begin(size)
        _forward_backward(*sending)

    works = [partial(_forward_backward, *silent), *(partial(send, size) for size in sizes)]
    for work in works:
        work()
    timed.clear()
    silently, *sent = _in_turn(works, clock, 2 * _TURNS)
    more = {
        size: len(times) * statistics.median(whole - alone for whole, alone in zip(times, silently, strict=True))
        for size, times in zip(sizes, sent, strict=True)
    }
    return _as_in_steps(timed.taken, more)


def _after_layers(model: nn.Module, send: Callable[[], None]) -> None:
    """Let every second layer that is called send something after its forward, and before its backward."""
    turns = itertools.cycle((False, True))

    def sent(_module: nn.Module, _given: object, output: Any) -> Any:
        right = isinstance(output, Tensor) and output.requires_grad and next(turns)
        return _Sending.apply(output, send) if right else output

    for module in list(model.modules())[1:]:
        module.register_forward_hook(sent)


def _in_turn(works: Sequence[Callable[[], object]], clock: Clock, turns: int) -> list[list[float]]:
    """Return the times of each of `works`, which take turns, so that what disturbs them disturbs all alike."""
    times: list[list[float]] = [[] for _ in works]
    for _ in range(turns):
        for work, taken in zip(works, times, strict=True):
            began = clock()
            work()
            taken.append(clock() - began)
    return times


def _as_in_steps(taken: Mapping[Trial, list[float]], more: Mapping[int, float]) -> tuple[Seen, ...]:
    """Return the collectives with their times in µs.

    `more` holds the seconds by which steps that send so many bytes at a time are longer, together, than as many that send
    nothing. Their collectives share them by the time that they usually take. None takes less than at its quickest.
    """
    usual = {key: statistics.median(times) for key, times in taken.items()}
    together = dict.fromkeys(more, 0.0)
    for key, times in taken.items():
        together[key[2]] += len(times) * usual[key]
    return tuple(
        (*key, 1e6 * max(time * more[key[2]] / together[key[2]], min(taken[key]))) for key, time in usual.items()
    )


def _trace(work: Callable[[], object]) -> Trace:
    """Return the operations and collectives that a step issues."""
    work()
    with Meter() as meter:
        work()
    return meter.work


class _Beyond(NamedTuple):
    """What a sharded model takes longer than its operations and collectives, in µs, and for what."""

    took: float
    collectives: int
    packed: int
    megabytes: float


def _beyond(machine: Machine, longer: float, plain: Trace, sharded: Trace) -> _Beyond:
    """Return what a sharded model takes beyond its operations and collectives.

    `longer` are the seconds by which its step takes longer than that of the same model as it is.
    """
    sent = [event for event in sharded.events if isinstance(event, Start)]
    more = compute_seconds(machine, sharded.pieces) - compute_seconds(machine, plain.pieces)
    more += sum(transfer_seconds(machine, one.kind, one.ranks, one.bytes) for one in sent)
    packs = [one for one in sent if one.packed]
    return _Beyond(
        1e6 * (longer - more), len(packs), sum(one.packed for one in packs), 1e-6 * sum(one.bytes for one in packs)
    )


def _of_fsdp2(many: _Beyond, single: _Beyond, large: _Beyond) -> dict[str, Any]:
    """Return `unit`, `packed` and `copied` in µs.

    `many` and `single` differ in their collectives alone, and `many` and `large` in their bytes.
    """
    unit = max(0.0, many.took - single.took) / (many.collectives - single.collectives)
    copied = max(0.0, large.took - many.took) / (large.megabytes - many.megabytes)
    rest = [one.took - unit * one.collectives - copied * one.megabytes for one in (many, single, large)]
    return {"unit": unit, "packed": max(0.0, statistics.mean(rest)) / many.packed, "copied": copied}


class _Step(NamedTuple):
    """The operations of a training step, its roofline time and its measured time, in seconds."""

    operations: int
    ideal: float
    took: float


def _training(machine: Machine, device: torch.device, clock: Clock) -> dict[str, Any]:
    """Return `reached`, and `launch` of a GPU or `floor` of a CPU, from steps of a small WXFormer, without autocast."""
    if device.type == "cuda":
        set_precision(_TRAINED)
    small, large = (_step(machine, device, grid, clock) for grid in _GRIDS[device.type])
    return _of_gpu(machine, small, large) if machine.streams else _of_cpu(small, large)


def _of_gpu(machine: Machine, small: _Step, large: _Step) -> dict[str, Any]:
    """Return `launch` from a step that waits for launches, and `reached` from one that does not.

    Where the larger one waits for them too, how fast the device computes is not known, and stays what is assumed of presets.
    """
    (few, _, short), (many, ideal, took) = small, large
    launch = short / few
    if took < _UNHURRIED * many * launch:
        log.warning(
            "a training step takes %.3g s, of which this host needs %.3g s to launch operations: the speed of the device cannot "
            "be determined, and the fraction of the peak that is reached is assumed to be %g",
            took, many * launch, Machine.reached,
        )  # fmt: skip
        return {"launch": 1e6 * launch, "reached": Machine.reached}
    return {"launch": 1e6 * launch, "reached": min(1.0, ideal / max(took - many * machine.floor * 1e-6, ideal))}


def _of_cpu(small: _Step, large: _Step) -> dict[str, Any]:
    """Return `reached` and `floor` from two steps that differ in their shares of both."""
    (few, light, short), (many, heavy, long) = small, large
    reached = (heavy * few - light * many) / max(long * few - short * many, 1e-9)
    reached = min(1.0, max(reached, 0.01))
    return {"reached": reached, "floor": 1e6 * max(0.0, short - light / reached) / few}


def _step(machine: Machine, device: torch.device, grid: tuple[int, int], clock: Clock) -> _Step:
    """Measure a step on a grid."""
    work = _whole_step(*_model(grid, device))
    pieces = _trace(work).pieces
    ideal = compute_seconds(replace(machine, floor=0.0), pieces)
    return _Step(sum(pieces.values()), ideal, _seconds(work, device, clock))


def _model(grid: tuple[int, int], device: torch.device, width: int = _WIDTH) -> tuple[nn.Module, Tensor]:
    """Return a small WXFormer and its input."""
    dim = (width, 2 * width, 4 * width, 8 * width)
    config = wxformer.Config(dim=dim, depth=(1, 1, 2, 1), dim_head=width, local_window_size=2)
    config = config.model_copy(update={"global_window_size": (4, 2, 1, 1)})
    model = wxformer.build(
        config, in_channels=_CHANNELS, out_channels=_CHANNELS, frames=1, height=grid[0], width=grid[1]
    )
    initialise(model, 0)
    return model.to(device), torch.randn(1, _CHANNELS, 1, *grid, device=device)


def _whole_step(model: nn.Module, x: Tensor) -> Callable[[], None]:
    """Return a function that performs a training step at a learning rate of 0, without communication.

    The norm of the gradients, the optimiser and the average go through lists of tensors: one operation, and on a CPU a call
    for each of them.
    """
    parameters = dict(model.named_parameters())
    optimizer, average = AdamW(adamw.Config(), parameters), Ema(parameters, 0.999)
    skip = torch.zeros((), device=x.device)

    def step() -> None:
        spectral_norm.before_step(model)
        _forward_backward(model, x)
        spectral_norm.correct_gradients(model)
        torch.stack(torch._foreach_norm([p.grad for p in parameters.values() if p.grad is not None])).norm()
        optimizer.step(0.0, skip)
        for parameter in parameters.values():
            parameter.grad = None
        average.update(1)

    return step


def _forward_backward(model: nn.Module, x: Tensor) -> None:
    model(x).square().mean().backward()
