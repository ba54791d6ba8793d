"""Checks that a folder may be used as `save_loc`, where a run replaces and removes files by name.

The checks look at paths only, so they can run before any file is opened.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel

from credit_like.outputs import begins_with
from credit_like.schema.errors import Path as Key
from credit_like.schema.experiment import Experiment
from credit_like.small_files import read_small

FILES = ("experiment.yml", "status.json", "log.jsonl")
"""Files that training writes in `save_loc`, besides its folders."""
RECORD = "forecast.json"
"""File in a folder of forecasts that says what they were made with."""
FOLDERS = ("checkpoints", "tensorboard", "tracking")
_MARKS = {"status.json": '"state":', "log.jsonl": '"step":'}
"""What these files hold, which a start that failed leaves without an experiment."""
_RECORD_MARKS = ("save_loc:", "data:", "model:")
_MANIFEST_MARK = '"checksum":'
_CHANGED = (".lock", "log.jsonl", "checkpoints")
"""What a training writes to where it finds it. It replaces other files, and goes on without `tensorboard`."""
_EVIDENCE = (".lock", "status.json", "log.jsonl", "checkpoints")


def is_run(folder: str | Path) -> bool:
    """Return whether training has begun in a folder: it holds the stored experiment and files of training."""
    return os.path.isfile(os.path.join(folder, "experiment.yml")) and any(
        os.path.exists(os.path.join(folder, name)) for name in _EVIDENCE
    )


def shows_a_run(folder: str | Path) -> bool:
    """Return whether a file in a folder has what only a run writes: its record, log, status or a manifest of a checkpoint."""
    place = Path(folder)
    if all(begins_with(mark)(place / "experiment.yml") for mark in _RECORD_MARKS):
        return True
    if any(begins_with(mark)(place / name) for name, mark in _MARKS.items()):
        return True
    return any(begins_with(_MANIFEST_MARK)(file) for file in place.glob("checkpoints/*step-*/manifest.json"))


def has_checkpoints(folder: str | Path) -> bool:
    """Return whether a run in a folder has saved a checkpoint, intact or not."""
    with suppress(FileNotFoundError):  # `--fresh --force` may remove it at any moment
        return any((Path(folder) / "checkpoints").glob("step-*"))
    return False


def state_of(folder: str | Path) -> str | None:
    """Return the state that status.json of a run says, None where it cannot be read."""
    with suppress(OSError, ValueError, RecursionError):
        status = json.loads(read_small(Path(folder) / "status.json"))
        return str(status["state"]) if isinstance(status, dict) and "state" in status else None
    return None


def write_findings(experiment: Experiment, fresh: bool = False) -> Iterator[tuple[Key, str]]:
    """Check that a training has write permission for the files in `save_loc`; forecasts do not need it.

    A `fresh` one removes all of it but the lock.
    """
    for name in (".lock",) if fresh else _CHANGED:
        path = os.path.join(experiment.save_loc, name)
        how = os.R_OK | os.W_OK | (os.X_OK if os.path.isdir(path) else 0)
        if os.path.exists(path) and not os.access(path, how):
            yield (
                ("save_loc",),
                f"expected permission to read and write for a training, got none for {path}, change its permissions or save_loc",
            )


def place_findings(experiment: Experiment) -> Iterator[tuple[Key, str]]:
    """Check that `save_loc` is not used for anything else.

    It must not be a shared folder or hold other files under the names that a run writes, and it must lie apart from the
    data.
    """
    folder = experiment.save_loc
    if "\0" in folder:
        return
    for problem in (_shared_folder(folder), _taken_name(folder), *_data_around(experiment), _own_source(experiment)):
        if problem:
            yield ("save_loc",), f"{problem}, change it"
            return


def _shared_folder(folder: str) -> str | None:
    """Return a problem for a folder that is, or contains, the root, the home folder or the current folder, or is blank.

    A folder that holds a run is allowed even if it is, or contains, the current folder.
    """
    expected = f"expected a folder of the run's own, got {folder!r}, which is"
    if not folder.strip():
        return f"{expected} blank"
    place = os.path.realpath(folder)
    if place == os.path.realpath(os.sep):
        return f"{expected} the root of the file system"
    home = os.path.expanduser("~")
    if os.path.isabs(home) and home != os.sep and _inside(os.path.realpath(home), place):
        return f"{expected} or holds the home folder {home}"
    try:
        current = os.getcwd()
    except FileNotFoundError:  # the current folder has been removed
        return None
    if _inside(os.path.realpath(current), place) and not is_run(place):
        return f"{expected} or holds the current folder {current}"
    return None


def _taken_name(folder: str) -> str | None:
    """Return a problem if a file or folder that a run would write exists already and was not written by a run."""
    own = f"expected a folder of the run's own, got {folder!r}, in which"
    for name in FILES:
        file = os.path.join(folder, name)
        if os.path.isdir(file):
            return f"{own} {name} is a folder and not a run's file"
        if os.path.exists(file) and not os.path.isfile(file):
            return f"{own} {name} is a pipe or device and not a run's file"
    for name in FOLDERS:
        if os.path.isfile(os.path.join(folder, name)):
            return f"{own} {name} is a file and not a run's folder"
    if os.path.isfile(os.path.join(folder, "experiment.yml")):
        # A run continues even if its logs are damaged.
        return None if is_run(folder) else f"{own} experiment.yml is not the record of a run and would be replaced"
    for name, mark in _MARKS.items():
        file = os.path.join(folder, name)
        if os.path.isfile(file) and os.path.getsize(file) and not begins_with(mark)(Path(file)):
            return f"{own} {name} is not a run's and would be replaced"
    return None


def _data_around(experiment: Experiment) -> Iterator[str]:
    """Yield a problem for each of the experiment's data paths that contains, is, or lies in `save_loc`."""
    place = os.path.realpath(experiment.save_loc)
    data, evaluation = experiment.data, experiment.evaluation
    for path in (*paths_of(data), *paths_of(evaluation.truth)):
        root, is_pattern = _fixed(path)
        within = not is_pattern and _inside(place, root)
        if _inside(root, place) or within:
            relation = "is the place of" if root == place else "lies in" if within else "holds"
            yield f"expected a folder apart from the data, got {experiment.save_loc!r}, which {relation} {path}"
    # These files may lie in save_loc, because this run or another one wrote them, but cannot be the folder itself.
    named = {f"evaluation.baselines.{name}": path for name, path in evaluation.baselines.items()}
    for what, path in {**named, "data.statistics": data.statistics or ""}.items():
        if path and "://" not in path and "\0" not in path and _inside(place, os.path.realpath(path)):
            yield f"expected a folder apart from {what}, got {experiment.save_loc!r}, which is or lies in {path}"


def _own_source(experiment: Experiment) -> str | None:
    """Return a problem if the weights of `start_from` are those of the run itself, which `--fresh` would remove."""
    section = experiment.start_from
    if section is None or "\0" in section.path:
        return None
    place, source = os.path.realpath(experiment.save_loc), os.path.realpath(section.path)
    if source == place or _inside(source, os.path.realpath(os.path.join(place, "checkpoints"))):
        return f"expected a folder apart from start_from.path, got {experiment.save_loc!r}, which holds {section.path}"
    return None


def paths_of(config: object) -> Iterator[str]:
    """Yield every local file or folder that a section of the experiment reads, at any depth."""
    if isinstance(config, BaseModel):
        for name in type(config).model_fields:
            value = getattr(config, name)
            if name in ("path", "like", "weights") and value:
                for path in [value] if isinstance(value, str) else value:
                    if isinstance(path, str) and path and "://" not in path and "::" not in path and "\0" not in path:
                        yield path
            else:
                yield from paths_of(value)
    elif isinstance(config, list | tuple):
        for item in config:
            yield from paths_of(item)


def _fixed(path: str) -> tuple[str, bool]:
    """Return the real path up to its first wildcard or date code, and whether it has one."""
    parts = path.split(os.sep)
    kept = next((i for i, part in enumerate(parts) if any(character in part for character in "*?[%")), len(parts))
    start = os.sep.join(parts[:kept]) or (os.sep if path.startswith(os.sep) else os.curdir)
    return os.path.realpath(start), kept < len(parts)


def _inside(path: str, folder: str) -> bool:
    """Return whether a path is a folder or lies in it."""
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)
