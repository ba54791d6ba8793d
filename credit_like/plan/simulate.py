"""Simulate one rank of a layout: run the training code on fake tensors, in a process group without peers.

The simulation runs the code of training: the model, `parallelise`, the stepper, the loss, the trainer with its
optimiser, and one call of its train step. The process group is torch's fake one, whose collectives return at once; fake
tensors have shapes but no values. Each simulation needs its own process, because torch caches meshes per process.
"""

from __future__ import annotations

import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from credit_like import build, ops
from credit_like.data.statistics import Statistics
from credit_like.data.store import Fields, FieldStore
from credit_like.grid import Grid
from credit_like.layout import accumulation
from credit_like.nn import init
from credit_like.parallel.apply import is_compiled, materialise
from credit_like.parallel.environment import Environment
from credit_like.parallel.observe import Message, apply_simulated_ddp, fake_group
from credit_like.parallel.runtime import Runtime
from credit_like.parallel.shards import local
from credit_like.plan.events import Event, Run, Simulated, Trace
from credit_like.plan.events import Sample as SampleNeeded
from credit_like.plan.layouts import Candidate, with_layout
from credit_like.plan.meter import GRADIENTS, Meter, attention_as_on_gpu, total_bytes
from credit_like.plan.replay import Recipes, Replay, cached
from credit_like.schema.experiment import Experiment
from credit_like.state import Sample
from credit_like.training.trainer import Trainer
from credit_like.variables import Variable, Variables

PARAMETERS, OPTIMIZER, AVERAGE, BUFFERS, SAMPLE = "parameters", "optimiser state", "weight average", "buffers", "sample"
_SIMULATED = 3  # micro-batches; further ones cost the same as the second
_MANY = 10**9  # steps of an epoch; the length of a run does not affect a step


@dataclass
class Rank:
    """The memory and work of one rank of a layout in one optimiser step. Sizes are in bytes."""

    rank: int
    place: str
    """Position among the bands of a sample: `first`, `interior`, `last`, or `only`."""
    peak: int
    parts: dict[str, int]
    """Bytes of the peak by use."""
    flops: int
    traffic: int
    """Bytes that its operations read from and write to device memory."""
    messages: dict[Message, int]
    events: list[Event]
    """Its operations and collectives in order."""
    checkpoint: int
    """Size of a checkpoint of the whole run."""
    read: int
    """Bytes of a sample that this rank reads from storage, as float32 before compression."""
    parameters: int
    """Number of parameters of the whole model."""
    accumulation: int
    micro_batch: int = 1
    """Samples of a micro-batch."""
    precision: str = "float32"
    """What the model computes in, and by what."""
    compiled: bool = False
    """Whether the run compiles the model, so that it launches fewer operations."""
    seconds: float = 0.0
    """CPU time of the simulation, in seconds."""
    resident: int = 0
    """Peak resident memory of the simulating process."""

    @property
    def operations(self) -> int:
        return sum(sum(event.pieces.values()) for event in self.events if isinstance(event, Run))

    @property
    def simulated(self) -> Simulated:
        """Return what a replay of the step needs."""
        return Simulated(self.rank, self.events, self.read * self.micro_batch, self.compiled)

    def collectives(self) -> dict[str, tuple[int, int]]:
        """Return kind → (number, bytes) of the collectives."""
        result: dict[str, tuple[int, int]] = {}
        for sent, times in self.messages.items():
            number, size = result.get(sent.kind, (0, 0))
            result[sent.kind] = (number + times, size + sent.bytes * times)
        return result


class _NoData:
    """A stand-in for a store: a grid, and fields of zeros."""

    step_seconds = 21600  # of no consequence for memory and time, but corrections of rates ask for it

    def __init__(self, grid: Grid, variables: Variables) -> None:
        self.grid, self.variables = grid, variables
        self.seconds = np.zeros(1, np.int64)
        self.other_sums: dict[str, int] = {}

    def static(self, rows: slice = slice(None), columns: slice = slice(None)) -> Fields:
        size = len(self.grid.latitude[rows]), len(self.grid.longitude[columns])
        return np.zeros((self.variables.n("static"), *size), np.float32)

    def period(self, _periods: object) -> NDArray[np.int64]:
        return np.zeros(1, np.int64)

    def reaches_over(self, _periods: object) -> bool:
        return True

    def read(
        self,
        variables: Sequence[Variable],
        times: Sequence[int],
        rows: slice = slice(None),
        columns: slice = slice(None),
    ) -> Fields:
        height, width = len(range(self.grid.height)[rows]), len(range(self.grid.width)[columns])
        return np.zeros((len(times), sum(map(len, variables)), height, width), np.float32)

    def attrs(self, _variable: Variable) -> dict[str, str]:
        return {}

    def level_attrs(self, _variable: Variable) -> dict[str, str]:
        return {}

    def level_units(self, _variable: Variable) -> str:
        return ""


class _NoStatistics(Statistics):
    """Statistics with mean 0, standard deviations 1 and data at every point."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def select(self, variables: Any) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        one = np.ones(sum(map(len, variables)))
        return np.zeros_like(one), one, one

    def mask(self, variables: Any) -> NDArray[np.bool_]:
        return np.ones((sum(map(len, variables)), self.grid.height, self.grid.width), bool)


class _NoBatches:
    """A stand-in for a loader, of which only the length is used."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def again(self, _epoch: int, _start: int, _count: int) -> list[Sample]:
        return []

    def batches(self, _epoch: int, _start: int = 0) -> Iterator[Sample]:
        raise AssertionError("a plan reads no samples")


def sample_of(
    experiment: Experiment, variables: Variables, grid: Grid, rows: slice, columns: slice = slice(None)
) -> Sample:
    """Return an empty micro-batch of this rank, in the shapes of the loader's."""
    data, batch = experiment.data, experiment.trainer.micro_batch_size
    height, width = len(range(*rows.indices(grid.height))), len(range(*columns.indices(grid.width)))
    frames, leads = data.history_len, data.forecast_len

    def fields(channels: int, times: int) -> Tensor:
        return torch.empty(batch, channels, times, height, width)

    return Sample(
        fields(variables.n("prognostic"), frames),
        fields(variables.n("dynamic_forcing"), frames + leads - 1),
        fields(variables.out_channels, leads),
        torch.zeros(batch, dtype=torch.int64),
    )


def bytes_read(experiment: Experiment, variables: Variables, grid: Grid, rows: slice, columns: slice) -> int:
    """Return the bytes of one sample that are read from files, as float32.

    Computed forcing and static fields, which are read once, are not included.
    """
    data = experiment.data
    stored = sum(len(v) for v in variables.role("dynamic_forcing") if not v.spec.compute)
    fields = variables.n("prognostic") * data.history_len + stored * (data.history_len + data.forecast_len - 1)
    fields += variables.out_channels * data.forecast_len
    return 4 * fields * len(range(*rows.indices(grid.height))) * len(range(*columns.indices(grid.width)))


def measured_step(trainer: Trainer, samples: Iterator[Sample], count: int, meter: Meter) -> dict[str, int]:
    """Run one optimiser step under a meter; return the bytes that existed before it, by use."""
    model = trainer.context.stepper.model
    parameters = [local(p) for p in model.parameters()]
    kept = {
        PARAMETERS: parameters,
        OPTIMIZER: [t for state in trainer.state.optimizer.state().values() for t in state.values()],
        AVERAGE: list(trainer.state.ema.average.values()) if trainer.state.ema else [],
        BUFFERS: [*trainer.context.stepper.buffers(), *trainer.loss.buffers()],
    }
    before = {name: total_bytes(tensors) for name, tensors in kept.items()}
    meter.ignore(t for tensors in kept.values() for t in tensors)
    hooks = [p.register_post_accumulate_grad_hook(_tagging(meter)) for p in model.parameters() if p.requires_grad]
    with meter:
        trainer.train_step(samples, count, trainer.schedule.rate(0), 1)
    for hook in hooks:
        hook.remove()
    return before


def _tagging(meter: Meter) -> Any:
    def tag(parameter: Tensor) -> None:
        if parameter.grad is not None:
            meter.tag([parameter.grad], GRADIENTS)

    return tag


def simulate(
    experiment: Experiment, layout: Candidate, rank: int, grid: Grid, gpu: bool = True, recipes: Recipes | None = None
) -> Rank:
    """Simulate one optimiser step of `rank` in a layout; call it only once in a process.

    `gpu` uses the code paths of GPUs instead of those of the CPU. `recipes` holds cached operations of earlier
    simulations, which save time without changing any figure; new ones are added. With `random_forecast_len`, the longest
    forecast is simulated. Raises UserError, as training does, where a degree does not fit the model.
    """
    began = time.process_time()
    compiled = is_compiled(experiment.trainer, torch.device("cuda" if gpu else "cpu"))
    # Of random forecasts, the longest: it decides whether the training fits.
    changed = {"compile": False, "fsdp2_cpu_offload": False, "random_forecast_len": False}
    section = with_layout(experiment, layout).trainer.model_copy(update=changed)
    experiment = experiment.model_copy(update={"trainer": section})
    variables = Variables(experiment.data)
    with ExitStack() as stack:
        if gpu:
            stack.enter_context(ops.cpu.policy.disabled())
            stack.enter_context(attention_as_on_gpu())
            stack.enter_context(_multiplying(experiment.trainer.matmul_precision))
        stack.enter_context(fake_group(rank, layout.world))
        runtime = Runtime.start(layout.parallelism, torch.device("cpu"), environment=Environment(rank, layout.world))
        # Meshes are built from real tensors, so they must be created before FakeTensorMode is entered.
        _ = runtime.flat_gradient_mesh, runtime.gradient_mesh
        store = cast(FieldStore, _NoData(grid, variables))
        model = build.parallel_model(experiment, variables, store, runtime)
        replay = cached(stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True)), recipes)
        with Meter(replay):  # the meter answers reads of values during construction
            trainer = _trainer(model, experiment, runtime, variables, store, grid, _materialise)
        return _run(trainer, experiment, layout, variables, grid, began, replay, compiled)


@contextmanager
def _multiplying(precision: str) -> Iterator[None]:
    """Set what `trainer.matmul_precision` sets on CUDA, for operations are counted by it."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _materialise(model: nn.Module, runtime: Runtime, seed: int) -> nn.Module:
    """Allocate a model without drawing its values, which are never used: that would be half of the work."""
    return materialise(model, runtime, seed, lambda model, _: init.reset_buffers(model), apply_simulated_ddp)


def _trainer(
    model: nn.Module,
    experiment: Experiment,
    runtime: Runtime,
    variables: Variables,
    store: FieldStore,
    grid: Grid,
    materialise: Callable[[nn.Module, Runtime, int], nn.Module] = materialise,
) -> Trainer:
    context = build.attach_weights(model, experiment, runtime, variables, store, _NoStatistics(grid), materialise)
    section = experiment.trainer
    count = accumulation(section.global_batch_size, section.micro_batch_size, runtime.dp_size)
    return build.build_trainer(context, (_NoBatches(_MANY * count), _NoBatches(_MANY * count)))


def _run(
    trainer: Trainer,
    experiment: Experiment,
    layout: Candidate,
    variables: Variables,
    grid: Grid,
    began: float,
    replay: Replay | None,
    compiled: bool,
) -> Rank:
    runtime, meter = trainer.runtime, Meter(replay)
    count = min(trainer.schedule.accumulation, _SIMULATED)
    part = (trainer.context.rows, trainer.context.columns)
    samples = [sample_of(experiment, variables, grid, *part) for _ in range(count)]
    marks: list[tuple[Counter[Message], int]] = []

    def batches() -> Iterator[Sample]:
        for sample in samples:
            marks.append((meter.messages.copy(), len(meter.work)))
            meter.work.append(SampleNeeded())
            yield sample

    before = measured_step(trainer, batches(), count, meter)
    before[SAMPLE] = total_bytes([samples[0].prognostic, samples[0].forcing, samples[0].target])
    messages, events, work = meter.messages, meter.work.events, meter.work
    if trainer.schedule.accumulation > count:
        more, (one, two) = trainer.schedule.accumulation - count, (marks[1][1], marks[2][1])
        messages = _repeated(messages, marks[2][0] - marks[1][0], more)
        work = Trace(events[:two] + events[one:two] * more + events[two:])
    inner = runtime.tensor_size * runtime.domain_size
    return Rank(
        rank=runtime.rank,
        place=_place(runtime.rank % inner % layout.domain, layout.shape),
        peak=sum(before.values()) + meter.peak,
        parts=before | meter.parts,
        flops=work.flops,
        traffic=work.traffic,
        messages=dict(messages),
        events=work.events,
        checkpoint=sum(_whole_bytes(piece) for piece in trainer.state.pieces().values()),
        read=bytes_read(experiment, variables, grid, *part),
        parameters=sum(p.numel() for p in trainer.state.model.parameters()),
        accumulation=trainer.schedule.accumulation,
        micro_batch=experiment.trainer.micro_batch_size,
        precision=trainer.precision,
        compiled=compiled,
        seconds=time.process_time() - began,
        resident=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
    )


def _repeated(total: Counter[Any], one: Counter[Any], times: int) -> Counter[Any]:
    return total + Counter({key: number * times for key, number in one.items()})


def _whole_bytes(piece: Any) -> int:
    return int(np.prod(piece.shape, dtype=np.int64)) * piece.local.element_size()


def _place(rank: int, shape: tuple[int, int]) -> str:
    """Return which of the bands a domain rank has: of rows, and after a comma of columns where these are shared."""
    row, column = divmod(rank, shape[1])
    return _band(row, shape[0]) + (f", {_band(column, shape[1])}" if shape[1] > 1 else "")


def _band(band: int, bands: int) -> str:
    if bands == 1:
        return "only"
    return "first" if band == 0 else "last" if band == bands - 1 else "interior"


def places(layout: Candidate) -> list[int]:
    """Return the ranks that differ: those with the first, an interior and the last band of either axis of the first sample."""
    rows, columns = (sorted({0, (size - 1) // 2 if size > 2 else 0, size - 1}) for size in layout.shape)
    return [row * layout.columns + column for row in rows for column in columns]


def within(layout: Candidate) -> list[int]:
    """Return those of `places` with interior columns, which have no padding: they hold most, and longitude has no ends."""
    return [rank for rank in places(layout) if rank % layout.columns == (layout.columns - 1) // 2]
