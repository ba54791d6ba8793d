"""Verification that an experiment gives the same numbers in every layout, compiled, recomputed, repeated and resumed elsewhere.

It runs the same code as a training run: the experiment's model, loss, physics and optimiser, `parallelise`, and the
trainer's own step. It computes in fp64, on two samples of the experiment's data, in local processes that communicate
over gloo. A single process is the reference. torch's dropout is disabled, because its random
numbers depend on the layout by design; that of `credit_like.nn.dropout` is compared.
"""

from __future__ import annotations

import inspect
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from credit_like import build, registry
from credit_like.data.loading.windows import Windows
from credit_like.data.statistics import Statistics, fit_statistics
from credit_like.data.store import FieldStore, open_store
from credit_like.data.times import to_text
from credit_like.errors import UserError
from credit_like.nn.noise import Noise
from credit_like.parallel.apply import freeze_parameters
from credit_like.parallel.domain.manager import DomainManager, get_domain_manager
from credit_like.parallel.fsdp2 import shard_units
from credit_like.parallel.processes import Answer, run_ranks
from credit_like.parallel.runtime import Runtime
from credit_like.parallel.shards import local, slice_like
from credit_like.parallel.unwrap import canonical_name, get_raw_model
from credit_like.schema.data import Period
from credit_like.schema.experiment import Experiment
from credit_like.schema.phases import phases
from credit_like.schema.trainer import Parallelism
from credit_like.state import Sample
from credit_like.stepper import Stepper
from credit_like.terminal import plain_console
from credit_like.training.step import Optimizer
from credit_like.training.trainer import Trainer
from credit_like.variables import Variables

TOLERANCE = 1e-10
"""Largest relative error where rounding does not grow: many times the rounding error in fp64."""
GROWTH = 100
"""How many times the effect of one rounding of each weight in one process, the largest of three, is allowed where that is more.

AdamW divides a gradient by its own size, and Muon by its singular values, and with these the rounding of small ones. So what
the steps make of rounding depends on the experiment. Layouts have been seen to add up to 9 times as much."""
UNSTABLE = 1e-6
"""Largest effect of one rounding with which an error of a layout can still be told from rounding."""
SLOPE_TOLERANCE = 1e-6
"""Tolerance for the loss's gradient against a difference quotient."""

STEPS, BATCH = 3, 2
_TIMES = 12
"""Samples of the training period for statistics, if none have been computed yet."""
_NOISE_WEIGHT = 0.2
"""Standard deviation of the weights of a model's noise."""
_TIMEOUT = 600.0
_ERRORS = ("outputs", "loss", "gradients", "weights")


@dataclass(frozen=True)
class Case:
    """One layout (or way to run) that is compared with one process."""

    name: str
    world: int = 1
    data: str = "none"
    tensor: int = 1
    domain: int | tuple[int, int] = 1
    compiled: bool = False
    recomputes: bool = False
    """Whether units are recomputed in backward, as with `trainer.activation_checkpoint`."""
    steps: tuple[int, int] = (0, STEPS)
    """The first and the last step; a case that does not begin with 0 resumes from the checkpoint in `folder`."""
    folder: str = ""
    """Folder where a checkpoint is written after the last step, or read before the first."""
    ensemble: int = 1

    @property
    def parallelism(self) -> dict[str, Any]:
        """Section `trainer.parallelism` of this case."""
        return {"data": self.data, "ensemble": self.ensemble, "tensor": self.tensor, "domain": self.domain}


CASES = (
    Case("again"),
    Case("compiled", compiled=True),
    Case("recomputed", recomputes=True),
    Case("DDP 2", 2, "ddp"),
    Case("FSDP2 2", 2, "fsdp2"),
    Case("tensor 2", 2, "fsdp2", tensor=2),
    Case("domain 2", 2, "fsdp2", domain=2),
    Case("domain 3", 3, "fsdp2", domain=3),
    Case("data 2 × domain 2", 4, "fsdp2", domain=2),
    Case("domain 1 × 2", 2, "fsdp2", domain=(1, 2)),
    Case("domain 2 × 2", 4, "fsdp2", domain=(2, 2)),
)


def cases_of(experiment: Experiment) -> tuple[Case, ...]:
    """Return the layouts to compare: with members, also those that share the members of a sample among ranks."""
    members = experiment.trainer.members
    degree = next((d for d in range(2, members + 1) if members % d == 0), 1)
    if degree == 1:
        return CASES
    return (
        *CASES,
        Case(f"ensemble {degree}", degree, "fsdp2", ensemble=degree),
        Case(f"ensemble {degree} × domain 2", 2 * degree, "fsdp2", domain=2, ensemble=degree),
        Case(f"ensemble {degree} × domain 1 × 2", 2 * degree, "fsdp2", domain=(1, 2), ensemble=degree),
    )


@dataclass
class Row:
    """The result of one comparison."""

    name: str
    errors: dict[str, float] = field(default_factory=dict)
    """Largest relative error of each quantity."""
    first: str = ""
    """Where the numbers first differ."""
    refused: str = ""
    """Why the model does not support this case."""
    failed: str = ""
    """The error of a rank."""
    allowed: dict[str, float] = field(default_factory=dict)
    """Tolerated error of each quantity, if it is not `TOLERANCE`."""

    @property
    def ok(self) -> bool:
        """Return whether the comparison passed; a refused case counts as passed."""
        return not self.failed and all(
            error <= self.allowed.get(what, TOLERANCE) for what, error in self.errors.items()
        )


def allowance(rounded: Mapping[str, float]) -> dict[str, float]:
    """Return the tolerated relative errors where one rounding of the weights makes these of the same steps in one process."""
    return {what: max(TOLERANCE, GROWTH * min(rounded.get(what, 0.0), UNSTABLE)) for what in _ERRORS}


@dataclass
class Problem:
    """The input of all cases: the experiment, its store and statistics, and a global batch for each step."""

    experiment: Experiment
    variables: Variables
    store: FieldStore
    statistics: Statistics
    samples: list[Sample]


def run(experiment: Experiment, cases: Sequence[Case] | None = None) -> int:
    """Run the comparisons of every phase that computes something else, print a table of each, and return 1 if any fails."""
    failed = False
    with plain_console(stderr=True).status("") as status:
        found = [
            (title, list(verify(each, cases or cases_of(each), lambda name: status.update(f"comparing: {name}"))))
            for title, each in compared_phases(experiment)
        ]
    for title, rows in found:
        print_rows(title, rows)
        failed |= not all(row.ok for row in rows)
    return int(failed)


def compared_phases(experiment: Experiment) -> list[tuple[str, Experiment]]:
    """Return the name and the experiment of each phase whose loss, members, forecasts or frozen parameters no earlier one has."""
    found: dict[Any, tuple[str, Experiment]] = {}
    for phase in phases(experiment):
        trainer, data = phase.experiment.trainer, phase.experiment.data
        computed = phase.experiment.loss, trainer.members, trainer.freeze, data.forecast_len, trainer.backprop_steps
        title = f"{experiment.name}, phase {phase.number}" if experiment.trainer.phases else experiment.name
        found.setdefault(repr(computed), (title, phase.experiment))
    return list(found.values())


def verify(
    experiment: Experiment, cases: Sequence[Case] = CASES, announce: Callable[[str], None] = lambda _: None
) -> Iterator[Row]:
    """Yield the result of each comparison. Raises UserError if a single process cannot run the experiment."""
    with tempfile.TemporaryDirectory(prefix="credit-like-verify-") as folder:
        problem = prepare(experiment, folder)
        reference = Path(folder) / "reference.pt"
        announce("one process")
        [answer] = run_ranks(1, partial(_reference, problem, reference), _TIMEOUT)
        if answer.state == "refused":
            raise UserError(answer.value)
        if answer.state == "failed":
            yield Row("one process", failed=_last_line(answer.value))
            return
        slope = {"slope": answer.value}
        yield Row(
            "loss: gradient against differences", slope, _loss_name(experiment), allowed={"slope": SLOPE_TOLERANCE}
        )
        allowed: dict[str, float] = {}

        def judged(row: Row) -> list[Row]:
            """Return the row, after what rounding makes of the steps if this is the first that rounding might explain."""
            effect = []
            explicable = not row.ok and not row.failed and max(row.errors.values()) <= GROWTH * UNSTABLE
            if explicable and not allowed:
                announce("one process, weights rounded")
                runs = [run_ranks(1, partial(_rounded, problem, reference, seed), _TIMEOUT) for seed in range(3)]
                effect = [_effect_of_rounding(runs)]
                allowed.update(allowance(effect[0].errors))
            return [*effect, replace(row, allowed=dict(allowed))]

        accepted: list[Case] = []
        for case in cases:
            announce(case.name)
            rows = judged(_compared(case, run_ranks(case.world, partial(_layout, problem, case, reference), _TIMEOUT)))
            accepted += [case] if rows[-1].ok and not rows[-1].refused else []
            yield from rows
        for first, second in _continuations(accepted):
            name = f"{first.name}, continued in {second.name}"
            announce(name)
            at = str(Path(folder) / f"{first.name}-{second.name}".replace(" ", "_"))
            half = replace(first, steps=(0, STEPS - 1), folder=at)
            rest = replace(second, name=name, steps=(STEPS - 1, STEPS), folder=at)
            row = _compared(half, run_ranks(half.world, partial(_layout, problem, half, reference), _TIMEOUT))
            if row.failed:
                yield Row(name, failed=row.failed)
                continue
            yield from judged(
                _compared(rest, run_ranks(rest.world, partial(_layout, problem, rest, reference), _TIMEOUT))
            )


def _continuations(accepted: Sequence[Case]) -> Iterator[tuple[Case, Case]]:
    """Yield (saving case, resuming case): sharded weights to another kind of layout, and bands to one process."""
    found = {case.name: case for case in accepted if not (case.compiled or case.recomputes)}
    one = Case("one process")
    if "FSDP2 2" in found:
        yield found["FSDP2 2"], next((found[name] for name in ("domain 2", "tensor 2") if name in found), one)
    if "domain 2" in found:
        yield found["domain 2"], one
    if members := next((case for case in found.values() if case.ensemble > 1), None):
        yield members, one


def prepare(experiment: Experiment, folder: str) -> Problem:
    """Reduce an experiment to what is compared, and read its samples.

    Statistics are those of the experiment if they exist, otherwise those of a few times. Raises UserError for errors in
    reading the data.
    """
    variables = Variables(experiment.data)
    store = open_store(experiment.data, variables)
    made = experiment.preprocessed_statistics
    trainer = experiment.trainer
    changes: dict[str, Any] = {
        "global_batch_size": BATCH,
        "amp": False,
        "compile": False,
        "activation_checkpoint": False,
        "use_ema": False,
        "shift_longitude": False,
        "monitor": type(trainer.monitor)(),
        "phases": None,
    }
    small = experiment.model_copy(
        update={"save_loc": folder, "trainer": trainer.model_copy(update=changes), "data": _short(experiment, store)}
    )
    statistics = Statistics.load(made, store) if made.is_file() else fit_statistics(store, variables, small.data)
    windows = Windows(
        store,
        variables,
        small.data.train,
        history_len=small.data.history_len,
        forecast_len=small.data.forecast_len,
        missing_times=statistics.missing_times,
        mask=statistics.mask(variables.outputs),
    )
    samples = [
        windows.batch([(BATCH * step + i) % len(windows) for i in range(BATCH)]).to(torch.device("cpu"))
        for step in range(STEPS)
    ]
    return Problem(small, variables, store, statistics, samples)


def _short(experiment: Experiment, store: FieldStore) -> Any:
    """Return the experiment's data reduced to the first times of the training period that make a few windows."""
    data = experiment.data
    wanted = max(_TIMES, data.history_len + data.forecast_len + BATCH * STEPS - 1)
    first = store.period(data.train[:1])[:wanted]
    period = Period(start=to_text(store.times[first[0]]), end=to_text(store.times[first[-1]]))
    return data.model_copy(update=dict.fromkeys(("train", "valid", "test"), (period,)))


# ---- computation on a rank ------------------------------------------------------------------------------------------------


class _Recorded:
    """An optimiser that saves the gradients of its first step."""

    def __init__(self, inner: Optimizer, parameters: dict[str, nn.Parameter]) -> None:
        self.inner, self.parameters = inner, parameters
        self.gradients: dict[str, Tensor] = {}

    def step(self, learning_rate: float, skip: Tensor) -> None:
        if not self.gradients:
            self.gradients = {n: p.grad.clone() for n, p in self.parameters.items() if p.grad is not None}
        self.inner.step(learning_rate, skip)

    def state(self) -> dict[str, dict[str, Tensor]]:
        return self.inner.state()


@dataclass
class _Numbers:
    """The results of a rank; gradients and weights are its shards."""

    outputs: list[tuple[str, Tensor]]
    """Every module's outputs in the first step, in the order in which they were computed."""
    predictions: list[Tensor]
    losses: list[Tensor]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


class _Batches:
    """The loader of a trainer whose samples are passed to each step directly."""

    def __len__(self) -> int:
        return 10**6  # no step depends on the length of the run

    def again(self, epoch: int, start: int, count: int) -> list[Sample]:
        return list(islice(self.batches(epoch, start), count))

    def batches(self, _epoch: int, _start: int = 0) -> Iterator[Sample]:
        raise AssertionError("samples are given to each step")


def _start(problem: Problem, case: Case) -> Trainer:
    """Build a trainer of this layout in fp64."""
    # resuming in another layout is intended here and need not be logged
    logging.getLogger("credit_like").setLevel(logging.ERROR)
    parallelism = Parallelism.model_validate(case.parallelism)
    runtime = Runtime.start(parallelism, torch.device("cpu"))
    section = problem.experiment.trainer.model_copy(
        update={
            "parallelism": parallelism,
            "micro_batch_size": BATCH // runtime.dp_size,
            "activation_checkpoint": case.recomputes,
        }
    )
    changes: dict[str, Any] = {"trainer": section, "save_loc": case.folder or problem.experiment.save_loc}
    experiment = problem.experiment.model_copy(update=changes)
    variables, store = problem.variables, problem.store
    with torch.device("meta"):
        model = build.build_model(experiment, variables, store.grid.height, store.grid.width).double()
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    if experiment.start_from is not None:
        freeze_parameters(model, experiment.start_from.freeze)
    freeze_parameters(model, section.freeze, "trainer.freeze")
    model = build.parallelise(model, section, runtime)
    if case.compiled:
        torch._dynamo.config.recompile_limit = 64
        for unit in shard_units(model):
            unit.compile(backend="aot_eager", dynamic=False)
    context = build.attach_weights(model, experiment, runtime, variables, store, problem.statistics)
    _stir(context.stepper.model)
    trainer = build.build_trainer(context, (_Batches(), _Batches()))
    for owner in (context.stepper, *context.stepper.physics.modules(), *trainer.loss.modules()):
        _widen(owner)
    return trainer


@torch.no_grad()
def _stir(model: nn.Module) -> None:
    """Give layers of noise other weights than zeros, with which all members of the first step would be the same."""
    for module in model.modules():
        if isinstance(module, Noise):
            generator = torch.Generator().manual_seed(module.level)
            shape = module.weight.shape
            full = torch.randn(shape, generator=generator, dtype=torch.float64) * _NOISE_WEIGHT
            local(module.weight).copy_(slice_like(full, module.weight))


def _widen(module: nn.Module) -> None:
    """Convert the module's own buffers to fp64; those of the model are fp64 already."""
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.is_floating_point():
            setattr(module, name, buffer.double())


def _compute(problem: Problem, trainer: Trainer, case: Case) -> _Numbers:
    """Run the case's steps and return the outputs, losses, gradients and weights."""
    runtime, stepper = trainer.runtime, trainer.context.stepper
    numbers = _Numbers([], [], [], {}, {})
    recorded = _Recorded(trainer.state.optimizer, trainer.state.parameters)
    trainer.train_step.optimizer = recorded
    trainer.state.seed(case.steps[0])
    parts: list[Tensor] = []

    def loss_gave(_module: nn.Module, arguments: tuple[Tensor, ...], loss: Tensor) -> None:
        parts.append(loss.detach())
        numbers.predictions.append(arguments[0].detach())

    trainer.loss.register_forward_hook(loss_gave)
    # Compiled units have no modules inside, and recomputed ones call theirs twice.
    hooks = [] if case.compiled or case.recomputes else _hooks(stepper, numbers.outputs)
    rate = trainer.context.experiment.trainer.optimizer.learning_rate
    for step in range(*case.steps):
        parts.clear()
        trainer.train_step([_share(problem.samples[step], trainer)], 1, rate, step + 1)
        for hook in hooks:
            hook.remove()
        numbers.losses.append(runtime.sum_over_data(torch.stack(parts).mean()))
    numbers.gradients = recorded.gradients
    numbers.weights = {name: parameter.detach() for name, parameter in trainer.state.parameters.items()}
    return numbers


def _hooks(stepper: Stepper, outputs: list[tuple[str, Tensor]]) -> list[Any]:
    def gave(name: str, _module: nn.Module, _arguments: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            outputs.append((name, output.detach().clone()))

    model = get_raw_model(stepper.model)
    named = [("model", stepper.model), *((canonical_name(n), m) for n, m in model.named_modules() if n)]
    named += [(n, m) for n, m in stepper.named_modules() if n.partition(".")[0] != "model" and n not in ("", "physics")]
    return [m.register_forward_hook(partial(gave, n)) for n, m in named]


def _share(sample: Sample, trainer: Trainer) -> Sample:
    """Return this rank's samples and its part of them, in fp64."""
    runtime, rows, columns = trainer.runtime, trainer.context.rows, trainer.context.columns
    size = BATCH // runtime.dp_size
    mine = slice(runtime.dp_rank * size, (runtime.dp_rank + 1) * size)
    prognostic, forcing, target = (
        x[mine][..., rows, columns].double() for x in (sample.prognostic, sample.forcing, sample.target)
    )
    return Sample(prognostic, forcing, target, sample.index[mine])


def _reference(problem: Problem, path: Path) -> float:
    """Run one process, write its numbers, and return the error of the loss's gradient against a difference quotient."""
    trainer = _start(problem, Case("one process"))
    numbers = _compute(problem, trainer, Case("one process"))
    torch.save(vars(numbers), path)
    generator = torch.Generator().manual_seed(0)
    prediction, target = numbers.predictions[0], problem.samples[0].target[:, :, 0].double()
    direction = torch.randn(prediction.shape, generator=generator, dtype=torch.float64) * trainer.loss.scale
    at = prediction.clone().requires_grad_()
    trainer.loss(at, target).backward()
    assert at.grad is not None
    slope = float((at.grad * direction).sum())
    step = 1e-6
    ahead, behind = (float(trainer.loss(prediction + s * step * direction, target)) for s in (1, -1))
    return abs((ahead - behind) / (2 * step) - slope) / max(abs(slope), 1e-12)


def _rounded(problem: Problem, reference: Path, seed: int) -> dict[str, float]:
    """Return the largest relative errors of one process whose weights are one rounding off at first, up or down at random."""
    case = Case("rounded")
    trainer = _start(problem, case)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trainer.state.parameters.values():
            sign = torch.randint(0, 2, parameter.shape, generator=generator, dtype=torch.float64) * 2 - 1
            parameter.mul_(1 + sign * torch.finfo(torch.float64).eps)
    numbers = _compute(problem, trainer, case)
    expected = _Numbers(**torch.load(reference, weights_only=True))
    return {
        "outputs": max(map(_error, numbers.predictions, expected.predictions)),
        "loss": max(map(_error, numbers.losses, expected.losses)),
        "gradients": _worst(numbers.gradients, expected.gradients)[0],
        "weights": _worst(numbers.weights, expected.weights)[0],
    }


def _layout(problem: Problem, case: Case, reference: Path) -> dict[str, Any]:
    """Run one rank of a layout; return its largest relative errors and the first place where the numbers differ."""
    trainer = _start(problem, case)
    runtime, manager = trainer.runtime, get_domain_manager(trainer.state.model)
    first_step, last_step = case.steps
    if first_step:
        checkpoint = trainer.manager.latest()
        assert checkpoint is not None, case.folder
        trainer.state.restore(checkpoint)
    numbers = _compute(problem, trainer, case)
    if case.folder and not first_step:
        trainer.state.progress.step = last_step
        trainer.state.save()
        trainer.manager.wait()
        runtime.barrier()
        return {"errors": {}, "first": None}
    expected = _Numbers(**torch.load(reference, weights_only=True))
    errors = {}
    predicted = expected.predictions[-len(numbers.predictions) :]  # steps may be of different numbers of leads
    pairs = zip(numbers.predictions, predicted, strict=True)
    errors["outputs"] = max(_error(mine, _part(full, mine, runtime, manager)) for mine, full in pairs)
    errors["loss"] = max(map(_error, numbers.losses, expected.losses[first_step:]))
    culprits: list[tuple[int, str]] = []
    if not first_step:
        errors["gradients"], worst = _worst(numbers.gradients, expected.gradients)
        culprits += [(10**6, f"gradient of {worst}")] if errors["gradients"] > TOLERANCE else []
        culprits += _differing(numbers.outputs, expected.outputs, runtime, manager)
        if _error(numbers.losses[0], expected.losses[0]) > TOLERANCE:  # of later steps, wrong gradients change it too
            culprits.append((10**5, _loss_name(problem.experiment)))
    errors["weights"], worst = _worst(numbers.weights, expected.weights)
    if errors["weights"] > TOLERANCE:
        culprits.append((10**7, f"weights of {worst}"))
    runtime.close()
    return {"errors": errors, "first": min(culprits, default=None)}


def _differing(
    outputs: list[tuple[str, Tensor]],
    expected: list[tuple[str, Tensor]],
    runtime: Runtime,
    manager: DomainManager | None,
) -> list[tuple[int, str]]:
    """Return (order in the reference, name) of modules whose outputs differ; skip those that cannot be aligned."""
    mine: dict[str, list[Tensor]] = {}
    for name, output in outputs:
        mine.setdefault(name, []).append(output)
    found = []
    for order, (name, full) in enumerate(expected):
        if not mine.get(name):
            continue
        output = mine[name].pop(0)
        part = _part(full, output, runtime, manager)
        if part is not None and _error(output, part) > TOLERANCE:
            found.append((order, name or "the model"))
    return found


def _part(full: Tensor, mine: Tensor, runtime: Runtime, manager: DomainManager | None) -> Tensor | None:
    """Return this rank's samples and part of a whole output; None if the two cannot be compared."""
    if full.ndim != mine.ndim:
        return None
    axes = [] if manager is None else [axis for axis in manager.axes if axis.size > 1]
    for dim, (whole, part) in enumerate(zip(full.shape, mine.shape, strict=True)):
        if whole == part:
            continue
        if dim == 0 and whole == part * runtime.dp_size * runtime.ensemble_size:
            # The members of a sample follow each other, and each rank has some of every one of its samples.
            by_rank = (runtime.dp_size, BATCH // runtime.dp_size, runtime.ensemble_size, -1)
            full = full.unflatten(0, by_rank)[runtime.dp_rank, :, runtime.ensemble_rank].flatten(0, 1)
            continue
        # Of two dimensions that are shared, rows are the first.
        axis = axes.pop(0) if axes else None
        start, stop = axis.own(whole) if axis is not None and axis.size <= whole else (0, 0)
        if dim == 0 or stop - start != part:
            return None
        full = full.narrow(dim, start, part)
    return full


def _error(mine: Tensor, expected: Tensor | None, scale: float = 0.0) -> float:
    """Return max |a − b| relative to max |b|, or to `scale` if that is larger."""
    assert expected is not None
    if not expected.numel():
        return 0.0
    largest = max(float(expected.abs().max()), scale)
    error = float((mine - expected).abs().max()) / (largest or 1.0)
    return error if error == error else float("inf")


def _worst(shards: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """Return the largest relative error of any tensor, and its name.

    The error of small tensors is relative to the scale of the largest one.
    """
    scale = 1e-3 * max((float(full.abs().max()) for full in expected.values() if full.numel()), default=1.0)
    missing = expected.keys() - shards.keys()
    if missing:
        return float("inf"), min(missing)
    pairs = ((_error(local(shards[n]), slice_like(full, shards[n]), scale), n) for n, full in expected.items())
    return max(pairs)


# ---- output ---------------------------------------------------------------------------------------------------


def _loss_name(experiment: Experiment) -> str:
    return f"loss.{experiment.loss.type} ({inspect.getfile(registry.of('loss', experiment.loss))})"


def _compared(case: Case, answers: list[Answer]) -> Row:
    """Return the results of all ranks as one row."""
    failed = [answer.value for answer in answers if answer.state == "failed"]
    refused = [answer.value for answer in answers if answer.state == "refused"]
    if refused:
        return Row(case.name, refused=" ".join(refused[0].split()))
    if failed:
        # Ranks whose peer has failed report that; the first cause is the error of the other rank.
        own = [text for text in failed if "closed by peer" not in text and "in time" not in text]
        return Row(case.name, failed=_last_line((own or failed)[0]))
    values = [answer.value for answer in answers]
    errors = {what: max(v["errors"][what] for v in values) for what in _ERRORS if what in values[0]["errors"]}
    first = min((v["first"] for v in values if v["first"]), default=None)
    return Row(case.name, errors, first[1] if first else "")


def _effect_of_rounding(runs: Sequence[list[Answer]]) -> Row:
    """Return the largest errors of processes with rounded weights; the row fails if these leave no room for a comparison."""
    name = "one process, weights rounded"
    failed = [answer.value for (answer,) in runs if answer.state != "done"]
    if failed:
        return Row(name, failed=_last_line(failed[0]))
    errors = {what: max(answer.value[what] for (answer,) in runs) for what in _ERRORS}
    row = Row(name, errors, allowed=dict.fromkeys(errors, UNSTABLE))
    if not row.ok:
        row.failed = (
            f"expected {STEPS} steps that one rounding of the weights changes by at most {UNSTABLE:g}, got "
            f"{max(errors.values()):.1e}, which errors cannot be told from; use a smaller learning_rate, unless `again` differs"
        )
    return row


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def print_rows(title: str, rows: Sequence[Row]) -> None:
    """Print the table and the details of comparisons that failed."""
    table = Table(box=None, pad_edge=False)
    table.add_column("one process against", overflow="fold")
    for what in _ERRORS:
        table.add_column(what, justify="right")
    table.add_column("")
    for row in rows:
        verdict = Text("same", "green") if row.ok else Text("differs", "red")
        if row.refused or row.failed:
            verdict = Text("refused") if row.refused else Text("failed", "red")
        slope = {"gradients": row.errors["slope"]} if "slope" in row.errors else row.errors
        table.add_row(row.name, *(f"{slope[w]:.1e}" if w in slope else "" for w in _ERRORS), verdict)
    console = plain_console()
    console.print(Text.assemble((title, "bold"), ": largest relative errors in fp64"))
    console.print(table)
    console.print(
        f"Tolerance {TOLERANCE:g}, or {GROWTH} times what one rounding of the weights makes of {STEPS} steps in one process; "
        f"{SLOPE_TOLERANCE:g} for the loss's gradient against differences.",
    )
    for row in rows:
        text = f"refused: {row.refused}" if row.refused else f"failed: {row.failed}" if row.failed else ""
        if not text and not row.ok:
            text = f"differs first at {row.first}"
        if text:
            console.print(f"{row.name}: {text}", soft_wrap=True)
