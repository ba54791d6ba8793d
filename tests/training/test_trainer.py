"""Ranks that were started with other files: named before the first step, on every rank."""

from __future__ import annotations

import dataclasses

import credit_like
from credit_like import build
from credit_like.errors import UserError
from credit_like.schema.load import load_experiment
from tests.experiments import DEMO, SHORT, SMALL_MODEL


def _other_seed(trainer):
    context = trainer.state.context
    experiment = context.experiment.model_copy(update={"seed": 7})
    trainer.state.context = dataclasses.replace(context, experiment=experiment)


def _other_statistics(trainer):
    trainer.state.context.statistics.dataset["mean"].values[0] += 1.0


def _fewer_files(trainer):
    windows = trainer.stages[0].train_loader.windows
    windows.starts = windows.starts[1:]


def _other_version(trainer):
    credit_like.__version__ = "0.0.1"


# What is compared first is changed last, since the first difference is the one that is named.
CHANGES = {
    "training samples": _fewer_files,
    "statistics": _other_statistics,
    "seed": _other_seed,
    "version of credit_like": _other_version,
}


def _messages(rank, experiment):
    """The messages as rank 1 changes one thing after the other; the first is that without a change."""
    runtime = build.start(experiment)
    trainer = build.build_trainer(build.build_context(experiment, runtime))
    messages = []
    for change in (None, *CHANGES.values()):
        if rank == 1 and change is not None:
            change(trainer)
        try:
            trainer.check_ranks()
            messages.append("")
        except UserError as error:
            messages.append(str(error))
    runtime.close()
    return messages


def test_what_differs_between_ranks_is_named_on_all_of_them(run_ranks, tmp_path):
    layout = ("trainer.parallelism={data: ddp}", "trainer.micro_batch_size=1", "trainer.scheduler.warmup_steps=1")
    experiment = load_experiment(DEMO, [*SHORT, SMALL_MODEL, *layout, f"save_loc={tmp_path}"])
    first, second = run_ranks(2, _messages, experiment)
    assert first == second
    none, *found = first
    assert none == ""
    for name, message in zip(CHANGES, found, strict=True):
        assert message.startswith(f"{name}: expected the same on all 2 ranks, got "), message
