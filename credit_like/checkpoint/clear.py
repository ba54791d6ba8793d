"""Remove the files of a run from its folder and leave everything else in place."""

from __future__ import annotations

import re
from contextlib import nullcontext, suppress
from pathlib import Path

from credit_like.checkpoint.files import remove
from credit_like.errors import UserError, reason
from credit_like.lock import FileLock, RunLock
from credit_like.schema.places import FILES, RECORD, is_run, shows_a_run

_CHECKPOINTS = ("step-*", ".step-*.tmp", ".trash-step-*", ".damaged-step-*")
_FORECASTS = (
    "forecast.zarr", "forecast.zarr.*part", "forecast/*.nc", "forecast/*.nc.part", "forecast/*.grib", "forecast/*.grib.part",
    "done/*", "forecast.json*", ".lock",
)  # fmt: skip


def clear_run(save_loc: Path, force: bool, statistics: bool = True) -> None:
    """Make `save_loc` ready for a new run; of an existing run, remove only the files that a run creates.

    Removes its checkpoints, logs, fitted `statistics` and forecasts. Scores, jobs and all other files stay, and so does
    the experiment file until the new run replaces it: a removal that is interrupted, or a start that fails after it, can
    be repeated.

    Raises UserError if the folder is not empty and is not that of a run, or if it is and `force` is not given. Raises
    Locked while another process trains there or writes its forecasts.
    """
    if not save_loc.is_dir() or not any(entry.name != ".lock" for entry in save_loc.iterdir()):
        return
    if not (is_run(save_loc) and shows_a_run(save_loc)):
        raise UserError(
            f"save_loc: expected an empty folder or one of a run for --fresh, got {save_loc} with other files in it; "
            "change save_loc, or leave out --fresh to keep them beside the run"
        )
    if not force:
        raise UserError(
            f"save_loc: expected an empty folder for --fresh, got {save_loc} with a run in it; add --force to remove it"
        )
    try:
        # Looked for once: those that a rollout begins meanwhile are not locked, and stay.
        forecasts = _is_ours(save_loc / "forecasts")
        with RunLock(save_loc), _forecasts_lock(save_loc / "forecasts") if forecasts else nullcontext():
            _clear(save_loc, statistics, forecasts)
    except OSError as error:
        raise UserError(
            f"save_loc: expected a run that can be removed, got {save_loc}: {reason(error)}; remove it"
        ) from error


def _forecasts_lock(folder: Path) -> FileLock:
    """Return the lock of all forecasts in a folder."""
    return FileLock(folder / ".lock", folder, "stop it", unknown="a rollout")


def _is_ours(forecasts: Path) -> bool:
    """Return whether a folder holds forecasts of a run, or the lock alone, which is removed last."""
    files = (path for path in forecasts.rglob("*") if not path.is_dir())
    return (forecasts / RECORD).is_file() or [*files] == [forecasts / ".lock"]


def _clear(save_loc: Path, statistics: bool, forecasts: bool) -> None:
    made = [path for pattern in _CHECKPOINTS for path in (save_loc / "checkpoints").glob(pattern)]
    made += (save_loc / "tensorboard").glob("events.out.tfevents.*")
    made += (save_loc / "tracking").glob("*.json")  # not what trackers hold: other runs may share it
    made += (save_loc / "hang").glob("rank-*.txt")
    made += save_loc.glob("memory-rank-*.pickle")
    if forecasts:
        _set_aside(save_loc / "forecasts" / "forecast.zarr")
        made += [path for pattern in _FORECASTS for path in (save_loc / "forecasts").glob(pattern)]
    if statistics:
        made += [save_loc / "statistics.nc", *_drafts(save_loc, "statistics.nc")]
    for file in FILES:
        made += _drafts(save_loc, file)
    made += [save_loc / file for file in FILES if file != "experiment.yml"]
    for path in made:
        remove(path)
    for name in ("checkpoints", "tensorboard", "tracking", "hang", "forecasts/forecast", "forecasts/done", "forecasts"):
        folder = save_loc / name
        if folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()):
            folder.rmdir()


def _set_aside(store: Path) -> None:
    """Rename a zarr store before its files are removed, because a reader would take missing chunks for missing values."""
    removed = store.with_name(f"{store.name}.removed.part")
    remove(removed)
    with suppress(FileNotFoundError):
        store.rename(removed)


def _drafts(folder: Path, name: str) -> list[Path]:
    """Return the drafts of a file, of this and of earlier releases."""
    own = re.compile(rf"\.{re.escape(name)}\.(tmp|.+-[0-9]+)")
    return [path for path in folder.glob(".*") if own.fullmatch(path.name)]
