"""Translate CREDIT's section for PBS or Slurm."""

from __future__ import annotations

import re
from typing import Any

from credit_like.migrate.document import Document

_CASPER = ("casper", "cpu", "gpgpu", "largemem", "vis", "htc", "rda", "l40")
_DERECHO = ("main", "preempt", "develop", "cpudev")


def job_sections(source: Document) -> dict[str, Any]:
    """Return the `site` to include and the `pbs` section, from CREDIT's section for PBS or for Slurm."""
    section = "pbs" if source.section("pbs") else "slurm"
    conf = source.section(section)
    if not conf:
        return {}

    def get(*names: str) -> Any:
        return next((value for name in names if (value := source.get(section, name)) is not None), None)

    made: dict[str, Any] = {}
    for theirs, ours in (
        (("project", "account"), "account"), (("nodes",), "nodes"), (("ngpus",), "ngpus"), (("walltime",), "walltime"),
    ):  # fmt: skip
        if (value := get(*theirs)) is not None:
            made[ours] = _with_hours(value) if ours == "walltime" else value
    queue = str(get("queue", "partition", "qos") or "")
    short = queue.split("@")[0]
    if section == "slurm":
        nersc = bool(constraint := get("constraint")) or get("cluster") == "perlmutter"
        if constraint not in (None, "gpu"):
            source.remark((section, "constraint"), "not translated: nodes are asked for by number of GPUs alone")
        site = "perlmutter" if nersc else "generic-slurm"
    else:
        site = "casper" if short in _CASPER else "derecho" if short in _DERECHO else "generic-pbs"
    if site == "casper" and short != "casper":
        source.remark((section, "queue"), "jobs go to `casper@casper-pbs`, which finds the nodes")
    elif queue and site != "casper":
        made["queue"] = queue if site == "generic-pbs" else short
    if gpu := get("gpu_type"):
        if site == "casper":
            made["fields"] = {"gpu_type": gpu}
        else:
            source.remark((section, "gpu_type"), "a node of the queue has its own kind of GPU")
    setup = [f"module load {name}" for name in _listed(get("modules"))]
    setup += _listed(get("env_setup"))
    if env := get("conda"):
        setup.append(f"conda activate {env}")
    if setup:
        made["setup"] = setup
    whole = site in ("derecho", "perlmutter")
    for key, ours in (("ncpus", "cpus"), ("mem", "memory_gb")):
        if (value := get(key)) is None:
            continue
        number = re.match(r"\d+", str(value))
        if whole or number is None or (key == "mem" and not str(value).upper().endswith(("GB", "G"))):
            source.remark((section, key), "jobs get the share of the node that comes with their GPUs", covered=whole)
        else:
            made[ours] = int(number[0])
    return {"site": site, "pbs": made}


def _with_hours(walltime: Any) -> Any:
    """Return a walltime with hours where Slurm's has days before them."""
    match = re.fullmatch(r"(\d+)-(\d+)(?::(\d+))?(?::(\d+))?", str(walltime))
    if match is None:
        return walltime
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return f"{24 * days + hours:02d}:{minutes:02d}:{seconds:02d}"


def _listed(value: Any) -> list[str]:
    return [] if value is None else [str(each) for each in (value if isinstance(value, list) else [value])]
