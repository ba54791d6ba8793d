"""A whole training against a plain loop over the files, written from the documentation and in float64.

Of the program it takes the experiment and the order of the samples. Files are read with xarray, and statistics, inputs, steps,
corrections, loss, gradients, clipping, optimiser, schedule and moving average are written out.
"""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
import json
import math

import numpy as np
import pytest
import torch
import xarray as xr
from torch import nn

from credit_like import build
from credit_like.context import Context
from credit_like.data.statistics import fit_statistics
from credit_like.data.store import open_store
from credit_like.parallel.runtime import Runtime
from credit_like.schema.experiment import Experiment
from credit_like.variables import Variables
from tests.inference.world import HEIGHT, WIDTH, make_data

FIRST, LAST = np.datetime64("2000-01-01"), np.datetime64("2000-01-05")
CHANNELS = ("u", "u", "temperature", "temperature", "sp", "rain")
LEVELS = (500, 850, 500, 850, None, None)
PROGNOSTIC = 5
ROOT = 0.5  # of the transform of rain


class Model(nn.Module):
    """All frames mixed at each point, a non-linearity, and a matrix."""

    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(channels, 7), nn.Linear(7, out_channels)
        self.gain = nn.Parameter(torch.ones(7))

    def forward(self, x_BCTHW):
        x = torch.tanh(self.first(x_BCTHW.flatten(1, 2).movedim(1, -1)).roll(1, -2)) * self.gain
        return self.head(x).movedim(-1, 1)[:, :, None]


INCREMENT = {
    "model": {"type": "wxformer", "predict": "increment"},
    "data": {"forecast_len": 3, "history_len": 1},
    "loss": {
        "type": "huber",
        "delta": 0.8,
        "variable_weights": {"u": [1, 2], "rain": 0.3},
        "level_weights": {850: 0.5},
        "lead_weights": [1, 2, 4],
    },
    "physics": [
        {"type": "clip", "variables": ["rain"], "minimum": 0.2},
        {"type": "conserve", "variables": ["sp"], "after_epochs": 1},
    ],
    "trainer": {
        "micro_batch_size": 2,
        "grad_max_norm": 0.1,
        "use_ema": True,
        "ema_decay": 0.3,
        "backprop_steps": 2,
        "optimizer": {
            "learning_rate": 1e-2,
            "weight_decay": 0.1,
            "groups": [{"match": "head.*", "learning_rate": 3e-2}, {"match": "*.weight", "weight_decay": 0.5}],
        },
        "scheduler": {"warmup_steps": 2, "min_lr": 1e-3},
    },
}
STATE = {
    "model": {"type": "wxformer", "predict": "state"},
    "data": {"forecast_len": 2, "history_len": 2},
    "loss": {"type": "mse", "scale": "state", "latitude_weights": False},
    "trainer": {
        "micro_batch_size": 1,
        "grad_max_norm": None,
        "optimizer": {"learning_rate": 1e-2, "weight_decay": 0.2, "betas": [0.8, 0.99], "eps": 1e-6},
        "scheduler": {"warmup_steps": 1},
    },
}


def make_fields(folder):
    """Data with a gap in time, points that never have a value, and a forcing without values elsewhere."""
    with xr.open_dataset(make_data(folder / "all.nc", masked=True, steps=24)) as opened:
        fields = opened.load().isel(time=[t for t in range(24) if t not in (7, 8)])
    fields["sst"].values[:, 4:6, 3:9] = np.nan
    fields.drop_encoding().to_netcdf(folder / "data.nc")
    return fields


def make_trainer(folder, case):
    data = {
        "source": {"type": "netcdf", "path": str(folder / "data.nc")},
        "timestep": "6h",
        "levels": [500, 850],
        "prognostic": {"level": ["u", "temperature"], "surface": ["sp"]},
        "diagnostic": {"surface": [{"name": "rain", "transform": {"type": "sqrt", "scale": ROOT}}]},
        "dynamic_forcing": {"surface": ["sst"]},
        "static": {"surface": ["oro"]},
        "train": [str(FIRST), str(LAST)],
        "valid": ["2000-01-05T06", "2000-01-06"],
        "test": ["2000-01-06T06", "2000-01-06T18"],
    }
    trainer = {"device": "cpu", "global_batch_size": 4, "epochs": 2, "batches_per_epoch": 2, **case["trainer"]}
    sections = {**case, "data": {**data, **case["data"]}, "trainer": trainer}
    experiment = Experiment.model_validate({"name": "by-hand", "save_loc": str(folder / "run"), **sections})
    variables = Variables(experiment.data)
    store = open_store(experiment.data, variables)
    statistics = fit_statistics(store, variables, experiment.data)
    history = experiment.data.history_len
    model = Model(variables.in_channels * history, variables.out_channels)
    context = Context.of(model, experiment, Runtime(), variables, store, statistics)
    context.stepper.double()
    made = build.build_trainer(context)
    made.loss.double()
    for loader in (made.train_loader, made.stage.valid_loader):
        loader.batches = doubled(loader.batches)
    return made


def doubled(batches):
    def wide(*where):
        for sample in batches(*where):
            parts = {name: getattr(sample, name).double() for name in ("prognostic", "forcing", "target")}
            yield dataclasses.replace(sample, **parts)

    return wide


def root(x):
    """√(1 + x / scale) − 1, odd."""
    return torch.sign(x) * ((1 + x.abs() / ROOT).sqrt() - 1)


def root_back(z):
    return torch.sign(z) * ROOT * ((1 + z.abs()) ** 2 - 1)


class ByHand:
    """The numbers of the files, and a training on them."""

    def __init__(self, fields, experiment):
        self.experiment, self.times = experiment, fields["time"].values
        parts = [fields[name].values for name in ("u", "temperature")]
        parts += [fields[name].values[:, None] for name in ("sp", "rain")]
        self.fields = torch.from_numpy(np.concatenate(parts, 1)).double()
        self.forcing = torch.from_numpy(fields["sst"].values[:, None]).double()
        self.valid = torch.isfinite(self.fields[0])
        self.inside = np.flatnonzero((self.times >= FIRST) & (self.times <= LAST))
        self.mean, self.std, self.change = self.statistics(self.scaled(self.fields))
        forcing_mean, forcing_std, _ = self.statistics(self.forcing)
        self.forcing = ((self.forcing - forcing_mean) / forcing_std).nan_to_num(0.0)
        static = torch.from_numpy(fields["oro"].values).double()
        self.static = ((static - static.mean()) / static.std(unbiased=False))[None]
        self.filled = torch.where(self.valid, self.fields, self.unscaled(self.mean))
        edge = np.concatenate([[90.0], (fields["latitude"].values[1:] + fields["latitude"].values[:-1]) / 2, [-90.0]])
        self.rows = torch.from_numpy(np.abs(np.diff(np.sin(np.deg2rad(edge)))))[:, None].expand(HEIGHT, WIDTH)

    def scaled(self, x):
        """The variables as statistics, model and loss have them, of which rain is transformed."""
        return torch.cat([x[:, :PROGNOSTIC], root(x[:, PROGNOSTIC:])], 1)

    def unscaled(self, x_CHW):
        return torch.cat([x_CHW[:PROGNOSTIC], root_back(x_CHW[PROGNOSTIC:])])

    def statistics(self, x):
        """Mean, standard deviation, and that of the change between times 6 h apart, rounded as the program stores them."""
        pairs = [i for i in self.inside[:-1] if self.times[i + 1] - self.times[i] == np.timedelta64(6, "h")]
        found = []
        for values in (x[self.inside].numpy(), np.stack([x[i + 1].numpy() - x[i].numpy() for i in pairs])):
            mean = np.nanmean(values, (0, 2, 3), keepdims=True)[0]
            found += [mean, np.sqrt(np.nanmean((values - mean) ** 2, (0, 2, 3), keepdims=True)[0])]
        return [torch.from_numpy(found[i].astype(np.float32)).double() for i in (0, 1, 3)]

    def area_mean(self, x, weights, valid):
        weights = weights * valid
        return (torch.where(valid, x, 0.0) * weights).sum((-2, -1)) / weights.sum((-2, -1))

    def step(self, model, frames, at, epoch):
        """The next predicted fields from the frames at time `at` and those before it."""
        n, inputs = PROGNOSTIC, []
        for back, frame in zip(range(len(frames) - 1, -1, -1), frames, strict=True):
            inputs.append(torch.cat([(frame - self.mean[:n]) / self.std[:n], self.static, self.forcing[at - back]]))
        y = model(torch.stack(inputs, 1)[None])[0, :, 0]
        if self.experiment.model.predict == "increment":
            state = frames[-1] + self.change[:n] * y[:n]
        else:
            state = self.mean[:n] + self.std[:n] * y[:n]
        rain = root_back(self.mean[n:] + self.std[n:] * y[n:])
        for fix in self.experiment.physics:
            if epoch >= fix.after_epochs and fix.type == "clip":
                rain = rain.clamp(min=fix.minimum)
            elif epoch >= fix.after_epochs:
                lost = self.area_mean(frames[-1][4] - state[4], self.rows, self.valid[4])
                state = torch.cat([state[:4], (state[4] + lost)[None]])
        return torch.where(self.valid[:n], state, self.filled[0, :n]), rain

    def lead_loss(self, state, rain, target):
        config = self.experiment.loss
        scale = torch.cat([(self.change if config.scale == "change" else self.std)[:PROGNOSTIC], self.std[PROGNOSTIC:]])
        error = (self.scaled(torch.cat([state, rain])[None]) - self.scaled(target[None]))[0] / scale
        error = torch.where(self.valid, error, 0.0)
        if config.type == "mse":
            value = error**2
        else:
            size = error.abs()
            value = torch.where(size <= config.delta, error**2 / 2, config.delta * (size - config.delta / 2))
        rows = self.rows if config.latitude_weights else torch.ones_like(self.rows)
        weights = []
        for c, (name, level) in enumerate(zip(CHANNELS, LEVELS, strict=True)):
            weight = config.variable_weights.get(name, 1.0)
            weight = weight[c % 2] if isinstance(weight, tuple) else weight
            weights.append(weight * config.level_weights.get(level, 1.0))
        weights = torch.tensor(weights).double()
        return (weights * self.area_mean(value, rows, self.valid)).sum() / weights.sum()

    def loss(self, model, at, epoch, backprop_steps=None):
        """The loss of the sample that begins at position `at`."""
        data = self.experiment.data
        weights = self.experiment.loss.lead_weights or [1] * data.forecast_len
        frames = [self.filled[i, :PROGNOSTIC] for i in range(at - data.history_len + 1, at + 1)]
        total = 0.0
        for lead, weight in enumerate(weights):
            if backprop_steps and lead % backprop_steps == 0:
                frames = [frame.detach() for frame in frames]
            state, rain = self.step(model, frames, at + lead, epoch)
            frames = [*frames[1:], state]
            total = total + weight * self.lead_loss(state, rain, self.fields[at + lead + 1]) / sum(weights)
        return total

    def train(self, model, samples, steps):
        """Take the steps, of (epoch, positions of the samples); yield loss, norm of the gradient and learning rate of each.

        At the end the model has the weights, and `average` their moving averages.
        """
        trainer, parameters = self.experiment.trainer, dict(model.named_parameters())
        optimizer, schedule = trainer.optimizer, trainer.scheduler
        self.average = {name: p.detach().clone() for name, p in parameters.items()}
        moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in parameters.items()}
        for number, (epoch, chosen) in enumerate(samples, 1):
            loss = sum(self.loss(model, at, epoch, trainer.backprop_steps) for at in chosen) / len(chosen)
            gradients = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
            norm = math.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
            clip = min(1.0, trainer.grad_max_norm / norm) if trainer.grad_max_norm else 1.0
            done = (number - 1 - schedule.warmup_steps) / (steps - schedule.warmup_steps)
            rate = optimizer.learning_rate * number / max(1, schedule.warmup_steps)
            if done >= 0:
                rate = (
                    schedule.min_lr + (optimizer.learning_rate - schedule.min_lr) * (1 + math.cos(math.pi * done)) / 2
                )
            yield float(loss.detach()), norm, rate
            with torch.no_grad():
                for name, p in parameters.items():
                    own, decay = rate, optimizer.weight_decay
                    group = next((g for g in optimizer.groups if fnmatch.fnmatchcase(name, g.match)), None)
                    if group is not None and group.learning_rate is not None:
                        own = rate * group.learning_rate / optimizer.learning_rate
                    if group is not None and group.weight_decay is not None:
                        decay = group.weight_decay
                    (a, b), (m, v) = optimizer.betas, moments[name]
                    m.mul_(a).add_((1 - a) * clip * gradients[name])
                    v.mul_(b).add_((1 - b) * (clip * gradients[name]) ** 2)
                    p.mul_(1 - own * (decay if p.ndim > 1 else 0.0))
                    p.sub_(own * (m / (1 - a**number)) / ((v / (1 - b**number)).sqrt() + optimizer.eps))
                    kept = min(trainer.ema_decay, (1 + number) / (10 + number))
                    self.average[name] = kept * self.average[name] + (1 - kept) * p


@pytest.mark.parametrize("case", [INCREMENT, STATE], ids=["increment", "state"])
def test_weights_and_the_log_are_those_of_a_plain_loop(tmp_path, case) -> None:
    fields = make_fields(tmp_path)
    made = make_trainer(tmp_path, case)
    context, loader = made.context, made.train_loader
    model = copy.deepcopy(context.stepper.model)
    samples = []
    for epoch in range(2):
        order = loader.windows.starts[np.concatenate(loader.indices(epoch))]
        samples += [(epoch, order[i : i + 4].tolist()) for i in (0, 4)]
    assert made.fit().state == "finished"
    rows = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    hand = ByHand(fields, context.experiment)
    begin = {name: p.detach().clone() for name, p in model.named_parameters()}
    expected = list(hand.train(model, samples, steps=4))
    found = [[row[key] for key in ("loss", "grad_norm", "learning_rate")] for row in rows if "loss" in row]
    np.testing.assert_allclose(found, expected, rtol=1e-6)  # the log is in float32
    trained, weights = (dict(one.named_parameters()) for one in (context.stepper.model, model))
    average = made.state.ema.average if made.state.ema is not None else {}
    for name, weight in weights.items():
        moved = float((weight.detach() - begin[name]).abs().max())
        assert moved > 1e-3
        # The weights of channels in the loss are rounded to float32.
        torch.testing.assert_close(trained[name], weight, rtol=0, atol=1e-6 * moved)
        if average:
            torch.testing.assert_close(average[name], hand.average[name], rtol=0, atol=1e-6 * moved)
    with torch.no_grad():
        for name, weight in weights.items() if average else ():
            weight.copy_(hand.average[name])
        leads = context.experiment.data.forecast_len
        first = np.flatnonzero(hand.times > LAST)[0] + context.experiment.data.history_len - 1
        last = np.flatnonzero(hand.times <= np.datetime64("2000-01-06"))[-1]
        losses = [float(hand.loss(model, at, epoch=1)) for at in range(first, last - leads + 1)]
    assert [row["valid_loss"] for row in rows if "valid_loss" in row][-1] == pytest.approx(np.mean(losses), rel=1e-6)
    context.store.close()
