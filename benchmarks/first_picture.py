"""Measure the time from a clone to the first picture: `python benchmarks/first_picture.py [--torch SPEC] [--output FILE]`.

The repository is cloned from this folder into a temporary one, and `make demo` installs the program there and runs the
demonstration, until the last map of its forecasts is drawn. The cache of data is empty; pip's downloads depend on the network
and are a line of their own.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]


def stages(torch: str) -> dict[str, list[str]]:
    """Return the commands by name, each run in the folder of the clone."""
    return {
        "clone": ["git", "clone", "--quiet", str(ROOT), "."],
        "install": ["make", ".venv/.installed-user", f"PYTHON={sys.executable}", f"TORCH={torch}"],
        "demonstration": ["make", "demo", f"PYTHON={sys.executable}", f"TORCH={torch}"],
    }


def measured(commands: Mapping[str, Sequence[str]], folder: Path, environment: Mapping[str, str]) -> dict[str, float]:
    """Run the commands one after the other; return their seconds. Raises CalledProcessError for one that fails."""
    seconds = {}
    for name, command in commands.items():
        began = time.perf_counter()
        subprocess.run(command, cwd=folder, env=dict(environment), check=True, stdout=sys.stderr)
        seconds[name] = time.perf_counter() - began
    return seconds


def page(seconds: Mapping[str, float], load: float, when: dt.date) -> str:
    """Return the table as Markdown."""
    lines = [
        "# From clone to first picture",
        "",
        f"{when}, {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; load of the machine at the "
        f"start {load:.1f}.",
        "",
        "| stage | minutes |",
        "|---|---|",
        *(f"| {name} | {value / 60:.1f} |" for name, value in seconds.items()),
        f"| together | {sum(seconds.values()) / 60:.1f} |",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", default="torch==2.13.0", help="what pip installs, with options such as --index-url")
    parser.add_argument("--output", type=Path, help="file for the table")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "clone").mkdir()
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        environment["CREDIT_LIKE_CACHE"] = str(folder / "cache")
        seconds = measured(stages(arguments.torch), folder / "clone", environment)
        pictures = sorted((folder / "clone" / "runs" / "demo" / "evaluation").glob("map_*.png"))
        assert pictures, "expected maps of the demonstration's forecasts, got none"
    text = page(seconds, load, dt.date.today())
    sys.stdout.write(text)
    if arguments.output:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
