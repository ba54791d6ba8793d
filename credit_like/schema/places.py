"""Which folder a run may take for its own: what it makes there is replaced and removed by name.

Everything here is textual or a look at names, so that it can be asked before any file is opened.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from credit_like.schema.errors import Path as Key
from credit_like.schema.experiment import Experiment

FILES = ("experiment.yml", "status.json", "log.jsonl")
"""What a training writes in `save_loc`, beside its folders."""
FOLDERS = ("checkpoints", "tensorboard")
_EVIDENCE = (".lock", "status.json", "log.jsonl", "checkpoints")


def is_run(folder: str | Path) -> bool:
    """Whether a training has begun in a folder: the stored experiment, and something that only a training makes."""
    return os.path.isfile(os.path.join(folder, "experiment.yml")) and any(
        os.path.exists(os.path.join(folder, name)) for name in _EVIDENCE
    )


def place_findings(experiment: Experiment) -> Iterator[tuple[Key, str]]:
    """A `save_loc` that is somebody else's folder, or in which something has the name of what a run writes."""
    folder = experiment.save_loc
    if "\0" in folder:
        return
    for problem in (_shared_folder(folder), _taken_name(folder), *_data_around(experiment)):
        if problem:
            yield ("save_loc",), f"{problem}, change it"
            return


def _shared_folder(folder: str) -> str | None:
    """The root, the home folder, or a folder above it; the current one and those above it unless it is a run."""
    expected = f"expected a folder of the run's own, got {folder!r}, which is"
    place = os.path.realpath(folder)
    if place == os.path.realpath(os.sep):
        return f"{expected} the root of the file system"
    home = os.path.expanduser("~")
    if os.path.isabs(home) and home != os.sep and _inside(os.path.realpath(home), place):
        return f"{expected} or holds the home folder {home}"
    try:
        current = os.getcwd()
    except FileNotFoundError:  # removed while we are in it
        return None
    if _inside(os.path.realpath(current), place) and not is_run(place):
        return f"{expected} or holds the current folder {current}"
    return None


def _taken_name(folder: str) -> str | None:
    """Something under the name of a file or folder of a run that is none of its making."""
    own = f"expected a folder of the run's own, got {folder!r}, in which"
    for name in FILES:
        for file in (name, f".{name}.tmp"):
            if os.path.isdir(os.path.join(folder, file)):
                return f"{own} {file} is a folder and not a run's file"
    for name in FOLDERS:
        if os.path.isfile(os.path.join(folder, name)):
            return f"{own} {name} is a file and not a run's folder"
    if os.path.isfile(os.path.join(folder, "experiment.yml")) and not is_run(folder):
        return f"{own} experiment.yml is not the record of a run and would be replaced"
    return None


def _data_around(experiment: Experiment) -> Iterator[str]:
    """`save_loc` that is, lies in, or holds data that the experiment reads."""
    place = os.path.realpath(experiment.save_loc)
    data, evaluation = experiment.data, experiment.evaluation
    for path in (*paths_of(data), *paths_of(evaluation.truth)):
        root, is_pattern = _fixed(path)
        within = not is_pattern and _inside(place, root)
        if _inside(root, place) or within:
            relation = "is the place of" if root == place else "lies in" if within else "holds"
            yield f"expected a folder apart from the data, got {experiment.save_loc!r}, which {relation} {path}"
    # These may have been made in save_loc by this very run, or by another one; they cannot be the folder itself.
    named = {f"evaluation.baselines.{name}": path for name, path in evaluation.baselines.items()}
    for what, path in {**named, "data.statistics": data.statistics or ""}.items():
        if path and "://" not in path and "\0" not in path and _inside(place, os.path.realpath(path)):
            yield f"expected a folder apart from {what}, got {experiment.save_loc!r}, which is or lies in {path}"


def paths_of(config: object) -> Iterator[str]:
    """Every local file or folder that a section of the experiment reads, at any depth."""
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
    """The real path up to its first wildcard or date code, and whether it has one."""
    parts = path.split(os.sep)
    kept = next((i for i, part in enumerate(parts) if any(character in part for character in "*?[%")), len(parts))
    start = os.sep.join(parts[:kept]) or (os.sep if path.startswith(os.sep) else os.curdir)
    return os.path.realpath(start), kept < len(parts)


def _inside(path: str, folder: str) -> bool:
    """Whether a path is a folder or lies in it."""
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)
