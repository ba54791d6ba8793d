"""Compare a training step of K members with one of the deterministic model, and ensembles with single forecasts.

    python benchmarks/ensemble.py [--members 4] [--steps 9] [--ranks 1] [--noise TYPE] [--quick]
    python benchmarks/ensemble.py --skill demo [--seeds 1 2 3] [--recipes NAME ...] [--work FOLDER] [--small] [--list]

Each command replaces its own section of benchmarks/results/ensemble.md (`--output`).

**Cost.** The trainings are the trainer's own, with the same WXFormer, grid and samples; one has noise and the loss `crps`, the
other `mse`. They take steps alternately (A B A B …) in the same processes, and the figure is the median over rounds.
Activations are those kept at the end of forward, counted exactly, allocation by allocation. With `--ranks e` the members are
shared by e processes of one thread over gloo. The deterministic training then has a sample of its own on each of these
ranks and reduces the same gradients; a third training has noise in its model too (one member). The exchange of members is
also measured alone, with the fields of the loss, in the same rounds. Seconds have no meaning on a busy machine; processor
seconds depend little on the load, and activations not at all.

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
TARGET_TIME, TARGET_ACTIVATIONS, TARGET_ON_RANKS = 1.03, 1.0, 1.0
"""Per member, relative to the deterministic step; with members on ranks, to the step of one member and the exchange."""
HEIGHT, QUICK_HEIGHT = 64, 32


DETERMINISTIC, MEMBER, MEMBERS = "deterministic", "one member", "members"
"""Trainings: a sample of each rank on `mse`, the same with noise in the model, and the members of one sample on `crps`."""


def settings(kind: str, height: int, members: int, ranks: int, folder: str, noise: str = "decoder") -> list[str]:
    """Return the overrides of `config/demo.yml` for a training, which reduces its gradients over all ranks."""
    found = [
        f"data.source.latitudes={height}",
        f"data.source.longitudes={2 * height}",
        "model={type: wxformer, dim: [16, 32, 64, 128], depth: [1, 1, 2, 1], dim_head: 8}",
        "trainer.device=cpu",
        f"trainer.global_batch_size={1 if kind == MEMBERS else ranks}",
        "trainer.micro_batch_size=1",
        f"save_loc={folder}",
    ]
    if kind != DETERMINISTIC:
        found.append(f"model.noise={{type: {noise}, channels: 16}}")
    if kind == MEMBERS:
        shared = f"trainer.parallelism={{data: none, ensemble: {ranks}}}"
        return [*found, f"trainer.members={members}", shared, "loss={type: crps}"]
    return [*found, "trainer.parallelism={data: ddp}"] if ranks > 1 else found


class Training:
    """Steps of the trainer on one sample of random numbers."""

    def __init__(self, kind: str, height: int, members: int, ranks: int, folder: str, noise: str = "decoder") -> None:
        import torch

        from credit_like import build
        from credit_like.data.store import open_store
        from credit_like.parallel.runtime import Runtime
        from credit_like.plan import simulate
        from credit_like.schema.load import load_experiment
        from credit_like.variables import Variables

        demo = Path(__file__).parents[1] / "config" / "demo.yml"
        experiment = load_experiment(demo, settings(kind, height, members, ranks, folder, noise))
        variables = Variables(experiment.data)
        grid = open_store(experiment.data, variables).grid
        self.runtime = Runtime.start(experiment.trainer.parallelism, torch.device("cpu"))
        store: Any = simulate._NoData(grid, variables)
        model = build.parallel_model(experiment, variables, store, self.runtime)
        self.trainer = simulate._trainer(model, experiment, self.runtime, variables, store, grid)
        self.sample = simulate.sample_of(experiment, variables, grid, slice(None))
        generator = torch.Generator().manual_seed(0)
        for fields in (self.sample.prognostic, self.sample.forcing, self.sample.target):
            fields.normal_(generator=generator)
        share = members // ranks if kind == MEMBERS else 1
        self.errors = self.sample.target[:, None, :, 0].repeat_interleave(share, 1)
        """Fields of the shape that the members on this rank have in the loss."""
        self.steps = 0

    def step(self) -> tuple[float, float]:
        """Take a step; return its seconds and its processor seconds."""
        self.steps += 1
        wall, processor = time.perf_counter(), time.process_time()
        self.trainer.train_step([self.sample], 1, 1e-4, self.steps)
        return time.perf_counter() - wall, time.process_time() - processor

    def exchange(self) -> tuple[float, float]:
        """Receive the members of the other ranks and send them those of this one, as the loss does, but nothing else.

        Backward exchanges none. Return the seconds and processor seconds.
        """
        wall, processor = time.perf_counter(), time.process_time()
        for _ in self.runtime.from_other_members(self.errors):
            pass
        return time.perf_counter() - wall, time.process_time() - processor

    def activations(self) -> int:
        """Return the bytes of activations that are kept at the end of forward, before backward frees them."""
        from credit_like.plan.meter import ACTIVATIONS, Meter
        from credit_like.plan.simulate import measured_step

        meter, found = Meter(), []
        meter.ignore([self.sample.prognostic, self.sample.forcing, self.sample.target])
        hook = self.trainer.loss.register_forward_hook(lambda *_: found.append(meter.by_part[ACTIVATIONS]))
        measured_step(self.trainer, iter([self.sample]), 1, meter)
        hook.remove()
        return found[0]


def measure(members: int, steps: int, ranks: int, height: int, folder: str, noise: str) -> dict[str, Any]:
    """Return activations of each training, and both kinds of seconds of rounds: a step of each, and an exchange."""
    import torch

    torch.set_num_threads(1)
    kinds = (DETERMINISTIC, MEMBER, MEMBERS) if ranks > 1 else (DETERMINISTIC, MEMBERS)
    trainings = [Training(kind, height, members, ranks, folder, noise) for kind in kinds]
    for training in trainings:
        for _ in range(2):  # some memory is allocated in the second step
            training.step()
    activations = [training.activations() for training in trainings]
    rounds = []
    for _ in range(steps):
        trainings[0].runtime.barrier()
        rounds.append([*(training.step() for training in trainings), trainings[-1].exchange()])
    return {"activations": activations, "seconds": rounds}


def table(found: list[dict[str, Any]], members: int, height: int) -> str:
    """Return the measurements of all ranks as a Markdown table; times are those of the slowest rank of each step."""
    ranks, rounds = len(found), len(found[0]["seconds"])
    memory = np.max([rank["activations"] for rank in found], 0)
    of_each = np.max([rank["seconds"] for rank in found], 0)
    title = f"{members} members on {ranks} rank{'s' * (ranks > 1)}, {height} × {2 * height} points, {rounds} rounds of steps:"
    return "\n".join([title, "", *(_of_one_rank if ranks == 1 else _of_ranks)(of_each, memory, members // ranks)])


def _of_one_rank(seconds: NDArray[np.floating], memory: NDArray[np.integer], members: int) -> list[str]:
    rows = []
    for clock, what in enumerate(("seconds", "processor seconds")):
        one, several = seconds[:, 0, clock], seconds[:, 1, clock]
        ratio = np.median(several / one) / members
        rows.append([what, f"{np.median(one):.3f}", f"{np.median(several):.3f}", f"{ratio:.3f}", f"{TARGET_TIME}"])
    kept, ratio = [f"{x / 1e6:.1f}" for x in memory], memory[1] / memory[0] / members
    rows.append(["activations, MB", *kept, f"{ratio:.3f}", f"{TARGET_ACTIVATIONS}"])
    return recipes.table(["step of a rank", "deterministic", "members", "per member", "target"], rows)


def _of_ranks(seconds: NDArray[np.floating], memory: NDArray[np.integer], members: int) -> list[str]:
    """Compare a step of each rank's members with as many of the deterministic model or of one member, and the exchange."""
    rows = []
    for clock, what in enumerate(("seconds", "processor seconds")):
        each = seconds[..., clock].T
        deterministic, member, several, exchange = each
        ratios = [np.median(several / (members * one + exchange)) for one in (deterministic, member)]
        shown = [f"{np.median(x):.4f}" for x in each]
        rows.append([what, *shown, *(f"{ratio:.3f}" for ratio in ratios), f"{TARGET_ON_RANKS}"])
    kept = [f"{x / 1e6:.1f}" for x in memory]
    ratios = memory[2] / memory[:2] / members
    rows.append(["activations, MB", *kept, "", *(f"{ratio:.3f}" for ratio in ratios), f"{TARGET_ACTIVATIONS}"])
    heads = ["step of a rank", DETERMINISTIC, MEMBER, MEMBERS, "exchange alone"]
    heads += ["members / (deterministic + exchange)", "members / (one member + exchange)", "target"]
    return recipes.table(heads, rows)


# --- skill ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """What is compared on one data set."""

    single: Recipe
    """Deterministic forecasts of the model that the ensembles start from."""
    others: tuple[Recipe, ...]
    """More deterministic forecasts of it."""
    ensembles: tuple[Recipe, ...]
    leads: tuple[int, ...]
    steps: int
    """Steps of the deterministic training."""
    circles: bool = True
    """Whether rows are whole circles of latitude, whose waves can be compared with the truth's."""

    def perturbed(self, recipe: Recipe, bench: recipes.Bench) -> list[Recipe]:
        """Return the ensembles of perturbed initial states with the physics of an ensemble with noise."""
        from credit_like.schema.load import load_experiment

        def physics(of: Recipe) -> object:
            return load_experiment(of.file, bench.overrides(of, bench.seeds[0])).physics

        if recipe.forecasts_of is not None:
            return []
        return [each for each in self.ensembles if each.forecasts_of is not None and physics(each) == physics(recipe)]


def made_of(
    single: Recipe,
    ensembles: Sequence[Recipe],
    leads: tuple[int, ...],
    steps: int,
    *sets: str,
    others: Sequence[Recipe] = (),
) -> Case:
    """Give the ensembles their members and scores, and all recipes the settings `sets`."""
    scores = (
        f"inference.ensemble.members={recipes.MEMBERS}",
        f"inference.batch_size={recipes.MEMBERS}",
        recipes.METRICS,
    )
    every = [replace(each, sets=(*each.sets, *scores, *sets)) for each in ensembles]
    first, *more = (
        replace(each, sets=(*each.sets, "evaluation.metrics=[rmse, mae]", *sets)) for each in (single, *others)
    )
    return Case(first, tuple(more), tuple(every), leads, steps)


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


DIFFUSION = damping("height, column_water", 0.035)


def with_diffusion(recipe: Recipe) -> Recipe:
    """Return a recipe of forecasts with the diffusion, which the training did not have."""
    kind, _, size = recipe.name.partition("-")
    return replace(
        recipe,
        name="-".join(filter(None, [kind, "damped", size])),
        what=f"{recipe.what}, and a diffusion",
        sets=(*recipe.sets, DIFFUSION),
    )


DEMO = made_of(
    recipes.SINGLE,
    [
        recipes.perturbed(1.0),
        recipes.perturbed(1.5),
        of_demo("noise-alone", "noise", 4.4e-2, 4),
        with_diffusion(recipes.perturbed(1.0)),
        with_diffusion(recipes.perturbed(1.5)),
        of_demo("noise-damped", "noise, and a diffusion", 4.2e-2, 4, DIFFUSION),
    ],
    (24, 72, 120),
    recipes.BUDGET,
    "inference.init=[2000-09-27, 2000-10-31T18, 144h]",
    others=[with_diffusion(recipes.SINGLE)],
)

GCM_ENSEMBLE, STORM = (recipes.ROOT / "config" / f"{name}.yml" for name in ("gcm-t21-ensemble", "storm96"))
GCM_TRAINED = Recipe("gcm-t21", "the deterministic model", file=recipes.GCM)
GCM_VARIABLES = "u v temperature specific_humidity surface_pressure geopotential_500"


# The diffusion of config/gcm-t21-ensemble.yml: surface pressure, which follows the mountains, has none.
GCM_DIFFUSION = (
    "physics=[{type: spherical-filter, winds: [u, v], variables: [temperature, specific_humidity, geopotential_500], "
    "damping: 0.06, order: 2}]"
)
GCM_SINGLE = replace(GCM_TRAINED, name="gcm-single", forecasts_of=GCM_TRAINED)
GCM = made_of(
    GCM_SINGLE,
    [
        replace(
            GCM_TRAINED,
            name="gcm-damped-1",
            what="initial states perturbed by 1 of the change per step, and a diffusion",
            sets=(GCM_DIFFUSION, perturbed(1.0, GCM_VARIABLES)),
            forecasts_of=GCM_TRAINED,
        ),
        Recipe(
            "gcm-noise",
            "config/gcm-t21-ensemble.yml, 5 %: 87 batches of a forecast of four steps",
            start=GCM_TRAINED,
            file=GCM_ENSEMBLE,
        ),
    ],
    (24, 72, 120),
    1746,
    "inference.init=[2000-08-11, 2000-09-30, 144h]",
    "inference.lead=120h",
    others=[
        replace(GCM_SINGLE, name="gcm-damped", what="the deterministic model, and a diffusion", sets=(GCM_DIFFUSION,))
    ],
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
    """Return a Markdown table of the recipes that have been run, and what it shows."""
    rows = []
    for recipe in (*case.others, *case.ensembles):
        seeds = bench.found(case.single, recipe)
        perturbed = [each for each in case.perturbed(recipe, bench) if set(seeds) <= set(bench.found(each))]
        energies = np.array(
            [
                ratio
                for seed in seeds
                if case.circles and recipe in case.ensembles
                for ratio in _energies(bench, recipe, seed)
            ]
        )
        for lead in case.leads if seeds else ():
            found = [_skill_of(bench, case.single, recipe, perturbed, seed, lead) for seed in seeds]
            columns = {name: np.concatenate([each[name] for each in found]) for name in HEADS}
            columns["energy"] = energies if lead == case.leads[-1] else np.array([])
            cells = [_range(x) for x in columns.values()]
            missed = "" if recipe in case.others else _verdict(columns, lead)
            rows.append([recipe.what, ", ".join(map(str, seeds)), f"{lead} h", *cells, missed])
    heads = ["forecasts", "seeds", "lead", *HEADS.values(), "energy of waves / the truth's", "targets"]
    what = (
        f"{recipes.MEMBERS} members from initial times of the test period. MAE and RMSE are those of the deterministic model that "
        f"the ensembles start from, after its training of {case.steps} steps. Each number is the mean over variables, levels and "
        "seeds, with the smallest and the largest of them in brackets; targets are of these. The squared error of a mean of K "
        "members exceeds that of infinitely many by variance / K. Perturbed initial states are those of the same model with the "
        "same physics, and of several amplitudes the best one for each variable and lead; the fair CRPS of a single forecast is "
        "its MAE."
    )
    return "\n".join([what, "", *recipes.table(heads, rows)])


HEADS = {
    "spread": "spread / skill",
    "CRPS": "fair CRPS / MAE",
    "perturbed": "fair CRPS / that of perturbed initial states",
    "RMSE": "RMSE of the mean / RMSE",
    "infinite": "the same of infinitely many members",
}
TWO_DAYS = 48


def _verdict(columns: dict[str, NDArray[np.floating]], lead: int) -> str:
    """Return which of the targets that a row can show its largest and smallest values miss."""
    missed = [
        name
        for name, lowest, highest in (
            ("spread", 0.9, 1.1),
            ("CRPS", 0.0, 1.0),
            ("perturbed", 0.0, 0.85),
            *([("RMSE", 0.0, 1.0)] if lead >= TWO_DAYS else []),
            ("energy", 0.85, 1.15),
        )
        if not ((columns[name] >= lowest) & (columns[name] <= highest)).all()  # also what is no number
    ]
    return f"{recipes.verdict(False)}: {', '.join(missed)}" if missed else recipes.verdict(True)


def _range(x: NDArray[np.floating]) -> str:
    return "" if not len(x) else f"{x.mean():.2f} ({x.min():.2f}–{x.max():.2f})"


def _energies(bench: recipes.Bench, recipe: Recipe, seed: int) -> list[float]:
    """Return for each channel the energy of all zonal waves of members at the last lead relative to the truth's."""
    found = recipes.energies(bench, recipe, seed).values()
    return [float(members[1:].sum() / truth[1:].sum()) for members, truth in found]


def _skill_of(
    bench: recipes.Bench, single: Recipe, recipe: Recipe, perturbed: Sequence[Recipe], seed: int, lead: int
) -> dict[str, NDArray[np.floating]]:
    """Return the columns of a table, one number for each channel; the fair CRPS of a single forecast is its MAE.

    Of several ensembles of perturbed initial states the one with the lowest score of the channel counts.
    """
    mae, rmse = (bench.rmse(single, seed, metric=metric) for metric in ("mae", "rmse"))
    error = bench.rmse(recipe, seed)
    none = error[:0]
    if "fair-crps" not in set(bench.scores(recipe, seed)["metric"]):
        columns = (none, bench.rmse(recipe, seed, metric="mae") / mae, none, error / rmse, none)
    else:
        ratio, crps, spread = (
            bench.rmse(recipe, seed, metric=metric) for metric in ("spread-skill", "fair-crps", "spread")
        )
        others = [bench.rmse(each, seed, metric="fair-crps") for each in perturbed]
        best = np.minimum.reduce(others) if others else none
        of_all = (error**2 - spread**2 / recipes.MEMBERS) ** 0.5
        columns = (ratio, crps / mae, crps / best if others else none, error / rmse, of_all / rmse)
    return {name: x[lead].dropna().to_numpy() for name, x in zip(HEADS, columns, strict=True)}


def run_skill(options: argparse.Namespace) -> str:
    """Run what has not been run yet, and return the table."""
    bench, case = recipes.Bench(options.work, tuple(options.seeds), options.small), CASES[options.skill]
    for seed in options.seeds:
        for recipe in [case.single, *case.others, *case.ensembles]:
            if options.recipes and recipe.name not in options.recipes:
                continue
            if options.list:
                print(*(shlex.join(bench.command(s, recipe, seed)) for s in ("train", "rollout", "evaluate")), sep="\n")
            else:
                bench.run(recipe, seed)
    return skill(bench, case)


# --- the page ---------------------------------------------------------------------------------------------------------------


def write_section(page: Path, title: str, text: str) -> None:
    """Replace the section of this title in the page where it is, or add it at the end."""
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
    page.write_text("\n".join([head.rstrip("\n") + "\n", *(f"## {found[name].rstrip(chr(10))}\n" for name in found)]))


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
