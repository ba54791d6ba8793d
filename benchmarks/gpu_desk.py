"""Count the kernels and the bytes of a training step, without a GPU: each operation by itself, and as inductor fuses them.

    python benchmarks/gpu_desk.py [--model 1°] [--only TEXT] [--output FILE.md]

Every unit that `trainer.compile` compiles is traced forward and backward on fake tensors of the full size, in bfloat16 where
a run with `amp` computes in it. Attention is the operation that runs on a GPU. Without compilation each dispatched operation
is a kernel that reads its inputs and writes its outputs; views and allocations are none. With it, inductor lowers the same
graphs and schedules them, and nothing is compiled further: a kernel is a group of fused operations, or one that calls a
library. Inductor schedules for the CPU here, whose rules of fusion differ from Triton's in reductions. The bytes are those
that inductor counts: what each kernel reads from and writes to memory, once.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.compile_fx import _recursive_joint_graph_passes, _recursive_post_grad_passes
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import ExternKernelSchedulerNode
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_structure, tree_unflatten

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.plan import experiment
from credit_like import build, ops
from credit_like.grid import Grid
from credit_like.losses._mean import AreaLoss
from credit_like.nn import attention
from credit_like.nn.attention import PositionBias
from credit_like.nn.precision import keeps_full_precision
from credit_like.parallel.fsdp2 import shard_units
from credit_like.plan.meter import Meter, attention_as_on_gpu
from credit_like.plan.run import grid_of
from credit_like.plan.simulate import _NoData, _NoStatistics
from credit_like.schema.experiment import Experiment
from credit_like.state import State
from credit_like.stepper import Stepper
from credit_like.training.step import compare
from credit_like.variables import Variables

GRIDS = {"1°": "181x360", "0.25°": "721x1440"}


@dataclass
class Count:
    """Kernels and the bytes that they read and write."""

    kernels: int = 0
    bytes: int = 0

    def add(self, kernels: int, size: int) -> None:
        self.kernels, self.bytes = self.kernels + kernels, self.bytes + size


@dataclass(frozen=True)
class Part:
    """A unit of the model, or what surrounds it; `times` it is called in a step with inputs of these shapes."""

    name: str
    module: nn.Module
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    times: int
    strides: tuple[tuple[int, ...], ...] | None = None
    """Of the inputs; by default they are contiguous."""
    is_compiled: bool = True
    """Whether a run compiles it."""


def lowered(gm: torch.fx.GraphModule, inputs: list[Tensor], backward: bool, mode: FakeTensorMode) -> Count:
    """Return the count of a graph as inductor schedules it."""
    gm = copy.deepcopy(gm)
    with V.set_fake_mode(mode), torch._inductor.config.patch(fx_graph_cache=False):
        _recursive_post_grad_passes(gm, is_inference=False)
        graph = GraphLowering(gm, example_inputs=inputs, is_backward=backward)
        with V.set_graph_handler(graph), V.set_extern_kernel_nodes([]), V.set_debug_handler(DebugContext()):
            graph.run(*inputs)
            graph.init_wrapper_code()
            graph._update_scheduler()
            return Count(sum(map(_kernels, graph.scheduler.nodes)), graph.count_bytes()[0])


def _kernels(node: Any) -> int:
    """Return how many kernels a scheduled node is: none for a view of a library's result."""
    if isinstance(node, ExternKernelSchedulerNode):
        return int(type(node.node).__name__ not in ("MultiOutput",))
    return int(not node.is_nop() if hasattr(node, "is_nop") else type(node).__name__ != "NopKernelSchedulerNode")


def compiled(call: Callable[..., Any], arguments: list[Tensor], mode: FakeTensorMode) -> tuple[Count, Count]:
    """Return the counts of forward and backward of a function of tensors, as inductor schedules them."""
    counts: dict[bool, Count] = {}

    def compiler(backward: bool) -> Callable[..., Any]:
        def compile_graph(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
            counts[backward] = lowered(gm, inputs, backward, mode)
            return make_boxed_func(gm.forward)

        return compile_graph

    def partition(joint: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        with V.set_fake_mode(mode):
            _recursive_joint_graph_passes(joint)
        return min_cut_rematerialization_partition(joint, inputs, compiler="inductor", **options)

    traced = aot_function(
        call, compiler(False), compiler(True), partition_fn=partition, decompositions=select_decomp_table()
    )
    with patch.object(torch.compiler, "is_compiling", lambda: True):  # as in a unit that `torch.compile` traces
        _differentiate(traced(*arguments))
    return counts[False], counts[True]


def eager(call: Callable[..., Any], arguments: list[Tensor]) -> tuple[Count, Count]:
    """Return the counts of forward and backward of a function of tensors, operation by operation."""
    with Meter() as forward:
        result = call(*arguments)
    with Meter() as backward:
        _differentiate(result)
    return tuple(Count(sum(m.work.pieces.values()), m.work.traffic) for m in (forward, backward))  # type: ignore[return-value]


def _differentiate(result: Any) -> None:
    tensors = [x for x in (result if isinstance(result, tuple | list) else (result,)) if x.requires_grad]
    torch.autograd.backward(tensors, [torch.empty_like(x) for x in tensors])


def counts_of(part: Part) -> dict[str, tuple[Count, Count]]:
    """Return {eager, compiled: (forward, backward)} of one call of a part."""
    found = {}
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        tensors = dict(part.module.named_parameters()) | dict(part.module.named_buffers())
        names = list(tensors)
        trained = {name for name, _ in part.module.named_parameters()}

        def fresh() -> list[Tensor]:
            own = [
                torch.empty(
                    tensors[n].shape, dtype=part.dtype if n in trained else tensors[n].dtype, requires_grad=n in trained
                )
                for n in names
            ]
            strides = part.strides or [torch.empty(shape, device="meta").stride() for shape in part.shapes]
            inputs = zip(part.shapes, strides, strict=True)
            return [*own, *(torch.empty_strided(*x, dtype=part.dtype, requires_grad=True) for x in inputs)]

        def call(*arguments: Tensor) -> Any:
            own = dict(zip(names, arguments[: len(names)], strict=True))
            return functional_call(part.module, own, arguments[len(names) :])

        found["eager"] = eager(call, fresh())
        found["compiled"] = compiled(call, fresh(), mode) if part.is_compiled else found["eager"]
    return found


class _WithTables(nn.Module):
    """A layer with the tables of its position biases as inputs."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x_BHWC: Tensor, *tables_N: Tensor) -> Any:
        short_and_long = (*tables_N, None)[:2] if self.layer.short.bias is not None else (None, *tables_N)
        return self.layer(x_BHWC, tables=short_and_long)


class _Stacking(nn.Module):
    """The parameters of the position biases of a stage as few tensors, and their table as one of each bias."""

    def __init__(self, biases: Sequence[PositionBias]) -> None:
        super().__init__()
        self.biases = nn.ModuleList(biases)

    def forward(self, table_nN: Tensor) -> tuple[Tensor, ...]:
        return (*tree_leaves(attention._stacked(list(self.biases))), *table_nN.unbind())


class _Tables(nn.Module):
    """The tables of the position biases of a stage, from their stacked parameters."""

    def __init__(self, like: attention._Stacked) -> None:
        super().__init__()
        self.like = like

    def forward(self, *tensors: Tensor) -> Tensor:
        stacked = tree_unflatten(tensors, tree_structure(self.like))
        states = [[x.detach() for x in state] for state in stacked.states]
        return attention._mlps(stacked._replace(offsets=stacked.offsets.detach(), states=states))


def tables_of(stage: int, biases: Sequence[PositionBias]) -> list[Part]:
    """Return the two parts of the tables of a stage: what is compiled, and how its parameters are stacked."""
    like = attention._stacked(biases)
    shapes = tuple(tuple(x.shape) for x in tree_leaves(like))
    table = (tuple(like.offsets.shape[:2]),)
    name = f"{len(biases)} position tables of stage {stage}"
    return [
        Part(f"{name}: parameters", _Stacking(biases), table, torch.float32, 1, is_compiled=False),
        Part(name, _Tables(like), shapes, torch.bfloat16, 1),
    ]


def parts_of(model: nn.Module, inputs: Tensor) -> list[Part]:
    """Return the units of a model on the meta device, those that are alike together."""
    calls: dict[tuple[Any, ...], list[nn.Module]] = defaultdict(list)
    tables: list[Part] = []

    def note(module: nn.Module, arguments: tuple[Tensor, ...], options: dict[str, Any]) -> None:
        given = [*arguments, *(table for table in options.get("tables", ()) if table is not None)]
        shapes, strides = tuple(tuple(x.shape) for x in given), tuple(x.stride() for x in given)
        weights = tuple(tuple(p.shape) for p in module.parameters())
        calls[type(module).__name__, shapes, strides, weights].append(module)

    def note_tables(_module: nn.Module, biases: tuple[PositionBias | None, ...]) -> None:
        tables.extend(tables_of(len(tables) // 2, [bias for bias in biases if bias is not None]))

    hooks = [unit.register_forward_pre_hook(note, with_kwargs=True) for unit in shard_units(model)]
    found = (module for module in model.modules() if isinstance(module, attention.PositionTables))
    hooks += [module.register_forward_pre_hook(note_tables) for module in found]
    model(inputs)
    for hook in hooks:
        hook.remove()
    units = [
        Part(
            f"{name} {'×'.join(map(str, shapes[0][1:]))}",
            modules[0] if len(shapes) == 1 else _WithTables(modules[0]),
            shapes,
            torch.float32 if keeps_full_precision(modules[0]) else torch.bfloat16,
            len(modules),
            strides,
        )
        for (name, shapes, strides, _), modules in calls.items()
    ]
    return [*units, *tables]


class _Inputs(nn.Module):
    """The model's input, of a later step of a rollout: with gradient."""

    def __init__(self, stepper: Stepper) -> None:
        super().__init__()
        self.stepper = stepper

    def forward(self, prognostic_BCTHW: Tensor, forcing_BCTHW: Tensor) -> Tensor:
        return self.stepper.inputs(_state(prognostic_BCTHW), forcing_BCTHW)


class _After(nn.Module):
    """The next state, from the model's output."""

    def __init__(self, stepper: Stepper) -> None:
        super().__init__()
        self.stepper = stepper

    def forward(self, y_BCTHW: Tensor, prognostic_BCTHW: Tensor) -> tuple[Tensor, Tensor]:
        state = _state(prognostic_BCTHW)
        return self.stepper._after(state, y_BCTHW, state.now[:, :0])  # only physics reads the forcing


class _Compare(nn.Module):
    """The loss, and the sums that tell which channel is not finite."""

    def __init__(self, loss: AreaLoss) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, prediction_BCHW: Tensor, target_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        return compare(self.loss, prediction_BCHW, target_BCHW)


def _state(prognostic_BCTHW: Tensor) -> State:
    batch, _, _, *size = prognostic_BCTHW.shape
    return State(prognostic_BCTHW, prognostic_BCTHW.new_zeros(batch, 0, *size), torch.zeros(batch, dtype=torch.int64))


def around(chosen: Experiment, variables: Variables, grid: Grid) -> list[Part]:
    """Return what surrounds the model in each step of a rollout, without physics."""
    statistics = _NoStatistics(grid)
    store = _NoData(grid, variables)
    stepper = Stepper(nn.Identity(), variables, statistics, store.static(), chosen.model.predict)
    loss = AreaLoss(chosen.loss, variables, statistics, grid)
    frames, size = chosen.data.history_len, (grid.height, grid.width)
    prognostic = (1, variables.n("prognostic"), frames, *size)
    forcing = (1, variables.n("dynamic_forcing"), frames, *size)
    fields = (1, variables.out_channels, *size)
    calls = (
        (_Inputs(stepper), (prognostic, forcing)),
        (_After(stepper), ((1, variables.out_channels, 1, *size), prognostic)),
        (_Compare(loss), (fields, fields)),
    )
    return [
        Part(f"around the model: {type(m).__name__[1:].lower()}", m, shapes, torch.float32, chosen.data.forecast_len)
        for m, shapes in calls
    ]


def measure(parts: list[Part]) -> list[tuple[Part, dict[str, Any]]]:
    """Return parts with their counts."""
    with ops.cpu.policy.disabled(), attention_as_on_gpu():
        return [(part, counts_of(part)) for part in parts]


def table(rows: list[tuple[Part, dict[str, Any]]]) -> list[str]:
    """Return a Markdown table: each part once, and the sum over a step."""
    lines = [
        "| part | calls | kernels, eager | compiled | GB, eager | compiled |",
        "|---|---|---|---|---|---|",
    ]
    total = {how: Count() for how in ("eager", "compiled")}
    for part, found in rows:
        cells = [part.name, str(part.times)]
        for field, scale in (("kernels", 1), ("bytes", 1e9)):
            for how in ("eager", "compiled"):
                forward, backward = (getattr(count, field) / scale for count in found[how])
                cells.append(f"{forward:.4g} + {backward:.4g}")
        for how in total:
            for count in found[how]:
                total[how].add(part.times * count.kernels, part.times * count.bytes)
        lines.append("| " + " | ".join(cells) + " |")
    e, c = total["eager"], total["compiled"]
    lines.append(f"| all | | {e.kernels:,} | {c.kernels:,} | {e.bytes / 1e9:.1f} | {c.bytes / 1e9:.1f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=GRIDS, default="1°")
    parser.add_argument("--only", default="", metavar="TEXT", help="parts whose names contain this")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("SCRATCH", "scratch")
    os.environ.setdefault("ERA5", "era5")
    chosen = experiment(options.model)
    variables = Variables(chosen.data)
    grid = grid_of(GRIDS[options.model])
    with torch.device("meta"):
        model = build.build_model(chosen, variables, grid.height, grid.width)
        inputs = torch.empty(1, variables.in_channels, chosen.data.history_len, grid.height, grid.width)
    parts = [*parts_of(model, inputs), *around(chosen, variables, grid)]
    text = "\n".join(table(measure([part for part in parts if options.only in part.name])))
    if options.output:
        options.output.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
