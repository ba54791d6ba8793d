"""Implementation of `credit-like preprocess`: statistics, audit, climatology and, on request, a training store."""

from __future__ import annotations

import datetime as dt
import importlib.util
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from credit_like.data.statistics import Progress, Statistics, wanted_times
from credit_like.data.store import FieldStore, open_store
from credit_like.data.times import parse
from credit_like.data.tools.audit import Audit
from credit_like.data.tools.climatology import CLIMATOLOGY, check_climatology
from credit_like.data.tools.preprocess import Mapper, PassPiece, in_processes, preprocess
from credit_like.data.tools.rechunk import rechunk
from credit_like.errors import UserError
from credit_like.lock import FileLock
from credit_like.naming import counted
from credit_like.outputs import check_new, check_own
from credit_like.schema.data import Period
from credit_like.schema.experiment import Experiment
from credit_like.schema.places import has_checkpoints
from credit_like.variables import Variables

_LOG = logging.getLogger(__name__)
_LINE_EVERY = 8.0  # seconds between log lines where there is no terminal
_SHOWN = 40


def prepare(
    experiment: Experiment,
    *,
    workers: int = 1,
    dask: str | None = None,
    climatology: bool = False,
    rechunk_to: Path | None = None,
    band: int | None = None,
) -> Audit:
    """Make one pass over the data: write to `save_loc`, print the audit, and write a training store to `rechunk_to`.

    The pass is shared by `workers` processes of this machine or by those of the dask scheduler at `dask` (an address,
    or the file that the scheduler has written). An interrupted pass continues where it stopped. The statistics
    with which checkpoints in `save_loc` were trained stay as they are. Raises UserError for invalid data or configuration, and
    Locked while another process does the same.
    """
    data = experiment.data
    if rechunk_to is not None:
        check_new("--rechunk", rechunk_to)
    folder = Path(experiment.save_loc)
    written = experiment.preprocessed_statistics
    check_own("data.statistics" if data.statistics else "save_loc", written, "a file of statistics", Statistics.is_file)
    Audit.check(folder)
    if climatology:
        check_climatology(Path(experiment.save_loc) / CLIMATOLOGY)
    if rechunk_to is not None and band is not None and band < 1:
        raise UserError(f"--band: expected at least 1 row, got {band}")
    keep = written.exists() and written == experiment.statistics_file and has_checkpoints(folder)
    mapper = in_dask(dask) if dask else in_processes(workers) if workers > 1 else None
    variables = Variables(data)
    store = open_store(data, variables)
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".preprocess.lock", folder, "change save_loc", temporary=True):
        try:
            with progress("looking at the data") as tell:
                statistics, found = preprocess(
                    store,
                    variables,
                    data,
                    folder,
                    tell,
                    mapper,
                    written,
                    experiment.evaluation.climatology_window_days if climatology else 0,
                    keep=keep,
                )
        except ValueError:
            if (folder / "audit.csv").exists():
                _LOG.warning("the findings of the audit are in %s", folder / "audit.csv")
            raise
    print_audit(found, statistics)
    made = [*([] if keep else [written]), folder / "audit.csv", folder / "audit.png"]
    if keep:
        _LOG.warning(
            "%s stays as it is: the weights in %s/checkpoints were trained with it; set another save_loc for other statistics",
            *(written, folder),
        )
    made += [folder / CLIMATOLOGY] if climatology else []
    if rechunk_to is not None:
        with progress("re-chunking") as tell:
            rechunk(store, variables, rechunk_to, band, progress=tell, times=times_read(experiment, store))
        made.append(rechunk_to)
    _LOG.info("written: %s", ", ".join(map(str, made)))
    return found


def times_read(experiment: Experiment, store: FieldStore) -> NDArray[np.int64]:
    """Return the positions of the times that training, forecasts and scores of an experiment read, in order.

    They are those of the three periods and of climatologies, and around each initial time those from the first history of its
    members to the last lead.
    """
    data, section = experiment.data, experiment.inference
    used = np.zeros(len(store), bool)
    used[wanted_times(store, data)[0]] = True
    means = [experiment.evaluation.climatology_period, *(getattr(c, "climatology", None) for c in experiment.physics)]
    for periods in means:
        if isinstance(periods, tuple) and all(isinstance(period, Period) for period in periods):
            used[store.period(periods)] = True
    if section.init is None:
        starts = store.seconds[store.period(data.test)]
    elif section.init.times:
        starts = np.array([parse(time, store.calendar) for time in section.init.times])
    else:
        first, last = (parse(str(time), store.calendar) for time in (section.init.start, section.init.end))
        starts = store.seconds[(store.seconds >= first) & (store.seconds <= last)]
    before = (data.history_len - 1) * store.step_seconds + _seconds_before(experiment)
    after = _seconds(section.lead, data.timestep)
    bounds = np.zeros(len(store) + 1, np.int64)
    np.add.at(bounds, np.searchsorted(store.seconds, starts - before), 1)
    np.add.at(bounds, np.searchsorted(store.seconds, starts + after, "right"), -1)
    return np.flatnonzero(used | (np.cumsum(bounds[:-1]) > 0))


def _seconds_before(experiment: Experiment) -> int:
    """Return the seconds before an initial time at which the first forecast starts that makes its members' initial states."""
    ensemble, timestep = experiment.inference.ensemble, experiment.data.timestep
    if ensemble.members == 1 or ensemble.perturbations is None:
        return 0
    if ensemble.kind == "bred":
        return ensemble.perturbations.cycles * _seconds(ensemble.perturbations.cycle, timestep)
    if ensemble.kind == "lagged":
        return (ensemble.members - 1) * _seconds(ensemble.perturbations.lag or timestep, timestep)
    return 0


def _seconds(lead: int | dt.timedelta, timestep: dt.timedelta) -> int:
    """Return the length of a lead, given as time or in steps."""
    return lead * round(timestep.total_seconds()) if isinstance(lead, int) else round(lead.total_seconds())


def in_dask(address: str) -> Mapper:
    """Return a mapper over the workers of a dask scheduler. Raises UserError if the scheduler cannot be used."""
    if importlib.util.find_spec("distributed") is None:
        raise UserError(
            "--dask: expected the package distributed, got none; install it with `pip install 'credit-like[hpc]'` or use "
            "--workers"
        )

    def run(function: Callable[[PassPiece], Path], pieces: Sequence[PassPiece]) -> Iterator[Path]:
        from dask.distributed import Client, as_completed

        arguments: dict[str, Any] = {"scheduler_file": address} if Path(address).is_file() else {"address": address}
        try:
            client = Client(timeout="30s", **arguments)
        except (OSError, ValueError) as error:
            raise UserError(f"--dask: expected a scheduler that answers, got none at {address}: {error}") from error
        with client:
            for future in as_completed(client.map(function, pieces, pure=False, retries=2)):
                yield future.result()

    return run


@contextmanager
def progress(what: str) -> Iterator[Progress]:
    """Show a progress bar on a terminal, and elsewhere log a line now and then."""
    if sys.stderr.isatty():
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        from credit_like.terminal import plain_console

        columns = (
            TextColumn(what, style="bold", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        with Bar(*columns, console=plain_console(stderr=True)) as bar:
            task = bar.add_task("", total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
        return
    began, last, first = time.monotonic(), time.monotonic(), -1

    def line(done: int, total: int) -> None:
        nonlocal last, first
        first = done if first < 0 else first
        now = time.monotonic()
        if done == total or now - last >= _LINE_EVERY:
            last = now
            left = (now - began) / (done - first) * (total - done) if done > first else 0.0
            _LOG.info("%s: %d of %d times, %.0f s left", what, done, total, left)

    yield line


def print_audit(found: Audit, statistics: Statistics) -> None:
    """Print a table of the findings, or a line if there are none."""
    from credit_like.terminal import folding_table, plain_console

    console = plain_console()
    times, channels = len(found.times), len(found.channels)
    seen = f"{times} times from {found.times[0]} to {found.times[-1]}, {channels} channels"
    if not found.findings:
        console.print(f"{seen}: nothing odd")
        return
    table = folding_table("what", "channel", "how often", "where", title=f"Audit: {seen}")
    for row in found.rows()[:_SHOWN]:
        table.add_row(*row)
    console.print(table)
    if len(found.findings) > _SHOWN:
        console.print(f"{len(found.findings) - _SHOWN} more in audit.csv")
    left_out = len(statistics.missing_times)
    if left_out:
        console.print(f"{counted(left_out, 'time')} with missing fields will be in no sample")
