"""A trainer in little: it counts, saves, heeds SIGTERM and SIGUSR1, and writes `status.json`, as the trainer does.

The weight after step n is a chain of hashes, so that a step left out or done twice shows. Behaviour comes from the
environment: STUB_STEPS, STUB_SECONDS per step, STUB_SAVE_EVERY, and STUB_FAULT: `deaf` to signals, `fail` or `crash` at
step STUB_FAULT_STEP.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path


def weight(before: str, step: int) -> str:
    return hashlib.sha256(f"{before}{step}".encode()).hexdigest()


def uninterrupted(steps: int) -> str:
    """What a run that is never stopped ends with."""
    value = ""
    for step in range(1, steps + 1):
        value = weight(value, step)
    return value


def _write(path: Path, data: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(data))
    temporary.rename(path)


def _save(folder: Path, step: int, value: str) -> None:
    beside = folder / "checkpoints" / f".step-{step}.tmp"
    beside.mkdir(parents=True, exist_ok=True)
    (beside / "weight").write_text(value)
    target = folder / "checkpoints" / f"step-{step}"
    if not target.exists():
        beside.rename(target)


def train(folder: Path) -> int:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    steps, pause = int(os.environ["STUB_STEPS"]), float(os.environ["STUB_SECONDS"])
    fault, fault_step = os.environ.get("STUB_FAULT", ""), int(os.environ.get("STUB_FAULT_STEP", "0"))
    asked: list[str] = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda n, _: asked.append(signal.Signals(n).name) if fault != "deaf" else None)
    job = next(os.environ[key] for key in ("PBS_JOBID", "SLURM_JOB_ID", "CREDIT_LIKE_JOB") if key in os.environ)
    done = folder / f"done-{job}-{starts(folder, job)}"
    _write(
        folder / "seen" / f"{job}-{rank}.json", {"world": world, "cwd": os.getcwd(), "extra": os.environ.get("EXTRA")}
    )
    if rank:
        while not (asked or done.exists()):
            time.sleep(0.02)
        # A signal that ended the run is on its way to this worker too, which would else be gone before it comes.
        patience = time.monotonic() + (300 if done.exists() and done.read_text() == "stopped" else 0)
        while not asked and time.monotonic() < patience:
            time.sleep(0.02)
        _write(folder / "seen" / f"{job}-{rank}-signals.json", asked)
        return 0
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    step = max((int(path.name[5:]) for path in (folder / "checkpoints").glob("step-*")), default=0)
    value = (folder / "checkpoints" / f"step-{step}" / "weight").read_text() if step else ""
    _write(folder / "status.json", {"state": "running", "step": step, "reason": None})
    while step < steps and not asked:
        time.sleep(pause)
        step, value = step + 1, weight(value, step + 1)
        with (folder / "log.jsonl").open("a") as log:
            log.write(json.dumps({"step": step, "epoch": 1, "loss": 1 / step, "samples_per_second": 2.5}) + "\n")
        if step == fault_step and fault == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if step == fault_step and fault == "fail":
            _write(folder / "status.json", {"state": "failed", "step": step, "reason": "loss is nan"})
            done.touch()
            return 1
        if step % int(os.environ.get("STUB_SAVE_EVERY", "1000")) == 0:
            _save(folder, step, value)
    _save(folder, step, value)
    _write(folder / "seen" / f"{job}-{rank}-signals.json", asked)
    finished = step == steps
    done.with_suffix(".new").write_text("finished" if finished else "stopped")
    done.with_suffix(".new").rename(done)
    _write(folder / "status.json", {"state": "finished" if finished else "continue", "step": step, "reason": None})
    return 0


def starts(folder: Path, job: str) -> int:
    """How often the job has begun: the same for all workers of one start."""
    events = (folder / "jobs" / "history.jsonl").read_text().splitlines()
    return sum('"event": "begin"' in event and f'"job": "{job}"' in event for event in events)


def main(arguments: list[str]) -> int:
    action, file, *rest = arguments
    # There is no YAML without the site's packages.
    lines = Path(file).read_text().splitlines()
    (save_loc,) = [line.removeprefix("save_loc: ") for line in lines if line.startswith("save_loc: ")]
    folder = Path(save_loc).absolute()
    if action == "train":
        return train(folder)
    _write(
        folder / "forecasts" / f"{action}-{'-'.join(rest).replace('/', 'of')}.json",
        {"cuda": os.environ.get("CUDA_VISIBLE_DEVICES")},
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
