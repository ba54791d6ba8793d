"""Steps on a simulated GPU: what autocast, FSDP2 and the compiler add to them makes the host wait as little as the rest."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from unittest.mock import patch

import pytest
import torch

from credit_like import build
from credit_like.parallel.environment import Environment
from credit_like.parallel.observe import fake_group
from credit_like.parallel.runtime import Runtime
from credit_like.plan import simulate
from credit_like.rollout import rollout
from credit_like.variables import Variables
from tests.simulated_gpu import simulated_gpu
from tests.training.test_host_never_waits import PHYSICS, VARIABLES, _Fields
from tests.training.without_data import NARROW_MODEL, global_grid, small_experiment

GRID = global_grid(64, 128)
FSDP2 = {"data": "fsdp2"}


@pytest.fixture(scope="module")
def apart():
    """Return apart(fn, *args), which runs fn in a process that has taken no gradient.

    Autograd counts the devices at the first one.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])

    def run(fn, *args):
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            return pool.submit(fn, *args).result()

    return run


def _experiment(trainer, model=None, data=None, **sections):
    return small_experiment(
        GRID,
        {**VARIABLES, "forecast_len": 1, **(data or {})},
        model={
            **NARROW_MODEL,
            "padding_conf": {"activate": True, "mode": "earth", "pad_lat": [32, 32], "pad_lon": [32, 32]},
            **(model or {}),
        },
        trainer={
            "amp": True, "use_ema": True, "grad_max_norm": 1.0, "shift_longitude": True, "global_batch_size": 8, **trainer,
        },
        **sections,
    )  # fmt: skip


def _trainer(gpu, experiment, world):
    runtime = Runtime.start(experiment.trainer.parallelism, gpu.device, environment=Environment(world=world))
    runtime.device = gpu.device
    _ = runtime.flat_gradient_mesh, runtime.gradient_mesh
    variables = Variables(experiment.data)
    store = simulate._NoData(GRID, variables)
    model = build.parallel_model(experiment, variables, store, runtime)  # outside of the mode, on the meta device
    with gpu.mode, gpu.watched():
        return simulate._trainer(model, experiment, runtime, variables, store, GRID, simulate._materialise)


def _sample(gpu, trainer):
    context = trainer.context
    sample = simulate.sample_of(context.experiment, context.variables, GRID, context.rows, context.columns)
    return gpu.in_pinned_memory(sample)


def _steps(gpu, experiment, world, count):
    """The precision of a training, and the waits of its steps after the first, which makes what is made once."""
    with fake_group(0, world):
        trainer = _trainer(gpu, experiment, world)
        found = []
        for step in range(1, count + 1):
            with gpu.mode, gpu.watched() as work:
                trainer.train_step([_sample(gpu, trainer)], 1, 1e-3, step)
            found.append(work.waits)
        return trainer.precision, found[1:]


def _all_steps(cases, count=2):
    with simulated_gpu() as gpu:
        return {name: _steps(gpu, _experiment(**options), world, count) for name, (world, options) in cases.items()}


def _seen():
    """What a `Work` sees of operations that wait, and of some that do not."""
    with simulated_gpu() as gpu, gpu.mode:
        x = torch.ones(3, device=gpu.device)
        pinned = torch.ones(3).pin_memory()
        waiting = {
            "item": lambda: x.sum().item(),
            "bool": lambda: bool(x[0]),
            "tensor": lambda: torch.tensor([1.0, 2.0], device=gpu.device),
            "new_tensor": lambda: x.new_tensor([1.0, 2.0]),
            "to": lambda: torch.ones(3).to(gpu.device),
            "copy_": lambda: x.copy_(torch.ones(3)),
            "cpu": lambda: x.cpu(),
            "synchronize": lambda: torch.gpu.synchronize(),
        }
        free = {
            "fill": lambda: torch.full((3,), 2.0, device=gpu.device) + 1.0,
            "pinned": lambda: pinned.to(gpu.device, non_blocking=True),
            "number": lambda: x + torch.ones(()),
        }
        found = {}
        for name, call in (waiting | free).items():
            with gpu.watched() as work:
                call()
            found[name] = len(work.waits)
        with torch.autocast(gpu.device.type, torch.bfloat16):
            product = torch.ones(2, 3, device=gpu.device) @ torch.ones(3, 2, device=gpu.device)
        return found, set(waiting), product.dtype


@pytest.mark.slow
def test_what_waits_is_seen_and_autocast_casts(apart):
    found, waiting, dtype = apart(_seen)
    assert {name for name, waits in found.items() if waits} == waiting
    assert dtype == torch.bfloat16


PLAIN = {"padding_conf": {"activate": False}, "use_spectral_norm": False}
NOISE = {"noise": {"type": "conditional-norm", "channels": 3, "correlation": 0.5}}


@pytest.mark.slow
def test_no_step_of_fsdp2_in_bfloat16_waits(apart):
    cases = {"fsdp2": (2, {"trainer": {"parallelism": FSDP2}, "model": PLAIN})}
    found = apart(_all_steps, cases)
    assert found == {"fsdp2": ("bfloat16 (FSDP2 policy)", [[]])}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "options"),
    [
        pytest.param(
            8,
            {"trainer": {"parallelism": FSDP2 | {"tensor": 2, "domain": 2}, "optimizer": {"type": "muon"}}},
            id="tensor-domain-muon",
        ),
        pytest.param(
            4,
            {
                "trainer": {"parallelism": FSDP2 | {"ensemble": 2}, "members": 4},
                "model": NOISE,
                "loss": {"type": "crps"},
            },
            id="members",
            marks=pytest.mark.long,
        ),
        pytest.param(
            8,
            {
                "trainer": {
                    "parallelism": FSDP2 | {"domain": [2, 2]},
                    "activation_checkpoint": True,
                    "backprop_steps": 2,
                },
                "data": {"forecast_len": 3},
                "physics": PHYSICS,
                "loss": {"type": "spectral"},
            },
            id="columns-physics-recomputed",
            marks=pytest.mark.long,
        ),
    ],
)
def test_no_step_of_a_layout_waits(apart, world, options):
    found = apart(_all_steps, {"here": (world, options)})
    assert found == {"here": ("bfloat16 (FSDP2 policy)", [[]])}


@pytest.mark.long
@pytest.mark.slow
def test_no_step_waits_where_parameters_stay_gathered_in_float32(apart):
    trainer = {"amp": False, "fsdp2_reshard_after_forward": False, "parallelism": FSDP2 | {"replicate": 2}}
    found = apart(_all_steps, {"here": (4, {"trainer": trainer})})
    assert found == {"here": ("float32", [[]])}


def _step_and_rollout():
    with simulated_gpu() as gpu:
        experiment = _experiment(
            {"input_noise": 0.1},
            {"attn_dropout": 0.1, "ff_dropout": 0.1, "drop_path": 0.1},
            physics=PHYSICS,
            loss={"type": "sum", "terms": [{"loss": {"type": "mse"}}, {"loss": {"type": "spectral"}}]},
        )
        trainer = _trainer(gpu, experiment, 1)
        context, found = trainer.context, {"says": trainer.precision}

        def leads():
            context.stepper.eval()
            store, rows = _Fields(context.store), context.variables
            for lead, _ in rollout(context.stepper, store, rows, [0], 2, amp=True, without_gradients=torch.no_grad):
                yield f"lead {lead}"

        def calls():
            for step in (1, 2):
                trainer.train_step([_sample(gpu, trainer)], 1, 1e-3, step)
                yield f"step {step}"
            yield from leads()

        remaining = calls()
        with gpu.mode:
            for _ in range(4):
                with gpu.watched() as work:
                    name = next(remaining)
                found[name] = work.waits
        return found


@pytest.mark.slow
def test_no_step_in_autocast_waits_whatever_the_physics(apart):
    """Of training with all corrections, a loss of rows, noise on the input and dropout, and of a forecast."""
    found = apart(_step_and_rollout)
    assert found.pop("says") == "bfloat16 (autocast)"
    # What is made once is constants alone; a forecast begins with copies of the analysis and its time.
    assert all("nn/constants.py" in wait for wait in found.pop("step 1"))
    assert found.pop("lead 1")
    assert found == {"step 2": [], "lead 2": []}


@pytest.mark.long
def test_no_step_in_autocast_waits_where_several_leads_are_computed_again(apart):
    trainer = {"activation_checkpoint": True, "backprop_steps": 2, "optimizer": {"type": "muon"}}
    found = apart(_all_steps, {"here": (1, {"trainer": trainer, "model": PLAIN, "data": {"forecast_len": 3}})})
    assert found == {"here": ("bfloat16 (autocast)", [[]])}


def _compiled(world, options):
    """Steps with compiled units, and the operations of all graphs that torch makes of them."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.utils import counters

    graphs = []

    def kept(graph, _inputs):
        graphs.append({str(node.target) for node in graph.graph.nodes if node.op == "call_function"})
        return make_boxed_func(graph.forward)

    whole = partial(torch.compile, backend=aot_autograd(fw_compiler=kept))
    with simulated_gpu() as gpu, patch.object(torch, "compile", lambda *args, **options: whole(*args, **options)):
        found = _steps(gpu, _experiment(**options), world, 2)
    return found, graphs, dict(counters["graph_break"])


@pytest.mark.slow
def test_no_compiled_step_waits(apart):
    """Neither what is compiled nor what is around it; each unit is one graph of forward and one of backward."""
    options = {"trainer": {"compile": True, "parallelism": FSDP2}, "model": PLAIN}
    found, graphs, breaks = apart(_compiled, 2, options)
    assert found == ("bfloat16 (FSDP2 policy)", [[]])
    assert not breaks
    assert len(graphs) > 2 * 4
    operations = set().union(*graphs)
    assert "aten._scaled_dot_product_efficient_attention_backward.default" in operations
    assert not [
        name for name in operations if any(x in name for x in ("local_scalar", "nonzero", "device_put", "lift"))
    ]
