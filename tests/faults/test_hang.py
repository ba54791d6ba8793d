"""A rank that hangs is named, with what it does, soon after `trainer.timeout`, and every rank leaves its stacks."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from credit_like import cli
from credit_like.errors import known_message, of_another_rank
from credit_like.parallel.hang import Collective, Position, describe, missing
from tests.experiments import DEMO
from tests.faults import harness
from tests.integration.test_restart import TINY

ALL, PAIR = (0, 1, 2, 3), (2, 3)


def position(number: int, waits: bool = True, pair: int = 0, waits_in_pair: bool = False) -> Position:
    """A rank whose newest collective of all ranks is `number`, and of its pair `pair`."""
    everyone, two = Collective("0", ALL, number, "all_reduce"), Collective("2", PAIR, pair, "all_gather")
    return Position((everyone, two), two if waits_in_pair else everyone if waits else None, "step.py:7 (wait)")


def test_the_rank_that_has_not_begun_what_the_others_wait_in_is_missing() -> None:
    positions = {0: position(5), 1: position(5), 2: position(4, waits=False), 3: position(5)}
    assert missing(positions, 4) == [2]
    said = describe(positions, 4, None)
    assert said.startswith("rank 2 held up the others: rank 2 is at step.py:7 (wait), last in ")
    assert "ranks 0, 1, 3 in all_reduce 5 of ranks 0, 1, 2, 3" in said


def test_a_rank_that_waits_itself_is_not_missing_although_others_wait_for_it() -> None:
    positions = {
        0: position(5),
        1: position(5),
        2: position(4, pair=3, waits_in_pair=True),
        3: position(4, False, pair=2),
    }
    assert missing(positions, 4) == [3]


def test_a_rank_that_does_not_respond_is_missing() -> None:
    positions = {0: position(5), 1: position(5), 3: position(5)}
    assert missing(positions, 4) == [2]
    assert "rank 2 does not respond" in describe(positions, 4, None)


def test_ranks_that_wait_for_each_other_are_no_one_s_fault() -> None:
    positions = {0: position(5), 1: position(5), 2: position(4, pair=3, waits_in_pair=True), 3: position(5, pair=2)}
    assert missing(positions, 4) == []
    assert describe(positions, 4, None).startswith("no rank is missing, but all wait: ")


def test_positions_survive_their_way_through_the_store() -> None:
    for made in (position(5), position(4, False), position(4, pair=3, waits_in_pair=True), Position()):
        assert Position.of_json(made.to_json()) == made


SILENT = "silent", "another rank did not answer within trainer.timeout: "
LOST = "lost", "the connection to another rank was lost: "


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        (
            "[../gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 15000ms for recv operation to complete",
            SILENT,
        ),
        ("Application timeout caused pair closure", SILENT),
        ("[../gloo/transport/tcp/pair.cc:144] Application timeout caused pair closure", SILENT),
        ("[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:48031.", LOST),
        ("[../gloo/transport/tcp/pair.cc:525] Read error [10.0.0.2]:48031: Connection reset by peer", LOST),
        ("[../gloo/transport/tcp/pair.cc:331] writev [10.0.0.2]:48031: Broken pipe", LOST),
        ("[../gloo/transport/tcp/pair.cc:799] connect [10.0.0.2]:48031: Connection refused", LOST),
        ("[../gloo/transport/tcp/pair.cc:525] Read error [10.0.0.2]:48031: Connection timed out", LOST),
    ],
)
def test_what_gloo_says_of_another_rank_is_one_message(text, meaning) -> None:
    error = RuntimeError(text)
    kind, beginning = meaning
    assert of_another_rank(error) == kind
    assert (known_message(error) or "").startswith(beginning)


def test_other_errors_say_nothing_of_another_rank() -> None:
    assert not of_another_rank(RuntimeError("shape"))


def hanging(rank, world, port, save_loc, section) -> int:
    """Train, and sleep or count for ever on one rank in the middle of step 3, before the gradients are reduced."""
    if rank == section["rank"]:
        from credit_like.training.step import TrainStep

        inner, seen = TrainStep.forward, []

        def forward(self, *arguments):
            seen.append(1)
            if len(seen) == 3:
                Path(save_loc).with_suffix(".planted").write_text(str(time.time()))
                if section["how"] == "stopped":
                    import os

                    os.kill(os.getpid(), signal.SIGSTOP)
                time.sleep(600)
            return inner(self, *arguments)

        TrainStep.forward = forward
    values = [
        f"save_loc={save_loc}", *TINY, "trainer.timeout=15s", f"trainer.parallelism={section['layout']}",
        "inference.init=null", "inference.lead=12h",
    ]  # fmt: skip
    cli.main(["train", str(DEMO), *(part for value in values for part in ("--set", value))])
    return 0


def hang_of_four(folder, rank: int, how: str, layout: str) -> None:
    run = folder / "run"
    job = harness.Job(run, {"rank": rank, "how": how, "layout": layout}, 4, body=hanging)
    others = [process for number, process in enumerate(job.processes) if number != rank]
    with harness.Waiting(job.pids) as waiting:
        for process in others:
            process.join(300)
    assert waiting.since(float(run.with_suffix(".planted").read_text())) < 60  # 15 of them are `trainer.timeout`
    codes = job.end()
    said = "".join(run.with_suffix(f".{r}.out").read_text() for r in range(4))
    assert [code for number, code in enumerate(codes) if number != rank] == [1, 1, 1], said
    assert said.count("held up the others") == 1, said
    assert f"within trainer.timeout: rank {rank} held up the others: rank {rank} " in said
    assert "Traceback" not in said
    status = json.loads((run / "status.json").read_text())
    assert status["state"] == "failed"
    assert f"rank {rank} held up the others" in status["reason"]
    stacks = {path.name: path.read_text() for path in (run / "hang").iterdir()}
    responding = [r for r in range(4) if r != rank or how == "asleep"]
    assert sorted(stacks) == [f"rank-{r}.txt" for r in responding]
    for r in responding:
        assert "Current thread" in stacks[f"rank-{r}.txt"] or "Thread 0x" in stacks[f"rank-{r}.txt"]
        assert "waits in no collective" not in stacks[f"rank-{r}.txt"] or r == rank
    if how == "asleep":
        assert "in forward" in stacks[f"rank-{rank}.txt"]
        assert "test_hang.py" in status["reason"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "how", "layout"),
    [
        (2, "stopped", "{data: ddp}"),
        pytest.param(1, "asleep", "{data: fsdp2, tensor: 2}", marks=pytest.mark.long),
        pytest.param(0, "asleep", "{data: ddp, domain: 2}", marks=pytest.mark.long),
        pytest.param(3, "stopped", "{data: fsdp2}", marks=pytest.mark.long),
    ],
)
def test_the_rank_that_hangs_is_named(tmp_path, rank, how, layout) -> None:
    hang_of_four(tmp_path, rank, how, layout)
