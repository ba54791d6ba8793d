"""Saves and what is found again: damage of every kind, retention, layouts, crashes between any two file operations."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from credit_like.checkpoint import export as export_module
from credit_like.checkpoint import format as format_module
from credit_like.checkpoint import manager as manager_module
from credit_like.checkpoint.errors import DamagedCheckpoint, SaveFailed
from credit_like.checkpoint.files import digest
from credit_like.checkpoint.format import MANIFEST, Piece, Stored, read_manifest, seal
from credit_like.checkpoint.manager import Checkpoint, CheckpointManager, prune, steps
from credit_like.errors import RunError, UserError
from credit_like.parallel.runtime import Runtime
from credit_like.schema.trainer import Parallelism
from tests.experiments import contents


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "model/weight": torch.randn(5, 3, generator=g),
        "model/scalar": torch.tensor(seed, dtype=torch.int64),
        "model/half": torch.randn(4, generator=g).bfloat16(),
        "model/double": torch.randn(2, 2, 2, generator=g, dtype=torch.float64),
        "model/flags": torch.tensor([True, False, True]),
        "model/empty": torch.zeros(0, 3),
        "random/0/torch": torch.arange(7, dtype=torch.uint8),
    }


def pieces(seed: int = 0) -> dict[str, Piece]:
    return {name: Piece.whole(x) for name, x in tensors(seed).items()}


def saved(folder: Path, *at: int, scores=None, **options) -> CheckpointManager:
    manager = CheckpointManager(folder, **{"keep": 9, **options})
    for step in at:
        manager.save(step, pieces(step), {"note": f"é {step}"}, (scores or {}).get(step))
    manager.wait()
    return manager


@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_is_saved_is_what_is_loaded(tmp_path, asynchronous) -> None:
    checkpoint = saved(tmp_path, 7, asynchronous=asynchronous).latest()
    assert checkpoint.step == 7
    assert checkpoint.meta == {"note": "é 7"}
    into = {name: Piece.whole(torch.zeros_like(x)) for name, x in tensors(7).items()}
    checkpoint.load(into, ("model/", "random/"))
    for name, x in tensors(7).items():
        assert torch.equal(into[name].local, x), name
        if x.numel():
            assert torch.equal(checkpoint.read(name), x)
            assert checkpoint.read(name).dtype == x.dtype


def test_the_file_is_plain_safetensors_with_the_checksum_of_sha256sum(tmp_path) -> None:
    saved(tmp_path, 7)
    folder = tmp_path / "step-7"
    loaded = load_file(folder / "rank-00000.safetensors")
    assert torch.equal(loaded["model/weight"], tensors(7)["model/weight"])
    entry = read_manifest(folder)["files"]["rank-00000.safetensors"]
    assert entry == {
        "bytes": (folder / "rank-00000.safetensors").stat().st_size,
        "sha256": digest(folder / "rank-00000.safetensors"),
    }
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "rank-00000.safetensors"]


def test_later_changes_do_not_reach_a_save_in_flight(tmp_path) -> None:
    manager = CheckpointManager(tmp_path)
    live = tensors(1)
    manager.save(1, {name: Piece.whole(x) for name, x in live.items()}, {})
    live["model/weight"].zero_()
    manager.wait()
    assert torch.equal(manager.latest().read("model/weight"), tensors(1)["model/weight"])


# ---- damage ----------------------------------------------------------------------------------------------------------


def every_damage(path: Path):
    """(what, how): each byte flipped, the file cut at each length, lengthened, emptied, gone."""
    content = path.read_bytes()
    for at in range(len(content)):
        flipped = bytearray(content)
        flipped[at] ^= 1 << (at % 8)
        yield f"bit {at % 8} of byte {at}", bytes(flipped)
    for length in range(len(content)):
        yield f"cut to {length}", content[:length]
    yield "lengthened", content + b"\0"
    yield "newline added", content + b"\n"
    yield "gone", None


def small(folder: Path) -> None:
    manager = CheckpointManager(folder, keep=9)
    for step in (1, 2):
        manager.save(step, {"w": Piece.whole(torch.full((3,), float(step)))}, {"n": step})
    manager.wait()


@pytest.mark.parametrize("name", [MANIFEST, "rank-00000.safetensors"])
def test_no_damaged_byte_goes_unnoticed_and_the_previous_one_is_used(tmp_path, name, caplog) -> None:
    small(tmp_path)
    path = tmp_path / "step-2" / name
    content = path.read_bytes()
    count = 0
    for what, damaged in every_damage(path):
        path.unlink(missing_ok=True)
        if damaged is not None:
            path.write_bytes(damaged)
        caplog.clear()
        found = CheckpointManager(tmp_path).latest()
        assert found is not None, what
        assert found.step == 1, what
        assert str(path) in caplog.text, what
        count += 1
    assert count > 300 if name == MANIFEST else count > 150
    path.write_bytes(content)
    assert CheckpointManager(tmp_path).latest().step == 2


def test_damage_to_all_is_an_error_and_each_is_named(tmp_path, caplog) -> None:
    small(tmp_path)
    for step in (1, 2):
        (tmp_path / f"step-{step}" / "rank-00000.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"got only damaged ones \(step 1, 2\)"):
        CheckpointManager(tmp_path).latest()
    assert "step-1" in caplog.text
    assert "step-2" in caplog.text


def test_a_folder_or_link_in_place_of_a_file_is_damage(tmp_path) -> None:
    small(tmp_path)
    path = tmp_path / "step-2" / "rank-00000.safetensors"
    path.unlink()
    path.mkdir()
    with pytest.raises(DamagedCheckpoint, match="rank-00000"):
        Checkpoint.open(tmp_path / "step-2").verify()
    path.rmdir()
    path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(DamagedCheckpoint, match="rank-00000"):
        Checkpoint.open(tmp_path / "step-2").verify()


def test_a_damaged_checkpoint_makes_way_for_the_same_step(tmp_path) -> None:
    small(tmp_path)
    (tmp_path / "step-2" / MANIFEST).write_bytes(b"{}")
    saved(tmp_path, 2)
    assert CheckpointManager(tmp_path).latest().step == 2
    assert not list(tmp_path.glob(".*"))


# ---- crashes ---------------------------------------------------------------------------------------------------------


class Crash(BaseException):
    """The process ends here."""


def test_a_crash_before_any_file_operation_leaves_the_old_or_the_new(tmp_path, monkeypatch) -> None:
    """Every call that changes the disk is the last one in turn; afterwards `recover` must leave a clean folder."""
    operations = [
        (os, "fsync"),
        (os, "rename"),
        (shutil, "rmtree"),
        (Path, "unlink"),
        (Path, "mkdir"),
        (Path, "rename"),
    ]
    seen: set[int] = set()
    for crash_at in range(200):
        folder = tmp_path / str(crash_at) / "checkpoints"
        saved(folder, 1, 2, keep=2, asynchronous=False)
        countdown = [crash_at]
        with monkeypatch.context() as patch:
            for owner, name in operations:
                patch.setattr(owner, name, _counted(getattr(owner, name), countdown))
            # In this thread, so that a crash is a crash.
            patch.setattr(manager_module.threading, "Thread", _Immediately)
            try:
                saved(folder, 3, keep=2)
                crashed = False
            except Crash:
                crashed = True
        manager = CheckpointManager(folder)
        manager.recover()
        found = manager.latest()
        assert found is not None, crash_at
        assert found.step in (2, 3), crash_at
        assert torch.equal(found.read("model/weight"), tensors(found.step)["model/weight"])
        assert not list(folder.glob(".*")), crash_at
        seen.add(found.step)
        if not crashed:
            assert found.step == 3
            break
    else:
        raise AssertionError("the save never ended")
    assert crash_at > 10
    assert seen == {2, 3}


def _counted(real, countdown):
    def guarded(*args, **kwargs):
        if countdown[0] == 0:
            raise Crash
        countdown[0] -= 1
        return real(*args, **kwargs)

    return guarded


class _Immediately:
    """A thread that runs when it is started."""

    def __init__(self, target=None, name=None) -> None:
        self.target = target

    def start(self) -> None:
        self.target()

    def join(self) -> None:
        pass

    def is_alive(self) -> bool:
        return False


def test_recover_finishes_a_rename_and_removes_the_rest(tmp_path) -> None:
    saved(tmp_path, 1, 2)
    (tmp_path / "step-2").rename(tmp_path / ".step-2.tmp")
    (tmp_path / ".step-3.tmp").mkdir()
    (tmp_path / ".step-3.tmp" / "rank-00000.safetensors").write_bytes(b"half")
    (tmp_path / ".trash-step-0").mkdir()
    CheckpointManager(tmp_path).recover()
    assert steps(tmp_path) == [1, 2]
    assert not list(tmp_path.glob(".*"))


# ---- failures, retention, versions, shapes ---------------------------------------------------------------------------


def test_a_failed_save_says_so_and_leaves_no_trace(tmp_path, monkeypatch) -> None:
    manager = saved(tmp_path, 1)

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(manager_module, "write_tensors", full)
        manager.save(2, pieces(2), {})
        with pytest.raises(SaveFailed, match=r"step 2.*No space left"):
            manager.wait()
    assert steps(tmp_path) == [1]
    assert not list(tmp_path.glob(".*"))
    manager.save(2, pieces(2), {})
    manager.wait()
    assert manager.latest().step == 2


def test_a_writing_thread_that_dies_is_a_failed_save(tmp_path, monkeypatch) -> None:
    manager = CheckpointManager(tmp_path)
    monkeypatch.setattr(manager_module.threading, "excepthook", lambda args: None)

    def bug(*args):
        raise KeyError("a mistake in the program")

    monkeypatch.setattr(manager_module, "write_tensors", bug)
    manager.save(2, pieces(2), {})
    with pytest.raises(SaveFailed, match="the writing thread died"):
        manager.wait()


def _without_memory(rank: int, folder: Path) -> tuple[str, list[int]]:
    """Save twice; the second time this process has no memory for the copies if it is rank 1."""
    with Runtime.start(Parallelism(data="ddp"), torch.device("cpu")) as runtime:
        manager = CheckpointManager(folder, runtime=runtime)
        manager.save(1, pieces(), {})
        manager.wait()
        if rank == 1:
            manager._stage = lambda pieces: (_ for _ in ()).throw(torch.OutOfMemoryError("no memory"))
        with pytest.raises(SaveFailed) as caught:
            manager.save(2, pieces(), {})
        return str(caught.value), steps(folder)


def test_a_rank_without_memory_for_a_save_fails_it_on_all(tmp_path, run_ranks) -> None:
    first, second = run_ranks(2, _without_memory, tmp_path)
    assert first == ("could not save step 2: another rank could not begin it", [1])
    assert second == ("could not save step 2: no memory", [1])


def test_the_newest_and_the_best_are_kept(tmp_path) -> None:
    saved(tmp_path, 1, 2, 3, 4, 5, scores={1: 3.0, 2: 1.0, 3: 2.0}, keep=2)
    assert steps(tmp_path) == [2, 4, 5]
    assert prune(tmp_path, 1) == [4]
    assert steps(tmp_path) == [2, 5]


def test_retention_reads_no_manifest_again(tmp_path, monkeypatch) -> None:
    """Manifests of many ranks take seconds to parse: a save reads none, the first one after a start each once."""
    saved(tmp_path, 1, 2)
    monkeypatch.setattr(manager_module, "_ranks", {})  # as after a start
    read = []
    monkeypatch.setattr(
        manager_module, "read_manifest", lambda folder: read.append(folder.name) or format_module.read_manifest(folder)
    )
    manager = CheckpointManager(tmp_path, keep=9)
    for step in (3, 4, 5):
        manager.save(step, pieces(step), {}, 1.0 / step)
        manager.wait()
        assert sorted(read) == ["step-1", "step-2"]
    (tmp_path / "step-5" / MANIFEST).write_bytes(b"")
    assert prune(tmp_path, 1) == [1, 2, 3]
    assert sorted(read) == ["step-1", "step-2", "step-5"], "what has changed is read, and found to be damaged"


def test_a_damaged_one_does_not_count_among_those_kept(tmp_path) -> None:
    saved(tmp_path, 1, 2, 3)
    (tmp_path / "step-3" / MANIFEST).write_bytes(b"")
    assert prune(tmp_path, 2) == []
    assert steps(tmp_path) == [1, 2, 3]


def damage(folder: Path, how: str) -> None:
    if how == "tensors":
        (folder / "rank-00000.safetensors").write_bytes(b"")
    elif how == "manifest":
        (folder / MANIFEST).write_bytes(b"[" * 100_000)
    else:
        shutil.rmtree(folder)
        folder.write_bytes(b"a file")


@pytest.mark.parametrize("how", ["tensors", "manifest", "file"])
@pytest.mark.parametrize("keep", [1, 2])
def test_what_is_saved_after_a_damaged_one_is_there_after_every_save(tmp_path, how, keep) -> None:
    """A run goes on from step 20 as step 300 is damaged: each save is what the next start finds, at every instant."""
    saved(tmp_path, 20, 300)
    damage(tmp_path / "step-300", how)
    manager = CheckpointManager(tmp_path, keep=keep)
    assert manager.latest().step == 20
    manager.set_aside(20)
    assert (tmp_path / ".damaged-step-300").exists()
    for step in (30, 60, 90):
        manager.save(step, pieces(step), {})
        manager.wait()
        found = CheckpointManager(tmp_path).latest()
        assert found.step == step
        assert len(steps(tmp_path)) <= keep
        assert (tmp_path / ".damaged-step-300").exists()
    for step in (310, 320):
        manager.save(step, pieces(step), {})
        manager.wait()
    assert steps(tmp_path) == [310, 320][-keep:]
    assert not list(tmp_path.glob(".damaged-*")), "as many intact ones as are kept are newer"


def test_the_one_just_saved_is_kept_whatever_lies_there(tmp_path) -> None:
    """Also where nothing could be set aside: damage of tensors that a look at the manifest cannot find."""
    saved(tmp_path, 300, 400, scores={300: 0.1})
    for step in (300, 400):
        damage(tmp_path / f"step-{step}", "tensors")
    manager = CheckpointManager(tmp_path, keep=1)
    for step in (30, 60):
        manager.save(step, pieces(step), {})
        manager.wait()
        assert CheckpointManager(tmp_path).latest().step == step


def test_those_that_are_set_aside_are_named_apart(tmp_path) -> None:
    saved(tmp_path, 1)
    for _ in range(3):
        saved(tmp_path, 2)
        damage(tmp_path / "step-2", "tensors")
        manager = CheckpointManager(tmp_path)
        manager.set_aside(manager.latest().step)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".damaged-step-2", ".damaged-step-2.1", ".damaged-step-2.2", "step-1",
    ]  # fmt: skip


def test_a_run_whose_checkpoints_are_all_damaged_is_not_continued_from_nothing(tmp_path) -> None:
    small(tmp_path)
    for step in (1, 2):
        damage(tmp_path / f"step-{step}", "tensors")
    before = contents(tmp_path)
    with pytest.raises(UserError, match=r"expected an intact checkpoint in .* got only damaged ones \(step 1, 2\)"):
        CheckpointManager(tmp_path).latest()
    assert contents(tmp_path) == before


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ESTALE, errno.EACCES, errno.ETIMEDOUT, errno.EIO])
@pytest.mark.parametrize("where", ["manifest", "size", "content", "folder"])
def test_what_cannot_be_read_now_is_no_damage(tmp_path, monkeypatch, where, number) -> None:
    """The checkpoint may be intact: it is neither passed over nor renamed or removed, and the next start finds it."""
    small(tmp_path)
    before = contents(tmp_path)

    def failing(real, ours):
        def call(path, *arguments, **options):
            if ours(Path(path)):
                raise OSError(number, os.strerror(number), str(path))
            return real(path, *arguments, **options)

        return call

    with monkeypatch.context() as patch:
        if where == "manifest":
            patch.setattr(
                format_module, "read_small", failing(format_module.read_small, lambda p: p.parent.name in names)
            )
        elif where == "size":
            ours = lambda p: p.suffix == ".safetensors" and p.parent.name in names  # noqa: E731
            patch.setattr(Path, "stat", failing(Path.stat, ours))
        elif where == "content":
            patch.setattr(format_module, "digest", failing(format_module.digest, lambda p: p.parent.name in names))
        else:
            patch.setattr(os, "listdir", failing(os.listdir, lambda p: p == tmp_path))
        names = ["step-2", ".step-2.tmp"]
        manager = CheckpointManager(tmp_path)
        for find in (manager.latest, lambda: manager.at(2)):
            with pytest.raises(RunError, match=f"{os.strerror(number)}; the checkpoint is left as it is.* start again"):
                find()
        if where != "folder":
            (tmp_path / "step-2").rename(tmp_path / ".step-2.tmp")
            with pytest.raises(RunError, match="the checkpoint is left as it is"):
                manager.recover()
            (tmp_path / ".step-2.tmp").rename(tmp_path / "step-2")
        if where == "manifest":
            names[:] = ["step-1"]
            patch.setattr(manager_module, "_ranks", {})
            assert prune(tmp_path, 1) == []
    assert contents(tmp_path) == before
    assert CheckpointManager(tmp_path).latest().step == 2


def test_what_another_rank_cannot_read_now_ends_all_ranks_alike(tmp_path) -> None:
    class Other(Runtime):
        """One of two ranks, the other of which cannot read its share."""

        def agree(self, value):
            return max(value, 2)

        def first(self, text):
            return text or "that of rank 1"

    small(tmp_path)
    before = contents(tmp_path)
    (tmp_path / "step-2").rename(tmp_path / ".step-2.tmp")
    manager = CheckpointManager(tmp_path, runtime=Other())
    for find in (manager.latest, lambda: manager.at(1), manager.recover):
        with pytest.raises(RunError, match="that of rank 1"):
            find()
    (tmp_path / ".step-2.tmp").rename(tmp_path / "step-2")
    assert contents(tmp_path) == before


def test_the_threads_of_a_save_use_the_gpu_of_their_rank(tmp_path, monkeypatch) -> None:
    chosen = []
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: chosen.append((threading.current_thread().name, device))
    )
    gpu = torch.device("cuda", 3)
    saved(tmp_path, 7, runtime=Runtime(gpu))
    assert chosen == [("checkpoint-7", gpu)] * 2, "of the thread that writes, and of the one that commits"
    assert CheckpointManager(tmp_path).latest().step == 7


@pytest.mark.parametrize("find", ["latest", "find_unread"])
def test_what_a_training_prunes_meanwhile_is_not_damaged(tmp_path, monkeypatch, caplog, find) -> None:
    """With `keep: 1` the only checkpoint goes as soon as there is a newer one."""
    training, listed = saved(tmp_path / "checkpoints", 1, keep=1), []

    def listed_just_before_a_save(folder):
        there = steps(folder)
        if not listed:
            saved(tmp_path / "checkpoints", 2, keep=1)
        listed.append(there)
        return there

    monkeypatch.setattr(manager_module, "steps", listed_just_before_a_save)
    monkeypatch.setattr(export_module, "steps", listed_just_before_a_save)
    monkeypatch.setattr(manager_module, "prune", lambda folder, keep, saved: shutil.rmtree(folder / "step-1"))
    found = training.latest() if find == "latest" else export_module.find_unread(tmp_path)
    assert found.step == 2
    assert listed == [[1], [2]]
    assert "damaged" not in caplog.text


def test_a_step_that_a_training_prunes_meanwhile_is_not_damaged(tmp_path, monkeypatch) -> None:
    training = saved(tmp_path, 1, 2)
    there = iter([[1, 2], [2]])
    monkeypatch.setattr(manager_module, "steps", lambda folder: next(there))
    shutil.rmtree(tmp_path / "step-1")
    with pytest.raises(UserError, match=r"expected a step with a checkpoint in .* \(2\), got 1"):
        training.at(1)


def test_a_step_that_is_saved_again_is_there_while_the_former_is_removed(tmp_path, monkeypatch) -> None:
    """A last step is, once it has been validated; the removal of a large checkpoint takes long."""
    removed, remove = [], manager_module.remove

    def removing(path):
        if path.name == ".trash-step-1" and path.exists():
            removed.append(Checkpoint.open(tmp_path / "step-1").score)
        remove(path)

    saved(tmp_path, 1)
    monkeypatch.setattr(manager_module, "remove", removing)
    saved(tmp_path, 1, scores={1: 0.5})
    assert removed == [0.5]


def test_who_only_reads_renames_nothing(tmp_path) -> None:
    saved(tmp_path, 1, 2)
    damage(tmp_path / "step-2", "tensors")
    before = sorted(tmp_path.rglob("*"))
    assert CheckpointManager(tmp_path).latest().step == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_that_is_named_after_another_step_is_damaged(tmp_path) -> None:
    saved(tmp_path, 57, 60)
    shutil.rmtree(tmp_path / "step-60")
    shutil.copytree(tmp_path / "step-57", tmp_path / "step-60")
    with pytest.raises(DamagedCheckpoint, match="holds step 57"):
        Checkpoint.open(tmp_path / "step-60")
    assert CheckpointManager(tmp_path).latest().step == 57
    shutil.copytree(tmp_path / "step-57", tmp_path / "best")
    assert Checkpoint.open(tmp_path / "best").step == 57
    (tmp_path / "step-60").rename(tmp_path / ".step-60.tmp")
    CheckpointManager(tmp_path).recover()
    assert steps(tmp_path) == [57]


def test_names_that_only_look_like_steps_are_not_ours(tmp_path) -> None:
    others = ["step-007", "step-٣", f"step-{'9' * 5000}"[:200], "step-", "step-1.bak", ".trash-mine", ".x.tmp"]
    for name in others:
        (tmp_path / name).mkdir()
    saved(tmp_path, 1, 2, keep=1).recover()
    assert steps(tmp_path) == [2]
    assert {path.name for path in tmp_path.iterdir()} == {*others, "step-2"}


def test_recover_removes_only_what_a_save_has_left_beside_the_checkpoints(tmp_path) -> None:
    (tmp_path / ".x.tmp").mkdir()
    (tmp_path / ".mine.tmp").write_text("keep")
    saved(tmp_path / "checkpoints", 1).recover()
    assert {path.name for path in tmp_path.iterdir()} == {".x.tmp", ".mine.tmp", "checkpoints"}


def test_a_later_format_is_never_taken_for_damage(tmp_path) -> None:
    saved(tmp_path, 1)
    path = tmp_path / "step-1" / MANIFEST
    body = json.loads(path.read_bytes())
    body.pop("checksum")
    path.write_bytes(seal({**body, "format": 99}))
    saved(tmp_path, 2, 3, keep=1)
    assert steps(tmp_path) == [1, 3]


def test_a_later_format_is_refused_and_an_older_one_migrated(tmp_path, monkeypatch) -> None:
    saved(tmp_path, 1)
    path = tmp_path / "step-1" / MANIFEST
    body = json.loads(path.read_bytes())
    body.pop("checksum")
    path.write_bytes(seal({**body, "format": 99}))
    with pytest.raises(ValueError, match="expected format 2 or older, got 99; use the release that wrote it"):
        CheckpointManager(tmp_path).latest()
    old = {**body, "format": 0}
    old["note"] = old.pop("meta")
    path.write_bytes(seal(old))
    with pytest.raises(ValueError, match="cannot bring forward"):
        Checkpoint.open(tmp_path / "step-1")
    monkeypatch.setitem(
        format_module.MIGRATIONS, 0, lambda b: {**{k: v for k, v in b.items() if k != "note"}, "meta": b["note"]}
    )
    monkeypatch.setitem(format_module.MIGRATIONS, 1, lambda b: b)
    assert CheckpointManager(tmp_path).latest().meta == {"note": "é 1"}


def as_format_1(body: dict) -> dict:
    """Return a manifest as releases before format 2 wrote it."""
    files, of = sorted(body["files"]), {}
    for name, entry in body["tensors"].items():
        rank = len(entry["shape"])
        of[name] = {
            "dtype": entry["dtype"],
            "shape": entry["shape"],
            "pieces": [
                {"file": files[writer], "key": name, "offset": box[:rank], "shape": box[rank:]}
                for box, writer in zip(body["boxes"][entry["boxes"]], body["writers"][entry["writers"]], strict=True)
            ],
        }
    return {**{k: v for k, v in body.items() if k not in ("boxes", "writers")}, "format": 1, "tensors": of}


def unsealed(folder: Path) -> dict:
    body = json.loads((folder / MANIFEST).read_bytes())
    del body["checksum"]
    return body


def test_a_manifest_of_format_1_is_read(tmp_path) -> None:
    saved(tmp_path, 1, 2)
    old = as_format_1(unsealed(tmp_path / "step-2"))
    (tmp_path / "step-2" / MANIFEST).write_bytes(seal(old))
    checkpoint = CheckpointManager(tmp_path).latest()
    assert checkpoint.step == 2
    into = {name: Piece.whole(torch.zeros_like(x)) for name, x in tensors(2).items()}
    checkpoint.load(into, ("model/", "random/"))
    assert all(torch.equal(into[name].local, x) for name, x in tensors(2).items())
    for changed in (
        {"pieces": [{**old["tensors"]["model/weight"]["pieces"][0], "key": "other"}]},
        {"pieces": [{**old["tensors"]["model/weight"]["pieces"][0], "file": "absent"}]},
        {"pieces": [{**old["tensors"]["model/weight"]["pieces"][0], "offset": [0]}]},
        {"pieces": "none"},
    ):
        weight = {**old["tensors"]["model/weight"], **changed}
        body = {**old, "tensors": {**old["tensors"], "model/weight": weight}}
        (tmp_path / "step-2" / MANIFEST).write_bytes(seal(body))
        with pytest.raises(DamagedCheckpoint, match="not in the form"):
            Checkpoint.open(tmp_path / "step-2")
        assert CheckpointManager(tmp_path).latest().step == 1


def test_a_manifest_with_its_checksum_among_the_other_keys_is_read(tmp_path) -> None:
    """As the first release wrote it."""
    saved(tmp_path, 1)
    path = tmp_path / "step-1" / MANIFEST
    body = json.loads(path.read_bytes())
    checksum = body.pop("checksum")

    def written(value):
        return json.dumps(value, sort_keys=True, indent=1).encode() + b"\n"

    path.write_bytes(written({**body, "checksum": hashlib.sha256(written(body)).hexdigest()}))
    assert read_manifest(path.parent) == body
    path.write_bytes(written({**body, "checksum": checksum}))
    with pytest.raises(DamagedCheckpoint, match="its checksum differs"):
        read_manifest(path.parent)


def test_tensors_that_do_not_fit_are_named(tmp_path) -> None:
    checkpoint = saved(tmp_path, 1).latest()
    with pytest.raises(ValueError, match=r"1 missing from it \(model/new\)"):
        checkpoint.load({"model/new": Piece.whole(torch.zeros(2))})
    with pytest.raises(ValueError, match="not in the model"):
        checkpoint.load({"model/weight": Piece.whole(torch.zeros(5, 3))}, ("model/",))
    with pytest.raises(ValueError, match=r"model/weight: expected shape \(3, 5\), got \(5, 3\)"):
        checkpoint.load({"model/weight": Piece.whole(torch.zeros(3, 5))})


def test_any_box_of_any_pieces(tmp_path) -> None:
    """Pieces written as boxes are read back as other boxes."""
    whole = torch.arange(60.0).reshape(6, 10)
    boxes = np.array([[(0, 0), (4, 3)], [(4, 0), (2, 3)], [(0, 3), (6, 7)]])
    tmp_path.joinpath("step-1").mkdir()
    files = {}
    for i, ((a, b), (n, m)) in enumerate(boxes):
        file = f"rank-{i:05d}.safetensors"
        part = {"w": whole[a : a + n, b : b + m].contiguous()}
        size, sha = format_module.write_tensors(tmp_path / "step-1" / file, part)
        files[file] = {"bytes": size, "sha256": sha}
    stored = Stored("F32", (6, 10), boxes, np.arange(3))
    body = {"format": 2, "step": 1, "score": None, "meta": {}, "files": files, **format_module.table({"w": stored})}
    (tmp_path / "step-1" / MANIFEST).write_bytes(seal(body))
    checkpoint = CheckpointManager(tmp_path).latest()
    assert torch.equal(checkpoint.read("w"), whole)
    for a, b, n, m in [(0, 0, 6, 10), (3, 2, 2, 2), (5, 9, 1, 1), (0, 3, 6, 7), (2, 0, 3, 10)]:
        into = torch.full((n, m), -1.0)
        checkpoint.load({"w": Piece(into, (6, 10), (a, b))})
        assert torch.equal(into, whole[a : a + n, b : b + m])
    with pytest.raises(ValueError, match="add up"):
        format_module.table({"w": Stored("F32", (6, 10), boxes[1:], np.arange(2))})


ODD = [None, True, -1, 2**70, 0.5, "x", [], [[]], {}, [["x"]], [[0, 1, 2]], [[-1, 0]]]


def test_odd_lists_in_a_manifest_are_answered(tmp_path) -> None:
    """A manifest that another program has changed and sealed is refused, or gives no tensor of another size."""
    saved(tmp_path, 1)
    folder, body = tmp_path / "step-1", unsealed(tmp_path / "step-1")
    places = [("boxes",), ("boxes", 0), ("boxes", 0, 0), ("writers",), ("writers", 0), ("writers", 0, 0)]
    places += [("tensors", "model/weight", key) for key in ("boxes", "writers", "shape")]
    for place in places:
        for odd in [*ODD, "absent"]:
            changed = json.loads(json.dumps(body))
            *path, key = place
            at = changed
            for part in path:
                at = at[part]
            if odd == "absent":
                del at[key]
            else:
                at[key] = odd
            (folder / MANIFEST).write_bytes(seal(changed))
            with contextlib.suppress(UserError):
                checkpoint = Checkpoint.open(folder)
                weight = torch.zeros(5, 3)
                checkpoint.load({"model/weight": Piece.whole(weight)})
                assert torch.equal(weight, tensors(1)["model/weight"]), (place, odd)


def test_the_name_of_a_checkpoint_is_that_of_its_tensors(tmp_path) -> None:
    """Two runs have other weights at the same step, of which forecasts must not pass for each other."""
    names = []
    for folder, value in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        manager = CheckpointManager(tmp_path / folder)
        manager.save(7, {"w": Piece.whole(torch.full((3,), value))}, {"when": folder})
        manager.wait()
        names.append(manager.latest().name)
    assert all(name.startswith("step-7 ") for name in names)
    assert names[0] == names[1] != names[2]
