"""Plug-ins by name: `type: wxformer` in YAML is the module `credit_like/models/wxformer`, with no table in between.

A plug-in module has a `Config` (a frozen section whose defaults form a tiny valid instance) and what its kind builds;
the `__init__` of each kind's package has the protocol. Importing a plug-in module never imports torch: a folder keeps
its torch code in `model.py`, imported by `build`.

Besides ours there are plug-ins of the experiment's `plugins` (folders, or importable packages) and of installed packages
that announce themselves by an entry point of the group `credit_like.plugins`. They are laid out as `FOLDERS` says. Names
are looked up in those that `searching` makes known; only the module that an experiment names is ever imported.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib
import os
import pkgutil
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from credit_like import plugins as outside
from credit_like.errors import UserError

KINDS = {
    "source": "credit_like.data.sources",
    "model": "credit_like.models",
    "loss": "credit_like.losses",
    "physics": "credit_like.physics",
    "optimizer": "credit_like.training.optimizers",
    "scheduler": "credit_like.training.schedulers",
    "metric": "credit_like.evaluation.metrics",
    "writer": "credit_like.inference.writers",
}

FOLDERS = {kind: package.rpartition(".")[2] for kind, package in KINDS.items()}
"""Where the plug-ins of a kind are in a folder of plug-ins."""

GROUP = "credit_like.plugins"
"""The entry points by which installed packages announce their plug-ins; the value is the package's name."""

_HAS = {
    "source": ("Config", "open_dataset"),
    "model": ("Config", "build"),
    "loss": ("Config", "pointwise"),
    "physics": ("Config", "build"),
    "optimizer": ("Config", "build"),
    "scheduler": ("Config", "learning_rate"),
    "metric": ("per_time", "finish"),
    "writer": ("Config", "open_writer", "finished_path"),
}


class BrokenPluginError(UserError):
    """A plug-in that cannot be imported, or lacks something that its kind has; the message names file and line."""


@dataclass(frozen=True)
class Package:
    """Plug-ins outside this package: a folder, or an importable package."""

    plugin: str
    """As the experiment has it: an absolute path, or the name of a package."""
    name: str
    """What it is imported as."""
    folders: tuple[Path, ...]

    def parts(self, kind: str) -> dict[str, str]:
        """Name → module of each of its plug-ins of a kind."""
        return _modules(f"{self.name}.{FOLDERS[kind]}", [str(folder / FOLDERS[kind]) for folder in self.folders])

    def record(self) -> dict[str, str | None]:
        """What a checkpoint keeps of it: name, place, version (`__version__` of its `__init__.py`) and content hash."""
        name = self.folders[0].name if os.path.isabs(self.plugin) else self.plugin
        version = next(filter(None, map(_version, self.folders)), None)
        return {"name": name, "path": str(self.folders[0]), "version": version, "sha256": self._hash()}

    def _hash(self) -> str:
        """Of every Python file, and of every file beside the plug-ins: names and contents."""
        digest = hashlib.sha256()
        for folder in self.folders:
            files = set(folder.rglob("*.py"))
            for kind in FOLDERS.values():
                files.update(file for file in (folder / kind).rglob("*") if file.is_file())
            inside = {file.relative_to(folder).as_posix(): file for file in files}
            for name, file in sorted(inside.items()):
                if not any(part[0] == "." or part == "__pycache__" for part in name.split("/")):
                    content = hashlib.sha256(file.read_bytes()).hexdigest()
                    digest.update(f"{name}\0{content}\n".encode())
        return digest.hexdigest()


_known: ContextVar[tuple[Package, ...]] = ContextVar("known", default=())


@contextmanager
def searching(plugins: Sequence[str] = ()) -> Iterator[None]:
    """Inside, the plug-ins of installed packages and these are known too.

    Raises UserError as `add` does.
    """
    token = _known.set(())
    try:
        for plugin in (*_announced(), *plugins):
            add(plugin)
        yield
    finally:
        _known.reset(token)


def add(plugin: str) -> None:
    """Make one more folder or package known, until the surrounding `searching` ends.

    Raises UserError for one that is not there, that has no plug-ins, or has a name that is already taken.
    """
    package, known = locate(plugin), _known.get()
    if any(package.folders == other.folders for other in known):
        return
    taken = [(kind, name) for kind in KINDS for name in package.parts(kind)]
    if not taken:
        raise UserError(
            f"expected a folder or package with plug-ins in {', '.join(f'{f}/' for f in FOLDERS.values())}, "
            f"got {plugin!r} without any, change it"
        )
    for kind, name in taken:
        holder = "credit_like" if name in _ours(kind) else None
        holder = holder or next((other.plugin for other in known if name in other.parts(kind)), None)
        if holder:
            raise UserError(
                f"expected a {kind} of another name than {name!r}, which {holder} has, got it in {plugin!r}, change "
                f"the name of the file in {FOLDERS[kind]}/"
            )
    _known.set((*known, package))


def locate(plugin: str) -> Package:
    """Where a folder (absolute) or an importable package is. Raises UserError where there is none."""
    if os.path.isabs(plugin):
        folder = Path(plugin)
        if not folder.is_dir():
            raise UserError(f"expected a folder of plug-ins, got {plugin!r}, which is none, change it")
        return Package(plugin, outside.package_name(folder), (folder,))
    try:
        spec = find_spec(plugin) if plugin.strip(".") else None
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            f"expected a folder beside the file that names it, or an importable package, got {plugin!r}, which is "
            "neither, change it"
        )
    return Package(plugin, plugin, tuple(map(Path, spec.submodule_search_locations)))


def record(plugins: Sequence[str] = ()) -> list[dict[str, str | None]]:
    """Name, place, version and content hash of each folder and package of plug-ins."""
    with searching(plugins):
        return [package.record() for package in _known.get()]


@cache
def _announced() -> tuple[str, ...]:
    return tuple(sorted({point.module for point in metadata.entry_points(group=GROUP)}))


def _modules(package: str, folders: Iterable[str]) -> dict[str, str]:
    """Name → module in some folders, leaving out those with a leading underscore; `_` is `-` in a name."""
    found = (info.name for info in pkgutil.iter_modules(folders))
    return {name.replace("_", "-"): f"{package}.{name}" for name in found if name[0] != "_"}


def _ours(kind: str) -> dict[str, str]:
    return _modules(KINDS[kind], importlib.import_module(KINDS[kind]).__path__)


def names(kind: str) -> list[str]:
    """The names of all known plug-ins of a kind as YAML spells them: modules without a leading underscore, `_` as `-`."""
    return sorted({*_ours(kind), *(name for package in _known.get() for name in package.parts(kind))})


def module(kind: str, name: str) -> ModuleType:
    """The plug-in module of this kind and name.

    Raises UserError with the closest valid names where there is none, BrokenPluginError for one from outside that
    cannot be imported or is not what its kind has to be.
    """
    if name not in names(kind):
        raise UserError(unknown(kind, name))
    if name in (ours := _ours(kind)):
        return importlib.import_module(ours[name])
    return next(_imported(kind, name, package) for package in _known.get() if name in package.parts(kind))


def of(kind: str, config: Any) -> ModuleType:
    """The plug-in module that a configuration belongs to, whatever is known at the moment."""
    found = sys.modules.get(type(config).__module__)
    if found is not None and getattr(found, "Config", None) is type(config):
        return found
    return module(kind, config.type)


def _imported(kind: str, name: str, package: Package) -> ModuleType:
    """A module from outside. Raises BrokenPluginError with file and line."""
    where = package.parts(kind)[name]
    try:
        found = importlib.import_module(where)
    except Exception as error:
        message = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
        raise BrokenPluginError(
            f"expected a {kind} that can be imported, got {_line(error, package.folders)}: {type(error).__name__}: "
            f"{message}, change that file"
        ) from error
    missing = [attribute for attribute in _HAS[kind] if not hasattr(found, attribute)]
    if missing:
        problem = f"no {' and no '.join(missing)}"
    elif "Config" in _HAS[kind] and (got := _type_of(found.Config)) != name:
        problem = (
            f"a Config with {f'the type {got!r}' if got else 'no type'}; write `type: Literal[{name!r}] = {name!r}`"
        )
    elif "Config" in _HAS[kind] and found.Config.__module__ != where:
        problem = f"the one of {found.Config.__module__}; derive a class Config from it"
    else:
        return found
    raise BrokenPluginError(
        f"expected {' and '.join(_HAS[kind])} of the {kind} {name!r} in {found.__file__}:1, got {problem}, change that file"
    )


def _type_of(config: Any) -> object:
    field = getattr(config, "model_fields", {}).get("type")
    return None if field is None else field.default


def _line(error: Exception, folders: Sequence[Path]) -> str:
    """`file:line` in the folders where an import failed."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if any(Path(frame.filename).is_relative_to(folder) for folder in folders)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else str(folders[0])


def _version(folder: Path) -> str | None:
    """`__version__ = "…"` of a package, without running it."""
    try:
        body = ast.parse((folder / "__init__.py").read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError):
        return None
    constants = [s for s in body if isinstance(s, ast.Assign) and isinstance(s.value, ast.Constant)]
    for statement in constants:
        if any(isinstance(target, ast.Name) and target.id == "__version__" for target in statement.targets):
            assert isinstance(statement.value, ast.Constant)
            return str(statement.value.value)
    return None


def unknown(kind: str, name: object) -> str:
    """What to say of a name that no plug-in of this kind has."""
    known = names(kind)
    return f"expected one of {', '.join(known)}, got {name!r}{did_you_mean(name, known)}"


def closest(name: object, known: Iterable[str]) -> str | None:
    """The known name most like this one, if any is near; capitals do not count."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(str(name).lower(), by_lower, n=1, cutoff=0.5)
    return by_lower[close[0]] if close else None


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the closest known name, or an empty string."""
    close = closest(name, known)
    return f"; did you mean {close!r}?" if close else ""
