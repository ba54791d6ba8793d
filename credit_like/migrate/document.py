"""CREDIT's experiment file: its values, the lines of its keys, and the record of what became of each of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from credit_like.errors import UserError, cut, reason
from credit_like.small_files import read_small, yaml_values

Keys = tuple[str | int, ...]
"""Path of a key in a document."""


@dataclass(frozen=True)
class Remark:
    """A key of the source that is not translated one to one."""

    line: int
    key: str
    value: str
    meaning: str
    covered: bool = False
    """Whether nothing is to be decided: this package does it another way, or always."""


@dataclass
class Document:
    """CREDIT's experiment: its values, the lines of its keys, and which of them have been read."""

    values: Mapping[str, Any]
    lines: Mapping[Keys, int]
    read: set[Keys] = field(default_factory=set)
    remarks: list[Remark] = field(default_factory=list)

    def get(self, *keys: str | int, default: Any = None) -> Any:
        """Return the value of a key, or `default` where it is absent or null; it counts as read with all below it."""
        found: Any = self.values
        for key in keys:
            inside = isinstance(found, Mapping) and key in found
            inside = inside or (isinstance(found, list) and isinstance(key, int) and key < len(found))
            if not inside:
                return default
            found = found[key]
        self.read.add(keys)
        return default if found is None else found

    def section(self, *keys: str | int) -> Mapping[str, Any]:
        """Return a section, empty where there is none, without counting its keys as read."""
        found: Any = self.values
        for key in keys:
            found = found.get(key) if isinstance(found, Mapping) else None
        return found if isinstance(found, Mapping) else {}

    def remark(self, keys: Keys, meaning: str, covered: bool = False) -> None:
        """List a key of the file, with its meaning here."""
        place = self.lines.get(keys, 1), ".".join(map(str, keys))
        self.remarks.append(Remark(*place, _short(self.get(*keys)), meaning, covered))

    def absent(self, key: str, meaning: str, line: int = 1) -> None:
        """List a key that the file does not have, with the value that is used instead."""
        self.remarks.append(Remark(line, key, "absent", meaning))

    def rest(self) -> Iterator[Keys]:
        """Yield the keys with a value of their own that nothing has read."""

        def below(value: Any, keys: Keys) -> Iterator[Keys]:
            if keys in self.read:
                return
            if isinstance(value, Mapping) and value:
                for key, child in value.items():
                    yield from below(child, (*keys, key))
            else:
                yield keys

        yield from below(self.values, ())


def read(path: Path) -> Document:
    """Read CREDIT's file. Raises UserError if it is no YAML mapping with a `data` section."""
    repeated: list[tuple[Keys, int]] = []
    try:
        text = read_small(path).decode("utf-8-sig")
        yaml_values(text)  # bounds what follows
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        for keys, node in _mappings(root, ()):
            repeated += _repeated(keys, node)
        values = loader.construct_document(root) if root else None
        lines = dict(_lines(root, (), loader))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: expected CREDIT's YAML, got a file that cannot be read: {reason(error)}") from error
    if not isinstance(values, dict) or not isinstance(values.get("data"), dict):
        raise UserError(
            f"{path}: expected CREDIT's YAML with a `data` section, got none; is it an experiment of CREDIT?"
        )
    found = Document(values, lines)
    for keys, line in repeated:
        found.remarks.append(Remark(line, ".".join(map(str, keys)), "repeated", "the last value counts, as in CREDIT"))
    return found


def _children(node: yaml.Node | None) -> Iterator[tuple[str | int, yaml.Node]]:
    if isinstance(node, yaml.MappingNode):
        yield from ((key.value, value) for key, value in node.value)
    elif isinstance(node, yaml.SequenceNode):
        yield from enumerate(node.value)


def _mappings(node: yaml.Node | None, keys: Keys) -> Iterator[tuple[Keys, yaml.MappingNode]]:
    """Yield the mappings as they are written, before anchors are merged into them."""
    if isinstance(node, yaml.MappingNode):
        yield keys, node
    for name, child in _children(node):
        yield from _mappings(child, (*keys, name))


def _repeated(keys: Keys, node: yaml.MappingNode) -> Iterator[tuple[Keys, int]]:
    """Yield the keys that a mapping has once more further down, each with its line."""
    names = [key.value for key, _ in node.value]
    for i, (key, _) in enumerate(node.value):
        if key.value != "<<" and key.value in names[i + 1 :]:
            yield (*keys, key.value), key.start_mark.line + 1


def _lines(node: yaml.Node | None, keys: Keys, loader: yaml.SafeLoader) -> Iterator[tuple[Keys, int]]:
    """Yield the line of every key; those that an anchor merges have the line of the anchor's key."""
    children: list[tuple[Any, int, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        children = [(loader.construct_object(key), key.start_mark.line, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        children = [(i, value.start_mark.line, value) for i, value in enumerate(node.value)]
    for name, line, child in children:
        yield (*keys, name), line + 1
        yield from _lines(child, (*keys, name), loader)


def _short(value: Any) -> str:
    return cut(" ".join(str(value).split()), 60)


def iso_time(value: str) -> str:
    """Return a time of CREDIT's in ISO 8601, without zero minutes and seconds."""
    return value.strip().removesuffix("Z").replace(" ", "T").removesuffix(":00").removesuffix(":00")


def shell_variables(text: str) -> str:
    """Return a path with `$USER` as `${USER}`."""
    return re.sub(r"\$([A-Za-z_]\w*)", r"${\1}", text)
