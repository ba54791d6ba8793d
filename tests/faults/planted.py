"""A training with an error planted on one rank: `python -m tests.faults.planted SAVE_LOC RANK MOMENT ERROR [SETTING…]`."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from pathlib import Path
from types import ModuleType

from credit_like import cli
from credit_like.data.store import ReadError
from credit_like.errors import UserError
from credit_like.parallel.environment import read_environment
from tests.experiments import DEMO
from tests.integration.test_restart import TINY

ERRORS = {"user": UserError("the wind has changed"), "read": ReadError("no such wind"), "fault": KeyError("windless")}
STATUS = {"user": 2, "read": 1, "fault": 1}
MOMENTS = {
    "start": "credit_like.build.open_store",
    "statistics": "credit_like.build.Statistics.load",
    "step": "credit_like.training.step.TrainStep.__call__",
    "save": "credit_like.training.state.TrainingState.save",
    "validation": "credit_like.training.validation.Validator.__call__",
    "forecast": "credit_like.training.forecasts.ShortForecasts.__call__",
}
SETTINGS = [
    "trainer.parallelism={data: ddp}", "trainer.timeout=300s", "trainer.epochs=1", "inference.init=null", "inference.lead=12h",
    "trainer.batches_per_epoch=3", "trainer.monitor={every: 1, share: 1.0, lead: 12h}",
]  # fmt: skip


def train(save_loc: str | Path, *settings: str) -> None:
    """Train as one rank; a rank that fails ends here."""
    values = [f"save_loc={save_loc}", *TINY, *SETTINGS, *settings]
    cli.main(["train", str(DEMO), *(part for value in values for part in ("--set", value))])


def plant(save_loc: str | Path, moment: str, error: str) -> None:
    """Have this process fail at a moment, of which the file `SAVE_LOC.planted` tells the time."""
    module, *names = _resolve(MOMENTS[moment])
    owner: object = module
    for name in names[:-1]:
        owner = getattr(owner, name)

    def fail(*args: object, **kwargs: object) -> None:
        Path(save_loc).with_suffix(".planted").write_text(str(time.time()))
        if error == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ERRORS[error]

    setattr(owner, names[-1], fail)


def _resolve(dotted: str) -> tuple[ModuleType | str, ...]:
    """The module of a dotted name, and the names within it."""
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        try:
            return importlib.import_module(".".join(parts[:count])), *parts[count:]
        except ModuleNotFoundError:
            continue
    raise AssertionError(dotted)


def main(save_loc: str, rank: str, moment: str, error: str, *settings: str) -> None:
    """Train; the error comes in the first start only, where torchrun starts the ranks again."""
    place = read_environment()
    Path(save_loc).with_suffix(f".{place.rank}.pid").write_text(str(os.getpid()))
    if place.rank == int(rank) and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        plant(save_loc, moment, error)
    train(save_loc, *settings)


if __name__ == "__main__":
    main(*sys.argv[1:])
