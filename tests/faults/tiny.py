"""A training small enough to be killed a hundred times: the real trainer with a small model on synthetic fields."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from credit_like.context import Context
from credit_like.grid import Grid
from credit_like.losses._mean import AreaLoss
from credit_like.nn.noise import Noise, NoiseKeys, innovations
from credit_like.parallel.runtime import Runtime
from credit_like.schema.experiment import Experiment
from credit_like.schema.phases import phases
from credit_like.state import Sample
from credit_like.stepper import Stepper
from credit_like.training.stage import Stage
from credit_like.training.trainer import Trainer
from credit_like.variables import Variables

HEIGHT, WIDTH, TIMES = 6, 8, 48


class Model(nn.Module):
    """A convolution, a non-linearity with dropout, noise if there are members, a matrix per point."""

    def __init__(
        self, in_channels: int, out_channels: int, width: int = 8, dropout: float = 0.1, noise: bool = False
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, width, 3, padding=1)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, out_channels)
        self.never = nn.Parameter(torch.ones(3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        if noise:
            self.noise = Noise(width, channels=2, scale=1.0, level=0)
            nn.init.normal_(self.noise.weight, std=0.1)

    def forward(self, x, key_B=None):
        if self.training:
            self.calls += 1
        x = self.dropout(torch.tanh(self.conv(x[:, :, -1]))).movedim(1, -1)
        if key_B is not None:
            x = self.noise(x, innovations(key_B, 1))
        return self.head(x).movedim(-1, 1)[:, :, None].clone()


@dataclass
class Statistics:
    channels: int = 2

    def select(self, variables):
        n = sum(map(len, variables))
        return np.zeros(n), np.ones(n), np.full(n, 0.5)

    def mask(self, variables):
        return np.ones((self.channels, HEIGHT, WIDTH), bool)


class Store:
    """Fields that are a pure function of time, and steady waves to predict."""

    grid = Grid(np.linspace(75, -75, HEIGHT), np.arange(WIDTH) * 360 / WIDTH)
    times = np.arange(TIMES) * np.timedelta64(6, "h") + np.datetime64("2000-01-01", "s")
    seconds = times.astype(np.int64)
    step_seconds = 21600

    def __init__(self, poison: frozenset[int] = frozenset()) -> None:
        t, y, x = np.meshgrid(np.arange(TIMES), np.arange(HEIGHT), np.arange(WIDTH), indexing="ij")
        waves = [np.sin(0.3 * t + x * 2 * np.pi / WIDTH) * (1 + y / HEIGHT), np.cos(0.5 * t - x * 4 * np.pi / WIDTH)]
        self.fields = np.stack(waves, 1).astype(np.float32)
        for time_ in poison:
            self.fields[time_, 1, 2, 3] = np.nan

    def read(self, variables, times, rows=slice(None), columns=slice(None)):
        return self.fields[list(times)][:, :, rows, columns]

    def period(self, periods):
        return np.arange(TIMES - 8)

    def attrs(self, variable):
        return {"units": "m s-1"}


class Loader:
    """Micro-batches of one replica: each global batch is split over the replicas."""

    def __init__(
        self, store: Store, experiment: Experiment, runtime: Runtime, first: int, last: int, shuffle: bool
    ) -> None:
        self.store, self.first, self.last, self.shuffle = store, first, last, shuffle
        self.leads, self.seed = experiment.data.forecast_len, experiment.seed
        self.micro, self.batch = experiment.trainer.micro_batch_size, experiment.trainer.global_batch_size
        self.rank, self.replicas = runtime.dp_rank, runtime.dp_size
        self.pause = float(os.environ.get("PAUSE", "0"))

    def __len__(self) -> int:
        return (self.last - self.first - self.leads) // self.batch * (self.batch // (self.micro * self.replicas))

    def batches(self, epoch: int, start: int = 0):
        n = self.last - self.first - self.leads
        order = np.random.default_rng((self.seed, epoch)).permutation(n) if self.shuffle else np.arange(n)
        share = self.batch // self.replicas
        per_step = share // self.micro
        for number in range(start, len(self)):
            step, part = divmod(number, per_step)
            begin = step * self.batch + self.rank * share + part * self.micro
            if self.pause:
                time.sleep(self.pause)
            yield self.sample(self.first + order[begin : begin + self.micro])

    def again(self, epoch: int, start: int, count: int) -> list[Sample]:
        return list(itertools.islice(self.batches(epoch, start), count))

    def sample(self, index) -> Sample:
        f = self.store.fields
        frames = np.stack([f[i : i + 1] for i in index]).swapaxes(1, 2)
        target = np.stack([f[i + 1 : i + 1 + self.leads] for i in index]).swapaxes(1, 2)
        forcing = np.zeros((len(index), 0, self.leads, HEIGHT, WIDTH), np.float32)
        return Sample(*map(torch.from_numpy, (frames.copy(), forcing, target.copy())), torch.as_tensor(index))


def experiment(save_loc: Path, **trainer) -> Experiment:
    forecast_len, loss = trainer.pop("forecast_len", 1), trainer.pop("loss", {"type": "mse"})
    section = {
        "device": "cpu",
        "global_batch_size": 4,
        "micro_batch_size": 1,
        "epochs": 2,
        "use_ema": True,
        "ema_decay": 0.9,
        "checkpoint": {"every": 3, "keep": 2},
        "scheduler": {"type": "linear-warmup-cosine", "warmup_steps": 2},
        **trainer,
    }
    return Experiment.model_validate(
        {
            "name": "tiny",
            "seed": 3,
            "save_loc": str(save_loc),
            "data": {
                "source": {"type": "synthetic"},
                "timestep": "6h",
                "prognostic": {"surface": ["u", "v"]},
                "forecast_len": forecast_len,
                "train": ["2000-01-01", "2000-01-10"],
                "valid": ["2000-01-11", "2000-01-12"],
                "test": ["2000-02-01", "2000-02-02"],
            },
            "model": {"type": "persistence"},
            "loss": loss,
            "trainer": section,
        }
    )


def trainer(
    save_loc: Path,
    runtime: Runtime | None = None,
    poison=frozenset(),
    width: int = 8,
    dropout: float = 0.1,
    wrap=None,
    stop_at=None,
    **section,
) -> Trainer:
    """A trainer of the tiny model; `wrap` shards or wraps the model."""
    runtime = runtime or Runtime()
    e = experiment(save_loc, **section)
    variables, statistics, store = Variables(e.data), Statistics(), Store(frozenset(poison))
    store.variables = variables
    torch.manual_seed(0)
    noise = NoiseKeys(store.times.astype(np.int64), e.seed) if e.trainer.members > 1 else None
    model = Model(variables.in_channels, variables.out_channels, width, dropout, noise is not None)
    model = wrap(model) if wrap else model
    static = np.zeros((0, HEIGHT, WIDTH), np.float32)
    stepper = Stepper(model, variables, statistics, static, "increment", noise=noise)
    others = runtime.from_other_members if runtime.ensemble_size > 1 else None
    stages = [
        Stage.of(
            phase,
            AreaLoss(phase.experiment.loss, variables, statistics, store.grid, others=others),
            Loader(store, phase.experiment, runtime, 0, TIMES - 8, True),
            Loader(store, phase.experiment, runtime, TIMES - 8, TIMES, False),
            runtime.dp_size,
        )
        for phase in phases(e)
    ]
    made = Trainer(Context(e, runtime, variables, store, statistics, stepper), stages)
    if stop_at is not None:
        stop_after_step(made, stop_at)
    return made


def stop_after_step(made: Trainer, number: int) -> None:
    """Request a stop, as the batch system would, during optimiser step `number`."""
    inner = made.train_step

    def step(micro_batches, count, learning_rate, step):
        if step == number:
            os.kill(os.getpid(), signal.SIGTERM)
        return inner(micro_batches, count, learning_rate, step)

    made.train_step = step


def stop_before_first_step(made: Trainer) -> None:
    """Request a stop once the newest checkpoint has been restored."""
    inner = made.state.restore

    def restore(checkpoint):
        inner(checkpoint)
        os.kill(os.getpid(), signal.SIGTERM)

    made.state.restore = restore


if __name__ == "__main__":
    import json

    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    outcome = trainer(Path(sys.argv[1]), **json.loads(sys.argv[2] if len(sys.argv) > 2 else "{}")).fit()
    print(outcome.state, outcome.step, outcome.reason)
    sys.exit(outcome.exit_status)
