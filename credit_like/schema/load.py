"""Load an experiment file into a frozen `Experiment`, reporting every problem with its file and line.

Files follow the core schema of YAML 1.2: `1e-3` is a number; `12:00:00` and `2020-01-01` are text; `on`, `off`, `yes`,
`no` and `y` are text too, so they can be variable names. In a value, `$VAR` and `${VAR}` are replaced by environment
variables, and `$$` is a dollar.

`include` names files relative to the including file, or else a shipped model or site by its path in the repository
(`models/wxformer-1deg/model.yml`, `config/site/derecho.yml`). Where one file names a site (`site: derecho`) and another one,
or an override, has other keys of `site` without a name, these change the named site. `plugins` names packages, or folders
relative to the file that names them. All other paths are relative to the current working directory, as on a command line.
"""

from __future__ import annotations

import itertools
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Any

import yaml
from pydantic import ValidationError

from credit_like.errors import UserError
from credit_like.schema import sites
from credit_like.schema.errors import (
    ExperimentError,
    Locations,
    Path,
    Place,
    Problem,
    error_paths,
    in_order,
    problems_of,
    shown,
)
from credit_like.schema.experiment import Experiment
from credit_like.schema.partial import partial_experiment
from credit_like.schema.shipped import shipped_file

_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*)|(\{)|(\$))")
_INT = re.compile(r"[-+]?[0-9]{1,4000}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_DEEPEST = 50
_MOST_NODES = 100_000
"""Most values after aliases have been expanded; a few lines of nested aliases can expand to billions of values."""
_MOST_BYTES = 4 * 2**20
_MOST_INCLUDES = 10
_WORDS: dict[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **{word: float("inf") for word in (".inf", "+.inf", ".Inf")},
    **{word: float("-inf") for word in ("-.inf", "-.Inf")},
    **{word: float("nan") for word in (".nan", ".NaN", ".NAN")},
}


def load_experiment(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Experiment:
    """Load and validate an experiment file, with its `include`s and `overrides` (`"trainer.epochs=2"`) merged in.

    Raises ExperimentError with every problem, each `file:line: key: expected …, got …, change …`.
    """
    return load_located(path, overrides)[0]


def load_located(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> tuple[Experiment, Locations]:
    """Load an experiment, and where each of its keys is written.

    Raises ExperimentError with every problem.
    """
    experiment, locations, problems = load_partly(path, overrides)
    if problems or experiment is None:
        raise ExperimentError(in_order(problems, str(path)))
    return experiment, locations


def load_partly(
    path: str | os.PathLike[str], overrides: Sequence[str] = ()
) -> tuple[Experiment | None, Locations, list[Problem]]:
    """Load an experiment as far as its keys are valid; return it with the places of its keys and all problems.

    Keys with problems are hidden (`schema.partial`); there is no experiment if too little is left. Raises ExperimentError
    for a file that cannot be read.
    """
    tree = _read_file(FilePath(path), including=())
    problems: list[Problem] = []
    for override in overrides:
        try:
            tree = _override(tree, override)
        except ExperimentError as error:
            problems += error.problems
    problems += [*tree.problems, *tree.unset()]
    locations = Locations(tree.places(), Place(str(path), 1))
    data = tree.plain()
    wrong: list[Path] = [tuple(int(p) if p.isdecimal() else p for p in problem.key.split(".")) for problem in problems]
    try:
        experiment = Experiment.model_validate(data)
    except ValidationError as error:
        known = {problem.key for problem in problems}
        # A value that could not be parsed fails validation only for that reason.
        problems += [p for p in problems_of(error, Experiment, data, locations) if p.key not in known]
        wrong += error_paths(error, Experiment, data)
    else:
        if not problems:
            return experiment, locations, []
    return partial_experiment(data, wrong), locations, problems


def read_plain(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the content of a file, with its `include`s, as plain data that has not been validated.

    Raises ExperimentError with every problem.
    """
    tree = _read_file(FilePath(path), including=())
    if problems := [*tree.problems, *tree.unset()]:
        raise ExperimentError(in_order(problems, str(path)))
    content: dict[str, Any] = tree.plain()
    return content


def dump_experiment(experiment: Experiment) -> str:
    """Return the resolved experiment as YAML, from which `load_experiment` makes an equal one in any environment."""

    def escaped(value: Any) -> Any:
        """Double the dollars of values; in keys, variables are not replaced."""
        if isinstance(value, dict):
            return {key: escaped(below) for key, below in value.items()}
        if isinstance(value, list | tuple):
            return [escaped(item) for item in value]
        return value.replace("$", "$$") if isinstance(value, str) else value

    def represent(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
        style = None if isinstance(_scalar(text), str) else "'"
        if not text.isprintable():  # line breaks among others, which YAML folds in other styles
            style = '"'
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)

    class Dumper(yaml.SafeDumper):
        """A dumper that quotes strings that would otherwise be read as something else."""

        def ignore_aliases(self, _data: Any) -> bool:
            return True

    Dumper.add_representer(str, represent)
    return yaml.dump(escaped(experiment.to_dict()), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)


@dataclass(frozen=True)
class _Tree:
    """A YAML value and the place where it is written; mappings and lists in `value` hold trees."""

    value: Any
    place: Place
    problems: tuple[Problem, ...] = ()
    """Of a whole file: its problems, but for those of single values."""
    own: tuple[Problem, ...] = ()
    """Problems of this value, which are none where another value replaces it."""

    def unset(self) -> list[Problem]:
        """Return the problems of all values."""
        below = self.value.values() if isinstance(self.value, dict) else self.value
        children = below if isinstance(self.value, dict | list) else ()
        return [*self.own, *(problem for child in children for problem in child.unset())]

    def plain(self) -> Any:
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value

    def places(self, prefix: Path = ()) -> dict[Path, Place]:
        items: Sequence[tuple[Any, _Tree]] = ()
        if isinstance(self.value, dict):
            items = list(self.value.items())
        elif isinstance(self.value, list):
            items = list(enumerate(self.value))
        result: dict[Path, Place] = {}
        for key, child in items:
            result[*prefix, key] = child.place
            result.update(child.places((*prefix, key)))
        return result


def _read_file(path: FilePath, including: tuple[FilePath, ...]) -> _Tree:
    """Return the tree of a file with its includes merged in."""
    place = Place(str(path), 1)
    text = _read_text(path)
    if path.resolve() in including:
        raise ExperimentError(
            [Problem(str(path), 1, "include", "expected files that do not include each other, got a cycle")]
        )
    if len(including) >= _MOST_INCLUDES:
        message = f"expected at most {_MOST_INCLUDES} files that include one another in turn, got more, merge some"
        raise ExperimentError([Problem(str(path), 1, "include", message)])
    tree = _parse(text, place)
    if not isinstance(tree.value, dict):
        raise ExperimentError([Problem(str(path), 1, "", "expected a mapping of sections, got " + _kind(tree.value))])
    included = tree.value.get("include")
    own = _Tree({key: child for key, child in tree.value.items() if key != "include"}, tree.place, tree.problems)
    own = _with_type(_with_absolute_plugins(own, path.parent))
    if included is None:
        return own
    problems = included.unset()
    base = _Tree({}, place)
    for name, at in _include_names(included, problems):
        target = _shipped_or_beside(name, path.parent)
        try:
            _read_text(target)
        except ExperimentError as error:
            problems.append(Problem(at.file, at.line, "include", _include_message(name, path.parent, error)))
            continue
        other = _read_file(target, (*including, path.resolve()))
        problems += [*_conflicts(base, other, ()), *other.problems]
        base = _merge_files(base, other)
    if any(problem.key == "include" for problem in problems):
        # Without the included keys, most other problems would only be consequences of the missing file.
        raise ExperimentError(problems)
    merged = _merge_files(base, own)
    return replace(merged, problems=(*problems, *merged.problems, *own.problems))


def _with_absolute_plugins(tree: _Tree, folder: FilePath) -> _Tree:
    """Make the folders in `plugins` absolute, so that the stored experiment can be loaded from anywhere."""
    plugins = tree.value.get("plugins") if isinstance(tree.value, dict) else None
    if plugins is None or not isinstance(plugins.value, list):
        return tree

    def absolute(entry: _Tree) -> _Tree:
        if not isinstance(entry.value, str) or not entry.value:
            return entry
        there = folder / FilePath(entry.value).expanduser()
        is_path = os.sep in entry.value or entry.value.startswith((".", "~"))
        return replace(entry, value=os.path.abspath(there)) if is_path or os.path.isdir(there) else entry

    entries = _Tree([absolute(entry) for entry in plugins.value], plugins.place)
    return _Tree({**tree.value, "plugins": entries}, tree.place, tree.problems)


def _with_type(tree: _Tree) -> _Tree:
    """Write `inference.output.format` of a file as `type`, which it stands for, so that the key that is set last counts.

    Different values of both stay for the section to refuse.
    """
    inference = tree.value.get("inference") if isinstance(tree.value, dict) else None
    output = inference.value.get("output") if inference is not None and isinstance(inference.value, dict) else None
    if inference is None or output is None or not isinstance(output.value, dict) or "format" not in output.value:
        return tree
    kinds = [output.value[key] for key in ("format", "type") if key in output.value]
    if kinds[0].value != kinds[-1].value:
        return tree
    keys = {"type" if key == "format" else key: child for key, child in output.value.items()}
    section = replace(inference, value={**inference.value, "output": replace(output, value=keys)})
    return replace(tree, value={**tree.value, "inference": section})


def _shipped_or_beside(name: str, folder: FilePath) -> FilePath:
    """Return the path of an included file: relative to `folder`, or shipped with the program where nothing is there."""
    beside = folder / os.path.expanduser(name)
    return beside if os.path.isfile(beside) else shipped_file(name) or beside


def _read_text(path: FilePath) -> str:
    """Return the text of a file.

    Raises ExperimentError for anything but a readable file of reasonable size.
    """
    try:
        status = path.stat()
        if stat.S_ISREG(status.st_mode) and status.st_size <= _MOST_BYTES:
            return path.read_text(encoding="utf-8")
        if stat.S_ISDIR(status.st_mode):
            message = "expected an experiment file, got a directory, name the file in it"
        elif stat.S_ISREG(status.st_mode):
            message = f"expected an experiment file, got {status.st_size / 2**20:.0f} MiB, change the path"
        else:
            message = "expected an experiment file, got a pipe, socket or device, change the path"
    except FileNotFoundError:
        message = "expected an experiment file, got nothing there, change the path"
    except UnicodeDecodeError as error:
        message = f"expected UTF-8 text, got {error.reason} at byte {error.start}"
    except OSError as error:
        message = f"expected a readable file, got {error.strerror}"
    except ValueError as error:
        message = f"expected the path of a file, got {error}"
    raise ExperimentError([Problem(str(path), 0, "", message)])


def _include_message(name: str, folder: FilePath, error: ExperimentError) -> str:
    """Return what is wrong with an included file, for the line that includes it."""
    if "://" in name:
        return f"expected a file relative to {folder}/, got the URL {shown(name)}, download it and name the file"
    if not os.path.lexists(folder / name.replace("\0", "")):
        return (
            f"expected a file relative to {folder}/ or a shipped one such as models/wxformer-tiny/model.yml, "
            f"got {shown(name)}, change it to a file that exists"
        )
    return f"{error.problems[0].message}: {shown(name)} in {folder}/"


def _include_names(included: _Tree, problems: list[Problem]) -> list[tuple[str, Place]]:
    entries = included.value if isinstance(included.value, list) else [included]
    names: list[tuple[str, Place]] = []
    for entry in entries:
        if isinstance(entry.value, str) and entry.value:
            if entry.value not in (name for name, _ in names):
                names.append((entry.value, entry.place))
        else:
            message = f"expected a file or a list of files, got {_kind(entry.value)}"
            problems.append(Problem(entry.place.file, entry.place.line, "include", message))
    return names


def _merge(base: _Tree, over: _Tree) -> _Tree:
    """Merge mappings key by key; replace anything else."""
    if not (isinstance(base.value, dict) and isinstance(over.value, dict)):
        return over
    merged = dict(base.value)
    for key, child in over.value.items():
        merged[key] = _merge(merged[key], child) if key in merged else child
    return _Tree(merged, over.place)


def _merge_files(base: _Tree, over: _Tree) -> _Tree:
    """Merge two files, or a file and an override; where one only names the site, the other one's keys change that site."""
    merged = _merge(base, over)
    both = [tree.value["site"] for tree in (base, over) if "site" in tree.value]
    named = [site for site in both if isinstance(site.value, str)]
    changed = [site for site in both if isinstance(site.value, dict) and "name" not in site.value]
    if not (named and changed):
        return merged
    if (profile := _profile(named[0].value)) is None:
        return replace(merged, value={**merged.value, "site": named[0]})
    site = _merge(profile, changed[0])
    return replace(merged, value={**merged.value, "site": site}, problems=profile.problems)


def _profile(name: str) -> _Tree | None:
    """Return the `site` section of a profile; None where there is none, which is reported with the name."""
    try:
        tree = _read_file(sites.find(name), including=())
    except UserError:
        return None
    section = tree.value.get("site")
    return None if section is None or not isinstance(section.value, dict) else replace(section, problems=tree.problems)


def _conflicts(first: _Tree, second: _Tree, path: Path) -> list[Problem]:
    """Return a problem for every key that two included files both set."""
    if isinstance(first.value, dict) and isinstance(second.value, dict):
        shared = [key for key in second.value if key in first.value]
        return [p for key in shared for p in _conflicts(first.value[key], second.value[key], (*path, key))]
    if first.place == second.place:
        return []
    message = f"expected one included file to set this key, got it in {first.place} too, remove one of the two"
    return [Problem(second.place.file, second.place.line, ".".join(map(str, path)), message)]


def _override(tree: _Tree, override: str) -> _Tree:
    """Return the tree with `section.key=value` set; the value is YAML."""
    place = Place(f"--set {override}")
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts) or len(parts) > _DEEPEST:
        raise ExperimentError([Problem(place.file, 0, "", "expected key=value such as trainer.epochs=2")])
    parsed = _parse(text, place)
    if parts[:2] == ["inference", "output"] and parts[2:] == ["format"]:
        parts[2] = "type"
    if parts in (["inference"], ["inference", "output"], ["site"]):
        whole = _set(_Tree({}, place), parts, parsed, place, key)
        merged = _merge_files(tree, _with_type(whole))
    else:
        named = tree.value.get("site") if parts[0] == "site" else None
        if named is None or not isinstance(named.value, str):
            merged = _set(tree, parts, parsed, place, key)
        elif (profile := _profile(named.value)) is None:
            merged = replace(tree, problems=())  # the name is reported
        else:
            problems = (*tree.problems, *profile.problems)
            tree = replace(tree, value={**tree.value, "site": profile}, problems=problems)
            merged = _set(tree, parts, parsed, place, key)
    result = _Tree(merged.value, tree.place, (*tree.problems, *merged.problems, *parsed.problems))
    return _with_absolute_plugins(result, FilePath()) if parts[0] == "plugins" else result


def _set(tree: _Tree, parts: list[str], value: _Tree, place: Place, key: str) -> _Tree:
    if not parts:
        return _merge(tree, value)
    head, rest = parts[0], parts[1:]
    if isinstance(tree.value, list):
        if not head.isdecimal() or len(head) > 9 or int(head) >= len(tree.value):
            message = f"expected a position from 0 to {len(tree.value) - 1}, got {head!r}"
            raise ExperimentError([Problem(place.file, 0, key, message)])
        items = list(tree.value)
        items[int(head)] = _set(items[int(head)], rest, value, place, key)
        return _Tree(items, tree.place)
    children = dict(tree.value) if isinstance(tree.value, dict) else {}
    children[head] = _set(children.get(head, _Tree({}, place)), rest, value, place, key)
    return _Tree(children, tree.place)


class _Loader(yaml.SafeLoader):
    """A loader that rejects tags, which would otherwise be ignored, and excessive nesting."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        tag = getattr(event, "tag", None)
        if tag not in (None, "!"):
            problem = f"the tag {shown(tag)}, remove it (a value from the environment is written $NAME)"
            raise yaml.composer.ComposerError(None, None, problem, event.start_mark)
        if self.depth >= _DEEPEST:
            problem = f"more than {_DEEPEST} levels of lists and mappings"
            raise yaml.composer.ComposerError(None, None, problem, event.start_mark)
        self.depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _parse(text: str, root: Place) -> _Tree:
    """Parse YAML text; if `root` has line 0 (the command line), it is the place of every value."""
    try:
        nodes = list(yaml.compose_all(text, Loader=_Loader))
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark and root.line else 0
        message = f"expected YAML, got {error.problem or error.context}"
        raise ExperimentError([Problem(root.file, line, "", message)]) from None
    except yaml.YAMLError as error:
        raise ExperimentError([Problem(root.file, root.line, "", f"expected YAML, got {error}")]) from None
    if len(nodes) > 1:
        line = nodes[1].start_mark.line + 1 if root.line else 0
        raise ExperimentError([Problem(root.file, line, "", f"expected one YAML document, got {len(nodes)}")])
    if not nodes:
        return _Tree(None, root)
    problems: list[Problem] = []
    tree = _construct(nodes[0], root, (), problems, (), itertools.count(1))
    return _Tree(tree.value, root, tuple(problems), tree.own)


def _construct(
    node: yaml.Node,
    root: Place,
    path: Path,
    problems: list[Problem],
    above: tuple[yaml.Node, ...],
    number: Iterator[int],
) -> _Tree:
    def place_of(part: yaml.Node) -> Place:
        return Place(root.file, part.start_mark.line + 1 if root.line else 0)

    def complain(part: yaml.Node, key: Path, message: str) -> None:
        problems.append(Problem(root.file, place_of(part).line, ".".join(map(str, key)), message))

    place = place_of(node)
    if next(number) > _MOST_NODES:
        message = f"expected at most {_MOST_NODES} values, got more, with aliases replaced by what they stand for"
        raise ExperimentError([Problem(root.file, place.line, "", message)])
    above = (*above, node)
    if isinstance(node, yaml.SequenceNode):
        if any(item is other for item in node.value for other in above):
            complain(node, path, "expected an anchor that does not contain itself, got one that does")
            return _Tree([], place)
        items = [_construct(item, root, (*path, i), problems, above, number) for i, item in enumerate(node.value)]
        return _Tree(items, place)
    if isinstance(node, yaml.MappingNode):
        result: dict[str, _Tree] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                complain(key_node, path, "expected text as a key, got a list or mapping")
                continue
            key = key_node.value
            if key in result:
                first = result[key].place
                complain(
                    key_node, (*path, key), f"expected each key once, got it at {first} too, remove one of the two"
                )
            if any(value_node is other for other in above):
                complain(key_node, (*path, key), "expected an anchor that does not contain itself, got one that does")
                continue
            child = _construct(value_node, root, (*path, key), problems, above, number)
            result[key] = replace(child, place=place_of(key_node))
        return _Tree(result, place)
    assert isinstance(node, yaml.ScalarNode)
    messages: list[str] = []
    text = _expand(node.value, messages.append)
    own = tuple(Problem(root.file, place.line, ".".join(map(str, path)), message) for message in messages)
    return _Tree(text if node.style else _scalar(text), place, own=own)


def _expand(text: str, complain: Callable[[str], None]) -> str:
    """Replace `$VAR` and `${VAR}` by environment variables and `$$` by a dollar; report unset variables."""

    def value(match: re.Match[str]) -> str:
        if match[4]:
            return "$"
        name = match[1] or match[2]
        if not name:
            complain(f"expected $VAR or ${{VAR}}, got {shown(text)}, change the reference")
            return ""
        if name not in os.environ:
            complain(
                f"expected the environment variable {name} to be set, got it unset, change it by `export {name}=…`"
            )
            return ""
        return os.environ[name]

    return _VARIABLE.sub(value, text)


def _scalar(text: str) -> Any:
    """Convert a plain scalar by YAML 1.2's core schema."""
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) and len(text) <= 4000 else text


def _kind(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, Mapping):
        return "a mapping"
    return "a list" if isinstance(value, list) else shown(value)
