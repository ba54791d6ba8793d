"""Measure what training recipes gain on the demonstration's data; write benchmarks/results/recipes.md.

    python benchmarks/recipes.py [--cases precipitation curriculum ...] [--seeds 1 2 3] [--work FOLDER] [--small]

Each case trains a few experiments that differ in one recipe and compares their forecasts of the test period. The budget of a
training is a number of autoregressive steps of the model, because the time of a shared machine says little; processor time
is stated beside it. Every experiment is a file and overrides for `credit-like train`, `rollout` and `evaluate`; `--list`
prints the commands. What is in the work folder is not computed again, so an interrupted benchmark continues, and the tables
are of all seeds found there. Sections of other cases stay as they are on the page. `--small` rehearses everything in a few steps.
"""

from __future__ import annotations

import argparse
import datetime as dt
import itertools
import json
import platform
import re
import resource
import shlex
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import xarray as xr
from numpy.typing import NDArray

if TYPE_CHECKING:
    from credit_like.data.store import FieldStore

Array = NDArray[np.floating]
MODEL, PERSISTENCE = "model", "persistence"
"""Sources of forecasts in an evaluation."""
ROOT = Path(__file__).parents[1]
DEMO, DEMO_LONG, GCM, GCM_LONG_FILE = (
    ROOT / "config" / f"{name}.yml" for name in ("demo", "demo-long", "gcm-t21", "gcm-t21-long")
)
STEPS_PER_EPOCH = 129
BUDGET = 5 * STEPS_PER_EPOCH
"""Autoregressive steps of the demonstration's training; a batch of forecasts of n steps counts n."""


@dataclass(frozen=True)
class Recipe:
    """An experiment: a file and overrides of its keys, perhaps with the weights of another recipe at the start."""

    name: str
    what: str
    sets: tuple[str, ...] = ()
    start: Recipe | None = None
    """Recipe whose weights the run begins with."""
    like: Recipe | None = None
    """Recipe whose first epochs, `trunk`, are the same: the run continues from its checkpoint."""
    trunk: int = 0
    forecasts_of: Recipe | None = None
    """Recipe whose weights make the forecasts; nothing is trained."""
    free: tuple[str, ...] = ()
    """Overrides for free runs alone."""
    file: Path = DEMO
    batches: int = STEPS_PER_EPOCH
    epochs: int = 5
    """Epochs of so many batches of 8 samples, of a training on single steps that others continue."""

    @property
    def steps(self) -> int:
        return self.epochs * self.batches

    def all(self) -> list[Recipe]:
        """Return this recipe after those that it needs."""
        needed = self.start or self.like or self.forecasts_of
        return [*(needed.all() if needed else []), self]


@dataclass(frozen=True)
class Bench:
    """Where runs are, and how small they are."""

    work: Path
    seeds: tuple[int, ...]
    small: bool

    def folder(self, recipe: Recipe, seed: int) -> Path:
        return self.work / f"{recipe.name}-s{seed}"

    def overrides(self, recipe: Recipe, seed: int) -> list[str]:
        """Return KEY=VALUE of everything in which the experiment differs from the demonstration."""
        sets = list(recipe.sets)
        if self.small:
            sets = [
                *SMALL,
                *(re.sub(r"(epochs|batches_per_epoch|warmup_steps)([=:] *)[0-9]+", few, each) for each in sets),
            ]
            sets = [re.sub(r"inference.init=.*", SMALL_INIT, each) for each in sets if not each.startswith(LATER)]
        sets += [f"save_loc={self.folder(recipe, seed)}", f"seed={seed}"]
        return sets + ([f"start_from.path={self.folder(recipe.start, seed)}"] if recipe.start else [])

    def command(self, stage: str, recipe: Recipe, seed: int) -> list[str]:
        sets = self.overrides(recipe, seed)
        command = [sys.executable, "-m", "credit_like.cli", stage, str(recipe.file)]
        return command + [part for each in sets for part in ("--set", each)]

    def run(self, recipe: Recipe, seed: int) -> None:
        """Train, forecast and score, as far as that has not been done; what is needed for it is only trained."""
        for needed in recipe.all():
            self._run(needed, seed, ("train", "rollout", "evaluate") if needed is recipe else ("train",))

    def _run(self, recipe: Recipe, seed: int, stages: Sequence[str]) -> None:
        cost, spent = self.folder(recipe, seed) / "cost.json", self.spent(recipe, seed)
        if recipe.like is not None and "before" not in spent:
            spent["before"] = self.branch(recipe.like, recipe, seed)
            cost.write_text(json.dumps(spent))
        if recipe.forecasts_of is not None and not spent:
            trained = self.folder(recipe.forecasts_of, seed)
            shutil.copytree(trained / "checkpoints", self.folder(recipe, seed) / "checkpoints", dirs_exist_ok=True)
            shutil.copy(trained / "statistics.nc", self.folder(recipe, seed))
        for stage in stages:
            if stage in spent or (stage == "train" and recipe.forecasts_of is not None):
                continue
            print(f"{dt.datetime.now():%H:%M:%S} {stage} {recipe.name} seed {seed}", flush=True)
            before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
            self.folder(recipe, seed).mkdir(parents=True, exist_ok=True)
            with (self.folder(recipe, seed) / f"{stage}.log").open("a") as log:
                done = subprocess.run(self.command(stage, recipe, seed), stdout=log, stderr=log, check=False)
            if done.returncode:
                raise SystemExit(f"{stage} of {recipe.name} failed: {log.name}")
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            took = (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime) + spent.pop("stopped", 0.0)
            if stage == "train" and not self.is_trained(recipe, seed):  # a signal ends a training without a failure
                cost.write_text(json.dumps(spent | {"stopped": took}))
                raise SystemExit(f"train of {recipe.name} was stopped; the same command continues it")
            spent[stage] = took
            spent[f"{stage}_wall"] = time.time() - began
            cost.write_text(json.dumps(spent))

    def is_trained(self, recipe: Recipe, seed: int) -> bool:
        """Return whether the training has ended by itself."""
        return bool(json.loads((self.folder(recipe, seed) / "status.json").read_text())["state"] == "finished")

    def spent(self, recipe: Recipe, seed: int) -> dict[str, float]:
        """Return the processor time (s) of each stage that has been done, and of what a run was copied from or trained so far."""
        path = self.folder(recipe, seed) / "cost.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def branch(self, trunk: Recipe, recipe: Recipe, seed: int) -> float:
        """Begin a run with the checkpoint of another one at the end of what both have; return the processor time of that."""
        there, here = self.folder(trunk, seed), self.folder(recipe, seed)
        steps = 2 if self.small else recipe.trunk * trunk.batches
        shutil.copytree(there / "checkpoints" / f"step-{steps}", here / "checkpoints" / f"step-{steps}")
        shutil.copy(there / "statistics.nc", here)
        return self.spent(trunk, seed)["train"] * recipe.trunk / trunk.epochs

    def found(self, *recipes: Recipe) -> list[int]:
        """Return the seeds of which all these recipes have scores."""
        seeds = {int(path.parent.name.rpartition("-s")[2]) for path in self.work.glob("*-s*/cost.json")}
        return sorted(s for s in seeds if all("evaluate" in self.spent(r, s) for r in recipes))

    def scores(self, recipe: Recipe, seed: int) -> pd.DataFrame:
        """Return values by (variable with level, lead in hours, source, metric)."""
        from credit_like.evaluation import load_scores

        scores = load_scores(self.folder(recipe, seed))
        scores = scores[scores["region"] == "global"]
        level = scores["level"].map(lambda x: "" if pd.isna(x) else f" {x:g}")
        return scores.assign(channel=scores["variable"] + level)

    def rmse(self, recipe: Recipe, seed: int, source: str = MODEL, metric: str = "rmse") -> pd.DataFrame:
        """Return a table of channels × leads in hours."""
        scores = self.scores(recipe, seed)
        chosen = scores[(scores["metric"] == metric) & (scores["source"] == source)]
        return chosen.pivot_table(index="channel", columns="lead_hours", values="value", sort=False)

    def minutes(self, recipe: Recipe, seeds: Sequence[int]) -> str:
        spent = [self.spent(recipe.forecasts_of or recipe, seed) for seed in seeds]
        costs = [(each["train"] + each.get("before", 0.0)) / 60 for each in spent]
        return f"{np.nanmean(costs):.1f}" if np.isfinite(costs).any() else "not measured"


SMALL_INIT = "inference.init=[2000-01-13, 2000-01-14, 24h]"
LATER = ("data.source.steps=", "data.test=[2000-09-27, 2001")
"""Overrides for a longer period of test, which a rehearsal leaves out."""
SMALL = [
    "data.source={type: synthetic, steps: 100}",
    "data.train=[2000-01-01, 2000-01-10T18]",
    "data.valid=[2000-01-11, 2000-01-12T18]",
    "data.test=[2000-01-13, 2000-01-24T18]",
    "trainer.epochs=1",
    "trainer.batches_per_epoch=2",
    "trainer.scheduler.warmup_steps=1",
    SMALL_INIT,
]


def few(found: re.Match[str]) -> str:
    """Return the key of a match with a small number instead of its own."""
    return f"{found[1]}{found[2]}{2 if found[1] == 'batches_per_epoch' else 1}"


def mean_and_range(values: Sequence[float], digits: int = 2) -> str:
    """Return the mean over seeds, and the smallest and largest value where there are several."""
    text = f"{np.mean(values):.{digits}f}"
    return text if len(values) == 1 else f"{text} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def verdict(met: bool) -> str:
    return "met" if met else "MISSED"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in [heads, ["---"] * len(heads), *rows]]


def legend(recipes: Sequence[Recipe]) -> list[str]:
    """Return a line that explains each name of a table."""
    return ["", *(f"- `{recipe.name}`: {recipe.what}." for recipe in recipes)]


LEADS = (6, 24, 72, 120)


def relative(bench: Bench, recipe: Recipe, base: Recipe, seeds: Sequence[int]) -> tuple[pd.DataFrame, list[list[str]]]:
    """Return RMSE divided by that of another recipe, mean over seeds, by channel and lead; and its cells at `LEADS`.

    The first row of cells is the mean over channels, with the lowest and the highest seed; the second one the lowest and the
    highest channel.
    """
    found = [bench.rmse(recipe, seed) / bench.rmse(base, seed) for seed in seeds]
    of_channels = sum(found[1:], found[0]) / len(found)
    mean = [mean_and_range([each[lead].mean() for each in found]) for lead in LEADS]
    return of_channels, [mean, [f"{of_channels[lead].min():.2f}–{of_channels[lead].max():.2f}" for lead in LEADS]]


def ratios(bench: Bench, recipe: Recipe, against: str, seeds: Sequence[int]) -> list[pd.DataFrame]:
    """Return RMSE relative to a source of the same evaluation, one table per seed."""
    return [bench.rmse(recipe, seed) / bench.rmse(recipe, seed, against) for seed in seeds]


# --- precipitation ----------------------------------------------------------------------------------------------------------

DIAGNOSTIC = (
    "data.prognostic={level: [u, v, height], surface: [column_water]}",
    "data.diagnostic={surface: [precipitation]}",
)
EPOCHS_KEPT = f"trainer.checkpoint={{every: {STEPS_PER_EPOCH}, keep: 5}}"
PLAIN = Recipe("plain", "precipitation diagnostic", (*DIAGNOSTIC, EPOCHS_KEPT))
PROGNOSTIC = Recipe(
    "prognostic",
    "precipitation prognostic: an input, and predicted as its change",
    (
        "data.prognostic={level: [u, v, height], surface: [column_water, precipitation]}",
        "data.diagnostic={surface: []}",
        EPOCHS_KEPT,
    ),
)


def longer(
    name: str,
    samples: int,
    steps: int,
    loss: str = "mse",
    physics: str = "",
    what: str = "",
    *,
    single: Recipe = PLAIN,
    trunk: int = 3,
    batches: int | None = None,
    rate: str = "1.0e-3",
) -> Recipe:
    """The first `trunk` epochs of `single`, then batches of fewer samples and more steps, by default of its cost in all."""
    first = f"{{epochs: {trunk}, scheduler: {{total_steps: {single.steps}}}}}"
    batches = batches or (single.epochs - trunk) * 8 * single.batches // (samples * steps)
    phase = (
        f"{{epochs: 1, batches_per_epoch: {batches}, forecast_len: {steps}, global_batch_size: {samples}, "
        f"micro_batch_size: {samples}, optimizer: {{learning_rate: {rate}}}, scheduler: {{warmup_steps: 10}}, "
        f"loss: {{type: {loss}}}}}"
    )
    kept = [each for each in single.sets if not each.startswith(("trainer.epochs=", "trainer.checkpoint="))]
    return Recipe(
        name,
        f"{trunk} epochs on single steps, then {batches} batches of {samples} sample{'s' * (samples > 1)} and {steps} steps{what}",
        (*kept, f"trainer.phases=[{first}, {phase}]", *([physics] if physics else [])),
        like=single,
        trunk=trunk,
        file=single.file,
    )


def damping(strength: float, more: str = "") -> str:
    """Return the override for the filter of waves above the truncation, which damps the others by a diffusion of order 4."""
    fields = "variables: [height, column_water], winds: [u, v]"
    return f"physics=[{{type: spherical-filter, {fields}, highest: 21, damping: {strength:g}, order: 4{more}}}]"


def sharp(
    name: str,
    trunk: int = 3,
    batches: int | None = None,
    single: Recipe = PLAIN,
    samples: int = 2,
    rate: str = "1.0e-3",
) -> Recipe:
    """Return the curriculum with a loss that keeps the energy of waves, and a diffusion of the short ones, which grow."""
    physics = damping(0.12, f", after_epochs: {trunk}")
    what = " on `spectral` with `spherical-filter` of damping 0.12 and order 4"
    return longer(name, samples, 4, "spectral", physics, what, single=single, trunk=trunk, batches=batches, rate=rate)


SHARP = sharp("curriculum-sharp")
EQUAL = sharp("curriculum-equal", batches=172)
"""As many batches as take the processor time of the rest of `PLAIN`: 0.32 s each, where its batches took 0.21 s."""
TWICE = Recipe(
    "plain-twice",
    "the same, 10 epochs instead of 5",
    (*DIAGNOSTIC, EPOCHS_KEPT, "trainer.epochs=10"),
    epochs=10,
)
EQUAL_TWICE = sharp("curriculum-twice", trunk=6, batches=187, single=TWICE, samples=4, rate="2.0e-3")
"""Of as much time as `TWICE`: 0.42 s for each batch of four samples and four steps, where its batches took 0.16 s."""
CURRICULA = [longer("curriculum", 2, 4), longer("curriculum-8", 1, 8), sharp("curriculum-early", trunk=2), SHARP]
TURN = "trainer.shift_longitude=true"
TURNED = Recipe("turned", "precipitation diagnostic, with `shift_longitude`", (*DIAGNOSTIC, TURN))
PROGNOSTIC_TURNED = Recipe(
    "prognostic-turned", "precipitation prognostic, with `shift_longitude`", (*PROGNOSTIC.sets, TURN)
)
PROGNOSTIC_WEIGHTED = Recipe(
    "prognostic-weighted",
    "the same with weights in the loss: 0.25 of precipitation, which has nearly half of it otherwise, and 2 of column water",
    (*PROGNOSTIC_TURNED.sets, "loss.variable_weights={column_water: 2, precipitation: 0.25}"),
)
PROGNOSTIC_SHARP = longer(
    "prognostic-sharp",
    2,
    4,
    "spectral, variable_weights: {column_water: 2, precipitation: 0.25}",
    damping(0.12, ", after_epochs: 3"),
    " on `spectral` with the same weights and `spherical-filter` of damping 0.12 and order 4",
    single=PROGNOSTIC_WEIGHTED,
    batches=160,
)
"""Of as much time as `PROGNOSTIC_WEIGHTED`, like `EQUAL`."""
PRECIPITATION = [PLAIN, TURNED, SHARP, PROGNOSTIC, PROGNOSTIC_TURNED, PROGNOSTIC_WEIGHTED, PROGNOSTIC_SHARP]


def precipitation(recipes: Sequence[Recipe], humidity: Sequence[str], text: str, bench: Bench) -> list[str]:
    """RMSE of precipitation and humidity relative to persistence; `text` begins the explanation.

    The first recipe is that which humidity is compared with.
    """
    rows, measured, plain = [], [recipe for recipe in recipes if bench.found(recipe)], recipes[0]
    for recipe in measured:
        seeds = bench.found(recipe)
        found = ratios(bench, recipe, PERSISTENCE, seeds)
        for channel in ("precipitation", *humidity):
            cells = [mean_and_range([r.loc[channel, lead] for r in found]) for lead in LEADS]
            average = np.mean([r.loc[channel] for r in found], 0)
            if channel == "precipitation":
                met = verdict(average[0] < 1)
            elif recipe is plain or not set(seeds) <= set(bench.found(plain)):
                met = ""
            else:
                before = np.mean([r.loc[channel] for r in ratios(bench, plain, PERSISTENCE, seeds)], 0)
                met = verdict(bool((average < before).all()))
            rows.append([recipe.name, channel, *cells, met, bench.minutes(recipe, seeds), ", ".join(map(str, seeds))])
    heads = ["recipe", "variable", *(f"{lead} h" for lead in LEADS), "target", "processor minutes", "seeds"]
    return [
        f"{text} Targets: precipitation below 1 at 6 h; {humidity[0].split()[0].replace('_', ' ')} at each of the 20 leads below "
        f"that of `{plain.name}` with the same seeds.",
        *legend(measured),
        "",
        *(table(heads, rows) if rows else ["Not measured yet."]),
    ]


# --- curriculum -------------------------------------------------------------------------------------------------------------

DAMPED = Recipe(
    "damped",
    "the training of `plain`, forecasts with `spherical-filter` of damping 0.04 and order 4",
    (*DIAGNOSTIC, damping(0.04)),
    forecasts_of=PLAIN,
)
"""What the filter does without the curriculum and the loss."""
TWICE_DAMPED = replace(DAMPED, name="damped-twice", what="likewise of `plain-twice`", forecasts_of=TWICE)
SINGLE_STEPS = (PLAIN, DAMPED)
"""What curricula are compared with."""

GCM_SINGLE = Recipe(
    "gcm-single",
    "config/gcm-t21.yml, forecasts of 5 days",
    (
        "inference.init=[2000-08-11, 2000-09-30, 2d]",
        "inference.lead=120h",
        "trainer.epochs=18",
        "trainer.checkpoint={every: 97, keep: 9}",
    ),
    file=GCM,
    batches=97,
    epochs=18,
)


def gcm_damping(strength: float, more: str = "") -> str:
    """Return the entry of `physics` of config/gcm-t21-ensemble.yml with another strength."""
    fields = "variables: [temperature, specific_humidity, geopotential_500], winds: [u, v]"
    return f"{{type: spherical-filter, {fields}, damping: {strength:g}, order: 2{more}}}"


GCM_LEVELS = (0.2, 0.51, 0.835)
GCM_PROGNOSTIC = replace(
    GCM_SINGLE,
    name="gcm-prognostic",
    what="precipitation prognostic: an input, and predicted as its change",
    sets=(
        *GCM_SINGLE.sets,
        "data.prognostic={level: [u, v, temperature, specific_humidity], "
        "surface: [surface_pressure, geopotential_500, precipitation]}",
        "data.diagnostic={surface: []}",
    ),
)
GCM_DAMPED = Recipe(
    "gcm-damped",
    "the training of `gcm-single`, forecasts with `spherical-filter` of damping 0.03 and order 2",
    (*GCM_SINGLE.sets[:2], f"physics=[{gcm_damping(0.03)}]"),
    forecasts_of=GCM_SINGLE,
    file=GCM,
)
GCM_CURRICULUM = longer(
    "gcm-curriculum",
    4,
    8,
    physics=f"physics=[{gcm_damping(0.12, ', after_epochs: 10')}]",
    what=" with `spherical-filter` of damping 0.12 and order 2",
    single=GCM_SINGLE,
    trunk=10,
    batches=150,
    rate="2.0e-3",
)
"""Of as much time as `GCM_SINGLE`: 0.9 s for each batch of four samples and eight steps, where its batches took 0.17 s."""
GCM_WEIGHTED = replace(
    GCM_PROGNOSTIC,
    name="gcm-prognostic-weighted",
    what="the same with weights in the loss: 3 of specific humidity and 0.5 of precipitation",
    sets=(*GCM_PROGNOSTIC.sets, "loss.variable_weights={specific_humidity: 3, precipitation: 0.5}"),
)
GCM_WEIGHTED_LONGER = longer(
    "gcm-prognostic-longer",
    4,
    4,
    "mse, variable_weights: {specific_humidity: 3, precipitation: 0.5}",
    physics=f"physics=[{gcm_damping(0.06, ', after_epochs: 13').replace('specific_humidity, ', '')}]",
    what=" with `spherical-filter` of damping 0.06 and order 2 of all but specific humidity, likewise weighted",
    single=GCM_WEIGHTED,
    trunk=13,
    batches=180,
    rate="2.0e-3",
)
GCM_PRECIPITATION = [GCM_SINGLE, GCM_PROGNOSTIC, GCM_WEIGHTED, GCM_WEIGHTED_LONGER]


def compared(bench: Bench, pairs: Sequence[tuple[Recipe, Recipe]]) -> list[str]:
    """Return a table of the RMSE of curricula, each divided by that of a training on single steps."""
    rows, measured = [], list[Recipe]()
    for phased, single in pairs:
        seeds = bench.found(single, phased)
        if not seeds:
            continue
        of_channels, (mean, of_single) = relative(bench, phased, single, seeds)
        spent = f"{bench.minutes(phased, seeds)} / {bench.minutes(single, seeds)}"
        met = verdict(of_channels.mean()[[72, 120]].max() <= 0.9)
        rows.append([phased.name, single.name, "mean", *mean, met, spent, ", ".join(map(str, seeds))])
        rows.append([phased.name, single.name, "single", *of_single, "", "", ""])
        measured += (recipe for recipe in (phased, single) if recipe not in measured)
    heads = ["curriculum", "single steps", "variables", *(f"{lead} h" for lead in LEADS)]
    heads += ["target", "processor minutes", "seeds"]
    return [*legend(measured), "", *(table(heads, rows) if rows else ["Not measured yet."])]


COMPARED = (
    "Target: at most 0.9 at 72 and 120 h in the mean over variables and levels; `single` are the lowest and the highest of them. "
    "Processor minutes are those of the curriculum and of single steps."
)


def curriculum(bench: Bench) -> list[str]:
    """RMSE of the curriculum relative to training on single steps for as many model steps, and for as long."""
    return [
        f"RMSE divided by that of training on single steps, of which {BUDGET} with 8 samples are as many steps of the model as "
        "a curriculum has. Their first epochs are the same to the bit, so that the curriculum continues from their checkpoint, "
        "and differs in the rest alone. Small batches take more processor time per sample, with this model on one core: "
        f"`{EQUAL.name}` has as many batches as take the time of the single steps that it does without, from the times of "
        f"`{PLAIN.name}` and `{SHARP.name}`. "
        f"A part of what a curriculum with a filter gains is the filter's, so that forecasts of single steps with a filter are "
        f"compared too. {COMPARED}",
        *compared(bench, list(itertools.product([*CURRICULA, EQUAL], SINGLE_STEPS))),
        "",
        "A part of the gain is a smoother forecast: see the zonal energy in [Sharpness](#sharpness).",
    ]


def curriculum_twice(bench: Bench) -> list[str]:
    """RMSE of a curriculum after twice as many single steps, relative to training on these alone for as long."""
    return [
        f"As above, but {TWICE.steps} single steps, and a curriculum that takes as long. {COMPARED}",
        *compared(bench, list(itertools.product([EQUAL_TWICE], (TWICE, TWICE_DAMPED)))),
    ]


def curriculum_gcm(bench: Bench) -> list[str]:
    """RMSE of curricula on the general circulation model's data relative to training on single steps for as long."""
    return [
        f"As above, on the data of config/gcm-t21.yml, of which {GCM_SINGLE.steps} single steps with 8 samples are the training. "
        f"The curriculum takes as long. {COMPARED}",
        *compared(bench, list(itertools.product([GCM_CURRICULUM], (GCM_SINGLE, GCM_DAMPED)))),
    ]


# --- start from another run -------------------------------------------------------------------------------------------------

DRY = Recipe(
    "dry",
    "wind and height alone",
    # A key that is left out would keep the demonstration's variables.
    ("data.prognostic={level: [u, v, height], surface: []}", "data.diagnostic={surface: []}"),
)
ADDED = Recipe(
    "added",
    "from the weights of the run without them",
    (
        *DIAGNOSTIC,
        "trainer.epochs=2",
        "trainer.batches_per_epoch=80",
        "trainer.optimizer.learning_rate=1.0e-3",
        "trainer.scheduler.warmup_steps=10",
    ),
    start=DRY,
)
ADDED_OFTEN = Recipe(
    "added-often",
    "the same in batches of 2 samples: four times as many updates of the weights",
    (
        *ADDED.sets,
        "trainer.batches_per_epoch=320",
        "trainer.global_batch_size=2",
        "trainer.micro_batch_size=2",
        "trainer.scheduler.warmup_steps=40",
    ),
    start=DRY,
)
ADDED_WEIGHTED = Recipe(
    "added-weighted",
    "the same with weights in the loss, 1.6 of column water and 2 of precipitation, and 2.5 times the learning rate",
    (
        *ADDED_OFTEN.sets,
        "trainer.optimizer.learning_rate=2.5e-3",
        "loss.variable_weights={column_water: 1.6, precipitation: 2}",
    ),
    start=DRY,
)
SINGLE_PHASE = ("trainer.epochs=", "trainer.batches_per_epoch=", "trainer.scheduler.")
ADDED_FORECASTS = Recipe(
    "added-forecasts",
    "the same, but after 520 batches 60 of forecasts of two steps, with a learning rate of 1.0e-3",
    (
        *(each for each in ADDED_WEIGHTED.sets if not each.startswith(SINGLE_PHASE)),
        "trainer.phases=[{epochs: 1, batches_per_epoch: 520, scheduler: {total_steps: 640, warmup_steps: 40}}, "
        "{epochs: 1, batches_per_epoch: 60, forecast_len: 2, optimizer: {learning_rate: 1.0e-3}, scheduler: {warmup_steps: 10}}]",
    ),
    start=DRY,
)
ADDITIONS = [ADDED, ADDED_OFTEN, ADDED_WEIGHTED, ADDED_FORECASTS]
SHORT = Recipe(
    "short", "from initial weights, as many steps", (*DIAGNOSTIC, "trainer.epochs=2", "trainer.batches_per_epoch=80")
)


GCM_DRY = replace(
    GCM_SINGLE,
    name="gcm-dry",
    what="without specific humidity and precipitation",
    sets=(
        *GCM_SINGLE.sets,
        "data.prognostic={level: [u, v, temperature], surface: [surface_pressure, geopotential_500]}",
        "data.diagnostic={surface: []}",
    ),
)
GCM_ADDED = Recipe(
    "gcm-added",
    "1416 batches of 2 samples from the weights of the run without them, then 163 of forecasts of two steps, with weights in the "
    "loss and learning rates as of `added-forecasts`",
    (
        *GCM_SINGLE.sets[:2],
        "trainer.global_batch_size=2",
        "trainer.micro_batch_size=2",
        "trainer.optimizer.learning_rate=2.5e-3",
        "loss.variable_weights={specific_humidity: 1.6, precipitation: 2}",
        "trainer.phases=[{epochs: 4, batches_per_epoch: 354, scheduler: {total_steps: 1746, warmup_steps: 100}}, "
        "{epochs: 1, batches_per_epoch: 163, forecast_len: 2, optimizer: {learning_rate: 1.0e-3}, scheduler: {warmup_steps: 10}}]",
    ),
    start=GCM_DRY,
    file=GCM,
)


@dataclass(frozen=True)
class Addition:
    """Runs that start from one without some channels (`new`, by what the table calls them), and the `base` from scratch."""

    base: Recipe
    recipes: Sequence[Recipe]
    new: Mapping[str, Sequence[str]]
    others: str
    text: str


ADDED_HERE = Addition(
    PLAIN,
    [*ADDITIONS, SHORT],
    {"column_water": ["column_water"], "precipitation": ["precipitation"]},
    "wind and height",
    f"Column water and precipitation are added to a trained run of wind and height (`{DRY.name}`), and trained for 160 steps "
    f"of 8 samples (25 % of {BUDGET}). RMSE relative to {BUDGET} steps from initial weights (`{PLAIN.name}`)",
)
ADDED_GCM = Addition(
    GCM_SINGLE,
    [GCM_ADDED],
    {"specific_humidity": [f"specific_humidity {level}" for level in GCM_LEVELS], "precipitation": ["precipitation"]},
    "the others",
    f"Specific humidity on three levels and precipitation are added to a trained run of the other variables of config/gcm-t21.yml "
    f"(`{GCM_DRY.name}`), and trained on as many samples as 25 % of {GCM_SINGLE.steps} steps of 8. RMSE relative to "
    f"{GCM_SINGLE.steps} steps from initial weights (`{GCM_SINGLE.name}`)",
)


def added(addition: Addition, bench: Bench) -> list[str]:
    """RMSE of a run that starts from one without some variables, relative to from-scratch."""
    base = addition.base
    measured = [recipe for recipe in addition.recipes if bench.found(base, recipe)]
    new = [channel for channels in addition.new.values() for channel in channels]
    rows = []
    for recipe in measured:
        seeds = bench.found(base, recipe)
        found = [bench.rmse(recipe, seed) / bench.rmse(base, seed) for seed in seeds]
        parts = {name: [r.loc[list(channels)].mean() for r in found] for name, channels in addition.new.items()}
        parts |= {addition.others: [r.drop(new).mean() for r in found], "mean": [r.mean() for r in found]}
        for name, of_seeds in parts.items():
            cells = [mean_and_range([x[lead] for x in of_seeds]) for lead in LEADS]
            met = verdict(np.mean(of_seeds, 0).max() <= 1)
            rows.append([recipe.name, name, *cells, met, bench.minutes(recipe, seeds), ", ".join(map(str, seeds))])
    heads = ["run", "variables", *(f"{lead} h" for lead in LEADS), "target", "processor minutes", "seeds"]
    return [
        f"{addition.text}, which took {bench.minutes(base, bench.found(base))} processor minutes. Target: at most 1 at all 20 "
        "leads in the mean over seeds. Batches of 2 samples make four times as many updates of the weights, about as many as from "
        "scratch.",
        *legend(measured),
        "",
        *(table(heads, rows) if rows else ["Not measured yet."]),
    ]


# --- sharpness --------------------------------------------------------------------------------------------------------------

FILTER = "physics=[{type: zonal-filter, variables: [u, v, height, column_water], highest: 21}]"
FINE_TUNING = (
    "trainer.epochs=2",
    "trainer.batches_per_epoch=80",
    "trainer.optimizer.learning_rate=5.0e-4",
    "trainer.scheduler.warmup_steps=10",
)
SPECTRAL = Recipe(
    "spectral", "160 more steps on `spectral`", (*DIAGNOSTIC, *FINE_TUNING, "loss={type: spectral}"), start=PLAIN
)


def spectral_forecasts(name: str, samples: int, physics: str, what: str) -> Recipe:
    """Forecasts of four steps from the weights of `PLAIN`, at the cost of its other further trainings."""
    batches = 160 * 8 // (4 * samples)
    return Recipe(
        name,
        f"{batches} batches of {samples} samples and 4 steps on `spectral`, with {what}",
        (
            *DIAGNOSTIC,
            *FINE_TUNING,
            "trainer.epochs=1",
            f"trainer.batches_per_epoch={batches}",
            f"trainer.global_batch_size={samples}",
            f"trainer.micro_batch_size={samples}",
            "data.forecast_len=4",
            "loss={type: spectral}",
            physics,
        ),
        start=PLAIN,
    )


def sharp_with(strength: float) -> Recipe:
    """Forecasts of `SHARP` with another damping than in its training, which shows the balance of energy and error."""
    return Recipe(
        f"{SHARP.name}-{strength:g}",
        f"the same training, forecasts with damping {strength:g}",
        (*SHARP.sets[:-1], damping(strength)),
        forecasts_of=SHARP,
    )


SPECTRAL_LONG = spectral_forecasts("spectral-long", 4, FILTER, "`zonal-filter`")
SPECTRAL_DAMPED = spectral_forecasts(
    "spectral-damped",
    2,
    damping(0.5),
    "`spherical-filter` of damping 0.5 and order 4",
)
MORE_MSE = Recipe("more-mse", "160 more steps on `mse`", (*DIAGNOSTIC, *FINE_TUNING), start=PLAIN)
FINE_GRID = (
    *DIAGNOSTIC,
    "data.source={type: synthetic, longitudes: 128, latitudes: 64, steps: 440}",
    "data.train=[2000-01-01, 2000-03-20T18]",
    "data.valid=[2000-03-21, 2000-03-24T18]",
    "data.test=[2000-03-25, 2000-04-19T18]",
    "model.padding_conf={activate: true, mode: earth, pad_lat: [0, 0], pad_lon: [32, 32]}",
    "trainer.global_batch_size=4",
    "trainer.micro_batch_size=4",
    "trainer.epochs=1",
    "trainer.batches_per_epoch=79",
    "inference.init=[2000-03-25, 2000-04-14T18, 48h]",
    "trainer.scheduler.warmup_steps=10",
)
FINE = Recipe("fine", "from initial weights", FINE_GRID)
FINE_FROM_COARSE = Recipe(
    "fine-from-coarse",
    "from the weights of the demonstration's grid",
    (*FINE_GRID, "trainer.optimizer.learning_rate=1.0e-3"),
    start=PLAIN,
)


def finer(bench: Bench) -> list[str]:
    """RMSE on a finer grid of a run from the weights of the demonstration's grid, relative to from-scratch."""
    seeds = bench.found(FINE, FINE_FROM_COARSE)
    rows = []
    if seeds:
        of_channels, (mean, single) = relative(bench, FINE_FROM_COARSE, FINE, seeds)
        spent = f"{bench.minutes(FINE_FROM_COARSE, seeds)} / {bench.minutes(FINE, seeds)}"
        met = verdict(of_channels.mean().max() < 1)
        rows = [["mean", *mean, met, spent, ", ".join(map(str, seeds))], ["single", *single, "", "", ""]]
    heads = ["variables", *(f"{lead} h" for lead in LEADS), "target", "processor minutes", "seeds"]
    return [
        "The embedded weather simulated on a grid of 64 × 128 points, truncated at 42 instead of 21, for 80 days of training: RMSE "
        "after 79 steps of 4 samples from the weights of a training of the demonstration, divided by that after as "
        "many from initial weights. Target: below 1 at all leads in the mean.",
        "",
        *(table(heads, rows) if rows else ["Not measured yet."]),
    ]


LITTLE = 1e-3
"""Fraction of the energy of all waves, below which a wavenumber carries little of the truth."""
RESOLVED = 21
"""Highest zonal wavenumber of the truth's dynamics, which are truncated there."""


SHARPNESS_TEXT = (
    "Zonal energy of forecasts of 5 days divided by the truth's: the lowest and the highest ratio of any seed over the "
    "wavenumbers that carry at least 0.1 % of the truth's energy of all waves (the highest of them in brackets), and over all "
    f"from 1 to {RESOLVED}, the truncation of the truth's dynamics; and the energy in the wavenumbers above, as a fraction of "
    f"that of all waves. Target: within 15 % at all wavenumbers to {RESOLVED}. `persistence` has the waves of the initial times, "
    "five days before: "
)


def sharpness(recipes: Sequence[Recipe], text: str, bench: Bench) -> list[str]:
    """Energy of 5-day forecasts relative to the truth's at each zonal wavenumber; `text` ends the explanation."""
    measured = [recipe for recipe in recipes if bench.found(recipe)]
    heads = [
        "run",
        "variable",
        "ratio where ≥ 0.1 %",
        f"ratio to {RESOLVED}",
        f"energy above {RESOLVED}",
        "the truth's",
    ]
    heads += ["target", "RMSE / persistence", "seeds"]
    of_leads = [by_lead(bench, recipe) for recipe in measured]
    return [
        SHARPNESS_TEXT + text,
        *legend(measured),
        "",
        *(
            table(heads, [*spectra(bench, measured[0], PERSISTENCE), *(r for m in measured for r in spectra(bench, m))])
            if measured
            else ["Not measured yet."]
        ),
        "",
        "The same at other leads, over the wavenumbers with at least 0.1 %, all seeds and all predicted variables but "
        "precipitation:",
        "",
        *(table(["run", *(f"{lead} h" for lead in LEADS), "seeds"], of_leads) if measured else ["Not measured yet."]),
    ]


def carried(truth: Array) -> NDArray[np.bool_]:
    """Return which waves carry more than little of the truth's energy."""
    much = truth >= LITTLE * truth[1:].sum()
    much[0] = False
    return much


def by_lead(bench: Bench, recipe: Recipe) -> list[str]:
    """Return the lowest and the highest ratio of energy at each lead."""
    seeds, cells = bench.found(recipe), []
    for lead in LEADS:
        found = [
            (model / truth)[carried(truth)]
            for seed in seeds
            for label, (model, truth) in energies(bench, recipe, seed, lead).items()
            if label != "precipitation"
        ]
        cells.append(spanned(np.concatenate(found)))
    return [recipe.name, *cells, ", ".join(map(str, seeds))]


def spanned(x: Array, form: str = ".2f") -> str:
    return f"{x.min():{form}}–{x.max():{form}}"


def spectra(bench: Bench, recipe: Recipe, source: str = MODEL) -> list[list[str]]:
    """Return a row of the table of zonal energy for each channel, of all seeds; persistence is the same with any seed."""
    seeds = bench.found(recipe) if source == MODEL else bench.found(recipe)[:1]
    errors = [bench.rmse(recipe, seed, source) / bench.rmse(recipe, seed, PERSISTENCE) for seed in seeds]
    found = [energies(bench, recipe, seed, source=source) for seed in seeds]
    rows = []
    for label, (_, truth) in found[0].items():
        of_seeds = np.array([each[label][0] for each in found])
        much, whole = carried(truth), (of_seeds / truth)[:, 1 : RESOLVED + 1]
        cells = [
            f"{spanned((of_seeds / truth)[:, much])} (to {np.flatnonzero(much)[-1]})",
            spanned(whole, ".2g"),
            *(f"{(x[:, RESOLVED + 1 :].sum(1) / x[:, 1:].sum(1)).max():.0e}" for x in (of_seeds, truth[None])),
            verdict(bool((abs(whole - 1) <= 0.15).all())),
            f"{np.mean([each.loc[label].iloc[-1] for each in errors]):.2f}",
        ]
        name, shown = (recipe.name, ", ".join(map(str, seeds))) if source == MODEL else (source, "")
        rows.append([name, label, *cells, shown])
    return rows


def energies(
    bench: Bench, recipe: Recipe, seed: int, hours: int = 120, source: str = MODEL
) -> dict[str, tuple[Array, Array]]:
    """Return the zonal energy of forecasts at a lead and of the truth at the same times, for each channel.

    Those of persistence are the truth at the initial times.
    """
    from credit_like.schema.load import load_experiment
    from credit_like.variables import Variables

    experiment = load_experiment(recipe.file, bench.overrides(recipe, seed))
    variables = Variables(experiment.data)
    store = opened(experiment.data.model_dump_json())
    forecasts = xr.open_zarr(next((bench.folder(recipe, seed) / "forecasts").glob("*.zarr")), chunks=None)
    lead = hours // 6
    forecasts = forecasts.isel(prediction_timedelta=lead - 1)
    times = [store.index(str(time)[:19]) for time in forecasts["time"].values]
    before, truth = (store.read(variables.outputs, [t + later for t in times]) for later in (0, lead))
    weight = np.cos(np.deg2rad(store.grid.latitude))[:, None]

    def energy(x: Array) -> Array:
        energies = np.abs(np.fft.rfft(x.astype(float) / x.shape[-1])) ** 2
        return np.asarray((energies * weight).sum(-2).reshape(-1, energies.shape[-1]).mean(0))

    found = {}
    for variable, channels in Variables.slices(variables.outputs).items():
        levels = next(v.levels for v in variables.outputs if v.name == variable) or (None,)
        for level, channel in zip(levels, range(channels.start, channels.stop), strict=True):
            label = variable if level is None else f"{variable} {level:g}"
            if source == PERSISTENCE:
                field = before[:, channel]
            else:
                field = (forecasts[variable] if level is None else forecasts[variable].sel(level=level)).values
            found[label] = energy(field), energy(truth[:, channel])
    return found


@cache
def opened(data: str) -> FieldStore:
    """Return the store of a section `data`, which is simulated once for all leads and recipes."""
    from credit_like.data.store import open_store
    from credit_like.schema.data import DataSection
    from credit_like.variables import Variables

    section = DataSection.model_validate_json(data)
    return open_store(section, Variables(section))


def input_noise(amplitude: float) -> Recipe:
    return Recipe(
        f"input-noise-{amplitude:g}",
        f"noise of {amplitude:g} of the change per step on the input",
        (*DIAGNOSTIC, f"trainer.input_noise={amplitude:g}"),
    )


INPUT_NOISE = input_noise(0.3)


def diffusion(damping: float, order: int) -> str:
    return (
        "physics=[{type: spherical-filter, variables: [height, column_water], winds: [u, v], highest: 21, "
        f"damping: {damping:g}, order: {order}}}, {{type: conserve, variables: [height, v]}}]"
    )


INPUT_NOISE_LOW_ORDER = Recipe(
    "input-noise-low-order",
    "the same with a diffusion of order 2",
    (*INPUT_NOISE.sets, diffusion(0.1, 2)),
    forecasts_of=INPUT_NOISE,
)
STRONG_DIFFUSION = (
    "physics=[{type: spherical-filter, variables: [height, column_water], winds: [u, v], highest: 21, damping: 0.15, "
    "order: 2}]"
)
INPUT_NOISE_FILTERED = Recipe(
    "input-noise-filtered",
    "none, and forecasts with `spherical-filter`, a diffusion, and `conserve` for the means of height and v",
    (*INPUT_NOISE.sets, diffusion(0.15, 4)),
    forecasts_of=INPUT_NOISE,
)
INPUT_NOISE_DIFFUSION = Recipe(
    "input-noise-diffusion",
    "160 more steps with `spherical-filter` and a diffusion, and forecasts with it",
    (*INPUT_NOISE.sets, *FINE_TUNING, STRONG_DIFFUSION),
    start=INPUT_NOISE,
)
DIFFUSION = (
    "physics=[{type: spherical-filter, variables: [height, column_water], winds: [u, v], highest: 21, damping: 0.1, "
    "order: 2}]"
)
ALWAYS_FILTERED = Recipe(
    "always-filtered",
    "noise of 0.3 on the input, and `spherical-filter` with a diffusion of order 2 in training and forecasts",
    (*INPUT_NOISE.sets, DIFFUSION),
)
LONG = Recipe("demo-long", "config/demo-long.yml", file=DEMO_LONG)
FILTERED = Recipe("filtered", "none, and forecasts with `zonal-filter`", (*DIAGNOSTIC, FILTER), forecasts_of=PLAIN)
SPECTRAL_FILTERED = Recipe(
    "spectral-filtered",
    "160 more steps on `spectral`, and forecasts with `zonal-filter`",
    (*DIAGNOSTIC, FILTER),
    forecasts_of=SPECTRAL,
)
GCM_SPECTRAL = Recipe(
    "gcm-spectral",
    "two more epochs on `spectral`",
    (
        *GCM_SINGLE.sets[:2],
        "trainer.epochs=2",
        "trainer.optimizer.learning_rate=5.0e-4",
        "trainer.scheduler.warmup_steps=10",
        "loss={type: spectral}",
    ),
    start=GCM_SINGLE,
    file=GCM,
)
GCM_FIELDS = "u, v, temperature, specific_humidity, surface_pressure, geopotential_500"
GCM_RAIN = (
    "{type: zonal-energy, variables: [precipitation], climatology: [2000-01-02, 2000-07-14]}, "
    "{type: clip, variables: [specific_humidity, precipitation]}"
)
# To clip negative values changes the energy, to restore the energy makes some negative again: less so each time.
GCM_HUMIDITY = "{type: zonal-energy, variables: [specific_humidity], rate: 1, lowest: 1}"
GCM_KEPT = Recipe(
    "gcm-kept",
    "the training of `gcm-single`, forecasts with `zonal-energy`, four times in turn with `clip`",
    (
        *GCM_SINGLE.sets[:2],
        f"physics=[{{type: zonal-energy, variables: [{GCM_FIELDS}], rate: 1, lowest: 1}}, "
        + ", ".join([GCM_RAIN, *[GCM_HUMIDITY, GCM_RAIN] * 3])
        + "]",
    ),
    forecasts_of=GCM_SINGLE,
    file=GCM,
)
GCM_SHARPNESS = [GCM_SINGLE, GCM_SPECTRAL, GCM_KEPT]
SHARPNESS = [
    PLAIN,
    DAMPED,
    SHARP,
    sharp_with(0.08),
    sharp_with(0.05),
    FILTERED,
    MORE_MSE,
    SPECTRAL,
    SPECTRAL_FILTERED,
    SPECTRAL_LONG,
    SPECTRAL_DAMPED,
    ALWAYS_FILTERED,
    LONG,
]
OF_TRAINING = "climatology: [2000-01-01, 2000-09-16T18]"
LATER_TEST = (
    "data.source.steps=2000",
    "data.test=[2000-09-27, 2001-05-14]",
    "inference.init=[2000-09-27, 2001-05-09, 5d]",
)
"""45 initial times five days apart: those of the truth at 5 days are the same but for the first and the last."""


def later(name: str, what: str, base: Recipe, *physics: str) -> Recipe:
    """Forecasts of a training in the longer test period, with some more corrections after its own."""
    sets = list(base.sets)
    if physics:
        sets[-1] = f"{sets[-1].removesuffix(']')}, {', '.join(physics)}]"
    return Recipe(name, what, (*sets, *LATER_TEST), forecasts_of=base)


def kept(lowest: int = 1, rate: float = 1.0) -> str:
    """Return the correction that keeps the energy of the waves before the step."""
    return f"{{type: zonal-energy, variables: [u, v, height, column_water], lowest: {lowest}, rate: {rate:g}}}"


RAIN = f"{{type: zonal-energy, variables: [precipitation], {OF_TRAINING}}}, {{type: clip, variables: [precipitation]}}"
"""What is cut off at zero changes the energy, so that this is done twice."""
RAIN_KEPT = "{type: zonal-energy, variables: [precipitation]}, {type: clip, variables: [precipitation]}"
"""Done four times, because a step begins with the energy that the last one has left: with two, 0.71 is left after 5 days."""
KEPT = [
    later("plain-later", "the training of `plain`", PLAIN),
    later("sharp-later", f"the training of `{SHARP.name}`", SHARP),
    later(
        "sharp-kept",
        "the same, forecasts with `zonal-energy`: each wave keeps 80 % of the difference in energy that a step would make, from "
        "wavenumber 6 on all of it; the waves of precipitation get the mean energy of the training data",
        SHARP,
        kept(rate=0.8),
        kept(lowest=6),
        RAIN,
        RAIN,
    ),
    later("sharp-kept-all", "likewise, but each wave keeps its energy", SHARP, kept(), RAIN, RAIN),
    later(
        "prognostic-kept",
        f"forecasts of `{PROGNOSTIC_SHARP.name}` with the corrections of `sharp-kept`, but the waves of precipitation keep their "
        "energy, like all from wavenumber 6 on",
        PROGNOSTIC_SHARP,
        kept(rate=0.8),
        kept(lowest=6),
        *[RAIN_KEPT] * 4,
    ),
]


# --- ensembles --------------------------------------------------------------------------------------------------------------

INITS = "inference.init=[2000-09-27, 2000-10-31T18, 72h]"
METRICS = "evaluation.metrics=[rmse, mae, fair-crps, spread, spread-skill]"
MEMBERS = 10
SINGLE = Recipe(
    "single", "one deterministic forecast", (*DIAGNOSTIC, INITS, "evaluation.metrics=[rmse, mae]"), forecasts_of=PLAIN
)


def perturbed(amplitude: float) -> Recipe:
    amplitudes = ", ".join(f"{name}: {amplitude}" for name in ("u", "v", "height", "column_water"))
    ensemble = f"inference.ensemble={{members: {MEMBERS}, from: perturbations, amplitude: {{{amplitudes}}}}}"
    return Recipe(
        f"perturbed-{amplitude:g}",
        f"initial states perturbed by {amplitude:g} of the change per step",
        (*DIAGNOSTIC, INITS, METRICS, ensemble, "inference.batch_size=10"),
        forecasts_of=PLAIN,
    )


def noisy(name: str, steps: int, what: str, *sets: str, start: Recipe = PLAIN) -> Recipe:
    """A model with noise, trained for `steps` batches of 4 samples and 2 members: each costs a step of 8 samples."""
    group = "{match: 'noise.*', learning_rate: 2.0e-2, weight_decay: 0.0}"
    return Recipe(
        name,
        what,
        (
            *DIAGNOSTIC,
            "model.noise={type: decoder, channels: 8}",
            "loss={type: crps, alpha: 0.95}",
            "trainer.members=2",
            "trainer.global_batch_size=4",
            "trainer.micro_batch_size=4",
            "trainer.epochs=1",
            f"trainer.batches_per_epoch={steps}",
            "trainer.valid_batches=4",
            f"trainer.optimizer={{type: adamw, learning_rate: 3.0e-4, weight_decay: 0.01, groups: [{group}]}}",
            "trainer.scheduler={type: linear-warmup-cosine, warmup_steps: 4}",
            *sets,
            INITS,
            METRICS,
            f"inference.ensemble={{members: {MEMBERS}, from: model}}",
            "inference.batch_size=10",
        ),
        start=start,
    )


NOISE = noisy("noise", 32, "noise, 5 % further cost: 32 batches of one step")
NOISE_LONG = noisy(
    "noise-long", 8, "the same, and 8 batches of 4 steps: 10 % in all", "data.forecast_len=4", start=NOISE
)
ENSEMBLES = [SINGLE, perturbed(0.2), perturbed(0.5), NOISE, NOISE_LONG]


def ensembles(bench: Bench) -> list[str]:
    """Spread over skill, fair CRPS and RMSE of the mean, relative to a deterministic forecast."""
    rows = []
    for recipe in ENSEMBLES[1:]:
        for seed in bench.found(SINGLE, recipe):
            mae, rmse = (bench.rmse(SINGLE, seed, metric=metric) for metric in ("mae", "rmse"))
            crps = bench.rmse(recipe, seed, metric="fair-crps") / mae
            mean = bench.rmse(recipe, seed) / rmse
            ratio = bench.rmse(recipe, seed, metric="spread-skill")
            for lead in (24, 72, 120):
                cells = (
                    f"{x[lead].dropna().mean():.2f} ({x[lead].min():.2f}–{x[lead].max():.2f})"
                    for x in (ratio, crps, mean)
                )
                calibrated = bool(ratio[lead].between(0.9, 1.1).all() and (crps[lead].dropna() < 1).all())
                rows.append([recipe.what, str(seed), f"{lead} h", *cells, verdict(calibrated)])
    heads = [
        "ensemble",
        "seed",
        "lead",
        "spread / skill",
        "fair CRPS / MAE of one forecast",
        "RMSE of the mean / of one forecast",
        "target",
    ]
    return [
        f"{MEMBERS} members from 12 initial times. Each number is the mean over variables and levels, and in brackets the "
        "smallest and the largest of them. Target: spread / skill from 0.9 to 1.1 and a CRPS below the MAE for every variable.",
        "",
        *(table(heads, rows) if rows else ["Not measured yet."]),
    ]


# --- free run ---------------------------------------------------------------------------------------------------------------

STEPS_PER_YEAR = 1460


INITIAL_TIMES = 5
SEA = "{name: sea_surface_temperature, fill: cyclic}"
CYCLIC = f"data.dynamic_forcing.surface=[{SEA}, {{name: toa_incident_solar_radiation, compute: solar}}]"
GCM_PLAIN = Recipe("gcm", "config/gcm-t21.yml", free=(CYCLIC,), file=GCM)
GCM_HELD = Recipe(
    "gcm-held",
    "forecasts of the same training with the diffusion of config/gcm-t21-ensemble.yml and zonal means relaxed by 0.01",
    (
        f"physics=[{gcm_damping(0.06)}, {{type: relax, variables: [u, v, temperature, specific_humidity, surface_pressure, "
        "geopotential_500], rate: 0.01, climatology: [2000-01-02, 2000-07-14]}]",
    ),
    forecasts_of=GCM_PLAIN,
    free=(CYCLIC,),
    file=GCM,
)
GCM_LONG = Recipe("gcm-t21-long", "config/gcm-t21-long.yml", free=(CYCLIC,), file=GCM_LONG_FILE)


def free_run(bench: Bench, recipe: Recipe, seed: int, years: float) -> None:
    """Forecast from some times of the test period for so many years.

    Stored are global means of one state a day, and spectra of the first and last year.

    A forecast has blown up where the variance of a variable's eddies is 10 times the truth's, or where a global mean is further
    from the truth's than the truth varies in space and time. The run ends when that holds tenfold for all forecasts.
    """
    import torch

    from credit_like import build
    from credit_like.rollout import rollout
    from credit_like.schema.load import load_experiment

    path = bench.folder(recipe, seed) / f"free-{years:g}.npz"
    if path.exists() and np.load(path)["finished"]:
        return
    experiment = load_experiment(recipe.file, [*bench.overrides(recipe, seed), *recipe.free])
    torch.set_num_threads(1)
    print(f"{dt.datetime.now():%H:%M:%S} {years:g} years of {recipe.name} seed {seed}", flush=True)
    with build.start(experiment, training=False) as runtime:
        context = build.build_context(experiment, runtime, train=False)
        build.load_weights(context)
        stepper, store, variables = context.stepper, context.store, context.variables
        stepper.eval()
        test = store.period(experiment.data.test)
        inits = [int(test[i * len(test) // INITIAL_TIMES]) for i in range(INITIAL_TIMES)]
        truth = store.read(variables.outputs, list(range(0, len(store), 4)))
        climate = Climate.of(truth, store.grid.latitude_weights() / store.grid.height)
        days: list[Day] = []
        spectra: dict[int, Array] = {}
        began, steps = time.process_time(), 8 if bench.small else 4 * round(365 * years)
        for lead, state in rollout(stepper, store, variables, inits, steps):
            if lead % 4:
                continue
            x = stepper.outputs(state).numpy()
            days.append(climate.day(x))
            year, days_of_year = year_of(lead, steps)
            spectra[year] = spectra.get(year, 0.0) + climate.spectrum(x) / days_of_year
            ended = bool(climate.blown(days[-1], 10).all())
            if ended or lead % STEPS_PER_YEAR == 0 or lead == steps:
                # Every year, so that what has been computed of a long run is not lost.
                np.savez(
                    path,
                    names=[name for v in variables.outputs for name in v.channels],
                    means=[day.means for day in days],
                    eddies=[day.eddies for day in days],
                    blown=[climate.blown(day) for day in days],
                    first_spectrum=spectra[0],
                    last_spectrum=spectra[year],
                    cpu=time.process_time() - began,
                    steps=lead,
                    finished=ended or lead == steps,
                    truth_mean=climate.means,
                    truth_change=climate.change,
                    truth_eddies=climate.eddies,
                    truth_spectrum=climate.waves,
                )
            if ended:
                break


def year_of(lead: int, steps: int) -> tuple[int, int]:
    """Return the simulated year of a lead, from 0, and the days that it has in a run of so many steps; the last may have fewer."""
    year = (lead - 1) // STEPS_PER_YEAR
    return year, min(365, steps // 4 - 365 * year)


@dataclass(frozen=True)
class Day:
    """Global means (B, C) of some fields, and of the variance of their eddies, which are deviations from the zonal mean."""

    means: Array
    eddies: Array


@dataclass(frozen=True)
class Climate:
    """The truth's global means, their standard deviation in time, its spread, eddy variance and zonal spectrum, by channel."""

    weights: Array
    means: Array
    change: Array
    spread: Array
    eddies: Array
    waves: Array

    @classmethod
    def of(cls, truth: Array, weights: Array) -> Climate:
        empty = cls(weights[:, None], *[np.zeros(0)] * 5)
        day = empty.day(truth)
        means = day.means.mean(0)
        spread = np.sqrt(
            (np.square(truth.astype(float) - means[:, None, None]) * empty.weights).sum(-2).mean(-1).mean(0)
        )
        return cls(
            empty.weights, means, day.means.std(0), spread, day.eddies.mean(0), empty.spectrum(truth).mean(0)
        )  # fmt: skip

    def day(self, x: Array) -> Day:
        x = x.astype(float)
        eddies = np.square(x - x.mean(-1, keepdims=True))
        return Day((x * self.weights).sum(-2).mean(-1), (eddies * self.weights).sum(-2).mean(-1))

    def spectrum(self, x: Array) -> Array:
        waves = np.fft.rfft(x.astype(float), norm="forward")
        return np.asarray((np.square(np.abs(waves)) * self.weights).sum(-2))

    def blown(self, day: Day, times: float = 1.0) -> NDArray[np.bool_]:
        """Return which forecasts are outside what a climate may be, by so many `times`; those with NaN are."""
        inside = (day.eddies < 10 * times * self.eddies) & (abs(day.means - self.means) < times * self.spread)
        return np.asarray(~inside.all(-1))


@dataclass(frozen=True)
class Free:
    """Free runs of one recipe with all its seeds; F counts their forecasts, of which `kept` have not blown up."""

    recipe: str
    seeds: tuple[str, ...]
    years: float
    speed: float
    """Simulated years per day of processor time."""
    ends: tuple[int, ...]
    """Days on which forecasts have blown up."""
    forecasts: int
    names: tuple[str, ...]
    truth: dict[str, Array]
    means: Array
    """Of the kept forecasts, (F, 2, C): global means of the first and of the last year."""
    eddies: Array
    waves: Array
    """Zonal energy (F, 2, C, wavenumber)."""

    @classmethod
    def read(cls, recipe: str, paths: Sequence[Path]) -> Free:
        found = [np.load(path) for path in paths]
        ends: list[int] = []
        parts: list[tuple[Array, Array, Array]] = []
        for each in found:
            blown = each["blown"]
            ends += [int(np.flatnonzero(of)[0]) + 1 for of in blown.T if of.any()]
            kept = ~blown.any(0)
            of_years = [np.stack([each[key][part][:, kept].mean(0) for part in ENDS], 1) for key in ("means", "eddies")]
            waves = np.stack([each[f"{year}_spectrum"][kept] for year in ("first", "last")], 1)
            parts.append((of_years[0], of_years[1], waves))
        means, eddies, waves = (np.concatenate(each) for each in zip(*parts, strict=True))
        simulated = [each["steps"] / STEPS_PER_YEAR * each["blown"].shape[1] for each in found]
        return cls(
            recipe,
            tuple(path.parent.name.rpartition("-s")[2] for path in paths),
            max(float(each["steps"]) / STEPS_PER_YEAR for each in found),
            float(sum(simulated) / sum(each["cpu"] / 86400 for each in found)),
            tuple(ends),
            sum(each["blown"].shape[1] for each in found),
            tuple(map(str, found[0]["names"])),
            {key: np.asarray(found[0][f"truth_{key}"]) for key in ("mean", "change", "eddies", "spectrum")},
            means,
            eddies,
            waves,
        )

    def row(self) -> list[str]:
        """Return recipe, seeds, years, forecasts that blew up, and simulated years per day."""
        when = f"{len(self.ends)} of {self.forecasts}"
        when += f", day {min(self.ends)}–{max(self.ends)}" if self.ends else ""
        return [self.recipe, ", ".join(self.seeds), f"{self.years:.2f}", when, f"{self.speed:.0f}"]

    def climate(self) -> list[list[str]]:
        """Return one row for each variable: global mean, eddy variance and energy of the first and of the last year."""
        rows = []
        for c, name in enumerate(self.names):
            truth = self.truth["spectrum"][c]
            carried = truth >= LITTLE * truth[1:].sum()
            carried[0] = False
            ratios = self.waves[:, :, c].mean(0)[:, carried] / truth[carried]
            short = self.waves[:, :, c, RESOLVED + 1 :].mean(0).sum(-1) / truth[1:].sum()
            means, eddies = self.means[:, :, c], self.eddies[:, :, c] / self.truth["eddies"][c]
            cells = [
                f"{self.truth['mean'][c]:.5g} ± {self.truth['change'][c]:.2g}",
                " → ".join(f"{x.mean():.5g}" for x in means.T),
                f"{np.ptp(means[:, 1]):.2g}",
                " → ".join(f"{x.mean():.2f}" for x in eddies.T),
                " → ".join(f"{r.min():.2f}–{r.max():.2f}" for r in ratios),
                " → ".join(f"{x:.0e}" for x in short),
            ]
            rows.append([self.recipe, name, *cells])
        return rows


def free_runs(recipes: Sequence[Recipe], bench: Bench) -> list[str]:
    """Years without a blow-up, and the climate of the first and of the last simulated year beside the truth's."""
    paths: dict[str, list[Path]] = {}
    known = {recipe.name: recipe.what for recipe in recipes}
    for path in sorted(bench.work.glob("*-s*/free-*.npz")):
        name = path.parent.name.rpartition("-s")[0]
        if name in known:
            paths.setdefault(name, []).append(path)
    found = [Free.read(recipe, each) for recipe, each in paths.items()]
    lasting = [each for each in found if len(each.means) and each.years >= 1]
    ends = ["run", "seeds", "years", "blown up", "simulated years per day of one core"]
    heads = [
        "run",
        "variable",
        "truth's global mean",
        "first → last year's",
        "range of last",
        "eddy variance / truth's",
        "zonal energy / truth's",
        f"energy above {RESOLVED}",
    ]
    return [
        f"Forecasts without end from {INITIAL_TIMES} times spread over the test period. A run blows up on the day when the eddy "
        "variance of a variable, that of deviations from the zonal mean, exceeds ten times the truth's, or when a global mean is "
        "further from the truth's than the truth's standard deviation in space and time. Target: 10 years without a blow-up.",
        "",
        *(table(ends, [each.row() for each in found]) if found else ["Not measured yet."]),
        "",
        *(f"- `{each.recipe}`: {known[each.recipe]}." for each in found),
        "",
        "The climate of the forecasts that lasted, in the first and in the last simulated year: global means (± is the truth's "
        "standard deviation in time) and the range of the last among forecasts, eddy variance, the lowest and highest ratio of "
        "energy over the zonal wavenumbers that carry at least 0.1 % of the truth's, and the energy above the truncation as a "
        "fraction of that of all waves of the truth.",
        "",
        *(table(heads, [row for each in lasting for row in each.climate()]) if lasting else ["None lasted a year."]),
        "",
        *short_scores(recipes, bench),
    ]


def short_scores(recipes: Sequence[Recipe], bench: Bench) -> list[str]:
    """RMSE of forecasts of five days of the recipes of free runs."""
    rows = []
    for recipe in recipes:
        for seed in bench.found(recipe):
            found = bench.rmse(recipe, seed) / bench.rmse(recipe, seed, PERSISTENCE)
            kept = found[~found.index.str.startswith(("precipitation", "wind_vector"))]
            cells = (
                f"{kept[lead].mean():.3f} ({kept[lead].min():.2f}–{kept[lead].max():.2f})" if lead in kept else "–"
                for lead in LEADS
            )
            rows.append([recipe.name, str(seed), *cells])
    if not rows:
        return []
    return [
        "RMSE of their forecasts as a fraction of persistence's, mean over the predicted variables and levels without "
        "precipitation, and in brackets the lowest and the highest:",
        "",
        *table(["run", "seed", "6 h", "24 h", "72 h", "120 h"], rows),
    ]


ENDS = (slice(None, 365), slice(-365, None))
"""The days of the first and of the last year."""


# --- growth -----------------------------------------------------------------------------------------------------------------

GROWTH_DAYS = (14, 44)
BANDS = {"0": (0, 1), "1–5": (1, 6), "6–12": (6, 13), "13–21": (13, 22), "22–32": (22, 33)}
"""Zonal wavenumbers: the truth has next to nothing above 21, and little from 13 on."""


def grow(bench: Bench, recipe: Recipe, seed: int) -> None:
    """Forecast from the first time of the test period, and store the daily fields."""
    import torch

    from credit_like import build
    from credit_like.rollout import rollout
    from credit_like.schema.load import load_experiment

    folder = bench.folder(recipe, seed)
    if (folder / "growth.npz").exists():
        return
    torch.set_num_threads(1)
    experiment = load_experiment(recipe.file, [*bench.overrides(recipe, seed), *recipe.free])
    with build.start(experiment, training=False) as runtime:
        context = build.build_context(experiment, runtime, train=False)
        weights = build.load_weights(context).name
        stepper, store, variables = context.stepper, context.store, context.variables
        stepper.eval()
        init = [store.index(experiment.data.test[0].start)]
        states = rollout(stepper, store, variables, init, 8 if bench.small else 4 * (GROWTH_DAYS[1] + 4))
        days = [stepper.outputs(state)[0].numpy() for lead, state in states if lead % 4 == 0]
    np.savez(
        folder / "growth.npz",
        days=days,
        weights=weights,
        names=[name for v in variables.outputs for name in v.channels],
        rows=store.grid.latitude_weights() / store.grid.height,
    )


def growth(bench: Bench) -> list[str]:
    """Growth of what a forecast has in bands of zonal wavenumbers, and how steady its short waves are."""
    rows = []
    for path in sorted(bench.work.glob("*-s*/growth.npz")):
        recipe, _, seed = path.parent.name.rpartition("-s")
        found = np.load(path)
        first, last = GROWTH_DAYS
        if len(found["days"]) <= last + 3:
            continue
        waves = np.fft.rfft(found["days"].astype(float), norm="forward")
        energy = (np.square(np.abs(waves)) * found["rows"][:, None]).sum(-2)
        short = waves[..., 13:] * np.sqrt(found["rows"])[:, None]
        for c, name in enumerate(found["names"]):
            rates = [
                100 * np.log(energy[last, c, a:b].sum() / energy[first, c, a:b].sum()) / (8 * (last - first))
                for a, b in BANDS.values()
            ]
            now, later = short[last, c], short[last + 3, c]
            same = (now.conj() * later).sum().real / np.sqrt(np.square(abs(now)).sum() * np.square(abs(later)).sum())
            weights = str(found["weights"])
            rows.append([recipe, seed, weights, str(name), *(f"{rate:+.2f}" for rate in rates), f"{same:.2f}"])
    heads = ["run", "seed", "weights", "variable", *(f"wavenumber {band}" for band in BANDS), "steadiness"]
    return [
        f"A forecast from the first time of the test period: growth of the amplitude between days {GROWTH_DAYS[0]} and "
        f"{GROWTH_DAYS[1]} in per cent per step, by zonal wavenumber. Steadiness is the correlation of the part from wavenumber 13 "
        "on with the same part three days later; that of weather is near 0. The mean of a row (wavenumber 0) is that of the whole "
        "field and grows only where it is small, as that of v.",
        "",
        *(table(heads, rows) if rows else ["Not measured yet."]),
    ]


FREE = [
    PLAIN,
    INPUT_NOISE,
    INPUT_NOISE_FILTERED,
    INPUT_NOISE_LOW_ORDER,
    INPUT_NOISE_DIFFUSION,
    ALWAYS_FILTERED,
    LONG,
    PROGNOSTIC,
    SPECTRAL,
    FILTERED,
]
FREE_GCM = [GCM_PLAIN, GCM_HELD, GCM_LONG]
CASES: dict[str, tuple[str, list[Recipe], Callable[[Bench], list[str]]]] = {
    "precipitation": (
        "Precipitation and humidity",
        PRECIPITATION,
        partial(
            precipitation,
            PRECIPITATION,
            ["column_water"],
            f"RMSE as a fraction of persistence's, at a budget of {BUDGET} steps of the model with 8 samples; "
            f"`{PROGNOSTIC_SHARP.name}` has as many batches as take that time instead.",
        ),
    ),
    "precipitation-gcm": (
        "Precipitation and humidity of gcm-t21",
        GCM_PRECIPITATION,
        partial(
            precipitation,
            GCM_PRECIPITATION,
            [f"specific_humidity {level}" for level in GCM_LEVELS],
            f"As above, on the data of config/gcm-t21.yml: RMSE as a fraction of persistence's after {GCM_SINGLE.steps} single "
            "steps with 8 samples.",
        ),
    ),
    "curriculum": (
        "Pretraining and longer forecasts",
        [*SINGLE_STEPS, *CURRICULA, EQUAL],
        curriculum,
    ),
    "curriculum-twice": (
        "Longer forecasts after more single steps",
        [TWICE, TWICE_DAMPED, EQUAL_TWICE],
        curriculum_twice,
    ),
    "curriculum-gcm": (
        "Longer forecasts of gcm-t21",
        [GCM_SINGLE, GCM_DAMPED, GCM_CURRICULUM],
        curriculum_gcm,
    ),
    "added": ("Two variables added", [PLAIN, *ADDITIONS, SHORT], partial(added, ADDED_HERE)),
    "added-gcm": (
        "Two variables added to gcm-t21",
        [GCM_SINGLE, GCM_ADDED],
        partial(added, ADDED_GCM),
    ),
    "finer": ("From a coarse to a fine grid", [FINE, FINE_FROM_COARSE], finer),
    "sharpness": (
        "Sharpness",
        SHARPNESS,
        partial(sharpness, SHARPNESS, "with so few forecasts even the truth differs from itself by what its row says."),
    ),
    "sharpness-gcm": (
        "Sharpness of gcm-t21",
        GCM_SHARPNESS,
        partial(
            sharpness, GCM_SHARPNESS, "of 26 initial times in two months of another season than those of the training."
        ),
    ),
    "kept": (
        "Sharpness of forecasts that keep zonal energy",
        KEPT,
        partial(
            sharpness,
            KEPT,
            "here the test period is 230 days, and the 45 initial times are five days apart, so that its row says what the "
            "first and the last time make. The energy of the waves is prescribed: what the table shows of it is that the "
            "correction does what it says, and the RMSE is what that costs. The errors of a forecast that is as sharp as the truth "
            "exceed those of a smooth one at the same skill.",
        ),
    ),
    "ensembles": ("Ensembles", ENSEMBLES, ensembles),
    "free": ("Free runs", FREE, partial(free_runs, FREE)),
    "free-gcm": ("Free runs of gcm-t21", FREE_GCM, partial(free_runs, FREE_GCM)),
    "growth": ("What grows", [PLAIN, INPUT_NOISE], growth),
}


def machine() -> str:
    path = Path("/proc/cpuinfo")
    names = (
        [x.split(":")[1].strip() for x in path.read_text().splitlines() if x.startswith("model name")]
        if path.exists()
        else []
    )
    return names[0] if names else platform.machine()


def sections(page: str) -> dict[str, str]:
    """Return the text of each section of a page by its title."""
    parts = re.split(r"^## (.*)\n", page, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def report(bench: Bench, cases: Sequence[str], before: str = "") -> str:
    """Return the page with new sections of `cases`; the others are those of the page `before`, unless it has none."""
    import torch

    kept = sections(before)
    today = f"{dt.date.today()}, {machine()}, one thread, PyTorch {torch.__version__}."
    pages = [
        "# Training recipes\n\n"
        + wrapped(
            [
                "Made by `python benchmarks/recipes.py`, whose option `--list` prints the commands. Budgets are steps of the "
                "model, because the machine was shared; processor minutes are those of training alone. A range in brackets "
                "after a mean is that of the seeds. The data are those of `credit-like demo`, the forecasts those of its test "
                "period. Their weather is simulated, and chaotic: where BLAS has other kernels, on another processor, it is "
                "another after some hundred days. [The same recipes on a second simulated data set](recipes-again.md) say "
                "what that changes."
            ]
        )
    ]
    for case, (title, _, tabulate) in CASES.items():
        made = case in cases or title not in kept
        text = (
            wrapped([f"{today} Made with `--cases {case}`.", "", *tabulate(bench)]) if made else kept[title].strip("\n")
        )
        pages.append(f"## {title}\n\n" + text)
    return "\n\n".join(page.strip("\n") for page in pages) + "\n"


def wrapped(lines: Sequence[str]) -> str:
    """Return lines of text wrapped at the width of the project's pages, and tables as they are."""
    parts = [part for line in lines for part in ([line] if line.startswith("|") else textwrap.wrap(line, 132) or [""])]
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--recipes", nargs="*", help="only these experiments of the cases")
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3])
    parser.add_argument("--years", type=float, default=10, help="length of free runs")
    parser.add_argument("--work", type=Path, default=Path("runs/recipes"), help="folder of the runs")
    parser.add_argument(
        "--output", type=Path, help="the page whose sections are replaced; default: recipes.md in --work"
    )
    parser.add_argument("--small", action="store_true", help="a few steps of everything")
    parser.add_argument("--list", action="store_true", help="only print the commands")
    arguments = parser.parse_args()
    bench = Bench(arguments.work, tuple(arguments.seeds), arguments.small)
    for seed in bench.seeds:
        for case in arguments.cases:
            for recipe in CASES[case][1]:
                if arguments.recipes and recipe.name not in arguments.recipes:
                    continue
                if arguments.list:
                    print(
                        *(shlex.join(bench.command(s, recipe, seed)) for s in ("train", "rollout", "evaluate")),
                        sep="\n",
                    )
                else:
                    bench.run(recipe, seed)
                    if case.startswith("free"):
                        free_run(bench, recipe, seed, arguments.years)
                    if case == "growth":
                        grow(bench, recipe, seed)
    if not arguments.list:
        output = arguments.output or arguments.work / "recipes.md"
        text = report(bench, arguments.cases, output.read_text() if output.exists() else "")
        output.write_text(text)
        print(text)


if __name__ == "__main__":
    main()
