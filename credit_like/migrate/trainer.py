"""Translate CREDIT's `trainer` section, with its layout and its schedule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from credit_like.migrate.document import Document, Keys

_TRAINERS = ("era5", "era5-gen1", "gen2", "era5-gen2", "era5-ensemble", "cam", "standard", "universal")
_MODES = {
    "fsdp": {"data": "fsdp2"}, "domain_parallel": {"data": "none"}, "fsdp+domain_parallel": {"data": "fsdp2"},
}  # fmt: skip
_WHOLE_RUN = 999
"""A patience from which CREDIT's own configurations mean "never"."""


def trainer_section(
    source: Document, model: dict[str, Any], loss: Mapping[str, Any], of_weights: bool = False
) -> dict[str, Any]:
    """Return the `trainer` section; members of an ensemble need a model with noise."""

    def get(key: str, default: Any = None) -> Any:
        return source.get("trainer", key, default=default)

    if get("type") not in (None, *_TRAINERS):
        source.remark(("trainer", "type"), "not translated: there is one trainer, of states from one time to the next")
    batch, accumulate = int(get("train_batch_size", 1)), int(get("grad_accum_every", 1))
    layout, replicas = _layout(source)
    made: dict[str, Any] = {
        "parallelism": layout,
        "global_batch_size": replicas * batch * accumulate,
        "micro_batch_size": batch,
        "epochs": int(get("epochs", 1)),
    }
    if (members := int(get("ensemble_size", 1))) > 1:
        if loss["type"] == "crps":
            made["members"] = members
            model.setdefault("noise", {"type": "decoder"})
            meaning = "members of `trainer.members` differ by the noise of `model.noise`, which is new"
        else:
            meaning = "not translated: members need a loss of ensembles such as `crps`"
        source.remark(("trainer", "ensemble_size"), meaning)
    for theirs, ours in (("batches_per_epoch", "batches_per_epoch"), ("valid_batches_per_epoch", "valid_batches")):
        if get(theirs):
            made[ours] = int(get(theirs))
    for theirs, ours in (
        ("amp", "amp"), ("activation_checkpoint", "activation_checkpoint"), ("compile", "compile"), ("use_ema", "use_ema"),
    ):  # fmt: skip
        if get(theirs):
            made[ours] = True
    if get("cpu_offload"):
        source.remark(
            ("trainer", "cpu_offload"),
            "not translated: it has not been tested on GPUs; shard over more ranks, or see `trainer.activation_checkpoint`",
        )
    if (decay := get("ema_decay")) and get("use_ema"):
        made["ema_decay"] = float(decay)
    made["optimizer"] = {"type": "adamw", "learning_rate": float(get("learning_rate", 1e-3))}
    if get("weight_decay"):
        made["optimizer"]["weight_decay"] = float(get("weight_decay"))
    made["scheduler"] = _scheduler(source, made)
    rate = made["optimizer"]["learning_rate"]
    if made["scheduler"].get("min_lr", 0.0) > rate:
        made["scheduler"]["min_lr"] = rate
        source.remark(
            ("trainer", "scheduler"), f"the lowest rate was above the learning rate {rate:g}: it is as high now"
        )
    clip = get("grad_max_norm", 0.0)
    if clip == "dynamic":
        source.remark(("trainer", "grad_max_norm"), "clipped to a norm of 1, the default; there is no dynamic norm")
    elif float(clip) != 1.0:
        made["grad_max_norm"] = float(clip) or None
    if get("skip_validation"):
        source.remark(
            ("trainer", "skip_validation"), "every epoch ends with a validation; `valid_batches: 1` makes it short"
        )
    elif (patience := int(get("stopping_patience", _WHOLE_RUN))) < min(_WHOLE_RUN, made["epochs"]):
        made["early_stopping"] = {"patience": max(patience, 1)}
    loader = {"num_workers": int(get("thread_workers", 0)), "prefetch_factor": int(get("prefetch_factor", 2))}
    made["loader"] = {
        key: value for key, value in loader.items() if value != {"num_workers": 0, "prefetch_factor": 2}[key]
    }
    if get("load_weights") and not of_weights:
        source.remark(("trainer", "load_weights"), "give the weights as `import-credit CONFIG --weights FILE`")
    return {key: value for key, value in made.items() if value != {}}


def _layout(source: Document) -> tuple[dict[str, Any], int]:
    """Return `trainer.parallelism`, and the number of replicas of the model on the ranks of the job."""
    mode, given = source.get("trainer", "mode", default="none"), source.get("trainer", "parallelism")
    if given:
        layout = {"data": "none", **given}
        if "mode" in source.section("trainer"):
            source.remark(("trainer", "mode"), "`trainer.parallelism` says it", covered=True)
    else:
        domain = int(source.get("trainer", "domain_parallel_size", default=1))
        layout = {"data": str(mode), **_MODES.get(str(mode), {}), "domain": domain}
    layout = {key: value for key, value in layout.items() if key == "data" or value != 1}
    conf = source.section("pbs") or source.section("slurm")
    ranks = int(conf.get("nodes") or 1) * int(conf.get("ngpus") or 1)
    shared = int(layout.get("tensor", 1)) * int(layout.get("domain", 1))
    return layout, 1 if layout["data"] == "none" else max(ranks // shared, 1)


def _scheduler(source: Document, trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schedule of the learning rate; those of CREDIT by epoch become smooth in steps."""
    at: Keys = ("trainer", "scheduler")

    def get(key: str, default: Any = None) -> Any:
        return source.get(*at, key, default=default)

    conf = source.section(*at)
    if not source.get("trainer", "use_scheduler", default=bool(conf)):
        if conf:
            source.remark(at, "not used, as in CREDIT", covered=True)
        return {"type": "constant"}
    kind, epochs, per_epoch = get("scheduler_type", ""), trainer["epochs"], trainer.get("batches_per_epoch", 0)
    get("last_epoch")
    if kind == "linear-warmup-cosine":
        made = {"warmup_steps": int(get("warmup_steps", 1000)), "min_lr": float(get("min_lr", 1e-5))}
        return {"type": kind, **made, "total_steps": int(get("total_steps", 500_000))}
    if kind == "cosine-annealing":
        low, length = float(get("eta_min", 0.0)), int(get("T_max", epochs))
        made = {"min_lr": low} if low else {}
        if length > epochs and per_epoch:
            made["total_steps"] = length * per_epoch
        elif length != epochs:
            source.remark((*at, "T_max"), f"one cosine over the {epochs} epochs of the run is taken instead")
        return {"type": "linear-warmup-cosine", **made}
    if kind == "lambda":
        if not per_epoch:
            source.remark(
                at, "10 epochs of 100 of warm-up, then a cosine: set `warmup_steps`, which counts optimiser steps"
            )
            return {"type": "linear-warmup-cosine"}
        return {"type": "linear-warmup-cosine", "warmup_steps": 10 * per_epoch, "total_steps": 100 * per_epoch}
    if kind == "plateau":
        for key, value in (("mode", "min"), ("threshold_mode", "rel")):
            if get(key, value) != value:
                source.remark((*at, key), "the validation loss is to fall, by a fraction")
        # CREDIT reduces the rate after more validations than its patience.
        made = {"factor": float(get("factor", 0.1)), "patience": int(get("patience", 10)) + 1}
        made |= {"min_change": float(get("threshold", 1e-4)), "min_lr": float(get("min_lr", 0.0))}
        return {"type": "plateau", **made}
    if kind == "cosine-annealing-restarts":
        warmup, factor = int(get("warmup_steps", 0)), float(get("cycle_mult", 1.0))
        if "max_lr" in conf:
            trainer["optimizer"]["learning_rate"] = float(get("max_lr"))
            if "learning_rate" in source.section("trainer"):
                source.remark(("trainer", "learning_rate"), "the schedule has its own, as in CREDIT", covered=True)
        made = {
            "warmup_steps": warmup,
            "period": int(get("first_cycle_steps")) - warmup,
            "factor": max(round(factor), 1),
        }
        if warmup or float(get("gamma", 1.0)) != 1 or factor != round(factor):
            source.remark(
                at, "compare: here the first cycle alone has a warm-up, all reach the full rate, and the factor is whole"
            )  # fmt: skip
        return {"type": "cosine-restarts", **made, "min_lr": float(get("min_lr", 1e-3))}
    source.remark(at, "not translated: the learning rate stays constant")
    return {"type": "constant"}
