"""Format of a checkpoint on disk.

    step-1200/
      rank-00000.safetensors   the pieces of tensors that rank 0 wrote, each under its key
      rank-00001.safetensors
      manifest.json            format version, step, meta; files (bytes, sha256); tensors (dtype, shape, pieces)

A piece is a box of a tensor: its offset and shape in the whole tensor, its file, its key there. Nothing in the folder
is executable: it holds only JSON and safetensors. The manifest is written last; it carries its own
checksum and is compared byte for byte with the only way to write it, so that a change to any byte is noticed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from credit_like.checkpoint.errors import DamagedCheckpoint
from credit_like.checkpoint.files import digest, to_json
from credit_like.errors import UserError

FORMAT = 1
MANIFEST = "manifest.json"
MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}
"""Format version → function that converts a manifest of that version to the next one."""

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

    @staticmethod
    def whole(tensor: Tensor) -> Piece:
        """Return the piece that covers a whole, undivided tensor."""
        return Piece(tensor, tuple(tensor.shape), (0,) * tensor.ndim)

    @property
    def box(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.offset, tuple(self.local.shape)


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
    """Return the manifest as bytes: `body`, and on a line of its own the checksum of all other lines."""
    content = to_json(body)
    return content[:1] + _checksum_line(hashlib.sha256(content).hexdigest()) + content[1:]


def _checksum_line(checksum: str) -> bytes:
    return f'\n "checksum": "{checksum}",'.encode()


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint, migrated to the present format.

    Raises DamagedCheckpoint if it is absent or altered, ValueError for a format that this release cannot read.
    """
    path = folder / MANIFEST
    try:
        if path.exists() and not path.is_file():
            raise DamagedCheckpoint(f"{path} is not a file")
        content = path.read_bytes()
        body = json.loads(content)
        checksum = body.pop("checksum")
        sealed = content.replace(_checksum_line(checksum), b"", 1)
        intact = hashlib.sha256(sealed).hexdigest() == checksum
    except DamagedCheckpoint:
        raise
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"{path} is missing") from error
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path} is not readable: {error}") from error
    if not intact:
        raise DamagedCheckpoint(f"{path} is not what was written: its checksum differs")
    body = migrate(body, path)
    if not _has_form(body):
        raise DamagedCheckpoint(f"{path} is intact but not in the form of a manifest; another program wrote it")
    return body


def _has_form(body: Mapping[str, Any]) -> bool:
    """Return whether a manifest has the keys and types that `seal` is given; `meta` may hold anything."""

    files = body.get("files")
    if not isinstance(files, dict):
        return False

    def is_size(value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63

    def is_box(value: object) -> bool:
        return isinstance(value, list) and all(map(is_size, value))

    def is_piece(value: object, rank: int) -> bool:
        return (
            isinstance(value, dict)
            and isinstance(value.get("file"), str)
            and value["file"] in files
            and isinstance(value.get("key"), str)
            and all(is_box(value.get(box)) and len(value[box]) == rank for box in ("offset", "shape"))
        )

    def is_tensor(value: object) -> bool:
        return (
            isinstance(value, dict)
            and isinstance(value.get("dtype"), str)
            and value["dtype"] in DTYPES
            and is_box(value.get("shape"))
            and isinstance(value.get("pieces"), list)
            and all(is_piece(piece, len(value["shape"])) for piece in value["pieces"])
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


def check_file(folder: Path, name: str, entry: Mapping[str, Any]) -> None:
    """Compare a file's size and SHA-256 with the manifest. Raises DamagedCheckpoint, which names the file."""
    path = folder / name
    try:
        size = path.stat().st_size
        if size != entry["bytes"]:
            raise DamagedCheckpoint(f"{path} has {size} bytes instead of {entry['bytes']}")
        if digest(path) != entry["sha256"]:
            raise DamagedCheckpoint(f"{path} is not what was written: its checksum differs")
    except OSError as error:
        raise DamagedCheckpoint(f"{path} is not readable: {error.strerror}") from error


class Reader:
    """Reader of the tensors of one checkpoint, box by box."""

    def __init__(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        self.folder = folder
        self.tensors: Mapping[str, Any] = manifest["tensors"]
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
        filled = 0
        for saved in entry["pieces"]:
            overlap = _overlap(saved["offset"], saved["shape"], *piece.box)
            if overlap is None:
                continue
            source, target, count = overlap
            values = self._slice(saved["file"], saved["key"], source)
            piece.local[target].copy_(values) if target else piece.local.copy_(values)
            filled += count
        if filled != piece.local.numel():
            raise UserError(f"{self.folder}: {name}: expected {piece.local.numel()} saved values, got {filled}")

    def _slice(self, file: str, key: str, source: tuple[slice, ...]) -> Tensor:
        path = self.folder / file
        try:
            if file not in self._open:
                self._open[file] = safe_open(path, framework="pt")
            values: Tensor = self._open[file].get_slice(key)[source] if source else self._open[file].get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise DamagedCheckpoint(f"{path} is not readable: {error}") from error
        return values


def _overlap(
    offset: Sequence[int], shape: Sequence[int], other_offset: Sequence[int], other_shape: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...], int] | None:
    """Return the overlap of two boxes as slices of each and its number of values, or None if they do not overlap."""
    source, target, count = [], [], 1
    for a, n, b, m in zip(offset, shape, other_offset, other_shape, strict=True):
        low, high = max(a, b), min(a + n, b + m)
        if low >= high:
            return None
        source.append(slice(low - a, high - a))
        target.append(slice(low - b, high - b))
        count *= high - low
    return tuple(source), tuple(target), count


def table(
    pieces: Iterable[tuple[str, str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...], str]],
) -> dict[str, Any]:
    """Return the manifest's `tensors` for rows of (name, dtype, file, shape, offset, piece shape, key).

    Raises UserError if the pieces of a tensor do not add up to the whole tensor.
    """
    tensors: dict[str, Any] = {}
    for name, dtype, file, shape, offset, size, key in pieces:
        entry = tensors.setdefault(name, {"dtype": dtype, "shape": list(shape), "pieces": []})
        entry["pieces"].append({"file": file, "key": key, "offset": list(offset), "shape": list(size)})
    for name, entry in tensors.items():
        covered = sum(torch.Size(piece["shape"]).numel() for piece in entry["pieces"])
        if covered != torch.Size(entry["shape"]).numel():
            raise UserError(f"expected pieces of {name} that add up to {entry['shape']}, got {covered} values")
    return tensors
