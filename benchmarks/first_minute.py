"""Measure what a user waits for first: `credit-like --help`, `check`, and the first training step of `demo`.

    python benchmarks/first_minute.py [--repeats N] [--output FILE]

Each command runs in a process of its own, from a cache of files whose first use is not counted; the first line says what the
demonstration takes without a cache, when it integrates its data first. Processor time is that of the command and of the
processes that it has waited for; wall time is only meaningful on a quiet machine.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import platform
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROGRAM = [sys.executable, "-m", "credit_like.cli"]
TARGETS = {"--help": 0.2, "check": 2.0, "demo": 15.0}
PATIENCE = 1800.0


def command(arguments: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """Return the seconds of wall and of processor time of a command."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([*PROGRAM, *arguments], check=True, stdout=subprocess.DEVNULL, env=environment)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def first_step(folder: Path, environment: dict[str, str]) -> tuple[float, float]:
    """Return the seconds from the command `demo` to the log line of its first step, which is then ended."""
    log, began = folder / "log.jsonl", time.perf_counter()
    process = subprocess.Popen(
        [*PROGRAM, "demo", "--save-loc", str(folder)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while not (log.exists() and log.stat().st_size):
            if process.poll() is not None or time.perf_counter() - began > PATIENCE:
                raise SystemExit(f"demo ended with status {process.returncode} before its first step")
            time.sleep(0.02)
        wall = time.perf_counter() - began
        ticks = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:15]
        own = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
    return wall, own


def row(name: str, times: list[tuple[float, float]], target: float | None) -> str:
    """Return a row of the table: the medians, and the target."""
    wall, own = (statistics.median(values) for values in zip(*times, strict=True))
    return f"| {name} | {wall:.2f} | {own:.2f} | {'' if target is None else f'{target:g}'} |"


def main() -> None:
    """Run, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "first-minute.md")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    rows = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        environment = os.environ | {"CREDIT_LIKE_CACHE": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
        rows.append(row("`demo` to its first step, without a cache", [first_step(folder / "first", environment)], None))
        for name, arguments in (("--help", ["--help"]), ("check", ["check", str(folder / "first" / "demo.yml")])):
            command(arguments, environment)
            times = [command(arguments, environment) for _ in range(options.repeats)]
            rows.append(
                row(f"`credit-like {name}`" if name[0] == "-" else "`credit-like check demo.yml`", times, TARGETS[name])
            )
        times = []
        for number in range(max(1, options.repeats // 2)):
            times.append(first_step(folder / f"again-{number}", environment))
            shutil.rmtree(folder / f"again-{number}", ignore_errors=True)
        rows.append(row("`demo` to its first step", times, TARGETS["demo"]))
    lines = [
        "# The first minute",
        "",
        f"{dt.date.today()}, {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; load of the machine "
        f"at the start {load:.1f}; medians of {options.repeats} (demo: {max(1, options.repeats // 2)}).",
        "",
        "| command | wall s | processor s | target s |",
        "|---|---|---|---|",
        *rows,
    ]
    print("\n".join(lines))
    options.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
