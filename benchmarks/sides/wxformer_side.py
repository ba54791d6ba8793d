"""Run one model in one process, a step per request; `benchmarks/wxformer.py` starts two of these and alternates between them.

It runs in any environment with torch: `ours`, `plain` and `definition` need credit_like, `credit` needs NCAR's miles-credit.
Each line on standard input is `step`, `memory`, `work` or `quit`; the answer is one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

TOLD = os.dup(1)  # for answers; all other output goes to standard error
os.dup2(2, 1)
ROOT = Path(__file__).parents[2]


@dataclass
class Subject:
    """A function with parameters, and everything else that a training step of it needs."""

    model: nn.Module
    forward: Callable[[Tensor], Tensor]
    x: Tensor
    optimizer: torch.optim.Optimizer
    before_step: Callable[[nn.Module], None] = lambda model: None
    after_backward: Callable[[nn.Module], None] = lambda model: None


def ours(side: str, arguments: dict[str, Any], weights: Path | None, options: argparse.Namespace) -> Subject:
    """Return our model, with its own or plain operations, or its definition (the transcription in the tests)."""
    from credit_like import ops
    from credit_like.checkpoint.credit import convert_model_args, load_credit_model
    from credit_like.nn import spectral_norm
    from credit_like.nn.init import initialise
    from credit_like.parallel.device import set_precision

    ops.cpu.policy.configure()
    described = convert_model_args(arguments)
    model = load_credit_model(weights, arguments) if weights else initialise(described.build(), 0)
    model.to(options.device)
    if side == "plain":
        ops.cpu.policy.set_enabled(False)
    if options.checkpointing:
        from credit_like.parallel.fsdp2 import _apply_activation_checkpointing

        _apply_activation_checkpointing(model)
    forward: Callable[[Tensor], Tensor] = model
    if side == "ours" and options.compile:  # as `trainer.compile` does
        from credit_like.parallel.fsdp2 import shard_units

        for unit in shard_units(model):
            unit.compile(dynamic=False)
    if side == "ours" and options.bf16:  # as `trainer.amp` and `trainer.matmul_precision` do
        set_precision("high")
        forward = torch.autocast(options.device, torch.bfloat16)(model)
    if side == "definition":
        import runpy

        transcription = runpy.run_path(str(ROOT / "tests" / "models" / "reference.py"))["wxformer"]
        state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        forward = lambda x: transcription(x, state, described.config)  # noqa: E731
    size = (1, described.in_channels, described.frames, described.height, described.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=side == "ours")
    x = image(size, options.device)
    return Subject(model, forward, x, optimizer, spectral_norm.before_step, spectral_norm.correct_gradients)


def credit(arguments: dict[str, Any], options: argparse.Namespace) -> Subject:
    """Return NCAR CREDIT's model, set up as by its own trainer."""
    from credit.models.wxformer.crossformer import CrossFormer  # type: ignore[import-not-found]

    torch.manual_seed(0)
    model = CrossFormer(**arguments).to(options.device)
    if options.checkpointing:
        from credit.parallel.fsdp2 import _apply_activation_checkpointing  # type: ignore[import-not-found]

        _apply_activation_checkpointing(model)
    forward: Callable[[Tensor], Tensor] = model
    if options.bf16:  # as its trainer's `amp` does
        forward = torch.autocast(options.device, torch.bfloat16)(model)
    size = (1, model.base_input_channels, arguments["frames"], arguments["image_height"], arguments["image_width"])
    return Subject(model, forward, image(size, options.device), torch.optim.AdamW(model.parameters(), lr=1e-4))


def image(size: tuple[int, ...], device: str) -> Tensor:
    """Return the input, the same for all sides."""
    return torch.randn(size, generator=torch.Generator().manual_seed(1)).to(device)


def wait(device: str) -> None:
    """Wait until the device has completed all its work."""
    if device != "cpu":
        torch.accelerator.synchronize()


def allocated(step: Callable[[], None], device: str) -> float:
    """Return the largest increase in MiB of the memory that torch has allocated on the device during a step."""
    if device != "cpu":
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        step()
        return (torch.accelerator.max_memory_allocated() - before) / 2**20
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    sizes = [
        (e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]" and e["args"]["Device Type"] == 0
    ]
    total = most = 0
    for _, size in sorted(sizes, key=lambda pair: pair[0]):
        total += size
        most = max(most, total)
    return most / 2**20


def resident(step: Callable[[], None]) -> float | None:
    """Return the largest increase in MiB of the process during a step (Linux), whatever allocates it; None elsewhere."""
    status, clear = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not os.access(clear, os.W_OK):
        return None

    def read(field: str) -> float:
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(field)) / 1024

    clear.write_text("5")  # reset the largest size so far
    before = read("VmRSS")
    step()
    return read("VmHWM") - before


def work(step: Callable[[], None]) -> float:
    """Return the multiplications and additions that a step executes in matrix products and convolutions."""
    from torch.utils.flop_counter import FlopCounterMode

    def product(size: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...], **_: object) -> int:
        batch = a[0] if len(a) == 3 else 1
        return 2 * batch * a[-2] * a[-1] * b[-1]

    def linear(x: tuple[int, ...], weight: tuple[int, ...], *_: object, **__: object) -> int:
        return 2 * math.prod(x) * weight[0]

    more = {
        torch.ops.aten.addmm_: product,
        torch.ops.aten.baddbmm_: product,
        torch.ops.mkldnn._linear_pointwise: linear,
    }
    with torch.compiler.set_stance("force_eager"), FlopCounterMode(display=False, custom_mapping=more) as counter:
        step()
    return float(counter.get_total_flops())


def steps(subject: Subject, mode: str) -> Callable[[], None]:
    """Return a training step (forward, backward, update) or a forward without gradients."""
    subject.model.train(mode == "train")
    with torch.no_grad():
        target = torch.randn_like(subject.forward(subject.x).float())

    def train() -> None:
        subject.before_step(subject.model)
        loss = ((subject.forward(subject.x).float() - target) ** 2).mean()
        loss.backward()
        subject.after_backward(subject.model)
        subject.optimizer.step()
        subject.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def infer() -> None:
        subject.forward(subject.x)

    return train if mode == "train" else infer


def settle(model: nn.Module) -> None:
    """Run power iterations for CREDIT's singular vectors, which start at random, as training would have done.

    Otherwise the weights are divided by wrong norms, and outputs of 1e19 cannot be compared.
    """
    model.train()
    with torch.no_grad():
        for _ in range(20):
            for module in model.modules():
                for hook in module._forward_pre_hooks.values():
                    hook(module, ())


def outputs(subject: Subject, file: Path, side: str) -> float | None:
    """Compute the output in evaluation mode: the other side writes it to the file, ours returns the relative difference."""
    if side == "credit":
        settle(subject.model)
    subject.model.eval()
    with torch.no_grad():
        y = subject.forward(subject.x).double().cpu()
    if side != "ours":
        weights = subject.model.state_dict() if side == "credit" else {}
        torch.save({"model_state_dict": {key: value.cpu() for key, value in weights.items()}, "y": y}, file)
        return None
    expected = torch.load(file, weights_only=True)["y"]
    size = float(expected.norm())
    if not 0 < size < float("inf"):
        raise SystemExit(f"the outputs cannot be compared: their norm is {size}")
    return float((y - expected).norm()) / size


def tell(reply: dict[str, Any]) -> None:
    os.write(TOLD, (json.dumps(reply) + "\n").encode())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=["ours", "plain", "definition", "credit"])
    parser.add_argument("config", type=Path)
    parser.add_argument("--mode", choices=["train", "infer"], default="train")
    parser.add_argument("--spectral-norm", action="store_true")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bf16", action="store_true", help="not of definition: matrix products in bfloat16")
    parser.add_argument("--compile", action="store_true", help="ours: compiled blocks")
    parser.add_argument(
        "--output", type=Path, required=True, help="the other side's output, written by it, read by ours"
    )
    parser.add_argument("--weights", type=Path, help="CREDIT's weights for our model")
    parser.add_argument("--path", action="append", default=[], help="put before the import path")
    options = parser.parse_args()
    sys.path[:0] = options.path
    torch.set_num_threads(options.threads)
    arguments = json.loads(options.config.read_text()) | {"use_spectral_norm": options.spectral_norm}
    if options.side == "credit":
        subject = credit(arguments, options)
    else:
        subject = ours(options.side, arguments, options.weights, options)
    difference = outputs(subject, options.output, options.side)
    step = steps(subject, options.mode)
    step()
    tell({"parameters": sum(p.numel() for p in subject.model.parameters()), "difference": difference})
    for line in sys.stdin:
        if line.strip() == "quit":
            break
        if line.strip() == "memory":
            largest = resident(step) if options.device == "cpu" else None
            tell({"resident": largest, "allocated": allocated(step, options.device)})
        elif line.strip() == "work":
            tell({"flops": work(step)})
        else:
            wait(options.device)
            wall, cpu = time.perf_counter(), time.process_time()
            step()
            wait(options.device)
            tell({"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu})


if __name__ == "__main__":
    main()
