"""Compare a training step of K members with one of the deterministic model, and ensembles with single forecasts.

    python benchmarks/ensemble.py [--members 4] [--steps 9] [--ranks 1] [--noise TYPE] [--quick]
    python benchmarks/ensemble.py --skill demo [--seeds 1 2 3] [--recipes NAME ...] [--work FOLDER] [--small] [--list]

Each command replaces its own section of benchmarks/results/ensemble.md (`--output`).

**Cost.** Both trainings are the trainer's own, with the same WXFormer, grid and samples; one has noise and the loss `crps`, the
other `mse`. They take steps alternately (A B A B …) in the same processes, and the figure is the median over neighbouring steps.
Activations are those kept at the end of forward, counted exactly, allocation by allocation. With `--ranks e` the members are
shared by e processes of one thread over gloo; each member then costs what it costs on one rank, and the exchange. Seconds
have no meaning on a busy machine; processor seconds depend little on the load, and activations not at all.

**Skill.** A deterministic model is trained, given noise and trained on at a cost of at most 5 % of its own training; then
members and single forecasts of the test period are scored. gcm-t21 and storm96 need their data in CREDIT_LIKE_DATA. Experiments
are files and overrides that `--list` prints. What is in the work folder is not computed again.
"""

from __future__ import annotations

import argparse
import re
import shlex
import tempfile
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import recipes
from numpy.typing import NDArray
from recipes import Recipe

OUTPUT = Path(__file__).parent / "results" / "ensemble.md"
TARGET_TIME, TARGET_ACTIVATIONS = 1.03, 1.0
"""Per member, relative to the deterministic step."""
HEIGHT, QUICK_HEIGHT = 64, 32


def settings(height: int, members: int, ranks: int, folder: str, noise: str = "decoder") -> list[str]:
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
    return [*found, *ensemble, f"model.noise={{type: {noise}, channels: 16}}", "loss={type: crps}"]


class Training:
    """Steps of the trainer on one sample of random numbers."""

    def __init__(self, height: int, members: int, ranks: int, folder: str, noise: str = "decoder") -> None:
        import torch

        from credit_like import build
        from credit_like.data.store import open_store
        from credit_like.parallel.runtime import Runtime
        from credit_like.plan import simulate
        from credit_like.schema.load import load_experiment
        from credit_like.variables import Variables

        demo = Path(__file__).parents[1] / "config" / "demo.yml"
        experiment = load_experiment(demo, settings(height, members, ranks, folder, noise))
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

    def step(self) -> tuple[float, float]:
        """Take a step; return its seconds and its processor seconds."""
        self.steps += 1
        wall, processor = time.perf_counter(), time.process_time()
        self.trainer.train_step([self.sample], 1, 1e-4, self.steps)
        return time.perf_counter() - wall, time.process_time() - processor

    def activations(self) -> int:
        """Return the bytes of activations that are kept at the end of forward, before backward frees them."""
        from credit_like.plan.meter import ACTIVATIONS, Meter
        from credit_like.plan.simulate import measured_step

        meter, found = Meter(), []
        hook = self.trainer.loss.register_forward_hook(lambda *_: found.append(meter.by_part[ACTIVATIONS]))
        measured_step(self.trainer, iter([self.sample]), 1, meter)
        hook.remove()
        return found[0]


def measure(members: int, steps: int, ranks: int, height: int, folder: str, noise: str) -> dict[str, Any]:
    """Return activations, and both kinds of seconds of alternating steps, deterministic first."""
    import torch

    torch.set_num_threads(1)
    both = [Training(height, 1, 1, folder), Training(height, members, ranks, folder, noise)]
    for training in both:
        for _ in range(2):  # DDP allocates its buckets anew in the second step
            training.step()
    activations = [training.activations() for training in both]
    return {"activations": activations, "seconds": [[training.step() for training in both] for _ in range(steps)]}


def table(found: list[dict[str, Any]], members: int, height: int) -> str:
    """Return the measurements of all ranks as a Markdown table; times are those of the slowest rank of each step."""
    ranks = len(found)
    share = members // ranks
    one, several = (max(rank["activations"][j] for rank in found) for j in (0, 1))
    lines = [
        f"{members} members on {ranks} rank{'s' * (ranks > 1)}, {height} × {2 * height} points, "
        f"{len(found[0]['seconds'])} pairs of steps:",
        "",
        "| step of a rank | deterministic | members | per member of the rank | target |",
        "|---|---|---|---|---|",
    ]
    for clock, what in enumerate(("seconds", "processor seconds")):
        steps = np.max([rank["seconds"] for rank in found], 0)[..., clock]
        of_one, of_several = np.median(steps, 0)
        ratio = np.median(steps[:, 1] / steps[:, 0]) / share
        lines.append(f"| {what} | {of_one:.3f} | {of_several:.3f} | {ratio:.3f} | {TARGET_TIME} |")
    lines.append(
        f"| activations, MB | {one / 1e6:.1f} | {several / 1e6:.1f} | {several / one / share:.3f} | {TARGET_ACTIVATIONS} |"
    )
    return "\n".join(lines)


# --- skill ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """What is compared on one data set."""

    single: Recipe
    """Deterministic forecasts of the model that the ensembles start from."""
    ensembles: tuple[Recipe, ...]
    leads: tuple[int, ...]
    steps: int
    """Steps of the deterministic training."""
    circles: bool = True
    """Whether rows are whole circles of latitude, whose waves can be compared with the truth's."""


def made_of(single: Recipe, ensembles: Sequence[Recipe], leads: tuple[int, ...], steps: int, *sets: str) -> Case:
    """Give the ensembles their members and scores, and all recipes the settings `sets`."""
    scores = (
        f"inference.ensemble.members={recipes.MEMBERS}",
        f"inference.batch_size={recipes.MEMBERS}",
        recipes.METRICS,
    )
    every = [replace(each, sets=(*each.sets, *scores, *sets)) for each in ensembles]
    single = replace(single, sets=(*single.sets, "evaluation.metrics=[rmse, mae]", *sets))
    return Case(single, tuple(every), leads, steps)


def perturbed(size: float, names: str) -> str:
    """Return the perturbations of initial states by so many standard deviations of the change per step."""
    return f"inference.ensemble={{from: perturbations, amplitude: {{{', '.join(f'{n}: {size:g}' for n in names.split())}}}}}"


def of_demo(name: str, what: str, rate: float, precipitation: int, *sets: str) -> Recipe:
    """Noise in the demonstration's model; nothing but its weights is trained."""
    group = f"{{match: '*noise.*', learning_rate: {rate}, weight_decay: 0.0}}"
    return recipes.noisy(
        name,
        32,
        f"{what}, 5 %: 32 batches of a forecast of four steps",
        "data.forecast_len=4",
        "model.noise={type: decoder, channels: 8, correlation: 0.8}",
        f"trainer.optimizer={{type: adamw, learning_rate: 3.0e-4, weight_decay: 0.01, groups: [{group}]}}",
        "trainer.ema_decay=0.9",
        "trainer.global_batch_size=1",
        "trainer.micro_batch_size=1",
        "start_from.freeze=[stages.*, up*, head.*]",
        f"loss={{type: crps, alpha: 1.0, variable_weights: {{precipitation: {precipitation}, column_water: 2}}}}",
        *sets,
    )


def damping(variables: str, by: float) -> str:
    """Return a diffusion of winds and of these variables."""
    return f"physics=[{{type: spherical-filter, winds: [u, v], variables: [{variables}], highest: 21, damping: {by}, order: 2}}]"


DEMO = made_of(
    recipes.SINGLE,
    [
        recipes.perturbed(1.0),
        of_demo("noise-alone", "noise", 4.4e-2, 4),
        of_demo("noise-damped", "noise, and a diffusion", 4.2e-2, 4, damping("height, column_water", 0.035)),
    ],
    (24, 72, 120),
    recipes.BUDGET,
    "inference.init=[2000-09-27, 2000-10-31T18, 144h]",
)

GCM_ENSEMBLE, STORM = (recipes.ROOT / "config" / f"{name}.yml" for name in ("gcm-t21-ensemble", "storm96"))
# A third of the epochs of config/gcm-t21.yml.
GCM_TRAINED = Recipe("gcm-short", "the deterministic model", ("trainer.epochs=6",), file=recipes.GCM)
GCM = made_of(
    replace(GCM_TRAINED, name="gcm-single", forecasts_of=GCM_TRAINED),
    [
        replace(
            GCM_TRAINED,
            name="gcm-perturbed-1",
            what="initial states perturbed by 1 of the change per step",
            sets=(
                *GCM_TRAINED.sets,
                perturbed(1.0, "u v temperature specific_humidity surface_pressure geopotential_500"),
            ),
            forecasts_of=GCM_TRAINED,
        ),
        Recipe(
            "gcm-noise",
            "config/gcm-t21-ensemble.yml, 5 %: 29 batches of a forecast of four steps",
            ("trainer.batches_per_epoch=29",),
            start=GCM_TRAINED,
            file=GCM_ENSEMBLE,
        ),
    ],
    (24, 72, 120),
    582,
    "inference.init=[2000-08-11, 2000-09-30, 144h]",
    "inference.lead=120h",
)

STORM_TRAINED = Recipe("storm96", "the deterministic model", file=STORM)
STORM96 = replace(
    made_of(
        replace(STORM_TRAINED, name="storm96-single", forecasts_of=STORM_TRAINED),
        [
            replace(
                STORM_TRAINED,
                name="storm96-perturbed-1",
                what="initial states perturbed by 1 of the change per step",
                sets=(perturbed(1.0, "P T U V U500 V500"),),
                forecasts_of=STORM_TRAINED,
            ),
            Recipe(
                "storm96-noise",
                "weights of noise at all but the finest resolution, 5 %: 7 batches of a forecast of two steps",
                (
                    "data.forecast_len=2",
                    "model.noise={type: decoder, channels: 8, correlation: 0.8, scales: [1, 1, 1, 0]}",
                    "loss={type: crps, alpha: 1.0}",
                    "trainer.members=2",
                    "trainer.global_batch_size=1",
                    "trainer.micro_batch_size=1",
                    "trainer.epochs=1",
                    "trainer.batches_per_epoch=7",
                    "trainer.valid_batches=1",
                    "trainer.ema_decay=0.8",
                    "trainer.optimizer={learning_rate: 0.15, weight_decay: 0}",
                    "trainer.scheduler={warmup_steps: 1}",
                    "start_from.freeze=[stages.*, up*, head.*]",
                    "inference.ensemble.from=model",
                ),
                start=STORM_TRAINED,
                file=STORM,
            ),
        ],
        (12, 24),
        144,
        "inference.init=[1996-01-18, 1996-01-19T18, 6h]",
        "inference.lead=24h",
    ),
    circles=False,
)
CASES = {"demo": DEMO, "gcm-t21": GCM, "storm96": STORM96}


def skill(bench: recipes.Bench, case: Case) -> str:
    """Return a Markdown table of the recipes that have been run: means over variables and seeds, and their range."""
    rows = []
    for recipe in case.ensembles:
        seeds = bench.found(case.single, recipe)
        energies = [ratio for seed in seeds if case.circles for ratio in _energies(bench, recipe, seed)]
        for lead in case.leads if seeds else ():
            found = [_skill_of(bench, case.single, recipe, seed, lead) for seed in seeds]
            columns = [np.concatenate(values) for values in zip(*found, strict=True)]
            ratio, crps = columns[:2]
            met = recipes.verdict(bool(((ratio >= 0.9) & (ratio <= 1.1)).all() and (crps < 1).all()))
            cells = [_range(x) for x in columns]
            cells.append(_range(np.array(energies)) if energies and lead == case.leads[-1] else "")
            rows.append([recipe.what, ", ".join(map(str, seeds)), f"{lead} h", *cells, met])
    heads = ["ensemble", "seeds", "lead", "spread / skill", "fair CRPS / MAE", "RMSE of the mean / RMSE"]
    heads += ["the same of infinitely many members", "energy of waves / the truth's", "target"]
    return "\n".join(recipes.table(heads, rows))


def _range(x: NDArray[np.floating]) -> str:
    return f"{x.mean():.2f} ({x.min():.2f}–{x.max():.2f})"


def _energies(bench: recipes.Bench, recipe: Recipe, seed: int) -> list[float]:
    """Return for each channel the energy of all zonal waves of members at the last lead relative to the truth's."""
    found = recipes.energies(bench, recipe, seed).values()
    return [float(members[1:].sum() / truth[1:].sum()) for members, truth in found]


def _skill_of(bench: recipes.Bench, single: Recipe, recipe: Recipe, seed: int, lead: int) -> list[NDArray[np.floating]]:
    """Return for each channel spread / skill, fair CRPS / MAE, and the RMSE of the mean relative to one forecast.

    The latter is also that of infinitely many members.
    """
    mae, rmse = (bench.rmse(single, seed, metric=metric) for metric in ("mae", "rmse"))
    ratio, crps, error, spread = (
        bench.rmse(recipe, seed, metric=metric) for metric in ("spread-skill", "fair-crps", "rmse", "spread")
    )
    of_all = (error**2 - spread**2 / recipes.MEMBERS) ** 0.5
    return [x[lead].dropna().to_numpy() for x in (ratio, crps / mae, error / rmse, of_all / rmse)]


def run_skill(options: argparse.Namespace) -> str:
    """Run what has not been run yet, and return the table."""
    bench, case = recipes.Bench(options.work, tuple(options.seeds), options.small), CASES[options.skill]
    for seed in options.seeds:
        for recipe in [case.single, *case.ensembles]:
            if options.recipes and recipe.name not in options.recipes:
                continue
            if options.list:
                print(*(shlex.join(bench.command(s, recipe, seed)) for s in ("train", "rollout", "evaluate")), sep="\n")
            else:
                bench.run(recipe, seed)
    return skill(bench, case)


# --- the page ---------------------------------------------------------------------------------------------------------------


def write_section(page: Path, title: str, text: str) -> None:
    """Replace the section of this title in the page, or add it at the end."""
    old = (
        page.read_text()
        if page.exists()
        else "# Ensembles\n\nMade by `python benchmarks/ensemble.py`, a section by each command.\n"
    )
    head, *sections = re.split(r"^## ", old, flags=re.MULTILINE)
    found = {section.partition("\n")[0]: section for section in sections}
    wrapped = [
        part
        for line in text.split("\n")
        for part in ([line] if line.startswith("|") else textwrap.wrap(line, 132) or [""])
    ]
    found[title] = "\n".join([title, "", *wrapped]) + "\n"
    page.write_text(
        "\n".join([head.rstrip("\n") + "\n", *(f"## {found[name].rstrip(chr(10))}\n" for name in sorted(found))])
    )


def cost(options: argparse.Namespace) -> str:
    """Measure, and return the table."""
    from credit_like.parallel.processes import run_ranks

    height = QUICK_HEIGHT if options.quick else HEIGHT
    with tempfile.TemporaryDirectory(prefix="credit-like-ensemble-") as folder:
        work = partial(measure, options.members, options.steps, options.ranks, height, folder, options.noise)
        answers = run_ranks(options.ranks, work, 3600.0)
    failed = [answer.value for answer in answers if answer.state != "done"]
    if failed:
        raise SystemExit(failed[0])
    return table([answer.value for answer in answers], options.members, height)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--ranks", type=int, default=1, help="processes that share the members")
    parser.add_argument("--noise", choices=["decoder", "conditional-norm"], default="decoder")
    parser.add_argument("--quick", action="store_true", help="a grid of a quarter of the points")
    parser.add_argument("--skill", choices=CASES, help="score ensembles on these data instead of measuring steps")
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3])
    parser.add_argument("--recipes", nargs="*", help="only these experiments")
    parser.add_argument(
        "--work", type=Path, default=Path("runs/recipes"), help="folder of the runs, that of recipes.py"
    )
    parser.add_argument("--small", action="store_true", help="a few steps of everything")
    parser.add_argument("--list", action="store_true", help="only print the commands")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="the page whose section is replaced")
    options = parser.parse_args()
    if options.members < 2 or options.members % options.ranks:
        parser.error(
            f"expected --ranks that divides --members of at least 2, got {options.ranks} and {options.members}"
        )
    text = run_skill(options) if options.skill else cost(options)
    if options.list:
        return
    print(text)
    of_cost = f"Cost: {options.noise}, {options.ranks} rank{'s' * (options.ranks > 1)}"
    write_section(options.output, f"Skill: {options.skill}" if options.skill else of_cost, text)


if __name__ == "__main__":
    main()
