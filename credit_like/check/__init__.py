"""Checks before a run starts: the experiment's sections, its stores, and whether they fit together.

The checks call the functions that refuse the same things in training, forecasts and evaluation. Nothing is written, and
torch is imported only where the experiment requests a GPU of this machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path as FilePath
from typing import TYPE_CHECKING

from credit_like.check.axes import ON_THE_AXES
from credit_like.check.content import (
    content_findings,
    fit_findings,
    gap_findings,
    made_statistics_findings,
    statistics_file_findings,
    statistics_findings,
    stored_findings,
)
from credit_like.check.run import (
    checkpoint_findings,
    evaluation_findings,
    launch_findings,
    parameter_findings,
    requested_findings,
    trained_findings,
    training_findings,
    variable_findings,
)
from credit_like.check.store import UNREADABLE, Store, one_line
from credit_like.layout import Finding
from credit_like.schema.base import HiddenKey
from credit_like.schema.checks import section_findings, world_of
from credit_like.schema.errors import ExperimentError, in_order
from credit_like.schema.experiment import Experiment
from credit_like.schema.load import load_partly
from credit_like.schema.partial import visible
from credit_like.variables import Variables

if TYPE_CHECKING:
    from credit_like.schema.launch import Mode


def checked_experiment(
    file: str | FilePath,
    overrides: Sequence[str] = (),
    world_size: int | None = None,
    scoring: bool = False,
    forecasting: bool = False,
    training: bool = False,
    launching: bool = False,
    continuing: bool = False,
    mode: Mode | None = None,
    fresh: bool = False,
) -> tuple[Experiment, Store, int]:
    """Load and check the experiment of a file; return it with its store and the world size it was checked for.

    `scoring`: the files that forecasts are compared with must be there too; a training does not wait for them.
    `forecasting`: the default forecasts must fit the data too; otherwise only those that the experiment requests.
    `training`: the model must be one that can be trained.
    `launching`: all ranks begin at once, so statistics that take long to fit must be there.
    `continuing`: checkpoints of the run, if there are any, must be of the same model, variables and statistics, and the
    statistics of the same data.
    `mode`: the jobs of this mode alone must be within the limits of the machine, because those of others are not at hand.
    `fresh`: the run begins anew, whatever checkpoints it has.
    Raises ExperimentError with every problem of the file, its sections and stores that no other one hides.
    """
    experiment, locations, problems = load_partly(file, overrides)
    store = None
    if experiment is not None:
        findings, store = _inspect(
            experiment, world_size, scoring, forecasting, whole=not problems, mode=mode, fresh=fresh
        )
        findings = [*(visible(trained_findings, experiment, fresh) if training else ()), *findings]
        if launching and store is not None and not findings and not problems:
            findings += fit_findings(store, world_size or world_of(experiment, mode))
        if continuing and store is not None and not findings and not problems:
            findings += checkpoint_findings(store)
        # A job that others precede may have its statistics from them.
        if (launching or (continuing and mode is None)) and store is not None and not findings and not problems:
            findings += made_statistics_findings(store)
        problems = [*problems, *(locations.problem(*finding) for finding in findings)]
    if problems or experiment is None or store is None:
        raise ExperimentError(in_order(problems, str(file)))
    return experiment, store, world_size or world_of(experiment, mode)


def _inspect(
    experiment: Experiment,
    world_size: int | None,
    scoring: bool,
    forecasting: bool,
    whole: bool,
    mode: Mode | None,
    fresh: bool,
) -> tuple[list[Finding], Store | None]:
    """Return what the checks find, and the store if the data can be opened.

    `whole`: whether no key of the experiment is hidden. A check that reads a hidden key ends there.
    """
    world = world_size
    with suppress(HiddenKey):
        world = world_size or world_of(experiment, mode)
    findings = list(section_findings(experiment, world))
    try:
        variables = Variables(experiment.data)
    except HiddenKey:
        return findings, None
    except ValueError as error:
        # Names and levels that do not make channels have already been reported one by one.
        return findings or [(("data",), str(error))], None
    # Imported here, because a file that cannot be read is reported without the slow libraries of the stores.
    from credit_like.data.store import StoreError, open_store

    try:
        store = Store(open_store(experiment.data, variables), variables, experiment)
    except StoreError as error:
        findings += ((place, one_line(message)) for place, message in error.problems)
        if error.partial is not None:
            partial = Store(error.partial, variables, experiment)
            for check in (*ON_THE_AXES, statistics_file_findings):
                findings += visible(check, partial)
        return list(dict.fromkeys([*findings, *visible(variable_findings, experiment, variables)])), None
    except HiddenKey:
        return list(dict.fromkeys([*findings, *visible(variable_findings, experiment, variables)])), None
    except UNREADABLE as error:
        return [*findings, (("data", "source"), one_line(error))], None
    for check in (*ON_THE_AXES, content_findings, statistics_findings, stored_findings):
        findings += visible(check, store)
    findings += visible(variable_findings, experiment, variables)
    if not any(path[:1] == ("data",) for path, _ in findings):
        findings += visible(gap_findings, store)
    findings += visible(launch_findings, experiment, world_size is None and whole and not findings, mode)
    # What follows calls functions that take the data and the times for granted.
    if not any(path[:1] in (("data",), ("inference",)) for path, _ in findings):
        findings += visible(training_findings, store)
        findings += parameter_findings(store, fresh) if whole and not findings else ()
        findings += visible(requested_findings, store, scoring, forecasting)
        findings += visible(evaluation_findings, store, scoring)
    return list(dict.fromkeys(findings)), store
