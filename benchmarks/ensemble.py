"""Compare a training step of K members with one of the deterministic model, and ensembles with single forecasts.

    python benchmarks/ensemble.py [--members 4] [--steps 9] [--ranks 1] [--noise TYPE] [--quick]
    python benchmarks/ensemble.py --skill [--seeds 1 2 3] [--recipes NAME ...] [--work FOLDER] [--small] [--list]

Each command replaces its own section of benchmarks/results/ensemble.md (`--output`).

**Cost.**
Both trainings are the trainer's own, with the same WXFormer, grid and samples; one has noise and the loss `crps`, the other
`mse`. They take steps alternately (A B A B …) in the same processes, and the figure is the median over neighbouring steps.
Activations are those kept at the end of forward, counted exactly, allocation by allocation. With `--ranks e` the members are
shared by e processes of one thread over gloo; each member then costs what it costs on one rank, and the exchange. Times have
no meaning on a busy machine; activations do not depend on the load.

**Skill.** The deterministic model of the demonstration is given noise and trained on, at a cost of at most a tenth of its own
training; then members and single forecasts of the test period are scored. Experiments are those of `recipes.py`: files and overrides
that `--list` prints. What is in the work folder is not computed again.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

TARGET_TIME, TARGET_ACTIVATIONS = 1.03, 1.0
"""Per member, relative to the deterministic step."""
HEIGHT, QUICK_HEIGHT = 64, 32


def settings(height: int, members: int, ranks: int, folder: str) -> list[str]:
    """Return the overrides of `config/demo.yml` for a training of so many members; 1 is the deterministic one."""
    found = [
        f"data.source.latitudes={height}",
        f"data.source.longitudes={2 * height}",
        "model={type: wxformer, dim: [16, 32, 64, 128], depth: [1, 1, 2, 1], dim_head: 8}",
        "trainer.device=cpu",
        "trainer.global_batch_size=1",
        "trainer.micro_batch_size=1",
        f"save_loc={folder}",
    ]
    if members == 1:
        # Every process takes it by itself, so that both trainings have as many processes.
        return found
    ensemble = [f"trainer.members={members}", f"trainer.parallelism={{data: none, ensemble: {ranks}}}"]
    return [*found, *ensemble, "model.noise={channels: 16}", "loss={type: crps}"]


class Training:
    """Steps of the trainer on one sample of random numbers."""

    def __init__(self, height: int, members: int, ranks: int, folder: str) -> None:
        import torch

        from credit_like import build
        from credit_like.data.store import open_store
        from credit_like.parallel.runtime import Runtime
        from credit_like.plan import simulate
        from credit_like.schema.load import load_experiment
        from credit_like.variables import Variables

        demo = Path(__file__).parents[1] / "config" / "demo.yml"
        experiment = load_experiment(demo, settings(height, members, ranks, folder))
        variables = Variables(experiment.data)
        grid = open_store(experiment.data, variables).grid
        runtime = Runtime() if members == 1 else Runtime.start(experiment.trainer.parallelism, torch.device("cpu"))
        store: Any = simulate._NoData(grid, variables)
        model = build.parallel_model(experiment, variables, store, runtime)
        self.trainer = simulate._trainer(model, experiment, runtime, variables, store, grid)
        self.sample = simulate.sample_of(experiment, variables, grid, slice(None))
        generator = torch.Generator().manual_seed(0)
        for fields in (self.sample.prognostic, self.sample.forcing, self.sample.target):
            fields.normal_(generator=generator)
        self.steps = 0

    def step(self) -> float:
        """Take a step; return its seconds."""
        self.steps += 1
        begin = time.perf_counter()
        self.trainer.train_step([self.sample], 1, 1e-4, self.steps)
        return time.perf_counter() - begin

    def activations(self) -> int:
        """Return the bytes of activations that are kept at the end of forward, before backward frees them."""
        from credit_like.plan.meter import ACTIVATIONS, Meter
        from credit_like.plan.simulate import measured_step

        meter, found = Meter(), []
        hook = self.trainer.loss.register_forward_hook(lambda *_: found.append(meter.by_part[ACTIVATIONS]))
        measured_step(self.trainer, iter([self.sample]), 1, meter)
        hook.remove()
        return found[0]


def measure(members: int, steps: int, ranks: int, height: int, folder: str) -> dict[str, Any]:
    """Return activations and the seconds of alternating steps, deterministic first."""
    import torch

    torch.set_num_threads(1)
    both = [Training(height, 1, 1, folder), Training(height, members, ranks, folder)]
    for training in both:
        for _ in range(2):  # DDP allocates its buckets anew in the second step
            training.step()
    activations = [training.activations() for training in both]
    return {"activations": activations, "seconds": [[training.step() for training in both] for _ in range(steps)]}


def table(found: list[dict[str, Any]], members: int, height: int) -> str:
    """Return the measurements of all ranks as a Markdown table; times are those of the slowest rank of each step."""
    ranks = len(found)
    share = members // ranks
    pairs = [[max(rank["seconds"][i][j] for rank in found) for j in (0, 1)] for i in range(len(found[0]["seconds"]))]
    ratio = statistics.median(several / one for one, several in pairs)
    one, several = (max(rank["activations"][j] for rank in found) for j in (0, 1))
    seconds = [statistics.median(pair[j] for pair in pairs) for j in (0, 1)]
    lines = [
        f"{members} members on {ranks} rank{'s' * (ranks > 1)}, {height} × {2 * height} points, {len(pairs)} pairs of steps:",
        "",
        "| step of a rank | deterministic | members | per member of the rank | target |",
        "|---|---|---|---|---|",
        f"| seconds | {seconds[0]:.3f} | {seconds[1]:.3f} | {ratio / share:.3f} | {TARGET_TIME} |",
        f"| activations, MB | {one / 1e6:.1f} | {several / 1e6:.1f} | {several / one / share:.3f} | {TARGET_ACTIVATIONS} |",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--ranks", type=int, default=1, help="processes that share the members")
    parser.add_argument("--quick", action="store_true", help="a grid of a quarter of the points")
    parser.add_argument("--output", type=Path, help="write the table to this file")
    options = parser.parse_args()
    if options.members < 2 or options.members % options.ranks:
        parser.error(
            f"expected --ranks that divides --members of at least 2, got {options.ranks} and {options.members}"
        )
    from credit_like.parallel.processes import run_ranks

    height = QUICK_HEIGHT if options.quick else HEIGHT
    with tempfile.TemporaryDirectory(prefix="credit-like-ensemble-") as folder:
        work = partial(measure, options.members, options.steps, options.ranks, height, folder)
        answers = run_ranks(options.ranks, work, 3600.0)
    failed = [answer.value for answer in answers if answer.state != "done"]
    if failed:
        raise SystemExit(failed[0])
    text = table([answer.value for answer in answers], options.members, height)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
