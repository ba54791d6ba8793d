"""Experiments and machines that the tests of this folder share."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

from credit_like.launch.plan import Plan, plan_jobs
from credit_like.launch.resources import Options, overrides_of
from credit_like.schema.experiment import Experiment
from credit_like.schema.launch import MODES, Mode, SiteSection
from credit_like.schema.load import dump_experiment, load_experiment

SITES = ("derecho", "casper", "polaris", "gadi", "generic-pbs", "perlmutter", "generic-slurm", "local")
GOLDEN = Path(__file__).parent / "golden"
WORKDIR = Path("/home/me/credit-like")

# what each site's example asks for: valid there, and different enough to show every directive
REQUESTS = {
    "derecho": {"account": "NAML0001", "queue": "main", "nodes": 8, "ngpus": 4, "walltime": "12:00:00"},
    "casper": {"account": "NAML0001", "queue": "casper@casper-pbs", "nodes": 1, "ngpus": 2, "walltime": "24:00:00"},
    "polaris": {"account": "climate", "queue": "prod", "nodes": 16, "ngpus": 4, "walltime": "03:00:00"},
    "gadi": {"account": "xy12", "queue": "gpuvolta", "nodes": 2, "ngpus": 4, "walltime": "48:00:00"},
    "generic-pbs": {"nodes": 2, "ngpus": 4, "walltime": "06:00:00"},
    "perlmutter": {"account": "m1234_g", "queue": "regular", "nodes": 4, "ngpus": 4, "walltime": "12:00:00"},
    "generic-slurm": {"queue": "gpu", "nodes": 2, "ngpus": 4, "walltime": "06:00:00"},
    "local": {"nodes": 1, "ngpus": 0, "processes": 2, "walltime": "00:10:00"},
}


def asking(given: Experiment, mode: Mode, options: Options) -> Experiment:
    """Return an experiment with options of the command line, which `submit` loads as overrides."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "experiment.yml"
        file.write_text(dump_experiment(given), encoding="utf-8")
        return load_experiment(file, overrides_of(options, mode))


def experiment(
    site: str, save_loc: str = "/scratch/me/runs/era5-1deg", pbs: dict | None = None, **sections
) -> Experiment:
    """Return a one-degree experiment for a site, with the keys that launching reads."""
    request = dict(REQUESTS[site], **(pbs or {}))
    if site == "gadi":
        request.setdefault("fields", {"storage": "gdata/xy12+scratch/xy12"})
    if site == "polaris":
        request.setdefault("preprocess", {"queue": "debug", "walltime": "01:00:00"})
        request.setdefault("evaluate", {"queue": "debug", "walltime": "01:00:00"})
        request.setdefault("rollout", {"queue": "debug", "nodes": 2, "walltime": "01:00:00"})
    else:
        request.setdefault("rollout", {"nodes": 3})
    return Experiment.model_validate(
        {
            "name": "era5-1deg",
            "save_loc": save_loc,
            "data": {
                "source": {"type": "synthetic"},
                "timestep": "6h",
                "prognostic": {"surface": ["column_water"]},
                "train": ["2000-01-01", "2000-06-30"],
                "valid": ["2000-07-01", "2000-07-31"],
                "test": ["2000-08-01", "2000-08-31"],
            },
            "model": {"type": "persistence"},
            "trainer": {"parallelism": {"data": "fsdp2"}, "global_batch_size": 64},
            "site": site,
            "pbs": request,
            **sections,
        }
    )


@cache
def profile(site: str) -> SiteSection:
    return SiteSection.model_validate(site)


def golden_plans() -> dict[str, tuple[Plan, SiteSection]]:
    """Every site × mode by file name, and a chain that extends itself if the site allows one."""
    plans = {}
    for site in SITES:
        for mode in MODES:
            chain = "auto" if mode == "train" and profile(site).submit_from_jobs else 1
            plan = plan_jobs(experiment(site), mode, chain=chain, python="/opt/env/bin/python", workdir=WORKDIR)
            plans[f"{site}-{mode}.sh"] = plan, profile(site)
    cut = experiment("derecho", trainer={"parallelism": {"domain": 2}})
    plan = plan_jobs(cut, "rollout", python="/opt/env/bin/python", workdir=WORKDIR)
    plans["derecho-rollout-domain.sh"] = plan, profile("derecho")
    return plans
