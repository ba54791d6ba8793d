"""The `credit-like` command: each subcommand parses arguments, checks the experiment and makes one call.

Nothing is imported before a command needs it, so that `--help` answers at once and `check` works without torch.
Exit status: 0 done, 1 a run that failed, 2 something for the user to change (one message each, nothing written).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from credit_like.schema.experiment import Experiment

app = typer.Typer(
    help="Train weather and climate models, make forecasts and score them.",
    no_args_is_help=True,
    add_completion=False,
    # Without rich, help takes a third of the time; tracebacks are shown whole, as they are needed in a report.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)

File = Annotated[Path, typer.Argument(metavar="FILE", help="The experiment file (YAML).", show_default=False)]
SaveLoc = Annotated[Path, typer.Argument(metavar="SAVE_LOC", help="The folder of a run.", show_default=False)]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key, as in trainer.epochs=2; may be repeated."),
]


def main() -> None:
    """Run the command line; a ValueError is a message for the user, anything else keeps its traceback."""
    try:
        app()
    except ValueError as error:
        if os.environ.get("CREDIT_LIKE_TRACEBACK"):
            raise
        _refuse(str(error))


def _refuse(*messages: str) -> NoReturn:
    """End with exit status 2; of the processes of a launch, only the first speaks."""
    if all(os.environ.get(rank, "0") == "0" for rank in ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")):
        for message in messages:
            typer.echo(message, err=True)
    sys.exit(2)


def _experiment(file: Path, overrides: list[str] | None, world_size: int | None = None) -> Experiment:
    """The loaded and checked experiment; every problem on stderr and exit status 2 otherwise."""
    from credit_like.check import checked_experiment
    from credit_like.parallel.environment import read_environment

    return checked_experiment(file, overrides or (), world_size or read_environment().world)[0]


@app.command()
def demo(
    save_loc: Annotated[Path, typer.Option(help="Where the demonstration keeps its run.")] = Path("runs/demo"),
) -> None:
    """Make data, train, forecast and score, all on embedded data: nothing to download or configure."""
    from credit_like import build

    sys.exit(build.demo(save_loc))


@app.command()
def check(
    file: File,
    set_: Set = None,
    world_size: Annotated[int | None, typer.Option(min=1, help="Check the layout for this many processes.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Check an experiment and its data, and say what would run; needs no torch and writes nothing."""
    from credit_like.check import checked_experiment, describe, print_table

    experiment, store, world = checked_experiment(file, set_ or (), world_size)
    description = describe(experiment, store, world)
    if json:
        _print_json(description)
    else:
        print_table(description)


@app.command()
def schema() -> None:
    """Print the JSON Schema of experiment files, for completion in editors."""
    from credit_like.schema.json_schema import experiment_schema

    _print_json(experiment_schema())


@app.command()
def preprocess(file: File, set_: Set = None) -> None:
    """Fit the statistics of the training period and report what is missing."""
    experiment = _experiment(file, set_)
    from credit_like import build

    sys.exit(build.preprocess(experiment))


@app.command()
def train(
    file: File,
    set_: Set = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start anew; refused if the run's folder is not empty.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="With --fresh: remove what is in the run's folder.")] = False,
) -> None:
    """Train, or continue where the run in `save_loc` stopped."""
    if force and not fresh:
        raise ValueError("expected --force together with --fresh, got it alone, add --fresh or leave it out")
    experiment = _experiment(file, set_)
    from credit_like import build

    sys.exit(build.train(experiment, fresh=fresh, force=force))


@app.command()
def rollout(file: File, set_: Set = None) -> None:
    """Forecast from the initial times of `inference.init` with the newest checkpoint."""
    experiment = _experiment(file, set_)
    from credit_like import build

    sys.exit(build.rollout(experiment))


@app.command()
def evaluate(file: File, set_: Set = None) -> None:
    """Score the forecasts against the truth, beside persistence and climatology."""
    experiment = _experiment(file, set_)
    from credit_like import build

    sys.exit(build.evaluate(experiment))


@app.command()
def plot(file: File, set_: Set = None) -> None:
    """Draw score curves and maps of truth, forecast and error."""
    experiment = _experiment(file, set_)
    from credit_like import build

    sys.exit(build.plot(experiment))


@app.command()
def submit(
    file: File,
    set_: Set = None,
    mode: Annotated[str, typer.Option(help="preprocess, train, rollout or evaluate.")] = "train",
    site: Annotated[str | None, typer.Option(help="A profile of config/site instead of the file's site.")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes; for a rollout, jobs of one node each.")] = None,
    ngpus: Annotated[int | None, typer.Option(min=0, help="GPUs per node.")] = None,
    walltime: Annotated[str | None, typer.Option(help="Time of one job, such as 12:00:00.")] = None,
    queue: Annotated[str | None, typer.Option(help="Queue, partition or QOS.")] = None,
    account: Annotated[str | None, typer.Option(help="Account or project to charge.")] = None,
    chain: Annotated[str, typer.Option(help="Jobs in a row, each continuing the one before, or auto.")] = "1",
    after: Annotated[list[str] | None, typer.Option(help="A job to wait for; may be repeated.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Submit although outputs or queued jobs exist.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and script; write nothing.")] = False,
) -> None:
    """Submit work to the batch system of `site`, or run it here, job by job, with `site: local`."""
    from credit_like.check import checked_experiment
    from credit_like.launch.resources import options
    from credit_like.launch.show import print_plan
    from credit_like.launch.submit import chain_of, mode_of
    from credit_like.launch.submit import submit as submit_jobs

    plan = submit_jobs(
        file,
        mode_of(mode),
        options(nodes=nodes, ngpus=ngpus, walltime=walltime, queue=queue, account=account),
        chain=chain_of(chain),
        after=after or (),
        overrides=set_ or (),
        site=site,
        dry_run=dry_run,
        force=force,
        check=checked_experiment,
    )
    print_plan(plan, script=dry_run)


@app.command()
def status(save_loc: SaveLoc) -> None:
    """Say what ran, how far the run is, and what the scheduler says of its jobs."""
    from credit_like.launch.show import print_status

    sys.exit(print_status(save_loc))


@app.command()
def checkpoints(save_loc: SaveLoc) -> None:
    """List the checkpoints of a run, and which are whole."""
    from credit_like.checkpoint.commands import list_checkpoints

    sys.exit(list_checkpoints(save_loc))


@app.command()
def export(
    save_loc: SaveLoc,
    output: Annotated[Path, typer.Option("-o", "--output", help="The safetensors file to write.")],
    raw: Annotated[bool, typer.Option("--raw", help="The trained weights instead of their moving average.")] = False,
) -> None:
    """Write a run's full fp32 weights to one file, whatever the layout that trained them."""
    from credit_like.checkpoint.commands import export as export_weights

    sys.exit(export_weights(save_loc, output, raw=raw))


@app.command(name="import-credit")
def import_credit(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", show_default=False, help="CREDIT's checkpoint file.")
    ],
    config: Annotated[Path, typer.Argument(metavar="CONFIG", show_default=False, help="CREDIT's YAML file.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The folder to write.")],
) -> None:
    """Convert the weights and the model section of NCAR's CREDIT."""
    from credit_like.checkpoint.commands import import_credit as convert

    sys.exit(convert(checkpoint, config, output))


@app.command()
def plan(
    file: File,
    set_: Set = None,
    world_size: Annotated[int | None, typer.Option(min=1, help="Processes to plan for.")] = None,
) -> None:
    """Estimate memory and time per step of the layouts that fit."""
    experiment = _experiment(file, set_, world_size)
    from credit_like import build

    sys.exit(build.plan(experiment, world_size))


@app.command(name="bench-data")
def bench_data(
    file: File,
    set_: Set = None,
    batches: Annotated[int, typer.Option(min=1, help="Batches to read.")] = 50,
) -> None:
    """Measure how fast training samples can be read."""
    experiment = _experiment(file, set_)
    from credit_like import build

    sys.exit(build.bench_data(experiment, batches))


def _print_json(data: Any) -> None:
    import json

    typer.echo(json.dumps(data, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
