"""Measure the planning of a checkpoint on very many ranks, without starting them.

    python benchmarks/checkpoint_plan.py [--ranks 1024] [--output FILE.md]

The model is the 0.25° WXFormer with its averaged weights and the two moments of AdamW, on the meta device, in torch's process
group without peers. Rank 0 and the last rank are built as in training. What the other ranks tell in the one collective of
planning is rank 0's record with their own positions in the mesh; that of the last rank is compared with what it says of
itself. Times are CPU times of one process; a rank's message is what it sends to all others.

For comparison, the first layout is also planned as if nothing were known of placements: every rank sends all its boxes, and
the manifest lists the pieces of every tensor, as in format 1.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import pickle
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from credit_like.checkpoint import shards
from credit_like.checkpoint.files import to_json
from credit_like.checkpoint.format import FORMAT, Piece, Stored, seal, table
from credit_like.checkpoint.rng import random_state
from credit_like.models import wxformer
from credit_like.parallel.apply import parallelise
from credit_like.parallel.environment import Environment
from credit_like.parallel.observe import fake_group
from credit_like.parallel.runtime import Runtime
from credit_like.schema.trainer import Parallelism, TrainerSection

ROOT = Path(__file__).parents[1]
LAYOUTS: list[dict[str, Any]] = [
    {"data": "fsdp2"},
    {"data": "fsdp2", "replicate": 128},
    {"data": "fsdp2", "tensor": 4},
    {"data": "fsdp2", "tensor": 4, "replicate": 32},
    {"data": "fsdp2", "tensor": 4, "domain": 2},
    {"data": "ddp", "tensor": 4},
]
MODEL: dict[str, Any] = {
    "dim": (128, 256, 512, 1024),
    "depth": (2, 2, 8, 2),
    "dim_head": 32,
    "cross_embed_kernel_sizes": ((4, 8, 16, 32), (2, 4), (2, 4), (2, 4)),
    "cross_embed_strides": (4, 2, 2, 2),
    "global_window_size": (10, 5, 2, 1),
    "local_window_size": 10,
    "use_spectral_norm": True,
}
CHANNELS, HEIGHT, WIDTH = 96, 640, 1280


def pieces(rank: int, world: int, parallelism: Parallelism) -> tuple[dict[str, Piece], Runtime]:
    """Return what a rank holds of the weights, their average, the moments and the random state."""
    runtime = Runtime.start(parallelism, torch.device("cpu"), environment=Environment(rank, world))
    with torch.device("meta"):
        model = wxformer.build(
            wxformer.Config.model_validate(MODEL),
            in_channels=CHANNELS,
            out_channels=CHANNELS,
            frames=1,
            height=HEIGHT,
            width=WIDTH,
        )
    section = TrainerSection.model_validate({"parallelism": parallelism.model_dump(), "compile": False})
    model = parallelise(model, section, runtime)
    held = shards.named_pieces(model)
    trained = {name for name, _ in model.named_parameters()}
    result = {f"model/{name}": piece for name, piece in held.items()}
    for kind in ("ema", "optimizer/exp_avg", "optimizer/exp_avg_sq"):
        result |= {f"{kind}/{name}": shards.beside(p, p.local) for name, p in held.items() if name in trained}
    result |= {f"random/{rank}/{name}": Piece.whole(value) for name, value in random_state().items()}
    return result, runtime


def position(rank: int, name: str, runtime: Runtime) -> int:
    """Return the position of any rank along a dimension of a mesh, which may be several of the root mesh, flattened."""
    assert runtime.mesh is not None
    names, sizes = runtime.mesh.mesh_dim_names, runtime.mesh.shape
    assert names is not None
    at = dict(zip(names, np.unravel_index(rank, sizes), strict=True))
    flat = {"dp_domain": ("dp", "domain"), "shard_domain": ("dp_shard", "domain")}.get(name, (name,))
    return int(np.ravel_multi_index([at[n] for n in flat], [sizes[names.index(n)] for n in flat]))


class Gathered:
    """The records of all ranks, made from that of this one."""

    def __init__(self, rank: int, runtime: Runtime) -> None:
        self.rank, self.runtime = rank, runtime
        self.seconds, self.bytes = 0.0, 0

    def record(self, of: shards._Record, rank: int) -> shards._Record:
        at = {division: tuple(position(rank, name, self.runtime) for name, _ in division.mesh) for division in of.at}
        loose = {name.replace(f"random/{self.rank}/", f"random/{rank}/"): piece for name, piece in of.loose.items()}
        return shards._Record(of.digest, at, loose)

    def __call__(self, record: shards._Record, world: int) -> list[shards._Record]:
        start = time.process_time()
        sent = [pickle.dumps(self.record(record, rank)) for rank in range(world)]
        self.bytes = len(sent[self.rank])
        self.seconds += time.process_time() - start
        return [pickle.loads(each) for each in sent]


def all_loose(held: dict[str, Piece], records: list[shards._Record]) -> list[dict[str, Any]]:
    """Return what every rank would send of all its pieces."""
    result: list[dict[str, Any]] = [dict(record.loose) for record in records]
    boxes: dict[Any, Any] = {}
    for name, piece in held.items():
        if piece.division is None:
            continue
        (described,) = shards._loose({name: Piece.whole(torch.empty(1, dtype=piece.local.dtype))}).values()
        division = piece.division[0]
        if (division, piece.shape) not in boxes:
            at = np.array([record.at[division] for record in records], np.int64).reshape(len(records), -1)
            found = division.boxes(piece.shape, at)
            boxes[division, piece.shape] = found[:, 1].prod(axis=1), found.tolist()
        for rank, (count, (offset, size)) in enumerate(zip(*boxes[division, piece.shape], strict=True)):
            if count:
                result[rank][name] = (described[0], described[1], piece.shape, tuple(offset), tuple(size))
    return result


def manifest(world: int, tensors: dict[str, Stored]) -> tuple[bytes, dict[str, Any]]:
    """Return a sealed manifest, and its parts."""
    files = {shards.rank_file(rank): {"bytes": 10**7 + rank, "sha256": f"{rank:064x}"} for rank in range(world)}
    grid = {"latitude": np.linspace(-90, 90, HEIGHT).tolist(), "longitude": np.linspace(0, 360, WIDTH).tolist()}
    body = {"format": FORMAT, "step": 1, "score": 0.1, "meta": {"grid": grid}, "files": files, **table(tensors)}
    return seal(body), body


def format_1(body: dict[str, Any]) -> bytes:
    """Return the manifest with a list of pieces for each tensor."""
    files = sorted(body["files"])
    tensors = {}
    for name, entry in body["tensors"].items():
        rank = len(entry["shape"])
        pairs = zip(body["boxes"][entry["boxes"]], body["writers"][entry["writers"]], strict=True)
        pieces = [{"file": files[w], "key": name, "offset": box[:rank], "shape": box[rank:]} for box, w in pairs]
        tensors[name] = {"dtype": entry["dtype"], "shape": entry["shape"], "pieces": pieces}
    return to_json({**{k: v for k, v in body.items() if k not in ("boxes", "writers")}, "tensors": tensors})


def case(rank: int, world: int, layout: dict[str, Any], compare: bool) -> dict[str, Any]:
    """Plan as one rank."""
    with fake_group(rank, world):
        held, runtime = pieces(rank, world, Parallelism.model_validate(layout))
        gathered = Gathered(rank, runtime)
        shards.gather = gathered
        start = time.process_time()
        plan = shards.share_out(held)
        result: dict[str, Any] = {"seconds": time.process_time() - start - gathered.seconds, "message": gathered.bytes}
        result["bytes"] = sum(held[name].local.nbytes for name in plan.mine)
        record, _ = shards._record(held, rank)
        result["record"] = repr([(d.mesh, d.cuts, at) for d, at in sorted(record.at.items(), key=repr)])
        other = gathered.record(record, world - 1)
        result["last"] = repr([(d.mesh, d.cuts, at) for d, at in sorted(other.at.items(), key=repr)])
        result["digest"] = record.digest
        if rank:
            return result
        start = time.process_time()
        sealed, body = manifest(world, plan.tensors)
        result |= {"manifest": len(sealed), "write": time.process_time() - start, "tensors": len(plan.tensors)}
        result["pieces"] = sum(len(stored.writers) for stored in plan.tensors.values())
        start = time.process_time()
        json.loads(sealed)
        result["parse"] = time.process_time() - start
        if compare:
            records = [gathered.record(record, r) for r in range(world)]
            everyone = [pickle.dumps(each) for each in all_loose(held, records)]
            result["message before"] = len(everyone[0])
            start = time.process_time()
            list(shards._share_out_loose([pickle.loads(each) for each in everyone], np.zeros(world, np.int64)))
            result["seconds before"] = time.process_time() - start
            start = time.process_time()
            before = format_1(body)
            result |= {"manifest before": len(before), "write before": time.process_time() - start}
            start = time.process_time()
            json.loads(before)
            result["parse before"] = time.process_time() - start
        return result


def in_process(*arguments: Any) -> dict[str, Any]:
    """Run a case in a process of its own: torch keeps its meshes."""
    done = subprocess.run(
        [sys.executable, __file__, "--case", json.dumps(arguments)], check=True, stdout=subprocess.PIPE, text=True
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def line(name: str, found: dict[str, Any], last: dict[str, Any] | None, before: str = "") -> str:
    seconds = [each[f"seconds{before}"] for each in (found, last) if each]
    return (
        f"| {name} | {found['tensors']:,} / {found['pieces']:,} | {max(seconds):.2f} | {found[f'message{before}']:,} "
        f"| {found[f'manifest{before}'] / 1e6:.2f} | {found[f'write{before}']:.2f} | {found[f'parse{before}']:.2f} |"
    )


def main() -> None:
    """Run all cases, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "checkpoint-plan.md")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(case(*json.loads(options.case))))
        return
    lines = [
        f"# Planning a checkpoint on {options.ranks:,} ranks", "",
        f"{dt.date.today()}, {platform.machine()}, torch {torch.__version__}, load of the machine at the start "
        f"{os.getloadavg()[0]:.1f}; written by `benchmarks/checkpoint_plan.py`.", "",
        "| layout | tensors / pieces | plan, s per rank | message of a rank, bytes | manifest, MB | write it, s | parse it, s |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for number, layout in enumerate(LAYOUTS):
        name = ", ".join(f"{key} {value}" for key, value in layout.items())
        found = in_process(0, options.ranks, layout, number == 0)
        last = in_process(options.ranks - 1, options.ranks, layout, False)
        if (found["digest"], found["last"]) != (last["digest"], last["record"]):
            raise SystemExit(f"{name}: rank {options.ranks - 1} is not where it was expected")
        lines.append(line(name, found, last))
        if number == 0:
            lines.append(line(f"{name}, all pieces gathered, format 1", found, None, " before"))
        print(lines[-1 - (number == 0)], flush=True)
    lines.append("")
    print("\n".join(lines))
    options.output.parent.mkdir(exist_ok=True)
    options.output.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
