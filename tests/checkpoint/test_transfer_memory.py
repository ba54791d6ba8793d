"""Starting from weights: every byte is verified once for all ranks, and a rank has no more in memory than its part."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from credit_like.checkpoint import format as format_module
from credit_like.checkpoint import transfer
from credit_like.checkpoint.format import Piece
from credit_like.checkpoint.manager import CheckpointManager
from credit_like.checkpoint.shards import named_pieces
from credit_like.errors import UserError
from credit_like.models import wxformer
from credit_like.nn.init import initialise
from credit_like.parallel.apply import materialise, parallelise
from credit_like.parallel.runtime import Runtime
from credit_like.schema.origin import StartFrom
from credit_like.schema.trainer import Parallelism, TrainerSection
from tests.checkpoint.test_transfer import saved

ROLES = {
    "prognostic": [f"p{i}" for i in range(6)],
    "diagnostic": ["d"],
    "dynamic_forcing": ["f"],
    "static": ["s"],
}
CONFIG = wxformer.Config(dim=(16, 32, 64, 128), depth=(2, 2, 8, 2), use_spectral_norm=True, dim_head=8)


def sizes(roles):
    inputs = sum(len(roles[role]) for role in ("prognostic", "dynamic_forcing", "static"))
    outputs = len(roles["prognostic"]) + len(roles["diagnostic"])
    return {"in_channels": inputs, "out_channels": outputs, "frames": 1, "height": 64, "width": 64}


LAYOUTS = {
    "fsdp2": {"data": "fsdp2"},
    "ddp": {"data": "ddp"},
    "tensor": {"data": "none", "tensor": 2},
    "domain": {"data": "fsdp2", "domain": 2},
}


def load(rank, path, folder, roles, layout):
    """Load a source into this rank's part; return the bytes of the part and the largest added by torch's allocator."""
    runtime = Runtime.start(Parallelism.model_validate(LAYOUTS[layout]), torch.device("cpu"))
    with torch.device("meta"):
        model = wxformer.build(CONFIG, **sizes(roles))
    section = TrainerSection.model_validate({"parallelism": LAYOUTS[layout], "compile": False})
    model = materialise(parallelise(model, section, runtime), runtime, 0)
    source = transfer.Source.open(StartFrom(path=str(path)), runtime)
    if folder is not None:
        checkpoint = CheckpointManager(folder, runtime=runtime).latest()
        names = {name.removeprefix("model/"): name for name in checkpoint.names("model/")}
        source = dataclasses.replace(source, checkpoint=checkpoint, names=names)
    plan = transfer.plan(source, model, CONFIG, transfer.Channels.of_roles(roles, 1, "increment"), "error")
    held = sum(piece.local.nbytes for piece in named_pieces(model).values())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        transfer.load(source, plan, model, 0)
    events = [(e.start_ns(), e.nbytes()) for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    # A file is mapped as one storage of its size, whose pages belong to the system's cache.
    files = {path.stat().st_size} | {file.stat().st_size for file in (folder or path.parent).rglob("*.safetensors")}
    changes = [size for _, size in sorted(events, key=lambda event: event[0]) if abs(size) not in files]
    runtime.close()
    return held, int(np.cumsum(changes).max()), len(plan.mapped)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "variables", "layout"),
    [
        ("checkpoint", "others", "fsdp2"),
        pytest.param("export", "others", "fsdp2", marks=pytest.mark.long),
        pytest.param("checkpoint", "the same", "fsdp2", marks=pytest.mark.long),
        ("checkpoint", "others", "ddp"),
        pytest.param("export", "others", "ddp", marks=pytest.mark.long),
        ("checkpoint", "others", "tensor"),
        pytest.param("export", "the same", "tensor", marks=pytest.mark.long),
        pytest.param("checkpoint", "others", "domain", marks=pytest.mark.long),
    ],
)
def test_a_rank_needs_the_memory_of_its_part(run_ranks, tmp_path, kind, variables, layout) -> None:
    model = initialise(wxformer.build(CONFIG, **sizes(ROLES)), 0)
    path = tmp_path / "m.safetensors"
    saved(path, model, CONFIG, ROLES, 1)
    folder = None
    if kind == "checkpoint":
        folder = tmp_path / "checkpoints"
        pieces = {f"model/{name}": Piece.whole(tensor) for name, tensor in model.state_dict().items()}
        CheckpointManager(folder, asynchronous=False).save(1, pieces, {})
    roles = ROLES if variables == "the same" else ROLES | {"prognostic": ["new", *ROLES["prognostic"][1:]]}
    for held, added, mapped in run_ranks(2, load, path, folder, roles, layout):
        assert (mapped > 0) == (variables == "others")
        assert held + added <= 1.05 * held


def opened(rank, path):
    """Return the files of which this rank computed a checksum, and what it said."""
    runtime = Runtime.start(Parallelism(data="ddp"), torch.device("cpu"))
    read, digest = [], format_module.digest
    format_module.digest = lambda path: read.append(path.name) or digest(path)
    told = None
    try:
        transfer.Source.open(StartFrom(path=str(path)), runtime)
    except UserError as error:
        told = str(error)
    assert runtime.agree(rank) == runtime.world - 1  # no rank waits for another in an earlier collective
    runtime.close()
    return read, told


def test_the_ranks_verify_a_source_together(run_ranks, tmp_path) -> None:
    """Every file is read once by all of them; damage that one of them finds is the same message on all."""
    folder = tmp_path / "run" / "checkpoints"
    meta = {
        "experiment": {"model": CONFIG.model_dump(mode="json"), "data": {}, "name": "x"},
        "normalisation": {role: {"channels": names} for role, names in ROLES.items()},
    }
    for step in (1, 2):
        run_ranks(3, _save, folder, step, meta)
    files = sorted(path.name for path in (folder / "step-2").glob("*.safetensors"))
    assert len(files) == 3
    answers = run_ranks(3, opened, tmp_path / "run")
    assert sorted(name for read, _ in answers for name in read) == files
    assert [told for _, told in answers] == [None] * 3
    assert transfer.Source.open(StartFrom(path=str(tmp_path / "run"))).step == 2

    path = folder / "step-2" / files[-1]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    told = {told for _, told in run_ranks(3, opened, folder / "step-2")}
    assert len(told) == 1
    assert "its checksum differs" in str(told)
    assert [told for _, told in run_ranks(3, opened, tmp_path / "run")] == [None] * 3  # the one before is taken
    assert {told for _, told in run_ranks(3, opened, tmp_path / "absent")} == {
        "start_from.path: expected a run, a checkpoint or an export, got nothing at "
        f"{tmp_path / 'absent'}; change the path"
    }


def _save(rank, folder, step, meta):
    runtime = Runtime.start(Parallelism(data="ddp"), torch.device("cpu"))
    manager = CheckpointManager(folder, runtime=runtime, asynchronous=False)
    manager.save(step, {f"model/{rank}": Piece.whole(torch.full((4,), float(step)))}, meta)
    runtime.close()


def test_without_other_ranks_a_source_is_not_read(tmp_path, monkeypatch) -> None:
    """As `check` and the statistics open it."""
    folder = tmp_path / "run" / "checkpoints"
    meta = {
        "experiment": {"model": CONFIG.model_dump(mode="json"), "data": {}, "name": "x"},
        "normalisation": {role: {"channels": names} for role, names in ROLES.items()},
    }
    for step in (1, 2):
        CheckpointManager(folder, asynchronous=False).save(step, {"model/w": Piece.whole(torch.zeros(4))}, meta)

    def no_digest(path):
        raise AssertionError(path)

    monkeypatch.setattr(format_module, "digest", no_digest)
    section = StartFrom(path=str(tmp_path / "run"))
    assert transfer.Source.open(section).step == 2
    path = folder / "step-2" / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert transfer.Source.open(section).step == 1
    with pytest.raises(UserError, match="bytes instead of"):
        transfer.Source.open(StartFrom(path=str(folder / "step-2")))
