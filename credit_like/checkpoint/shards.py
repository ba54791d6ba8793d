"""Boxes of tensors that this rank holds, and the selection of those that it writes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from credit_like.checkpoint.format import NAMES, Piece, Stored
from credit_like.errors import UserError
from credit_like.parallel.shards import Division, box, local
from credit_like.parallel.shards import division as division_of
from credit_like.parallel.unwrap import canonical_name, get_raw_model


def piece_of(tensor: Tensor) -> Piece:
    """Return the box of a tensor that this rank holds; it shares the tensor's memory."""
    offset = tuple(part.start for part in box(tensor))
    return Piece(local(tensor).detach(), tuple(tensor.shape), offset, division_of(tensor))


def named_pieces(model: nn.Module) -> dict[str, Piece]:
    """Return every parameter and saved buffer of a model under its layout-independent name, the first of a shared parameter."""
    state = get_raw_model(model).state_dict(keep_vars=True)
    first = first_names(state)
    return {canonical_name(name): piece_of(tensor) for name, tensor in state.items() if first[name] == name}


def first_names(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the first name of the parameter of every name; `state` holds a model's own tensors (`keep_vars=True`).

    Buffers are named by themselves: whether those of several modules are one tensor depends on the device.
    """
    found: dict[int, str] = {}
    return {
        name: found.setdefault(id(tensor), name) if isinstance(tensor, nn.Parameter) else name
        for name, tensor in state.items()
    }


def refuse_apart(model: nn.Module, saved: Collection[str], where: object) -> None:
    """Raise UserError if several of the `saved` names are those of one parameter, which earlier versions trained apart."""
    for name, first in first_names(get_raw_model(model).state_dict(keep_vars=True)).items():
        name, first = canonical_name(name), canonical_name(first)
        if name != first and name in saved:
            raise UserError(
                f"{where}: expected one tensor for {first} and {name}, which are one parameter of the model, got two; an earlier "
                "version trained these layers apart; remove what shares the parameter from the model, or train it again"
            )


def beside(piece: Piece, local: Tensor) -> Piece:
    """Return a piece sharded like `piece`, such as an optimiser moment; single elements are not sharded."""
    if local.shape == piece.local.shape:
        return Piece(local, piece.shape, piece.offset, piece.division)
    return Piece(local, tuple(local.shape), (0,) * local.ndim, (Division(), ()))


@dataclass(frozen=True)
class SavePlan:
    """The pieces that this rank writes; on the main rank also the places of all pieces."""

    mine: list[str]
    tensors: dict[str, Stored]


_Loose = tuple[str, int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""dtype, bytes of an element, shape, offset and size of a piece that other ranks cannot derive."""


@dataclass(frozen=True)
class _Record:
    """The description of its pieces that a rank sends to the others."""

    digest: str
    """Digest of the tensors that all ranks divide in a known way; it differs on a rank that holds another box."""
    at: dict[Division, tuple[int, ...]]
    loose: dict[str, _Loose]


def share_out(pieces: Mapping[str, Piece]) -> SavePlan:
    """Return which pieces this rank writes. Collective.

    A piece that several ranks hold is written once, so that each rank writes about 1/ranks of all bytes in every layout.
    Every rank computes the boxes of all ranks from their positions in the mesh. Only pieces of unknown placement, such as
    a rank's random state, are gathered; all pieces are where ranks divide tensors in a way that is not known here.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    record, placed = _record(pieces, rank)
    records = gather(record, world)
    groups = _groups(records)
    if groups is None:
        records, groups, placed = gather(_Record("", {}, _loose(pieces)), world), {}, {}
    loads = np.zeros(world, np.int64)
    mine: list[str] = []
    tensors: dict[str, Stored] = {}
    boxes: dict[tuple[Division, tuple[int, ...]], NDArray[np.int64]] = {}
    for piece in placed.values():
        division, shape = _division(piece), piece.shape
        if (division, shape) not in boxes:
            boxes[division, shape] = division.boxes(shape, groups[division].at)
    most = {key: int(found[:, 1].prod(axis=1).max()) for key, found in boxes.items()}

    def size(name: str) -> int:
        piece = placed[name]
        return most[_division(piece), piece.shape] * piece.local.element_size()

    # The largest come first, and every tensor is written by those of its holders that have the least to write so far.
    for name in sorted(placed, key=lambda name: (-size(name), name)):
        piece = placed[name]
        division = _division(piece)
        holders, found = groups[division].holders, boxes[division, piece.shape]
        copy = int(loads[holders].max(axis=0).argmin())
        counts = found[:, 1].prod(axis=1)
        full, writers = counts > 0, holders[:, copy]
        loads[writers] += counts * piece.local.element_size()
        if bool((writers[full] == rank).any()):
            mine.append(name)
        if rank == 0:
            tensors[name] = Stored(NAMES[piece.local.dtype], piece.shape, found[full], writers[full])
    for name, stored in _share_out_loose([record.loose for record in records], loads):
        if rank in stored.writers:
            mine.append(name)
        if rank == 0:
            tensors[name] = stored
    return SavePlan(mine, tensors)


def _division(piece: Piece) -> Division:
    assert piece.division is not None
    return piece.division[0]


def _record(pieces: Mapping[str, Piece], rank: int) -> tuple[_Record, dict[str, Piece]]:
    """Return the record of this rank, and its pieces of tensors that are divided in a known way."""
    placed = {name: p for name, p in pieces.items() if p.division is not None and 0 not in p.shape}
    at: dict[Division, tuple[int, ...]] = {}
    known = True
    for piece in placed.values():
        assert piece.division is not None
        division, coordinate = piece.division
        box = division.boxes(piece.shape, np.array([coordinate], np.int64).reshape(1, -1))[0]
        empty = not piece.local.numel() and not box[1].all()
        known &= at.setdefault(division, coordinate) == coordinate
        known &= empty or (*map(tuple, box.tolist()),) == piece.box
    described = [(name, str(p.local.dtype), p.shape, _division(p)) for name, p in sorted(placed.items())]
    digest = hashlib.sha256(repr(described).encode()).hexdigest() if known else f"rank {rank}"
    loose = _loose({name: piece for name, piece in pieces.items() if name not in placed})
    return _Record(digest, at, loose), placed


def _loose(pieces: Mapping[str, Piece]) -> dict[str, _Loose]:
    return {
        name: (NAMES[p.local.dtype], p.local.element_size(), p.shape, *p.box)
        for name, p in pieces.items()
        if p.local.numel() or 0 in p.shape
    }


def gather(record: _Record, world: int) -> list[_Record]:
    """Return the records of all ranks. Collective."""
    records = [record] * world
    if world > 1:
        dist.all_gather_object(records, record)
    return records


@dataclass(frozen=True)
class _Groups:
    """The ranks of a division: `holders` (box, copy), and the position `at` (box, mesh dimension) of each box."""

    holders: NDArray[np.int64]
    at: NDArray[np.int64]


def _groups(records: Sequence[_Record]) -> dict[Division, _Groups] | None:
    """Return the ranks by the boxes that they hold; None where they do not describe the same division into boxes."""
    if len({record.digest for record in records}) > 1 or records[0].digest.startswith("rank"):
        return None
    result = {}
    for division in records[0].at:
        at = np.array([record.at[division] for record in records], np.int64).reshape(len(records), -1)
        cut = sorted({mesh_dim for mesh_dim, _ in division.cuts})
        sizes = [division.mesh[dim][1] for dim in cut]
        number = np.ravel_multi_index(at[:, cut].T, sizes) if cut else np.zeros(len(records), np.int64)
        counts = np.bincount(number, minlength=math.prod(sizes))
        if counts.min() != counts.max():
            return None
        holders = np.argsort(number, kind="stable").reshape(len(counts), -1)
        result[division] = _Groups(holders, at[holders[:, 0]])
    return result


def _share_out_loose(
    everyone: Sequence[Mapping[str, _Loose]], loads: NDArray[np.int64]
) -> Iterator[tuple[str, Stored]]:
    """Yield the places of the pieces of each tensor from the records of all ranks; `loads` are bytes so far."""
    holders: dict[tuple[Any, ...], list[int]] = {}
    for rank, held in enumerate(everyone):
        for name, about in held.items():
            holders.setdefault((name, *about), []).append(rank)

    def size(key: tuple[Any, ...]) -> int:
        return int(key[2] * torch.Size(key[5]).numel())

    found: dict[str, list[tuple[tuple[Any, ...], int]]] = {}
    for key in sorted(holders, key=lambda key: (-size(key), key)):
        rank = min(holders[key], key=lambda rank: (loads[rank], rank))
        loads[rank] += size(key)
        found.setdefault(key[0], []).append((key, rank))
    for name, each in found.items():
        _, dtype, _, shape, _, _ = each[0][0]
        boxes = np.array([(key[4], key[5]) for key, _ in each], np.int64).reshape(len(each), 2, len(shape))
        yield name, Stored(dtype, shape, boxes, np.array([rank for _, rank in each], np.int64))


def rank_file(rank: int) -> str:
    """Return the name of the file of one rank."""
    return f"rank-{rank:05d}.safetensors"
