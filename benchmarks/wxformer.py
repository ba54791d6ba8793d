"""Compare WXFormer's steps with another implementation's in one run: time, memory, fraction of the matmul peak.

    python benchmarks/wxformer.py [CONFIG.json …] [--credit PYTHON [--stub FOLDER]] [--against definition | plain]
                                  [--device cuda [--bf16] [--compile]]

CONFIG.json holds NCAR CREDIT's constructor arguments; by default, the benchmark runs the architectures of the zoo on reduced
grids. With `--credit PYTHON` the other side is CREDIT's own model in that environment (`--stub`: a folder put before its
import path), and our model uses its weights. Otherwise it is the definition as transcribed in the tests, or our model with
plain operations.

Each side runs in its own process; they step alternately (A B A B …), and a ratio is the median over pairs of neighbouring
steps. Memory is measured in another pair of processes, in which the C library returns freed memory to the system: the largest
increase of the process during a step, gradients included, and the largest amount that torch allocates (on an accelerator only
the latter).

With `--bf16` and `--compile` our side runs as with `trainer.amp` and `trainer.compile`; the other side runs as published, in
fp32 (on CUDA with TensorFloat-32 in convolutions, torch's default), or with `--theirs-bf16` in bfloat16, as with `amp` of
CREDIT's trainer. MFU then refers to a matrix product in bfloat16 (on a CPU still in fp32).
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.utils.flop_counter import FlopCounterMode

from credit_like.checkpoint.credit import convert_model_args
from credit_like.ops.cpu import matrix

ROOT = Path(__file__).parents[1]
# (grid, pads) small enough for a CPU: windows divide every stage.
REDUCED = {"wxformer-tiny": (32, 64), "wxformer-1deg": (117, 232), "wxformer-0.25deg": (81, 160)}
NORMALISED = ["--spectral-norm", "--checkpointing"]
SETTINGS: list[tuple[str, list[str]]] = [("train", []), ("infer", []), ("train", NORMALISED)]
NAMES = {"credit": "CREDIT", "definition": "definition", "plain": "plain"}
TITLES = {
    "credit": "NCAR CREDIT's own",
    "definition": "the plain transcription of its definition",
    "plain": "our model with plain operations",
}


class Side:
    """A model in its own process."""

    def __init__(self, command: list[str], lean: bool = False) -> None:
        # Lean: freed memory is returned to the system at once, so the size of the process is the memory in use.
        surroundings = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"} if lean else {}
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.command = " ".join(command)
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=os.environ | surroundings,
        )
        self.about = self._answer()

    def ask(self, what: str) -> dict[str, Any]:
        """Return the answer to `step` (seconds), `memory` (MiB) or `work` (FLOPs)."""
        assert self.process.stdin is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            status = self.process.wait()
            self.errors.seek(0)
            raise SystemExit(f"{self.command} ended with status {status}:\n{self.errors.read()[-2000:]}")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        self.errors.close()


def zoo(folder: Path) -> list[Path]:
    """Return the zoo's architectures on reduced grids as CREDIT's constructor arguments."""
    paths = []
    for name, (height, width) in REDUCED.items():
        model = yaml.safe_load((ROOT / "models" / name / "model.yml").read_text())["model"]
        drop = {"type", "upsample", "position_index", "predict"}
        arguments = {key: value for key, value in model.items() if key not in drop}
        arguments |= {"image_height": height, "image_width": width, "frames": 1, "cross_embed_strides": [2, 2, 2, 2]}
        counts = {
            "channels": 4,
            "levels": 15,
            "surface_channels": 4,
            "input_only_channels": 3,
            "output_only_channels": 0,
        }
        if name == "wxformer-tiny":
            counts |= {"channels": 2, "levels": 2}
        path = folder / f"{name}.json"
        path.write_text(json.dumps(arguments | counts))
        paths.append(path)
    return paths


def flops(config: Path) -> int:
    """Return the multiplications and additions of a forward by the definition (direct convolutions)."""
    described = convert_model_args(json.loads(config.read_text()) | {"use_spectral_norm": False})
    with torch.device("meta"):
        model = described.build()
        x = torch.empty(1, described.in_channels, described.frames, described.height, described.width)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(x)
    return int(counter.get_total_flops())


def matmul_peak(options: argparse.Namespace) -> float:
    """Return the FLOP/s of a large matrix product, on an accelerator in the precision of our side; the best of several."""
    torch.set_num_threads(options.threads)
    on_cpu = options.device == "cpu"
    size, dtype = 2048 if on_cpu else 8192, torch.bfloat16 if options.bf16 and not on_cpu else torch.float32
    a = torch.randn(size, size, device=options.device, dtype=dtype)
    multiply = (
        matrix.product if on_cpu and dtype == torch.float32 else torch.matmul
    )  # by the library that our kernels use
    best = float("inf")
    for _ in range(8):
        start = time.perf_counter()
        multiply(a, a)
        if not on_cpu:
            torch.accelerator.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def compare(config: Path, mode: str, flags: list[str], options: argparse.Namespace) -> dict[str, float]:
    """Return medians of both sides and of the ratios of neighbouring steps, peaks of memory, and the operations of our step."""
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder, "output.pt")
        worker = str(ROOT / "benchmarks" / "sides" / "wxformer_side.py")
        common = [str(config), "--mode", mode, "--threads", str(options.threads), "--output", str(written), *flags]
        common += ["--device", options.device]
        how = [f"--{name}" for name in ("bf16", "compile") if getattr(options, name)]
        our_path = ["--path", str(ROOT)]
        if options.credit:
            path = ["--path", options.stub] if options.stub else []
            theirs = [options.credit, worker, "credit", *common, *path, *(["--bf16"] if options.theirs_bf16 else [])]
            our_path += ["--weights", str(written)]
        else:
            theirs = [sys.executable, worker, options.against, *common, *our_path]
        commands = [theirs, [sys.executable, worker, "ours", *common, *how, *our_path]]
        other, mine = (Side(command) for command in commands)
        pairs = [(mine.ask("step"), other.ask("step")) for _ in range(options.pairs)]
        work, difference = mine.ask("work")["flops"], mine.about["difference"]
        mine.close()
        other.close()
        memory = []
        for command in commands[::-1]:
            side = Side(command, lean=True)
            memory.append(side.ask("memory"))
            side.close()
    allocated = [m["allocated"] for m in memory]
    resident = [m["resident"] if m["resident"] is not None else m["allocated"] for m in memory]
    return {
        "ours": statistics.median(a["wall"] for a, _ in pairs),
        "other": statistics.median(b["wall"] for _, b in pairs),
        "ratio": statistics.median(a["wall"] / b["wall"] for a, b in pairs),
        "cpu_ratio": statistics.median(a["cpu"] / b["cpu"] for a, b in pairs),
        "memory": resident[0],
        "other_memory": resident[1],
        "memory_ratio": resident[0] / resident[1],
        "allocated_ratio": allocated[0] / allocated[1],
        "work": work,
        "difference": difference,
    }


def processor(options: argparse.Namespace) -> str:
    """Return the name of the processor."""
    if options.device != "cpu":
        return torch.cuda.get_device_name() if options.device == "cuda" else str(options.device)
    cores = f"{options.threads} threads of {os.cpu_count()} cores"
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return f"{line.split(':', 1)[1].strip()}, {cores}"
    return f"{platform.processor()}, {cores}"


def settings(options: argparse.Namespace) -> list[tuple[str, list[str]]]:
    """Return the kinds of step; the transcription is one function, without parts that could be recomputed."""
    chosen = [SETTINGS[i] for i in options.settings]
    if options.credit or options.against == "plain":
        return chosen
    return [(mode, [flag for flag in flags if flag != "--checkpointing"]) for mode, flags in chosen]


def main() -> None:
    """Run, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="*", type=Path)
    parser.add_argument("--credit", help="python of an environment with miles-credit")
    parser.add_argument("--stub", help="folder put before that environment's import path")
    parser.add_argument("--against", choices=["definition", "plain"], default="definition", help="without --credit")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--device", default="cpu", help="cpu or an accelerator")
    parser.add_argument("--bf16", action="store_true", help="our matrix products in bfloat16")
    parser.add_argument("--theirs-bf16", action="store_true", help="CREDIT's matrix products in bfloat16")
    parser.add_argument("--compile", action="store_true", help="our blocks compiled")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--settings", type=int, nargs="*", default=[0, 1, 2], help="0 train, 1 infer, 2 normalised")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/wxformer-SIDE.md")
    options = parser.parse_args()
    side = "credit" if options.credit else options.against
    output = options.output or ROOT / "benchmarks" / "results" / f"wxformer-{side}.md"
    other = NAMES[side]
    peak = matmul_peak(options)
    ours = ("bf16" if options.bf16 else "fp32") + (", compiled" if options.compile else "")
    lines = [
        f"# WXFormer on {'a CPU' if options.device == 'cpu' else options.device} compared with {TITLES[side]}",
        "",
        f"{dt.date.today()}, {processor(options)}, torch {torch.__version__}, "
        f"{ours if ours == 'fp32' else ours + ' (theirs fp32)'}, batch 1, "
        f"{options.pairs} pairs of alternating steps; load of the machine at the start {os.getloadavg()[0]:.1f}; "
        f"a large matrix product then {peak / 1e9:.0f} GFLOP/s.",
        "",
        "Ratio: ours / theirs, as the median over pairs, of wall time and of processor time. MiB: the largest increase of the "
        "process during a step, gradients included. Allocated ratio: of the largest amounts that torch allocates. Of peak: "
        "operations of our step / time / the speed of the fastest of such products so far, measured before each row. MFU: the "
        "same with the operations of the definition (train: 3 forwards). Difference: relative norm of the difference of the "
        "outputs with the same weights.",
        "",
        f"| configuration | step | ours s | {other} s | ratio | CPU ratio | ours MiB | {other} MiB | ratio "
        "| allocated ratio | of peak | MFU | difference |",
        "|" + "---|" * 13,
    ]
    print("\n".join(lines), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for config in options.configs or zoo(Path(folder)):
            defined = flops(config)
            for mode, flags in settings(options):
                peak = max(peak, matmul_peak(options))  # one measurement on a shared machine is unreliable
                r = compare(config, mode, flags, options)
                rate = r["ours"] * peak
                mfu = defined * (3 if mode == "train" else 1) / rate
                name = mode + ("".join(", " + flag.removeprefix("--").replace("-", " ") for flag in flags))
                lines.append(
                    f"| {config.stem} | {name} | {r['ours']:.3f} | {r['other']:.3f} | {r['ratio']:.2f} | {r['cpu_ratio']:.2f} "
                    f"| {r['memory']:.0f} | {r['other_memory']:.0f} | {r['memory_ratio']:.2f} | {r['allocated_ratio']:.2f} "
                    f"| {r['work'] / rate:.2f} | {mfu:.2f} | {r['difference']:.0e} |"
                )
                print(lines[-1], flush=True)
    output.parent.mkdir(exist_ok=True)
    output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
