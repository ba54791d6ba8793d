"""Train one problem in every layout: memory of a rank, time of a step, and the gain of two ranks over two threads.

    python benchmarks/parallel.py [--quick] [--steps 7] [--layouts NAME …] [--output benchmarks/results/parallel.md]

The global problem is the same in all layouts: a WXFormer, its image and four samples per optimiser step. Ranks are processes
of one thread, over gloo. Memory is counted exactly, allocation by allocation, in one step: the parameters, gradients and
optimiser state that a rank stores, and the largest memory of activations in forward. Efficiency compares two ranks of one
thread with one rank of two threads, both on the same two cores: they take steps alternately (A B A B …), and the figure is
the median over neighbouring steps. On a busy machine times have no meaning; memory does not depend on the load.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SAMPLES, CHANNELS = 4, 8
HEIGHT, PADS_LAT, PADS_LON = 121, (3, 4), (8, 8)  # 128 padded rows: windows for four bands at the coarsest stage
WIDTH, QUICK_WIDTH = 240, 48


@dataclass(frozen=True)
class Layout:
    """The degrees and the wrapper."""

    dp: int = 1
    tensor: int = 1
    domain: int = 1
    data: str = "fsdp2"

    @property
    def world(self) -> int:
        return self.dp * self.tensor * self.domain

    @property
    def name(self) -> str:
        if self.world == 1:
            return "one rank"
        parts = [("data", self.dp), ("tensor", self.tensor), ("domain", self.domain)]
        return " × ".join(f"{name} {n}" for name, n in parts if n > 1) + f", {self.data}"


SERIAL = Layout()
PAIRED = [Layout(dp=2), Layout(dp=2, data="ddp"), Layout(domain=2), Layout(domain=2, data="none"), Layout(tensor=2)]
LAYOUTS = [
    SERIAL,
    *PAIRED,
    Layout(dp=4),
    Layout(domain=4),
    Layout(dp=2, domain=2),
    Layout(dp=2, tensor=2),
    Layout(tensor=2, domain=2),
]
TARGETS = {"data": 0.9, "domain": 0.8}  # parallel efficiency


# ---- a rank ----------------------------------------------------------------------------------------------------------


def rank_main(options: dict[str, Any]) -> None:
    """Take or measure a step for each line on standard input; answer with a line of JSON."""
    import torch

    torch.set_num_threads(options["threads"])
    training = Training(Layout(**options["layout"]), options["width"], options["checkpointing"])
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        if line.strip() == "memory":
            answer = training.memory()
        else:
            wall, cpu = time.perf_counter(), time.process_time()
            training.step()
            answer = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        print(json.dumps(answer), flush=True)
    training.runtime.close()


class Training:
    """Optimiser steps of one rank on random samples, by the functions that training uses."""

    def __init__(self, layout: Layout, width: int, checkpointing: bool) -> None:
        import torch

        from credit_like.models import wxformer
        from credit_like.parallel.apply import materialise, own_part, parallelise
        from credit_like.parallel.runtime import Runtime
        from credit_like.parallel.unwrap import get_raw_model
        from credit_like.schema.trainer import TrainerSection
        from credit_like.training.optimizers import adamw

        parallelism = {"data": layout.data, "tensor": layout.tensor, "domain": layout.domain}
        section = TrainerSection.model_validate({"parallelism": parallelism, "activation_checkpoint": checkpointing})
        self.runtime = Runtime.start(section.parallelism, torch.device("cpu"), section.timeout)
        padding = {"activate": True, "mode": "earth", "pad_lat": PADS_LAT, "pad_lon": PADS_LON}
        config = wxformer.Config.model_validate(
            {"dim": (32, 64, 128, 256), "depth": (1, 1, 2, 1), "dim_head": 16, "padding_conf": padding}
        )
        with torch.device("meta"):
            model = wxformer.build(
                config, in_channels=CHANNELS, out_channels=CHANNELS, frames=1, height=HEIGHT, width=width
            )
        self.model = materialise(parallelise(model, section, self.runtime), self.runtime, seed=0)
        self.parameters = dict(get_raw_model(self.model).named_parameters())
        self.optimizer = adamw.build(adamw.Config(), self.parameters)
        rows, _, _ = own_part(self.model, HEIGHT)
        generator = torch.Generator().manual_seed(self.runtime.dp_rank)
        shape = (SAMPLES // layout.dp, CHANNELS, 1, HEIGHT, width)
        self.x, self.target = (torch.randn(shape, generator=generator)[..., rows, :].clone() for _ in range(2))
        self.points = shape[0] * CHANNELS * HEIGHT * width
        self.skip = torch.zeros(())

    def loss(self) -> Any:
        return ((self.model(self.x) - self.target) ** 2).sum() * (self.runtime.gradient_scale / self.points)

    def update(self) -> None:
        from credit_like.parallel.collectives import clip_grad_norm_

        clip_grad_norm_(self.parameters.values(), 1.0)
        self.optimizer.step(1e-3, self.skip)

    def step(self) -> None:
        self.loss().backward()
        self.update()
        for parameter in self.parameters.values():
            parameter.grad = None

    def memory(self) -> dict[str, int]:
        """Return the bytes that this rank stores, by kind, and the largest memory of activations in forward."""
        from credit_like.parallel.shards import local
        from credit_like.plan.meter import ACTIVATIONS, GRADIENTS, Meter, total_bytes

        class Watch(Meter):
            """Records the maximum of every part as well."""

            def __init__(self) -> None:
                super().__init__()
                self.most: Counter[str] = Counter()

            def _add(self, size: int, part: str) -> None:
                super()._add(size, part)
                self.most[part] = max(self.most[part], self.by_part[part])

        states = [t for state in self.optimizer.state().values() for t in state.values()]
        meter = Watch()
        meter.ignore(
            [*(local(p) for p in self.parameters.values()), *states, *self.model.buffers(), self.x, self.target]
        )
        hooks = [
            p.register_post_accumulate_grad_hook(lambda p: meter.tag([p.grad], GRADIENTS))
            for p in self.parameters.values()
        ]
        with meter:
            loss = self.loss()
            activations = meter.most[ACTIVATIONS]  # backward frees more of them than it allocates
            loss.backward()
        gradients = total_bytes(p.grad for p in self.parameters.values() if p.grad is not None)
        self.update()
        for hook in hooks:
            hook.remove()
        for parameter in self.parameters.values():
            parameter.grad = None
        return {
            "parameters": total_bytes(self.parameters.values()),
            "gradients": gradients,
            "optimizer": total_bytes(t for t in states if t.ndim),
            "activations": activations,
            "peak": total_bytes([*self.parameters.values(), *states]) + meter.peak,
        }


# ---- all ranks of a layout -------------------------------------------------------------------------------------------


class Team:
    """The processes of one layout."""

    def __init__(self, layout: Layout, threads: int, width: int, checkpointing: bool = False) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        options = {"layout": vars(layout), "threads": threads, "width": width, "checkpointing": checkpointing}
        common = {
            "WORLD_SIZE": layout.world,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": threads,
        }
        self.ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": str(ROOT), "RANK": str(rank), "LOCAL_RANK": str(rank)}
                | {key: str(value) for key, value in common.items()},
            )
            for rank in range(layout.world)
        ]
        self._answers()

    def ask(self, what: str) -> list[dict[str, Any]]:
        """Return each rank's answer."""
        for process in self.ranks:
            assert process.stdin is not None
            process.stdin.write(what + "\n")
            process.stdin.flush()
        return self._answers()

    def step(self) -> float:
        """Return the seconds until the slowest rank has taken a step."""
        return max(float(answer["wall"]) for answer in self.ask("step"))

    def _answers(self) -> list[dict[str, Any]]:
        answers = []
        for process in self.ranks:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                self.close()
                raise RuntimeError(f"rank {len(answers)} ended with {process.wait()}")
            answers.append(json.loads(line))
        return answers

    def close(self) -> None:
        for process in self.ranks:
            assert process.stdin is not None
            process.stdin.close()
        for process in self.ranks:
            process.wait()


def measure(layout: Layout, options: argparse.Namespace) -> dict[str, float]:
    """Return the memory of the largest rank, and the median step."""
    print(f"{layout.name} …", file=sys.stderr, flush=True)
    team = Team(layout, 1, options.width)
    for _ in range(2):  # DDP rebuilds its buckets in the second; they are no activations
        team.step()
    memory = team.ask("memory")
    times = [team.step() for _ in range(options.steps)]
    team.close()
    return {key: max(m[key] for m in memory) for key in memory[0]} | {"time": statistics.median(times)}


def efficiency(layout: Layout, options: argparse.Namespace) -> float:
    """Return the step of one rank with two threads over that of two ranks with one, as median over neighbouring steps."""
    print(f"{layout.name} compared with two threads …", file=sys.stderr, flush=True)
    two, one = Team(layout, 1, options.width), Team(SERIAL, 2, options.width)
    for _ in range(2):  # DDP arranges its buckets anew in the second step
        two.step()
        one.step()
    ratios = []
    for turn in range(options.steps):
        first, second = (two, one) if turn % 2 else (one, two)
        times = {id(first): first.step(), id(second): second.step()}
        ratios.append(times[id(one)] / times[id(two)])
    two.close()
    one.close()
    return statistics.median(ratios)


# ---- the report ------------------------------------------------------------------------------------------------------


def report(found: dict[Layout, dict[str, float]], gains: dict[Layout, float], options: argparse.Namespace) -> str:
    """Return the report in Markdown."""
    serial, mib = found[SERIAL], 2**20
    lines = [
        "# One training problem in every layout",
        "",
        f"{dt.date.today()}, {platform.machine()}, {os.cpu_count()} cores, load {options.load:.1f} at the start"
        + (" (busy: times are unreliable)" if options.load > 0.5 else "")
        + f". WXFormer of {serial['parameters'] / 4e6:.1f} M parameters, {HEIGHT} × {options.width} points, "
        f"{CHANNELS} channels, {SAMPLES} samples per optimiser step in all layouts, fp32, AdamW; gloo, ranks of one "
        f"thread; medians of {options.steps} steps; MiB of the largest rank.",
        "",
        "| layout | ranks | parameters | gradients | optimiser state | activations | peak | step (s) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for layout, row in found.items():
        cells = [
            f"{row[key] / mib:.1f} ({row[key] / serial[key]:.3f})"
            for key in ("parameters", "gradients", "optimizer", "activations", "peak")
        ]
        lines.append(f"| {layout.name} | {layout.world} | {' | '.join(cells)} | {row['time']:.2f} |")
    lines += ["", "Numbers in parentheses are fractions of the memory of one rank. Targets:", ""]
    for layout, row in found.items():
        lines += [f"- {text}" for text in verdicts(layout, row, serial)]
    for layout, gain in gains.items():
        kind = "domain" if layout.domain > 1 else "tensor" if layout.tensor > 1 else "data"
        target = TARGETS.get(kind)
        verdict = "" if target is None else f", at least {target}: {'met' if gain >= target else 'MISSED'}"
        verdict = f"{verdict} (busy: unreliable)" if options.load > 0.5 and verdict else verdict
        lines.append(f"- {layout.name}: two ranks of one thread against one rank of two threads {gain:.2f}{verdict}")
    return "\n".join(lines) + "\n"


def verdicts(layout: Layout, row: dict[str, float], serial: dict[str, float]) -> list[str]:
    """Compare memory with its bounds: 1/n + 15 % of activations under domain, 1/n + 10 % of the state under FSDP2."""
    found = []
    if layout.world > 1 and layout.world == layout.domain:
        share, bound = row["activations"] / serial["activations"], 1 / layout.domain + 0.15
        verdict = "met" if share <= bound else "MISSED"
        found.append(f"{layout.name}: activations {share:.3f} of one rank's, at most {bound:.3f}: {verdict}")
    if layout.data == "fsdp2" and layout.tensor == 1 and layout.world > 1:
        share = max(row[key] / serial[key] for key in ("parameters", "gradients", "optimizer"))
        bound = 1 / layout.world + 0.10
        verdict = "met" if share <= bound else "MISSED"
        found.append(f"{layout.name}: stored state {share:.3f} of one rank's, at most {bound:.3f}: {verdict}")
    return found


def main() -> None:
    """Run, print, and write to `--output`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a narrow image, two steps, no more than two ranks")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--layouts", nargs="*", default=None, help="only those whose name contains one of these")
    parser.add_argument("--no-pairs", action="store_true", help="memory and times only")
    parser.add_argument("--output", type=Path, help="also write the report to this file")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main(json.loads(options.rank))
        return
    options.load = os.getloadavg()[0]
    options.width = QUICK_WIDTH if options.quick else WIDTH
    options.steps = min(options.steps, 2) if options.quick else options.steps
    chosen = [
        layout
        for layout in LAYOUTS
        if layout == SERIAL
        or (
            (options.layouts is None or any(part in layout.name for part in options.layouts))
            and not (options.quick and layout.world > 2)
        )
    ]
    found = {layout: measure(layout, options) for layout in chosen}
    gains = {layout: efficiency(layout, options) for layout in PAIRED if layout in chosen and not options.no_pairs}
    text = report(found, gains, options)
    print(text)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text)


if __name__ == "__main__":
    main()
