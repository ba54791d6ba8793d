"""Functions behind `credit-like checkpoints`, `export` and `import-credit`.

The functions that collect data come first, followed by those that print it.
"""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.table import Table

from credit_like import nested
from credit_like.checkpoint.errors import reading_metadata
from credit_like.checkpoint.format import MANIFEST
from credit_like.checkpoint.manager import Checkpoint, Rank, best_step, prune, steps
from credit_like.errors import RunError, UserError
from credit_like.lock import RunLock
from credit_like.terminal import fitted, folding_table, plain_console


@dataclass(frozen=True)
class Entry:
    """One checkpoint of a run. `damage` describes what is wrong with it and is empty for an intact checkpoint."""

    step: int
    epoch: int | None = None
    score: float | None = None
    best: bool = False
    bytes: int | None = None
    saved: str = ""
    layout: str = ""
    damage: str = ""


def entries(save_loc: Path, verify: bool = False) -> list[Entry]:
    """Return the checkpoints of a run, oldest first; `verify` reads every byte.

    Raises UserError if there is no run.
    """
    folder = _folder(save_loc)
    found: dict[int, Entry] = {}
    ranks: dict[int, Rank] = {}
    for step in steps(folder):
        try:
            checkpoint = Checkpoint.open(folder / f"step-{step}")
            if verify:
                checkpoint.verify()
            entry = _entry(step, checkpoint)
            with reading_metadata(checkpoint.folder):
                rank = checkpoint.rank
            found[step] = entry
            if rank is not None:
                ranks[step] = rank
        except (ValueError, FileNotFoundError) as error:
            if os.path.lexists(folder / f"step-{step}"):  # else a training has pruned it since it was listed
                found[step] = Entry(step, damage=f"damaged: {error}")
        except RunError as error:
            found[step] = Entry(step, damage=f"unreadable: {error}")
    best = best_step(ranks)
    return [replace(entry, best=step == best) for step, entry in found.items()]


def _entry(step: int, checkpoint: Checkpoint) -> Entry:
    with reading_metadata(checkpoint.folder):
        layout = ", ".join(f"{key} {value}" for key, value in checkpoint.meta["layout"].items())
        epoch = checkpoint.meta["progress"]["epoch"]
    saved = dt.datetime.fromtimestamp((checkpoint.folder / MANIFEST).stat().st_mtime).isoformat(" ", "seconds")
    return Entry(step, epoch, checkpoint.score, bytes=checkpoint.bytes, saved=saved, layout=layout)


def differences(first: Path, second: Path) -> list[tuple[str, str, str]]:
    """Return the differences between two checkpoint folders as (name, value in the first, value in the second).

    Compares the keys of the experiment and of the layout, and the tensors: those that only one checkpoint has or whose
    shapes differ are listed; for the others the largest absolute difference. Raises DamagedCheckpoint.
    """
    a, b = Checkpoint.open(first), Checkpoint.open(second)
    a.verify()
    b.verify()
    rows = [
        (key, repr(x), repr(y))
        for part in ("experiment", "layout", "progress", "version")
        for key, x, y in nested.differences(a.meta.get(part), b.meta.get(part), part)
    ]
    for name in sorted(set(a.names()) | set(b.names())):
        shapes = [repr(c.manifest["tensors"][name]["shape"]) if name in c.names() else "absent" for c in (a, b)]
        if shapes[0] != shapes[1]:
            rows.append((name, shapes[0], shapes[1]))
            continue
        x, y = a.read(name).double(), b.read(name).double()
        if x.numel() and not bool((x == y).all()):
            largest = f"differs by up to {float((x - y).abs().max()):.3g}"
            rows.append((name, f"norm {float(x.norm()):.6g}", f"norm {float(y.norm()):.6g}, {largest}"))
    return rows


def _folder(save_loc: Path) -> Path:
    folder = save_loc / "checkpoints"
    if not folder.is_dir():
        raise UserError(f"expected the folder of a run, got {save_loc} without `checkpoints`; change SAVE_LOC")
    return folder


# ---- command line; each function returns the exit status -------------------------------------------------------------


def list_checkpoints(save_loc: Path, verify: bool = False, json: bool = False) -> int:
    """Print the checkpoints of a run and return 1 if one of them is damaged; `verify` reads every byte."""
    found = entries(save_loc, verify)
    if json:
        plain_console(soft_wrap=True).print_json(data=[asdict(entry) for entry in found])
    else:
        _print(found, verify)
    return int(any(entry.damage for entry in found))


def prune_checkpoints(save_loc: Path, keep: int) -> int:
    """Remove all but the `keep` newest intact checkpoints and the best one.

    Raises Locked while the run is being trained.
    """
    folder = _folder(save_loc)
    with RunLock(save_loc):
        removed = prune(folder, keep)
    names = ", ".join(f"step-{step}" for step in removed) or "nothing"
    plain_console(soft_wrap=True).print(f"removed {names}")
    return 0


def diff_checkpoints(first: Path, second: Path) -> int:
    """Print the differences between two checkpoint folders and return 1 if there are any."""
    rows = differences(first, second)
    table = folding_table("", str(first), str(second), box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    plain_console(soft_wrap=True).print(table if rows else "no difference")
    return int(bool(rows))


def diff_steps(save_loc: Path, first: int, second: int) -> int:
    """Print the differences between two steps of a run (see `diff_checkpoints`).

    Raises UserError if there is no such run or step, and DamagedCheckpoint if one of the two is damaged.
    """
    folder = _folder(save_loc)
    there = steps(folder)
    for step in (first, second):
        if step not in there:
            known = ", ".join(map(str, there)) or "none"
            raise UserError(f"--diff: expected a step that was saved ({known}), got {step}; change it")
    return diff_checkpoints(folder / f"step-{first}", folder / f"step-{second}")


def export(save_loc: Path, output: Path, raw: bool = False) -> int:
    """Export the weights of the newest intact checkpoint to one file."""
    from credit_like.checkpoint.export import export as write

    written = write(save_loc, output, "raw" if raw else "ema")
    plain_console(soft_wrap=True).print(f"{written} and {written.with_suffix('.md')}")
    return 0


def export_package(save_loc: Path, folder: Path, raw: bool = False, licence: str | None = None) -> int:
    """Write the newest intact checkpoint as a model package."""
    from credit_like.checkpoint.package import write_package

    missing = write_package(save_loc, folder, "raw" if raw else "ema", licence)
    plain_console(soft_wrap=True).print("\n".join([str(folder), *missing]))
    return 0


def import_credit(checkpoint: Path, config: Path | None, output: Path) -> int:
    """Convert CREDIT's weights and model section and write both into the folder `output`."""
    from credit_like.checkpoint.credit import import_credit as convert

    written = convert(checkpoint, config, output / "model.safetensors")
    plain_console(soft_wrap=True).print(str(written))
    return 0


def _print(found: Sequence[Entry], verified: bool) -> None:
    table = Table("step", "epoch", "valid. loss", "MiB", "saved", "layout", "state", box=None, pad_edge=False)
    for entry in found:
        if entry.damage:
            table.add_row(str(entry.step), "", "", "", "", "", entry.damage)
            continue
        score = "" if entry.score is None else f"{entry.score:.6g}{' best' if entry.best else ''}"
        size = f"{(entry.bytes or 0) / 2**20:.1f}"
        state = "intact" if verified else "not verified"
        table.add_row(str(entry.step), str(entry.epoch), score, size, entry.saved, entry.layout, state)
    console = plain_console(soft_wrap=True)
    fitted(console, table, ("MiB", "saved", "layout"))
    console.print(table if found else "no checkpoint")
