"""Files that the program reads as a whole: they must be regular files of a plausible size.

Anything may be where such a file is expected. A pipe or a device waits for a writer or never ends, a sparse file declares more
than the memory holds, and a few lines of YAML with aliases stand for billions of values.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import yaml

MOST_BYTES = 256 * 2**20
"""Largest size of a file of metadata; a manifest of thousands of ranks has a few MB."""
LOG_BYTES = 2**30
"""Largest size of the log of a run that is read."""
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MOST_YAML = 4 * 2**20
_MOST_VALUES = 100_000


def require_regular(path: str | Path) -> None:
    """Raise ValueError for a pipe, socket or device, and OSError where nothing can be looked at. A folder is left to `open`."""
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise ValueError("expected a file, got a pipe, socket or device")


def read_small(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return the content of a file. Raises OSError, or ValueError for one larger than `most` bytes or not regular."""
    require_regular(path)
    with path.open("rb") as file:
        content = file.read(most + 1) if os.fstat(file.fileno()).st_size <= most else None
    if content is None or len(content) > most:
        raise ValueError(f"expected at most {most / 2**20:g} MiB, got more")
    return content


def read_yaml(path: Path) -> Any:
    """Return the values of a YAML file of UTF-8 text. Raises OSError, or ValueError as `read_small` and `yaml_values` do."""
    return yaml_values(read_small(path, _MOST_YAML).decode("utf-8-sig"))


def yaml_values(text: str) -> Any:
    """Return the values of a YAML text. Raises ValueError for another text and for more values than any of our files has."""
    loader = _LOADER(text)
    try:
        node = loader.get_single_node()
        _count(node, {})
        values = None if node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply or contains itself") from error
    finally:
        loader.dispose()
    return values


def _count(node: yaml.Node | None, known: dict[int, int]) -> int:
    """Return the number of values with every alias replaced by what it stands for. Raises ValueError for too many."""
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) not in known:
        pairs = node.value if isinstance(node, yaml.MappingNode) else [(item,) for item in node.value]
        known[id(node)] = 1 + sum(_count(item, known) for pair in pairs for item in pair)
    if known[id(node)] > _MOST_VALUES:
        raise ValueError(
            f"expected at most {_MOST_VALUES} values, got more, with aliases replaced by what they stand for"
        )
    return known[id(node)]
