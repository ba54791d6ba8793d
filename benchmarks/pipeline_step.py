"""Compare a training step of an experiment with the same pipeline around NCAR CREDIT's module in place of ours.

    python benchmarks/pipeline_step.py --credit PYTHON [--stub FOLDER] [--config FILE] [--pairs N] [--profile]

Both sides run in one process with one thread, from the same batches, and take steps in turn; a ratio is the median over
pairs of neighbouring steps. CREDIT's module is that of the environment of PYTHON; its other packages are found there where
ours lacks them. Without `--credit` our step alone is timed. With `--profile` its operators are listed instead.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from credit_like import build
from credit_like.checkpoint.credit import _SAME
from credit_like.parallel.runtime import Runtime
from credit_like.schema.experiment import Experiment
from credit_like.schema.load import load_experiment
from credit_like.training.trainer import Trainer
from credit_like.variables import Variables

ROOT = Path(__file__).parents[1]
RATE = 1e-4


def credit_module(experiment: Experiment, height: int, width: int) -> nn.Module:
    """Return CREDIT's WXFormer of the same size, with the channels of the experiment."""
    from credit.models.wxformer.crossformer import CrossFormer

    variables = Variables(experiment.data)
    model: dict[str, Any] = experiment.model.model_dump(mode="json")
    prognostic = sum(len(variable) for variable in variables.role("prognostic"))
    arguments = {key: model[key] for key in (*_SAME, "global_window_size", "local_window_size", "padding_conf")}
    arguments |= {
        "image_height": height, "image_width": width, "frames": 1, "channels": prognostic, "levels": 1, "surface_channels": 0,
        "input_only_channels": variables.in_channels - prognostic,
        "output_only_channels": variables.out_channels - prognostic,
    }  # fmt: skip
    torch.manual_seed(0)
    return CrossFormer(**arguments)


def trainer_of(experiment: Experiment, runtime: Runtime, theirs: bool) -> Trainer:
    """Return a trainer, with CREDIT's module in place of ours or not."""
    context = build.build_context(experiment, runtime)
    if theirs:
        grid = context.store.grid
        context.stepper.model = credit_module(experiment, grid.height, grid.width)
    return build.build_trainer(context)


class Side:
    """Takes one training step after the other."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.step, self.epoch = trainer, 0, 0
        self.batches = trainer.train_loader.batches(0, 0)

    def __call__(self) -> tuple[float, float]:
        """Return the seconds of wall time and of this process's time that a step takes, loading included."""
        self.step += 1
        wall, own = time.perf_counter(), time.process_time()
        sample = next(self.batches, None)
        if sample is None:
            self.epoch += 1
            self.batches = self.trainer.train_loader.batches(self.epoch, 0)
            sample = next(self.batches)
        self.trainer.train_step([sample], 1, RATE, self.step).ready()
        return time.perf_counter() - wall, time.process_time() - own


def profile(side: Side, steps: int) -> str:
    """Return the operators that take most of this process's time, and a sum of what is outside the model."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recording

    with recording(activities=[ProfilerActivity.CPU]) as found:
        for _ in range(steps):
            side()
    return str(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=45, max_name_column_width=60))


def main() -> None:
    """Run, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--credit", help="python of an environment with miles-credit")
    parser.add_argument("--stub", help="folder put before its packages")
    parser.add_argument("--config", type=Path, default=ROOT / "config" / "gcm-t21.yml")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "pipeline-step.md")
    options = parser.parse_args()
    if options.credit:
        program = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
        found = subprocess.run(
            [options.credit, "-c", program], check=True, capture_output=True, text=True
        ).stdout.strip()
        sys.path += [path for path in (options.stub, found) if path]  # after ours, so that both sides have one torch
    with tempfile.TemporaryDirectory() as folder:
        changes = [f"save_loc={folder}/run", "trainer.device=cpu", "trainer.threads=1", "trainer.loader.num_workers=0"]
        experiment = load_experiment(options.config, changes)
        with build.start(experiment) as runtime:
            ours = Side(trainer_of(experiment, runtime, theirs=False))
            if options.profile:
                for _ in range(3):
                    ours()
                print(profile(ours, 10))
                return
            if not options.credit:
                own = [ours() for _ in range(options.pairs)][2:]
                wall, processor = (statistics.median(times) for times in zip(*own, strict=True))
                print(f"our step takes {wall:.3f} s, {processor:.3f} s of processor time; for a ratio give --credit")
                return
            theirs = Side(trainer_of(experiment, runtime, theirs=True))
            for side in (ours, theirs, ours, theirs):
                side()  # what the first steps do once
            pairs = [(ours(), theirs()) for _ in range(options.pairs)]
    rows = []
    for number, name in enumerate(("wall", "processor")):
        own, other = ([pair[side][number] for pair in pairs] for side in (0, 1))
        ratio = statistics.median(a / b for a, b in zip(own, other, strict=True))
        rows.append(f"| {name} | {statistics.median(own):.3f} | {statistics.median(other):.3f} | {ratio:.2f} |")
    lines = [
        f"# A training step of {options.config.name} with CREDIT's module in place of ours",
        "",
        f"{dt.date.today()}, one thread of {os.cpu_count()} cores, torch {torch.__version__}, {options.pairs} pairs of steps "
        f"in turn, loading included; load of the machine at the end {os.getloadavg()[0]:.1f}.",
        "",
        "| time | ours s | CREDIT's module s | ratio (median over pairs) |",
        "|---|---|---|---|",
        *rows,
    ]
    print("\n".join(lines))
    options.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
