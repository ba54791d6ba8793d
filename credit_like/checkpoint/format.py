"""Format of a checkpoint on disk.

    step-1200/
      rank-00000.safetensors   the pieces of tensors that rank 0 wrote, each under its key
      rank-00001.safetensors
      manifest.json            format version, step, meta; files (bytes, sha256); boxes; writers; tensors

A piece is a box of a tensor, in the file of one rank under the tensor's name. Tensors of the same shape and placement have
the same boxes, of which there may be thousands. The manifest therefore holds each list of boxes once:

    boxes     lists of boxes, each the offsets of a box followed by its sizes
    writers   lists of numbers of files, by sorted name, in the order of the boxes
    tensors   name → dtype, shape, number of its list of boxes, number of its list of writers

Format 1 had a list of pieces (file, key, offset, shape) for each tensor. Nothing in the folder is executable: it holds only
JSON and safetensors. The manifest is written last; it carries its own checksum and is compared byte for byte with the
only way to write it, so that a change to any byte is noticed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from credit_like.checkpoint.errors import DamagedCheckpoint, unreadable
from credit_like.checkpoint.files import digest, to_json
from credit_like.errors import UserError
from credit_like.parallel.shards import Division
from credit_like.small_files import read_small

FORMAT = 2
MANIFEST = "manifest.json"

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Piece:
    """A box of a tensor that one process holds: `local`, at `offset` of a tensor of `shape`."""

    local: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    division: tuple[Division, tuple[int, ...]] | None = None
    """How all ranks divide the tensor, and this one's position; None if that is not known here."""

    @staticmethod
    def whole(tensor: Tensor) -> Piece:
        """Return the piece that covers a whole, undivided tensor."""
        return Piece(tensor, tuple(tensor.shape), (0,) * tensor.ndim)

    @property
    def box(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.offset, tuple(self.local.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Return the box as an index of the whole tensor."""
        return tuple(slice(start, start + size) for start, size in zip(*self.box, strict=True))


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Write host tensors to one safetensors file, flush it, and return its size and SHA-256."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for key, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[key] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, position + size],
        }
        position += size
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    sha = hashlib.sha256()
    total = 0
    with path.open("wb", buffering=0) as file:

        def put(block: Any) -> None:
            nonlocal total
            view = memoryview(block).cast("B")
            sha.update(view)
            while len(view):
                written = file.write(view) or 0
                total += written
                view = view[written:]

        put(len(head).to_bytes(8, "little"))
        put(head)
        for tensor in tensors.values():
            if tensor.numel():
                put(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
        os.fsync(file.fileno())
    return total, sha.hexdigest()


def seal(body: dict[str, Any]) -> bytes:
    """Return the manifest as bytes: `body`, and one line with the checksum of all other lines."""
    content = to_json(body)
    return content[:1] + _checksum_line(hashlib.sha256(content).hexdigest()) + content[1:]


def _checksum_line(checksum: str) -> bytes:
    return f'\n "checksum": "{checksum}",'.encode()


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint, migrated to the present format.

    Raises DamagedCheckpoint if it is absent or altered, RunError if it cannot be read now, and UserError for a format that this
    release cannot read.
    """
    path = folder / MANIFEST
    try:
        content = read_small(path)
        body = json.loads(content)
        checksum = body.pop("checksum")
        sealed = content.replace(_checksum_line(checksum), b"", 1)
        intact = hashlib.sha256(sealed).hexdigest() == checksum
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"{path} is missing") from error
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
        raise unreadable(path, error) from error
    if not intact:
        raise DamagedCheckpoint(f"{path} is not what was written: its checksum differs")
    foreign = DamagedCheckpoint(f"{path} is intact but not in the form of a manifest; another program wrote it")
    try:
        body = migrate(body, path)
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise foreign from error
    if not _has_form(body):
        raise foreign
    return body


def _has_form(body: Mapping[str, Any]) -> bool:
    """Return whether a manifest has the keys and types that `seal` is given; `meta` may hold anything."""

    files = body.get("files")
    if not isinstance(files, dict):
        return False

    def is_size(value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63

    def is_sizes(value: object) -> bool:
        return isinstance(value, list) and all(map(is_size, value))

    boxes, writers = body.get("boxes"), body.get("writers")
    if not isinstance(boxes, list) or not isinstance(writers, list) or not all(map(is_sizes, writers)):
        return False
    dims: list[set[int]] = []
    for each in boxes:
        if not isinstance(each, list) or not all(map(is_sizes, each)):
            return False
        dims.append({len(box) for box in each})
    if any(max(each, default=0) >= len(files) for each in writers):
        return False

    def is_tensor(value: object) -> bool:
        return (
            isinstance(value, dict)
            and isinstance(value.get("dtype"), str)
            and value["dtype"] in DTYPES
            and is_sizes(value.get("shape"))
            and is_size(value.get("boxes"))
            and is_size(value.get("writers"))
            and value["boxes"] < len(boxes)
            and value["writers"] < len(writers)
            and dims[value["boxes"]] <= {2 * len(value["shape"])}
            and len(boxes[value["boxes"]]) == len(writers[value["writers"]])
        )

    tensors, score = body.get("tensors"), body.get("score")
    return (
        is_size(body.get("step"))
        and "score" in body
        and (score is None or isinstance(score, int | float))
        and isinstance(body.get("meta"), dict)
        and all(isinstance(f, dict) and is_size(f.get("bytes")) and "sha256" in f for f in files.values())
        and isinstance(tensors, dict)
        and all(map(is_tensor, tensors.values()))
    )


def migrate(body: dict[str, Any], path: Path) -> dict[str, Any]:
    """Convert a manifest of an older release to the present format."""
    version = body.get("format")
    if not isinstance(version, int) or version > FORMAT:
        raise UserError(
            f"{path}: expected format {FORMAT} or older, got {version}; use the release that wrote it or a later one"
        )
    while version < FORMAT:
        if version not in MIGRATIONS:
            raise UserError(
                f"{path}: expected format {FORMAT}, got {version}, which this release cannot bring forward; "
                "export it with the release that wrote it"
            )
        body = MIGRATIONS[version](body)
        version += 1
    return {**body, "format": FORMAT}


def _from_1(body: dict[str, Any]) -> dict[str, Any]:
    """Convert a manifest of format 1, which lists the pieces of each tensor."""
    number = {file: i for i, file in enumerate(sorted(body["files"]))}
    tensors = {}
    for name, entry in body["tensors"].items():
        if any(piece["key"] != name for piece in entry["pieces"]):
            raise ValueError(f"expected pieces of {name} under its name")
        rank = len(entry["shape"])
        if any(len(piece[part]) != rank for piece in entry["pieces"] for part in ("offset", "shape")):
            raise ValueError(f"expected boxes of {name} with {rank} dimensions")
        boxes = _boxes([[*piece["offset"], *piece["shape"]] for piece in entry["pieces"]], rank)
        writers = np.array([number[piece["file"]] for piece in entry["pieces"]], np.int64)
        tensors[name] = Stored(entry["dtype"], tuple(entry["shape"]), boxes, writers)
    return {**body, **table(tensors)}


MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {1: _from_1}
"""Format version → function that converts a manifest of that version to the next one."""


def check_size(folder: Path, name: str, entry: Mapping[str, Any]) -> None:
    """Compare a file's size with the manifest.

    Raises DamagedCheckpoint, which names the file, and RunError if it cannot be read now.
    """
    path = folder / name
    try:
        size = path.stat().st_size
    except OSError as error:
        raise unreadable(path, error) from error
    if size != entry["bytes"]:
        raise DamagedCheckpoint(f"{path} has {size} bytes instead of {entry['bytes']}")


def check_file(folder: Path, name: str, entry: Mapping[str, Any]) -> None:
    """Compare a file's size and SHA-256 with the manifest. Raises as `check_size`."""
    check_size(folder, name, entry)
    path = folder / name
    try:
        if digest(path) != entry["sha256"]:
            raise DamagedCheckpoint(f"{path} is not what was written: its checksum differs")
    except OSError as error:
        raise unreadable(path, error) from error


class Reader:
    """Reader of the tensors of one checkpoint, box by box."""

    def __init__(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        self.folder = folder
        self.tensors: Mapping[str, Any] = manifest["tensors"]
        self._files = sorted(manifest["files"])
        self._boxes, self._writers = manifest["boxes"], manifest["writers"]
        self._arrays: dict[int, NDArray[np.int64]] = {}
        self._open: dict[str, Any] = {}

    def read(self, name: str) -> Tensor:
        """Return a whole tensor."""
        entry = self.tensors[name]
        result = torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]])
        self.fill(name, Piece.whole(result))
        return result

    def fill(self, name: str, piece: Piece) -> None:
        """Copy the saved values of `piece`'s box into it, from all saved pieces that overlap it.

        Raises UserError if the shapes of the whole tensors differ or the saved pieces leave a gap.
        """
        entry = self.tensors[name]
        if tuple(entry["shape"]) != piece.shape:
            raise UserError(
                f"{self.folder}: {name}: expected shape {piece.shape}, got {tuple(entry['shape'])}; "
                "the experiment's model or variables differ from the checkpoint's"
            )
        number, rank = entry["boxes"], len(piece.shape)
        if number not in self._arrays:
            self._arrays[number] = _boxes(self._boxes[number], rank)
        boxes, writers = self._arrays[number], self._writers[entry["writers"]]
        offset, shape = (np.array(part, np.int64) for part in piece.box)
        low = np.maximum(boxes[:, 0], offset)
        high = np.minimum(boxes[:, 0] + boxes[:, 1], offset + shape)
        filled = 0
        for at in np.flatnonzero((low < high).all(axis=1)):
            source = _slices(low[at] - boxes[at, 0], high[at] - boxes[at, 0])
            target = _slices(low[at] - offset, high[at] - offset)
            values = self._slice(self._files[writers[at]], name, source)
            piece.local[target].copy_(values) if target else piece.local.copy_(values)
            filled += int((high[at] - low[at]).prod())
        if filled != piece.local.numel():
            raise UserError(f"{self.folder}: {name}: expected {piece.local.numel()} saved values, got {filled}")

    def _slice(self, file: str, key: str, source: tuple[slice, ...]) -> Tensor:
        path = self.folder / file
        try:
            if file not in self._open:
                path.open("rb").close()  # safe_open says of any error that there is no such file
                self._open[file] = safe_open(path, framework="pt")
            values: Tensor = self._open[file].get_slice(key)[source] if source else self._open[file].get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise unreadable(path, error) from error
        except RuntimeError as error:  # of torch, which opens the file by its name once more
            if path.exists():
                raise
            raise unreadable(path, FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))) from error
        return values


def _boxes(rows: Sequence[Sequence[int]], rank: int) -> NDArray[np.int64]:
    """Return boxes of a manifest as an array (box, offset or size, dimension)."""
    return np.array(rows, np.int64).reshape(len(rows), 2, rank)


def _slices(low: NDArray[np.int64], high: NDArray[np.int64]) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in zip(low.tolist(), high.tolist(), strict=True))


@dataclass(frozen=True)
class Stored:
    """Where the pieces of a tensor are: `boxes` (piece, offset or size, dimension), and the number of each one's file."""

    dtype: str
    shape: tuple[int, ...]
    boxes: NDArray[np.int64]
    writers: NDArray[np.int64]


def table(tensors: Mapping[str, Stored]) -> dict[str, Any]:
    """Return the manifest's `tensors`, `boxes` and `writers`, in which equal lists are held once.

    Raises UserError if the pieces of a tensor do not add up to the whole tensor.
    """
    boxes: list[list[list[int]]] = []
    writers: list[list[int]] = []
    seen: dict[tuple[Any, ...], int] = {}

    def number(key: tuple[Any, ...], lists: list[Any], make: Callable[[], list[Any]]) -> int:
        if key not in seen:
            seen[key] = len(lists)
            lists.append(make())
        return seen[key]

    entries = {}
    for name, of in tensors.items():
        covered = int(of.boxes[:, 1].prod(axis=1).sum())
        if covered != torch.Size(of.shape).numel():
            raise UserError(f"expected pieces of {name} that add up to {list(of.shape)}, got {covered} values")
        flat = of.boxes.reshape(len(of.boxes), -1)
        entries[name] = {
            "dtype": of.dtype,
            "shape": list(of.shape),
            "boxes": number(("boxes", flat.shape, flat.tobytes()), boxes, flat.tolist),
            "writers": number(("writers", of.writers.tobytes()), writers, of.writers.tolist),
        }
    return {"tensors": entries, "boxes": boxes, "writers": writers}
