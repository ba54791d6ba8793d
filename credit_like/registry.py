"""Plug-ins by name: `type: wxformer` in YAML is the module `credit_like/models/wxformer`, without a registration table.

A plug-in module has a `Config` (a frozen section whose defaults form a tiny valid instance) and the functions of its
kind, whose protocol is in the `__init__` of the kind's package. Importing a plug-in module never imports torch: a
folder keeps its torch code in `model.py`, which `build` imports.

Besides the built-in plug-ins there are those of the experiment's `plugins` (folders, or importable packages) and those
of installed packages with an entry point in the group `credit_like.plugins`. Their folders are named as in `FOLDERS`.
Names are looked up in the packages that `searching` makes known; only modules that an experiment names are imported.
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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
"""Name of the subfolder that holds the plug-ins of a kind."""

GROUP = "credit_like.plugins"
"""Group of the entry points by which installed packages register plug-ins; the value is the package's name."""

_HAS = {
    "source": ("Config", "open_dataset"),
    "model": ("Config", "build"),
    "loss": ("Config", "pointwise or rowwise or of_members"),
    "physics": ("Config", "build"),
    "optimizer": ("Config", "build"),
    "scheduler": ("Config", "learning_rate"),
    "metric": ("per_time", "finish"),
    "writer": ("Config", "open_writer", "finished_path"),
}


class BrokenPluginError(UserError):
    """A plug-in that cannot be imported or does not satisfy its kind's protocol; the message gives file and line."""


@dataclass(frozen=True)
class PluginPackage:
    """Plug-ins outside this package, in a folder or an importable package."""

    plugin: str
    """Absolute path of a folder, or name of a package, as in the experiment."""
    name: str
    """Name under which it is imported."""
    folders: tuple[Path, ...]

    def parts(self, kind: str) -> dict[str, str]:
        """Return the plug-ins of a kind in this package: name → module."""
        return _modules(f"{self.name}.{FOLDERS[kind]}", [str(folder / FOLDERS[kind]) for folder in self.folders])

    def record(self) -> dict[str, str | None]:
        """Return what checkpoints store: name, path, version (`__version__` of its `__init__.py`) and content hash."""
        name = self.folders[0].name if os.path.isabs(self.plugin) else self.plugin
        version = next(filter(None, map(_version, self.folders)), None)
        return {"name": name, "path": str(self.folders[0]), "version": version, "sha256": self.hash()}

    def hash(self, without: Collection[str] = ()) -> str:
        """Return a hash of the names and contents of all Python files and of all files in the plug-in folders.

        Those in the folders of the kinds `without` are left out.
        """
        digest = hashlib.sha256()
        for folder in self.folders:
            files = set(folder.rglob("*.py"))
            for kind in FOLDERS.values():
                files.update((folder / kind).rglob("*"))
            # Broken links and pipes have no contents.
            inside = {file.relative_to(folder).as_posix(): file for file in files if file.is_file()}
            for name, file in sorted(inside.items()):
                if name.partition("/")[0] not in without and not any(
                    part[0] == "." or part == "__pycache__" for part in name.split("/")
                ):
                    content = hashlib.sha256(file.read_bytes()).hexdigest()
                    digest.update(f"{name}\0{content}\n".encode())
        return digest.hexdigest()


_known: ContextVar[tuple[PluginPackage, ...]] = ContextVar("known", default=())


@contextmanager
def searching(plugins: Sequence[str] = ()) -> Iterator[None]:
    """Make these plug-ins, and those of installed packages, known inside the context.

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
    """Make one more folder or package known, until the surrounding `searching` context ends.

    Raises UserError where it does not exist, has no plug-ins, or has a plug-in whose name is already taken.
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


def locate(plugin: str) -> PluginPackage:
    """Return the package of plug-ins in a folder (absolute path) or an importable package.

    Raises UserError where it does not exist.
    """
    if os.path.isabs(plugin):
        folder = Path(plugin)
        if not os.path.isdir(plugin):  # also for a name that no path can have
            raise UserError(f"expected a folder of plug-ins, got {plugin!r}, which is not one, change it")
        return PluginPackage(plugin, outside.package_name(folder), (folder,))
    try:
        spec = find_spec(plugin) if plugin.strip(".") else None
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            f"expected a folder beside the file that names it, or an importable package, got {plugin!r}, which is "
            "neither, change it"
        )
    return PluginPackage(plugin, plugin, tuple(map(Path, spec.submodule_search_locations)))


def record(plugins: Sequence[str] = ()) -> list[dict[str, str | None]]:
    """Return name, path, version and content hash of each known folder and package of plug-ins."""
    with searching(plugins):
        return [package.record() for package in _known.get()]


def forecast_hashes(plugins: Sequence[str] = ()) -> list[str]:
    """Return a hash of each known folder and package of plug-ins, without what makes no difference to a forecast."""
    without = [FOLDERS[kind] for kind in ("loss", "optimizer", "scheduler", "metric", "writer")]
    with searching(plugins):
        return [package.hash(without) for package in _known.get()]


def changed(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> list[str]:
    """List folders and packages of plug-ins whose files differ between two results of `record`, wherever they lie."""

    def shown(record: Mapping[str, Any] | None) -> str:
        if record is None:
            return "none"
        return f"{record['version'] or 'no version'}, sha256 {record['sha256'][:12]}"

    alike = {record["sha256"] for record in before} & {record["sha256"] for record in after}
    was, now = ({r["name"]: r for r in records if r["sha256"] not in alike} for records in (before, after))
    return [f"{name} ({shown(was.get(name))} → {shown(now.get(name))})" for name in sorted(was.keys() | now.keys())]


@cache
def _announced() -> tuple[str, ...]:
    return tuple(sorted({point.module for point in metadata.entry_points(group=GROUP)}))


def _modules(package: str, folders: Iterable[str]) -> dict[str, str]:
    """Return the modules in some folders, name → module; `_` becomes `-`, and leading underscores are left out."""
    found = (info.name for info in pkgutil.iter_modules(folders))
    return {name.replace("_", "-"): f"{package}.{name}" for name in found if name[0] != "_"}


@cache
def _ours(kind: str) -> dict[str, str]:
    return _modules(KINDS[kind], importlib.import_module(KINDS[kind]).__path__)


def names(kind: str) -> list[str]:
    """Return the sorted names of all known plug-ins of a kind, as spelt in YAML."""
    return sorted({*_ours(kind), *(name for package in _known.get() for name in package.parts(kind))})


def module(kind: str, name: str) -> ModuleType:
    """Return the plug-in module of a kind and name.

    Raises UserError with the closest valid name where there is none, and BrokenPluginError for an external plug-in that
    cannot be imported or does not satisfy its kind's protocol.
    """
    if name not in names(kind):
        raise UserError(unknown(kind, name))
    if name in (ours := _ours(kind)):
        return importlib.import_module(ours[name])
    return next(_imported(kind, name, package) for package in _known.get() if name in package.parts(kind))


def of(kind: str, config: Any) -> ModuleType:
    """Return the plug-in module of a configuration, even outside the `searching` context that made it known."""
    found = sys.modules.get(type(config).__module__)
    if found is not None and getattr(found, "Config", None) is type(config):
        return found
    return module(kind, config.type)


def _imported(kind: str, name: str, package: PluginPackage) -> ModuleType:
    """Import and check an external plug-in module.

    Raises BrokenPluginError with file and line.
    """
    where = package.parts(kind)[name]
    try:
        found = importlib.import_module(where)
    except (Exception, SystemExit) as error:
        message = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
        raise BrokenPluginError(
            f"expected a {kind} that can be imported, got {_line(error, package.folders)}: {type(error).__name__}: "
            f"{message}, change that file"
        ) from error
    missing = [names for names in _HAS[kind] if not any(hasattr(found, name) for name in names.split(" or "))]
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


def is_foreign(module: str) -> bool:
    """Return whether the module of this name is one of a plug-in, or of any other package than this."""
    parts = module.split(".")
    return parts[0] != "credit_like" or parts[:2] == ["credit_like", "plugins"]


def _type_of(config: Any) -> object:
    field = getattr(config, "model_fields", {}).get("type")
    return None if field is None else field.default


def _line(error: BaseException, folders: Sequence[Path]) -> str:
    """Return `file:line` of the innermost frame of an import error that lies in the folders."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if any(Path(frame.filename).is_relative_to(folder) for folder in folders)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else str(folders[0])


def _version(folder: Path) -> str | None:
    """Return the `__version__` of a package without executing it; None if it has none."""
    initial = folder / "__init__.py"
    try:
        body = ast.parse(initial.read_text(encoding="utf-8") if initial.is_file() else "").body
    except (OSError, SyntaxError, ValueError):
        return None
    constants = [s for s in body if isinstance(s, ast.Assign) and isinstance(s.value, ast.Constant)]
    for statement in constants:
        if any(isinstance(target, ast.Name) and target.id == "__version__" for target in statement.targets):
            assert isinstance(statement.value, ast.Constant)
            return str(statement.value.value)
    return None


def unknown(kind: str, name: object) -> str:
    """Return the error message for a name that no plug-in of this kind has."""
    known = names(kind)
    return f"expected one of {', '.join(known)}, got {name!r}{did_you_mean(name, known)}"


def closest(name: object, known: Iterable[str]) -> str | None:
    """Return the known name that is most similar, ignoring case; None if none is similar."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(str(name).lower(), by_lower, n=1, cutoff=0.5)
    return by_lower[close[0]] if close else None


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` with the closest known name, or an empty string."""
    close = closest(name, known)
    return f"; did you mean {close!r}?" if close else ""
