"""Zarr arrays on a local disk, read straight from their chunks.

zarr-python passes every chunk through an event loop and a pool of threads, which costs about a millisecond a chunk:
more than decoding a field of a coarse grid. For the layouts that weather stores have (regular chunks, sharded or
not, versions 2 and 3; blosc, zstd, gzip, zlib or nothing), reading a file and decoding it into its place needs
neither, and is safe to fork. Anything else stays with zarr-python.

Where a chunk is absent, zarr means the fill value; here the array's own metadata must still be there, so that a
store that was removed or unmounted is an error and not a field of zeros.
"""

from __future__ import annotations

import itertools
import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import google_crc32c
import numcodecs  # type: ignore[import-untyped]
import numpy as np
import zarr
from numpy.typing import NDArray

from credit_like.data.files.direct import DirectArray, Spans
from credit_like.errors import UserError

_ABSENT = 2**64 - 1  # offset and size that a shard's index gives for an absent chunk
_SHARDS_REMEMBERED = 64
_BYTES_CODECS = {"blosc": "blosc", "zstd": "zstd", "gzip": "gzip", "zlib": "zlib", "lz4": "lz4"}

numcodecs.blosc.use_threads = False  # each process uses one core, and blosc's own thread pool would not survive a fork


@dataclass(frozen=True)
class ChunkLayout:
    """Location and encoding of the chunks of an array.

    A sharded array has `shard` set: its files are shards, each a sequence of chunks with an index at its end or start.
    """

    folder: str
    metadata: str
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    shard: tuple[int, ...] | None
    stored: np.dtype[Any]
    fill: Any
    codecs: tuple[Any, ...]
    """In the order of encoding."""
    prefix: tuple[str, ...]
    separator: str
    index_at_end: bool = True

    def file(self, chunk: Sequence[int]) -> str:
        """Return the file of a chunk, or of a shard."""
        return f"{self.folder}/{self.separator.join([*self.prefix, *map(str, chunk)])}"


def layout_of(array: zarr.Array[Any], folder: Path) -> ChunkLayout | None:
    """Return the layout of an array in a local folder, or None if zarr-python has to read it."""
    meta: dict[str, Any] = array.metadata.to_dict()
    if array.dtype.kind not in "iufb" or not array.shape:
        return None
    if meta.get("zarr_format") == 2:
        return _layout_v2(array, meta, folder)
    grid, keys = meta["chunk_grid"], meta["chunk_key_encoding"]
    if grid["name"] != "regular" or meta.get("storage_transformers"):
        return None
    chunks = tuple(grid["configuration"]["chunk_shape"])
    codecs, shard, at_end = list(meta["codecs"]), None, True
    if codecs[0]["name"] == "sharding_indexed":
        inner = codecs[0]["configuration"]
        index = [codec["name"] for codec in inner["index_codecs"]]
        if len(codecs) > 1 or index != ["bytes", "crc32c"] or _endian(inner["index_codecs"][0]) != "<":
            return None
        shard, chunks, codecs = chunks, tuple(inner["chunk_shape"]), list(inner["codecs"])
        at_end = inner.get("index_location", "end") == "end"
    chain = _chain(codecs[1:])
    if codecs[0]["name"] != "bytes" or chain is None:
        return None
    stored = array.dtype.newbyteorder(_endian(codecs[0]))
    separator = keys.get("configuration", {}).get("separator", "/" if keys["name"] == "default" else ".")
    prefix = ("c",) if keys["name"] == "default" else ()
    fill = array.fill_value
    place = str(folder / array.path)
    return ChunkLayout(
        place, f"{place}/zarr.json", array.shape, chunks, shard, stored, fill, chain, prefix, separator, at_end
    )


def _layout_v2(array: zarr.Array[Any], meta: dict[str, Any], folder: Path) -> ChunkLayout | None:
    if meta.get("filters") or meta.get("order", "C") != "C":
        return None
    compressor = meta.get("compressor")
    config = compressor if isinstance(compressor, dict) else compressor.get_config() if compressor else None
    if config is not None and config["id"] not in _BYTES_CODECS:
        return None
    codecs = () if config is None else (numcodecs.get_codec(config),)
    stored = (
        np.dtype(array.metadata.dtype.to_native_dtype())
        if hasattr(array.metadata.dtype, "to_native_dtype")
        else array.dtype
    )
    fill = 0 if array.fill_value is None else array.fill_value
    place = str(folder / array.path)
    separator = meta.get("dimension_separator", ".")
    return ChunkLayout(place, f"{place}/.zarray", array.shape, array.chunks, None, stored, fill, codecs, (), separator)


def _endian(codec: dict[str, Any]) -> Literal["<", ">"]:
    return ">" if str(codec.get("configuration", {}).get("endian", "little")).endswith("big") else "<"


def _chain(codecs: Sequence[dict[str, Any]]) -> tuple[Any, ...] | None:
    """Return the codecs as numcodecs objects (or "crc32c"), or None where one is unknown."""
    chain: list[Any] = []
    for codec in codecs:
        if codec["name"] == "crc32c":
            chain.append("crc32c")
        elif codec["name"] in _BYTES_CODECS:
            chain.append(numcodecs.get_codec({"id": _BYTES_CODECS[codec["name"]]}))
        else:
            return None
    return tuple(chain)


class ChunkedArray(DirectArray):
    """An array that xarray indexes lazily and that reads and decodes its chunks itself."""

    def __init__(self, layout: ChunkLayout) -> None:
        self.layout = layout
        self.shape, self.chunks = layout.shape, layout.chunks
        self.dtype = layout.stored.newbyteorder("=")
        self._indices: OrderedDict[str, tuple[tuple[int, ...], NDArray[np.uint64]]] = OrderedDict()
        self._chunk_bytes = int(np.prod(layout.chunks)) * layout.stored.itemsize

    def box(self, spans: Spans, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Return the values inside the spans, converted to the dtype of `out` if given."""
        layout = self.layout
        shape = [stop - start for start, stop in spans]
        result: NDArray[Any] = np.empty(shape, self.dtype) if out is None else out
        if not result.size:
            return result
        touched = [range(start // n, -(-stop // n)) for (start, stop), n in zip(spans, layout.chunks, strict=True)]
        for chunk in itertools.product(*touched):
            target, source, whole = [], [], True
            for i, (start, stop), n in zip(chunk, spans, layout.chunks, strict=True):
                a, b = max(start, i * n), min(stop, (i + 1) * n)
                target.append(slice(a - start, b - start))
                source.append(slice(a - i * n, b - i * n))
                whole &= b - a == n
            place = result[tuple(target)]
            coded = self._coded(chunk)
            if coded is None:
                place[...] = layout.fill
            elif whole and place.flags.c_contiguous and place.dtype == layout.stored:
                self._decode(coded, chunk, place)
            else:
                full = _scratch(self._chunk_bytes).view(layout.stored).reshape(layout.chunks)
                self._decode(coded, chunk, full)
                place[...] = full[tuple(source)]
        return result

    def _coded(self, chunk: tuple[int, ...]) -> bytes | None:
        """Read the bytes of a chunk as stored, or None if it is absent. Raises FileNotFoundError if the store is gone."""
        layout = self.layout
        if layout.shard is None:
            try:
                with open(layout.file(chunk), "rb", buffering=0) as file:
                    return file.read()
            except FileNotFoundError:
                self._check_store()
                return None
        per_shard = tuple(s // c for s, c in zip(layout.shard, layout.chunks, strict=True))
        shard = tuple(i // n for i, n in zip(chunk, per_shard, strict=True))
        path = layout.file(shard)
        try:
            with open(path, "rb", buffering=0) as file:
                index = self._index(path, file.fileno(), per_shard)
                offset, size = index[tuple(i % n for i, n in zip(chunk, per_shard, strict=True))].tolist()
                if offset == _ABSENT and size == _ABSENT:
                    return None
                coded = os.pread(file.fileno(), size, offset)
        except FileNotFoundError:
            self._check_store()
            return None
        if len(coded) != size:
            raise UserError(f"expected {size} bytes of chunk {chunk} in {path}, got {len(coded)}: the file is cut off")
        return coded

    def _check_store(self) -> None:
        if not os.path.exists(self.layout.metadata):
            raise FileNotFoundError(
                f"{self.layout.metadata} is gone: the store was removed or its disk is no longer there"
            )

    def _index(self, path: str, file: int, per_shard: tuple[int, ...]) -> NDArray[np.uint64]:
        """Return (…, 2) offset and size of every chunk of a shard, cached for the most recently read shards.

        A shard that was replaced, as by times that are appended to it, has another index.
        """
        status = os.fstat(file)
        stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
        if path in self._indices and self._indices[path][0] == stamp:
            return self._indices[path][1]
        length = 16 * int(np.prod(per_shard)) + 4
        start = status.st_size - length if self.layout.index_at_end else 0
        raw = os.pread(file, length, start) if start >= 0 else b""
        if len(raw) != length or google_crc32c.value(raw[:-4]) != struct.unpack("<I", raw[-4:])[0]:
            raise UserError(
                f"expected an index of {length} bytes with its checksum in {path}: the file is damaged or cut off"
            )
        index = np.frombuffer(raw[:-4], "<u8").reshape(*per_shard, 2)
        self._indices[path] = (stamp, index)
        while len(self._indices) > _SHARDS_REMEMBERED:
            self._indices.popitem(last=False)
        return index

    def _decode(self, coded: bytes, chunk: tuple[int, ...], out: NDArray[Any]) -> None:
        """Decode into `out`, C-contiguous with the shape of a whole chunk."""
        data: Any = coded
        codecs = self.layout.codecs
        for i, codec in enumerate(reversed(codecs)):
            if codec == "crc32c":
                if len(data) < 4 or google_crc32c.value(bytes(data[:-4])) != struct.unpack("<I", data[-4:])[0]:
                    raise UserError(
                        f"checksum of chunk {chunk} of {self.layout.folder} does not match: the file is damaged"
                    )
                data = data[:-4]
            elif i == len(codecs) - 1 and decoded_size(codec.codec_id, data) == self._chunk_bytes:
                codec.decode(data, out=out.reshape(-1).view(np.uint8))
                return
            else:
                data = codec.decode(data)
        if len(data) != self._chunk_bytes:
            raise UserError(
                f"expected {self._chunk_bytes} bytes in chunk {chunk} of {self.layout.folder}, got {len(data)}: "
                "it is damaged or cut off"
            )
        out[...] = np.frombuffer(data, self.layout.stored).reshape(out.shape)


_SCRATCH = threading.local()


def _scratch(size: int) -> NDArray[np.uint8]:
    """Return scratch memory of this thread, valid until the next call, since allocating per chunk costs as much as a copy."""
    held: NDArray[np.uint8] | None = getattr(_SCRATCH, "held", None)
    if held is None or held.size != size:
        held = _SCRATCH.held = np.empty(size, np.uint8)
    return held


def decoded_size(codec: str, data: bytes) -> int:
    """Return the decoded size that the header of a compressed buffer states, or −1 if it states none.

    Raises UserError if a blosc buffer is shorter than its header states, because blosc itself would read beyond its
    end.
    """
    if codec == "blosc":
        if len(data) < 16 or len(data) < struct.unpack("<I", data[12:16])[0]:
            raise UserError("a compressed chunk is cut off")
        return int(struct.unpack("<I", data[4:8])[0])
    if codec == "zstd" and data[:4] == b"\x28\xb5\x2f\xfd" and len(data) > 14:
        # RFC 8878, 3.1.1.1: descriptor, window byte unless single segment, dictionary id, content size
        descriptor = data[4]
        single = descriptor >> 5 & 1
        at = 5 + (0 if single else 1) + (0, 1, 2, 4)[descriptor & 3]
        width = (single, 2, 4, 8)[descriptor >> 6]
        return int.from_bytes(data[at : at + width], "little") + (256 if width == 2 else 0) if width else -1
    return -1
