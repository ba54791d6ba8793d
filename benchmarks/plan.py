"""Measure the cost of planning, and compute the table of docs/scaling.md.

    python benchmarks/plan.py [cost] [--processes 2] [--output FILE.md]
    python benchmarks/plan.py scaling [--models 1° 0.25°] [--gpus 64 512] [--output FILE.md]

cost: one layout of the 0.25° model at 256 ranks, one rank after the other, and all layouts of 64 ranks of the 1° model, two
ranks at a time. Each starts in a new process; its start and imports are included. Processor time is that of the process and
of all its forks; memory is that of the largest of these processes.

scaling: selected layouts of both models at 1 to 4,096 GPUs, with one sample per replica. The rank is the first of its sample,
or the second of four bands, which holds more rows.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
MODELS = {
    "1°": ("wxformer-1deg", "181x360"),
    "0.25°": ("wxformer-0.25deg", "721x1440"),
    "0.1°": ("wxformer-0.25deg", "1801x3600"),
}
PADDED = {"0.1°": {"activate": True, "mode": "earth", "pad_lat": [59, 60], "pad_lon": [120, 120]}}
"""The padding of the 0.25° model on another grid: to 1920 × 3840 points, which its windows divide."""
COUNTS = (1, 64, 256, 512, 1024, 2048, 4096)
BANDS = 4
SHARDS = 64  # ranks that share one copy of the states in the layouts with copies
GPUS = ("a100-40gb", "h100")


def experiment(model: str, **trainer: Any) -> Any:
    """Return the variables and training of config/era5-1deg.yml with a model of the zoo, computed in bfloat16."""
    from credit_like.schema.experiment import Experiment
    from credit_like.schema.load import load_located

    os.environ.setdefault("SCRATCH", "scratch")
    os.environ.setdefault("ERA5", "era5")
    found, _ = load_located(ROOT / "config" / "era5-1deg.yml", [])
    document = found.to_dict()
    document |= yaml.safe_load((ROOT / "models" / MODELS[model][0] / "model.yml").read_text())
    if model in PADDED:
        document["model"]["padding_conf"] = PADDED[model]
    document["trainer"] |= trainer
    return Experiment.model_validate(document)


def measured(case: str, processes: int) -> dict[str, Any]:
    """Run one case in this process."""
    began = time.perf_counter()
    from credit_like.plan.layouts import Candidate
    from credit_like.plan.machine import machine_of
    from credit_like.plan.run import grid_of, plan, simulate_all

    machine = machine_of("a100-40gb", {})
    if case == "1°":
        report = plan(experiment(case), 64, machine, grid_of(MODELS[case][1]), processes)
        rows, best = list(report.rows), report.recommended
        what = f"all {len(rows)} layouts of 64 ranks, 1°"
        print(f"recommended: {best.layout if best else None}", file=sys.stderr)
    else:
        layout = Candidate(64, domain=BANDS)
        rows, _ = simulate_all(
            experiment(case, global_batch_size=64), [layout], machine, grid_of(MODELS[case][1]), processes
        )
        what = f"{layout} of 256 ranks, 0.25°"
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {
        "what": what,
        "simulated": sum(len(row.ranks) for row in rows),
        "processes": processes,
        "elapsed": time.perf_counter() - began,
        "processor": sum(u.ru_utime + u.ru_stime for u in used),
        "resident": max(u.ru_maxrss for u in used) * (1 if sys.platform == "darwin" else 1024),
    }


def cost(processes: int) -> str:
    """Return the table of both cases, each run in a new process."""
    load = os.getloadavg()[0]
    lines = [
        "# Cost of planning",
        "",
        f"{dt.date.today()}, {platform.machine()}, {os.cpu_count()} cores, load {load:.1f} at the start; including the "
        "start of Python and the import of torch.",
        "",
        "| simulated | ranks | processes | processor time | elapsed | largest process |",
        "|---|---|---|---|---|---|",
    ]
    for case, most in (("0.25°", 1), ("1°", processes)):
        command = [sys.executable, __file__, "one", "--case", case, "--processes", str(most)]
        done = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout)
        lines.append(
            f"| {done['what']} | {done['simulated']} | {done['processes']} | {done['processor']:.0f} s | "
            f"{done['elapsed']:.0f} s | {done['resident'] / 1e9:.2f} GB |"
        )
    return "\n".join(lines) + "\n"


def chosen(model: str, count: int) -> list[tuple[Any, bool]]:
    """Return (layout, recomputation) for a number of ranks: replicas alone, with bands, and with copies of the states."""
    from credit_like.plan.layouts import Candidate

    if count == 1:
        return [
            (Candidate(1, data="none"), recompute) for recompute in ((False, True) if model == "0.25°" else (False,))
        ]
    found = [(Candidate(count), model == "0.25°"), (Candidate(count // BANDS, domain=BANDS), False)]
    if count > SHARDS:
        found.append((Candidate(count // BANDS, domain=BANDS, replicate=count // SHARDS), False))
    return found


def fuller(layout: Any) -> list[int]:
    """Return the second of several bands, or the first rank."""
    return [min(1, layout.domain - 1)]


def scaling(models: list[str], counts: list[int]) -> str:
    """Return one row per model, number of GPUs, layout and recomputation."""
    from credit_like.plan.estimate import PlanRow
    from credit_like.plan.machine import machine_of
    from credit_like.plan.run import grid_of, simulate_all

    lines = [
        "| model | GPUs | dp × tensor × domain | recompute | peak GB | states GB | activations GB | TFLOP | "
        "GB gathered, reduced, exchanged | s/step A100 | s/step H100 | most of it |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    known: dict[Any, Any] = {}
    machines = [machine_of(name, {}) for name in GPUS]
    for model in models:
        grid = MODELS[model][1]
        for count in counts:
            for layout, recompute in chosen(model, count):
                section = {"global_batch_size": layout.dp, "activation_checkpoint": recompute}
                rows, refused = simulate_all(
                    experiment(model, **section), [layout], machines[0], grid_of(grid), 1, places=fuller, known=known
                )
                if refused:
                    print(refused[0].reason, file=sys.stderr)
                    continue
                both = [PlanRow(layout, rows[0].ranks, machine, rows[0].samples) for machine in machines]
                lines.append(line(model, count, recompute, both))
                print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines) + "\n"


def line(model: str, count: int, recompute: bool, rows: list[Any]) -> str:
    """Return the memory of the fullest rank and the time of the slowest."""
    rank = rows[0].fullest
    kept = sum(rank.parts.get(name, 0) for name in ("parameters", "optimiser state", "weight average", "gradients"))
    sent = rank.collectives()
    moved = [sent.get(kind, (0, 0))[1] / 1e9 for kind in ("all-gather", "reduce-scatter", "all-to-all")]
    times = rows[0].estimate.times
    largest = max(("computing", times.compute), ("exchanges", times.waited), ("parameters", times.exposed),
                  ("launching", times.launched), ("reading", times.read), key=lambda item: item[1])  # fmt: skip
    cells = [
        model, str(count), str(rows[0].layout).replace("dp ", "").replace("tensor ", "").replace("domain ", ""),
        "yes" if recompute else "no", f"{rank.peak / 1e9:.2f}", f"{kept / 1e9:.2f}",
        f"{rank.parts['activations'] / 1e9:.2f}", f"{max(r.flops for r in rows[0].ranks) / 1e12:.2f}",
        ", ".join(f"{size:.2f}" for size in moved), *(f"{row.seconds:.3f}" for row in rows),
        f"{largest[0]} {largest[1] / times.total:.0%}",
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="cost", choices=["cost", "scaling", "one"])
    parser.add_argument("--case", choices=list(MODELS), help=argparse.SUPPRESS)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["1°", "0.25°"])
    parser.add_argument("--gpus", nargs="+", type=int, default=list(COUNTS))
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    if given.what == "one":
        print(json.dumps(measured(given.case, given.processes)))
        return
    text = cost(given.processes) if given.what == "cost" else scaling(given.models, given.gpus)
    print(text)
    if given.output:
        given.output.write_text(text)


if __name__ == "__main__":
    main()
