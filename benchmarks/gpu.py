"""Check and measure training on one GPU, in at most ten minutes; write benchmarks/results/gpu.md.

    python benchmarks/gpu.py [--credit PYTHON [--stub FOLDER]] [--minutes 10] [--output FILE.md]
    python benchmarks/gpu.py --small --output FILE.md

The table has one row for each of these, in the order in which they are measured:

- arithmetic: output and gradients of a model in float32, TensorFloat-32, bfloat16 and compiled, against float64 on the CPU;
- compilation of all cases side by side, which fills the compiler's cache: it takes minutes of the host;
- repetition: whether the weights after some training steps have the same bits, twice in each of two processes;
- NCCL in a world of one process: each kind of collective that training uses, and the host's own over gloo;
- training steps of the 1° and 0.25° models, eager and compiled: time, MFU, share of the memory bandwidth, and peak memory
  against that of `credit-like plan`; a step after the first ones is taken with CUDA set to refuse waits of the host. No
  experiment has an option for CUDA graphs: their row says what the compiler's graphs of each unit would save the host;
- the same step with samples from the loader and with a sample that stays on the device;
- forward and backward of our 1° model compared with NCAR CREDIT's own in the environment of `--credit`, else with the
  definition as transcribed in the tests.

MFU is the operations of the step, as `plan` counts them, over its time and the vendor's peak in bfloat16. The share of the
bandwidth takes the bytes that the operations would move one by one; fused ones move less. Where the vendor's figures are
not known, the measured speeds of a matrix product and a copy take their place.

Every group of measurements has a process of its own, and one that fails or takes too long is a row that says so; the exit
status is then 1. `--small` runs the same code on the CPU at reduced sizes, where of the compiled cases the arithmetic alone is
traced, since compiling takes minutes; its times have no meaning.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
ROOT = Path(__file__).parents[1]
Row = dict[str, Any]
ANY, GRAPHS = "any algorithm", "CUDA graphs"

STEPS = [
    "1°,1,compiled+eager", "0.25°,1,compiled+eager", "1°,8,compiled", f"0.25°,1,compiled, {ANY}", f"1°,1,compiled, {GRAPHS}",
]  # fmt: skip
TARGETS = {"1°": 100.0, "0.25°": 16.0}  # samples/s on an H100
SMALL_GRID, SMALL_MODEL = (32, 64), {"dim": (8, 16, 32, 64), "depth": (1, 1, 1, 1), "dim_head": 8}
LEVELS = 2
ROUNDS = 5
LIMITS = {"float32": 1e-5, "float32, compiled": 1e-5, "TensorFloat-32": 1e-2, "bfloat16": 1e-1}


# ---- experiments -----------------------------------------------------------------------------------------------------


def experiment(model: str, small: bool, **trainer: Any) -> Any:
    """Return the 1° experiment with this model on one device, in bfloat16; reduced if `small`."""
    import plan

    from credit_like.schema.experiment import Experiment

    section = {
        "parallelism": {"data": "none"},
        "device": "cpu" if small else "cuda",
        "loader": {"num_workers": 0 if small else 8},
    }
    found = plan.experiment(model, **(section | trainer))
    if not small:
        return found
    document = found.to_dict()
    document["model"] = {"type": "wxformer", "use_spectral_norm": True, **SMALL_MODEL}
    document["data"]["levels"] = document["data"]["levels"][:LEVELS]
    return Experiment.model_validate(document)


def grid(model: str, small: bool) -> Any:
    """Return the grid of a model."""
    import plan

    from credit_like.plan.run import grid_of

    return grid_of("x".join(map(str, SMALL_GRID)) if small else plan.MODELS[model][1])


def trainer_of(found: Any, where: Any) -> Any:
    """Return a trainer without data, as the planner makes it, on a real device."""
    from credit_like import build
    from credit_like.plan.simulate import _NoData, _trainer
    from credit_like.variables import Variables

    runtime = build.start(found)
    variables = Variables(found.data)
    store: Any = _NoData(where, variables)
    model = build.parallel_model(found, variables, store, runtime)
    return _trainer(model, found, runtime, variables, store, where)


def sample_on(trainer: Any, where: Any) -> Any:
    """Return a sample of random fields on the trainer's device."""
    from credit_like.plan.simulate import sample_of

    sample = sample_of(trainer.context.experiment, trainer.context.variables, where, slice(None))
    generator = torch.Generator().manual_seed(0)
    drawn = {
        field.name: torch.randn(getattr(sample, field.name).shape, generator=generator)
        for field in dataclasses.fields(sample)
        if field.name != "index"
    }
    return dataclasses.replace(sample, **drawn).to(trainer.runtime.device, non_blocking=False)


def wait(device: torch.device) -> None:
    """Wait until the device has completed all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds_per_step(step: Callable[[], None], device: torch.device, small: bool) -> float:
    """Return the median time of a step over rounds of several; within a round the host does not wait."""
    wait(device)
    began = time.perf_counter()
    step()
    wait(device)
    number = 1 if small else max(1, min(50, round(1.5 / (time.perf_counter() - began))))
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(number):
            step()
        wait(device)
        times.append((time.perf_counter() - began) / number)
    return statistics.median(times)


# ---- groups of measurements; each runs in a process of its own ---------------------------------------------------------


def machine(small: bool) -> list[Row]:
    """Return the device's name and speeds: the vendor's where they are known, else measured ones."""
    from credit_like.plan.calibrate import _copies, _name, _products
    from credit_like.plan.machine import PRESETS

    device = torch.device("cpu" if small else "cuda")
    name = _name(device)
    product, copied = _products(device, torch.bfloat16), _copies(device)
    memory = 0.0 if small else torch.cuda.get_device_properties(device).total_memory / 1e9
    squeezed = name.lower().replace(" ", "").replace("-", "")
    known = [m for m in PRESETS.values() if m.name.partition("-")[0] in squeezed and not small]
    best = min(known, key=lambda m: abs(m.memory - memory), default=None)
    note = f"a matrix product in bfloat16 {product:.4g} TFLOP/s, a copy {copied:.4g} GB/s"
    return [
        {
            "what": "machine",
            "setting": name,
            "note": note + (f"; vendor {best.peak:g} TFLOP/s, {best.bandwidth:g} GB/s" if best else ""),
            "peak": best.peak if best else product,
            "bandwidth": best.bandwidth if best else copied,
            "preset": best.name if best else "h100",
        }
    ]


def arithmetic(small: bool) -> list[Row]:
    """Compare output and gradients of the zoo's smallest model with those in float64 on the CPU with plain operations."""
    import yaml

    from credit_like import ops
    from credit_like.models import wxformer
    from credit_like.nn import spectral_norm
    from credit_like.nn.init import initialise
    from credit_like.parallel.device import set_precision

    height, width = SMALL_GRID if small else (64, 128)
    section = yaml.safe_load((ROOT / "models" / "wxformer-tiny" / "model.yml").read_text())["model"]
    section = {key: value for key, value in section.items() if key != "predict"} | {"use_spectral_norm": True}
    section |= SMALL_MODEL if small else {}
    config = wxformer.Config.model_validate(section)
    x = torch.randn(2, 6, 1, height, width, generator=torch.Generator().manual_seed(0))

    def run(
        device: str, dtype: torch.dtype, matmul: str = "highest", bf16: bool = False, compiled: bool = False
    ) -> Any:
        set_precision(matmul)
        model = initialise(
            wxformer.build(config, in_channels=6, out_channels=5, frames=1, height=height, width=width), 0
        )
        model.to(device, dtype)
        spectral_norm.refresh(model)
        if compiled:
            from credit_like.parallel.fsdp2 import shard_units

            for unit in shard_units(model):
                unit.compile(dynamic=False, backend="eager" if small else "inductor")
        with torch.autocast(device, torch.bfloat16, enabled=bf16):
            y = model(x.to(device, dtype))
        y.square().mean().backward()
        gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        return [t.detach().double().cpu() for t in (y, gradients)]

    with ops.cpu.policy.disabled():
        expected = run("cpu", torch.float64)
    device = "cpu" if small else "cuda"
    ways: dict[str, dict[str, Any]] = {
        "float32": {},
        "TensorFloat-32": {"matmul": "high"},
        "bfloat16": {"bf16": True, "matmul": "high"},
        "float32, compiled": {"compiled": True},
    }
    rows = []
    for name, options in ways.items():
        got = run(device, torch.float32, **options)
        errors = [float((a - b).norm() / b.norm()) for a, b in zip(got, expected, strict=True)]
        good = max(errors) < LIMITS[name]
        note = f"output {errors[0]:.0e}, gradients {errors[1]:.0e} from float64; limit {LIMITS[name]:.0e}"
        rows.append({"what": "arithmetic", "setting": name, "note": note, "failed": not good})
    return rows


def world_of_one(small: bool) -> list[Row]:
    """Join a process group of one rank as training does, and run every kind of collective over it."""
    import socket

    import torch.distributed as dist

    from credit_like.parallel import collectives
    from credit_like.parallel.environment import Environment
    from credit_like.parallel.rendezvous import join

    device = torch.device("cpu") if small else torch.device("cuda", 0)
    if not small:
        torch.cuda.set_device(device)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    began = time.perf_counter()
    join(Environment(0, 1, address="127.0.0.1", port=port), device, dt.timedelta(minutes=1))
    group = dist.group.WORLD
    assert group is not None
    x = torch.arange(4.0, device=device, requires_grad=True)
    shard = torch.empty(4, device=device)
    dist.reduce_scatter_tensor(shard, x.detach())
    dist.barrier()
    host = torch.tensor([3])
    dist.all_reduce(host, dist.ReduceOp.MAX)
    results: dict[str, Tensor] = {
        "all-reduce": collectives.all_reduce_sum(x, group),
        "all-gather": collectives.gather_over(x, group)[0],
        "all-to-all": collectives.all_to_all(x, [4], [4], group),
        "reduce-scatter": shard,
        "host": x + (host.to(device) - 3),
    }
    results["all-reduce"].sum().backward()
    assert x.grad is not None
    results["backward"] = x + (x.grad - 1)
    wrong = [name for name, y in results.items() if not torch.equal(y.detach(), x.detach())]
    dist.destroy_process_group()
    note = (
        f"wrong: {', '.join(wrong)}" if wrong else f"{', '.join(results)}; {time.perf_counter() - began:.1f} s in all"
    )
    setting = f"{'gloo' if small else 'NCCL'}, world of 1"
    return [{"what": "collectives", "setting": setting, "note": note, "failed": bool(wrong)}]


def planned(small: bool, case: str, preset: str) -> list[Row]:
    """Return the operations, bytes and peak memory of a step by `credit-like plan`."""
    from credit_like.plan.layouts import Candidate
    from credit_like.plan.machine import machine_of
    from credit_like.plan.run import plan_one

    model, batch, _ = case.split(",", 2)
    found = experiment(model, small, global_batch_size=int(batch), micro_batch_size=int(batch), device="cpu")
    row = plan_one(found, Candidate(1, data="none"), machine_of(preset, {}), grid(model, small), 1)
    rank = row.fullest
    return [{"flops": rank.flops, "traffic": rank.traffic, "memory": rank.peak}]


def prepared(small: bool, case: str) -> tuple[Any, Any]:
    """Return the trainer of a case, and a sample on its device."""
    model, batch, how = case.split(",", 2)
    found = experiment(
        model, small, global_batch_size=int(batch), micro_batch_size=int(batch), deterministic=ANY not in how,
        compile="compiled" in how and not small,
    )  # fmt: skip
    where = grid(model, small)
    if GRAPHS in how:
        import torch._inductor.config

        torch._inductor.config.triton.cudagraphs = True
    trainer = trainer_of(found, where)
    return trainer, sample_on(trainer, where)


def compilation(small: bool, case: str) -> list[Row]:
    """Take two steps, which fills the compiler's cache on this machine."""
    trainer, sample = prepared(small, case)
    for number in (1, 2):
        trainer.train_step([sample], 1, 1e-4, number).ready()
    return []


def repetition(small: bool, reference: str | None = None) -> list[Row]:
    """Compare the weights after steps from the same start, here and in the process that wrote the file `reference`."""
    import hashlib

    found: dict[str, list[str]] = {"eager": [], "compiled": []}
    trainings, steps = (1, 2) if small else (2, 5)
    for how, bits in found.items():
        for _ in range(trainings):
            trainer, sample = prepared(small, f"1°,1,{how}")
            for number in range(1, steps + 1):
                trainer.train_step([sample], 1, 1e-4, number).ready()
            weights = hashlib.sha256()
            for parameter in trainer.context.stepper.model.parameters():
                weights.update(parameter.detach().cpu().numpy().tobytes())
            bits.append(weights.hexdigest())
    before = json.loads(Path(reference).read_text()) if reference and Path(reference).exists() else {}
    if reference:
        Path(reference).write_text(json.dumps(found))
    different = [how for how, bits in found.items() if len({*bits, *before.get(how, [])}) > 1]
    note = f"weights after {steps} steps: {trainings * (2 if before else 1)} times the same bits, eager and compiled"
    if different:
        note = f"weights after {steps} steps differ: {', '.join(different)}"
    return [{"what": "repetition", "setting": "1°, batch 1", "note": note, "failed": bool(different)}]


def profiled(take: Callable[[], None], device: torch.device) -> str:
    """Return the number of kernels of a step on the GPU, and the time that they take."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        take()
        wait(device)
    kernels = [e for e in recorded.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return f"{len(kernels)} kernels, {sum(e.device_time_total for e in kernels) / 1e6:.4g} s on the device"


def step(small: bool, case: str) -> list[Row]:
    """Measure training steps on a sample that stays on the device; `compiled+eager` measures both ways in one process."""
    model, batch, hows = case.split(",", 2)
    trainer, sample = prepared(small, case)
    rows = []
    for how in hows.split("+"):
        with torch.compiler.set_stance("force_eager" if how == "eager" else "default"):
            row = measured(small, trainer, sample)
        setting = f"{model}, batch {batch}, {how}"
        rows.append(row | {"what": "training step", "setting": setting, "batch": int(batch), "model": model})
    return rows


def measured(small: bool, trainer: Any, sample: Any) -> Row:
    """Return time and memory of a step, and what goes wrong in it."""
    from credit_like.plan.meter import Meter
    from credit_like.plan.simulate import measured_step

    device = trainer.runtime.device
    reports: list[Any] = []

    def take() -> None:
        reports.append(trainer.train_step([sample], 1, 1e-4, len(reports) + 1))

    began = time.perf_counter()
    take()
    take()
    wait(device)
    first = time.perf_counter() - began
    waits = ""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.set_sync_debug_mode("error")
        try:
            take()
        except RuntimeError as error:
            waits = f"the host waits for the device: {str(error).splitlines()[0]}"
        torch.cuda.set_sync_debug_mode("default")
    taken = seconds_per_step(take, device, small)
    if device.type == "cuda":
        memory = torch.cuda.max_memory_allocated()
    else:
        meter = Meter()
        with torch.compiler.set_stance("force_eager"):
            memory = sum(measured_step(trainer, iter([sample]), 1, meter).values()) + meter.peak
        memory += sum(getattr(sample, f.name).nbytes for f in dataclasses.fields(sample))
    counted = profiled(take, device) if device.type == "cuda" else ""
    numbers = [report.ready() for report in reports]
    skipped = sum(values[2] for values in numbers)
    notes = [f"first two steps {first:.0f} s", trainer.precision, *([counted] if counted else [])]
    if skipped:
        notes.append(f"{skipped:g} of {len(numbers)} steps were not finite")
    if waits:
        notes.append(waits)
    return {"seconds": taken, "memory": memory, "note": "; ".join(notes), "failed": bool(skipped or waits)}


def loader(small: bool) -> list[Row]:
    """Compare steps on samples from the loader with steps on one of them that stays on the device."""
    import loader as stores

    from credit_like import build
    from credit_like.schema.experiment import Experiment

    height, width = SMALL_GRID if small else (181, 360)
    times, levels = (8, 2) if small else (24, 19)
    stores.LEVELS = list(range(1, levels + 1))
    with tempfile.TemporaryDirectory() as folder:
        written = stores.weather(times, height, width)
        chunks = {name: {"chunks": (1, *v.shape[1:])} for name, v in written.items()}
        written.to_zarr(Path(folder, "weather.zarr"), encoding=chunks, consolidated=False, mode="w")
        days = [f"2000-01-{day:02}T{hour:02}" for day, hour in ((1, 0), (1 + (times - 2) // 4, 0))]
        found = experiment("1°", small, compile=not small).to_dict()
        found["save_loc"] = str(Path(folder, "run"))
        found["data"] = {
            "source": {"type": "zarr", "path": str(Path(folder, "weather.zarr"))},
            "timestep": "6h",
            "levels": stores.LEVELS,
            "prognostic": {"level": list("utvq"), "surface": ["sp", "t2m", "u10", "v10"]},
            "dynamic_forcing": {"surface": [{"name": "toa", "compute": "solar"}]},
            "train": days,
            "valid": days,
            "test": days,
        }
        found["trainer"] |= {"global_batch_size": 1, "micro_batch_size": 1, "epochs": 10000}
        made = Experiment.model_validate(found)
        runtime = build.start(made)
        trainer = build.build_trainer(build.build_context(made, runtime))
        device = runtime.device
        kept = next(iter(trainer.train_loader.batches(0))).to(device, non_blocking=False)
        coming: Iterator[Any] = iter(())
        epoch = number = 0

        def take(sample: Any) -> None:
            nonlocal number
            number += 1
            trainer.train_step([sample], 1, 1e-4, number)

        def from_loader() -> None:
            nonlocal coming, epoch
            sample = next(coming, None)
            while sample is None:
                epoch += 1
                coming = trainer.train_loader.batches(epoch)
                sample = next(coming, None)
            take(sample)

        for _ in range(2):
            take(kept)
        from_loader()
        pairs = [
            (seconds_per_step(from_loader, device, small), seconds_per_step(lambda: take(kept), device, small))
            for _ in range(2)
        ]
        trainer.train_loader.close()
    with_loader, without = (statistics.median(side) for side in zip(*pairs, strict=True))
    workers = made.trainer.loader.num_workers
    setting = f"1°, batch 1, {f'{workers} workers' if workers else 'a thread'}, files in the page cache"
    note = f"without the loader {without:.4g} s/step: {with_loader / without:.2f} ×"
    return [{"what": "loader", "setting": setting, "seconds": with_loader, "batch": 1, "note": note}]


def beside(small: bool, credit: str | None, stub: str | None, theirs_bf16: bool = False) -> list[Row]:
    """Compare our 1° model with NCAR CREDIT's own, or with the transcribed definition, in alternating steps."""
    import wxformer

    options = SimpleNamespace(
        credit=credit, stub=stub, against="definition", threads=1 if small else os.cpu_count() or 1, pairs=1 if small else 10,
        device="cpu" if small else "cuda", bf16=bool(credit), compile=bool(credit) and not small, theirs_bf16=theirs_bf16,
    )  # fmt: skip
    mode, flags = "infer" if small else "train", ["--spectral-norm"] if credit else []
    with tempfile.TemporaryDirectory() as folder:
        name = "wxformer-tiny" if small else "wxformer-1deg"
        config = next(path for path in wxformer.zoo(Path(folder)) if path.stem == name)
        if not small:
            full = json.loads(config.read_text()) | {"image_height": 181, "image_width": 360}
            config.write_text(json.dumps(full))
        found = wxformer.compare(config, mode, flags, options)
    other = wxformer.NAMES["credit" if credit else "definition"]
    theirs = "theirs in bfloat16" if theirs_bf16 else "theirs float32 as published"
    how = f"spectral norm; ours in bfloat16, compiled; {theirs}" if credit else "both float32"
    limit = LIMITS["bfloat16" if credit else "TensorFloat-32"]
    note = (
        f"{other} {found['other']:.4g} s: ratio {found['ratio']:.2f}, of memory {found['memory_ratio']:.2f}; outputs differ by "
        f"{found['difference']:.0e}, limit {limit:.0e}"
    )
    row = {"what": f"beside {other}", "setting": f"{name}, {mode}, {how}", "seconds": found["ours"], "batch": 1}
    return [row | {"note": note, "failed": not found["difference"] < limit}]


GROUPS: dict[str, Callable[..., list[Row]]] = {
    "machine": machine,
    "arithmetic": arithmetic,
    "collectives": world_of_one,
    "planned": planned,
    "compilation": compilation,
    "repetition": repetition,
    "step": step,
    "loader": loader,
    "beside": beside,
}


# ---- the whole ---------------------------------------------------------------------------------------------------------


def in_process(group: str, deadline: float, small: bool, *arguments: str | bool | None) -> list[Row]:
    """Run a group in a process of its own until `deadline`; return its rows, or one that says why there are none."""
    title = {"what": group, "setting": ", ".join(a for a in arguments if isinstance(a, str))}
    left = deadline - time.monotonic()
    if left < 1:
        return [title | {"note": "not measured: no time was left", "failed": True}]
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "rows.json")
        call = json.dumps([group, small, *arguments])
        process = subprocess.Popen(
            [sys.executable, __file__, "--one", call, "--output", str(answer)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, start_new_session=True,
        )  # fmt: skip
        try:
            said, _ = process.communicate(timeout=left)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that it started
            process.communicate()
            return [title | {"note": "not finished: no time was left", "failed": True}]
        if process.returncode or not answer.exists():
            last = (said.strip().splitlines() or [""])[-1]
            print(said, file=sys.stderr)
            return [title | {"note": f"ended with status {process.returncode}: {last[:300]}", "failed": True}]
        rows: list[Row] = json.loads(answer.read_text())
        return rows


def line(row: Row, about: Row, plan: Row) -> str:
    """Return a row of the table."""
    seconds, memory, batch = row.get("seconds"), row.get("memory"), row.get("batch")
    rate = batch / seconds if seconds and batch else None
    model, note = row.get("model"), row["note"]
    if model and rate and not about["small"]:
        note += f"; {rate / TARGETS[model]:.2f} of the {TARGETS[model]:g} samples/s to be reached on an H100"
    mfu = plan["flops"] / (seconds * about["peak"] * 1e12) if plan and seconds else None
    share = plan["traffic"] / (seconds * about["bandwidth"] * 1e9) if plan and seconds else None
    expected = plan["memory"] if plan else None
    cells = [
        row["what"],
        row["setting"],
        f"{seconds:.4g}" if seconds else "",
        f"{rate:.3g}" if rate else "",
        f"{100 * mfu:.3g}%" if mfu else "",
        f"{100 * share:.3g}%" if share else "",
        f"{memory / 1e9:.3g}" if memory else "",
        f"{expected / 1e9:.3g} ({memory / expected:.2f} ×)" if memory and expected else "",
        ("**failed** " if row.get("failed") else "") + note,
    ]
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def measure(options: argparse.Namespace) -> tuple[list[str], bool]:
    """Return the lines of the table, and whether every row is as it should be."""
    small, deadline = options.small, time.monotonic() + 60 * options.minutes
    (about,) = in_process("machine", deadline, small)
    if "peak" not in about:
        raise SystemExit(f"the device could not be measured: {about['note']}")
    about["small"] = small
    lines = [
        "# Training on one GPU" if not small else "# A rehearsal of the GPU benchmark on a CPU, at reduced sizes",
        "",
        f"{dt.date.today()}, {about['setting']}, torch {torch.__version__}, CUDA {torch.version.cuda}. Each row is described by "
        "`python benchmarks/gpu.py --help`.",
        "",
        "| what | setting | s/step | samples/s | MFU | of bandwidth | peak GB | planned GB (ratio) | notes |",
        "|" + "---|" * 9,
    ]  # fmt: skip
    print("\n".join(lines), flush=True)
    good = True

    def add(rows: list[Row], plan: Row | None = None) -> None:
        nonlocal good
        for row in rows:
            good &= not row.get("failed") or GRAPHS in row["setting"]  # no experiment uses those
            lines.append(line(row, about, plan or {}))
            print(lines[-1], flush=True)

    add([about])
    cases = STEPS[:1] if small else STEPS
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(cases) + 3) as beside_each_other:
        reference = str(Path(folder, "weights.json"))
        began = time.monotonic()
        arithmetic = beside_each_other.submit(in_process, "arithmetic", deadline, small)
        repeated = beside_each_other.submit(in_process, "repetition", deadline, small, reference)
        compiled = [beside_each_other.submit(in_process, "compilation", deadline, small, case) for case in cases]
        plans = plans_of(cases, deadline, about)
        add(arithmetic.result())
        for work in (repeated, *compiled):
            add([row for row in work.result() if row.get("failed")])
        note = f"{len(compiled)} cases, with arithmetic and repetition beside them, {time.monotonic() - began:.0f} s in all"
        add([{"what": "compilation", "setting": f"{os.cpu_count()} cores", "note": note}])
        add(in_process("repetition", deadline, small, reference))
    add(in_process("collectives", deadline, small))
    for case in cases[:2]:
        add(in_process("step", deadline, small, case), plans.get(case))
    add(in_process("loader", deadline, small))
    for theirs_bf16 in (True, False) if options.credit else (False,):
        add(in_process("beside", deadline, small, options.credit, options.stub, theirs_bf16))
    for case in cases[2:]:
        add(in_process("step", deadline, small, case), plans.get(case))
    return lines, good


def plans_of(cases: list[str], deadline: float, about: Row) -> dict[str, Row]:
    """Return what `plan` says of each case; one that fails is left out."""
    plans: dict[str, Row] = {}
    found: dict[str, Row] = {}
    for case in cases:
        model, batch, _ = case.split(",", 2)
        if (key := f"{model},{batch}") not in found:
            (found[key],) = in_process("planned", deadline, about["small"], case, about["preset"])
            if "flops" not in found[key]:
                print(f"no plan of {case}: {found[key]['note']}", file=sys.stderr)
        if "flops" in found[key]:
            plans[case] = found[key]
    return plans


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="the same on the CPU, at reduced sizes")
    parser.add_argument("--credit", help="python of an environment with miles-credit")
    parser.add_argument("--stub", help="folder put before that environment's import path")
    parser.add_argument("--minutes", type=float, default=10.0, help="time after which nothing more is measured")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "gpu.md")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        group, small, *arguments = json.loads(options.one)
        options.output.write_text(json.dumps(GROUPS[group](small, *arguments)))
        return
    if not options.small and not torch.cuda.is_available():
        raise SystemExit("expected a CUDA device, got none; rehearse on the CPU with --small")
    lines, good = measure(options)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text("\n".join(lines) + "\n")
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
