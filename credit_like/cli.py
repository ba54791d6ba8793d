"""The `credit-like` command: each subcommand parses arguments, checks the experiment and makes one call.

Modules are imported when a command needs them, so that `--help` is fast and `check` works without torch. Exit status: 0
for success, 1 for a failed run, 2 for an error that the user has to correct (nothing is written), 130 for an
interruption by Ctrl-C.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.main import get_command

from credit_like.errors import UserError, known_message, reason
from credit_like.processes import end_with, open_standard_streams

if TYPE_CHECKING:
    from credit_like.launch.plan import Plan
    from credit_like.schema.experiment import Experiment
    from credit_like.schema.launch import Mode

app = typer.Typer(
    help="Train weather and climate models, make forecasts and score them.",
    no_args_is_help=True,
    add_completion=False,
    # Without rich, help takes a third of the time. Plain tracebacks are complete, as bug reports need them.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)

File = Annotated[Path, typer.Argument(metavar="FILE", help="The experiment file (YAML).", show_default=False)]
SaveLoc = Annotated[Path, typer.Argument(metavar="SAVE_LOC", help="The folder of a run.", show_default=False)]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key, such as trainer.epochs=2; may be repeated."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

_INTERRUPTED = 130
_ON_RANKS = ("train", "rollout", "evaluate", "bench")
"""The commands that several launched processes perform together; others ignore the variables of a launcher."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line.

    A UserError or RunError, exhausted memory, a full disk and a rank that does not answer are printed as one message. Any other
    exception is a fault of the program and keeps its traceback; CREDIT_LIKE_TRACEBACK=1 shows the traceback of the former too.
    """
    open_standard_streams()
    for stream in (sys.stdout, sys.stderr):
        # A terminal may not be able to show all characters in names of files and in units.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    command = next(iter(sys.argv[1:] if arguments is None else arguments), None)
    try:
        with _OneMessage(on_ranks=command in _ON_RANKS):
            if "TORCHELASTIC_RUN_ID" in os.environ:
                # The parent is torchrun's agent: a scheduler that kills the agent's session does not kill this process.
                end_with(os.getppid())
            _check_current_folder()
            _command()(arguments, prog_name="credit-like")
    except SystemExit as end:
        if isinstance(end.__context__, typer.Exit) and end.code == _INTERRUPTED:  # from Ctrl-C, by way of typer
            typer.echo("interrupted; run the same command again to continue or repeat the work", err=True)
        raise


@cache
def _command() -> Callable[..., Any]:
    """Return the command line; cached, because the parameters of all commands are inspected, which takes 0.1 s."""
    return get_command(app)


def _check_current_folder() -> None:
    """Raise UserError if the current folder has been removed, which many libraries do not expect."""
    try:
        os.getcwd()
    except OSError as error:
        raise UserError(
            f"expected a current folder that exists, got one that has been removed ({reason(error)}); change to another folder"
        ) from error


class _OneMessage:
    """Ends a process that fails; of several `on_ranks`, only the one that failed first prints the reason."""

    def __init__(self, on_ranks: bool = False) -> None:
        self._on_ranks = on_ranks

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, KeyboardInterrupt):
            return
        exits = isinstance(error, SystemExit)
        if exits and (trace is None or _is_of_command(trace)):
            return
        message = None if os.environ.get("CREDIT_LIKE_TRACEBACK") else known_message(error)
        status = 2 if isinstance(error, UserError) else 1
        if self._on_ranks and _of_several():
            _end_rank(error, message, status)
        elif message is not None:
            typer.echo(message, err=True)
            sys.exit(status)
        elif exits:
            traceback.print_exception(error)
            sys.exit(status)


def _is_of_command(trace: TracebackType) -> bool:
    """Return whether a command or typer caused an exit, rather than a plug-in, whose exit must not be taken for success."""
    while trace.tb_next is not None:
        trace = trace.tb_next
    caller = trace.tb_frame.f_globals
    return caller is globals() or caller.get("__name__", "").partition(".")[0] in ("typer", "click")


def _of_several() -> bool:
    from credit_like.parallel.environment import read_environment

    with suppress(UserError):  # the command itself reports this error
        return read_environment().world > 1
    return False


def _end_rank(error: BaseException, message: str | None, status: int) -> NoReturn:
    """Report the error if it was the first of all ranks, and end.

    The process ends without the usual finalisation of the interpreter, which may wait for ranks that have already ended.
    """
    from credit_like.parallel import blame
    from credit_like.parallel.environment import read_environment

    place = read_environment()
    # A launcher ends the other ranks when the first one ends, which must not happen before the reason is reported.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    cause, causes = blame.claim(blame.cause_of(error, place.rank, status), place)
    if cause.rank == place.rank:
        text = "".join(traceback.format_exception(error)).rstrip() if message is None else cause.message
        typer.echo(f"rank {place.rank}: {text}", err=True)
        if causes is not None:
            causes.reported()
    elif causes is not None:
        causes.wait_for_report()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(cause.status)


def _experiment(
    file: Path,
    overrides: list[str] | None,
    world_size: int | None = None,
    scoring: bool = False,
    forecasting: bool = False,
    training: bool = False,
    mode: Mode | None = None,
    fresh: bool = False,
) -> Experiment:
    """Load and check the experiment of a file.

    The layout is checked for `world_size`, else for the number of launched processes if those perform the command of `mode`
    together, else for the batch job that the experiment requests. Of the resources of jobs, those of `mode` are checked, by
    default all. Raises ExperimentError with every problem.
    """
    from credit_like.check import checked_experiment
    from credit_like.parallel.environment import read_environment

    launched = read_environment().world if mode in _ON_RANKS else 1
    world_size = world_size or (launched if launched > 1 else None)
    return checked_experiment(
        file, overrides or (), world_size, scoring, forecasting, training, mode=mode, fresh=fresh
    )[0]


@app.command()
def demo(
    save_loc: Annotated[
        Path | None, typer.Option(help="Folder of the demonstration run. [default: runs/demo, or runs/demo-ensemble]")
    ] = None,
    ensemble: Annotated[bool, typer.Option("--ensemble", help="Train and score an ensemble with noise.")] = False,
) -> None:
    """Train, forecast and score on built-in data.

    No download is needed.
    """
    from credit_like import demo as demonstration
    from credit_like.parallel.environment import forget_launcher

    forget_launcher()
    sys.exit(demonstration.run(save_loc or Path("runs/demo-ensemble" if ensemble else "runs/demo"), ensemble))


@app.command()
def new(
    data: Annotated[
        list[str], typer.Argument(metavar="DATA...", show_default=False, help="Stores, files, folders, globs or URLs.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The experiment to write.")] = Path("my.yml"),
) -> None:
    """Write an experiment file for given data.

    Propose roles of variables, levels, periods, and a model whose windows fit the grid.
    """
    from credit_like.new import run

    for line in run(data, output):
        typer.echo(line)


@app.command()
def check(
    file: File,
    set_: Set = None,
    world_size: Annotated[int | None, typer.Option(min=1, help="Check the layout for this many processes.")] = None,
    json: Json = False,
) -> None:
    """Check an experiment and its data.

    If there are no problems, a summary of the run is printed.
    """
    from credit_like.check import checked_experiment
    from credit_like.check.describe import describe, print_table

    experiment, store, world = checked_experiment(
        file, set_ or (), world_size, scoring=True, training=True, continuing=True
    )
    description = describe(experiment, store, world)
    if json:
        _print_json(description)
    else:
        print_table(description)


@app.command()
def schema(
    plugins: Annotated[
        list[str] | None,
        typer.Option(metavar="FOLDER|PACKAGE", help="Include the plug-ins of this folder; may be repeated."),
    ] = None,
) -> None:
    """Print the JSON Schema of experiment files.

    Editors use it to complete and explain keys.
    """
    from credit_like.schema.json_schema import experiment_schema

    _print_json(experiment_schema([os.path.abspath(p) if Path(p).is_dir() else p for p in plugins or ()]))


@app.command()
def verify(file: File, set_: Set = None) -> None:
    """Compare every parallel layout with a single process.

    If results differ, the first module or parameter that differs is named.
    """
    one = "trainer.parallelism={data: none, tensor: 1, domain: 1, ensemble: 1, replicate: 1}"
    experiment = _experiment(file, [*(set_ or ()), one], world_size=1)
    from credit_like import verify as kit

    sys.exit(kit.run(experiment))


@app.command()
def preprocess(
    file: File,
    set_: Set = None,
    workers: Annotated[int, typer.Option(min=1, help="Number of processes on this machine.")] = 1,
    dask: Annotated[
        str | None, typer.Option(metavar="ADDRESS|FILE", help="Use the workers of this dask scheduler.")
    ] = None,
    climatology: Annotated[bool, typer.Option("--climatology", help="Also write climatology.zarr.")] = False,
    rechunk: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Write a training store to PATH and verify it.")
    ] = None,
    band: Annotated[int | None, typer.Option(min=1, help="With --rechunk: rows of latitude per chunk.")] = None,
) -> None:
    """Compute statistics, audit, climatology or a training store.

    An interrupted command is continued by running it again.
    """
    from credit_like.parallel.environment import read_environment

    if (place := read_environment()).rank:  # one of the launched processes is enough
        typer.echo(
            f"nothing is done by rank {place.rank} of {place.world}: rank 0 performs this command alone", err=True
        )
        return
    if band is not None and rechunk is None:
        raise UserError("expected --band together with --rechunk, got --band alone, add --rechunk or leave --band out")
    from credit_like.schema.load import load_experiment

    experiment = load_experiment(file, set_ or ())
    # The checks must not require what this command makes.
    _experiment(file, [*(set_ or ()), "data.statistics=null"], mode="preprocess")
    from credit_like.data.tools.prepare import prepare

    _log_lines()
    prepare(
        experiment,
        workers=workers,
        dask=dask,
        climatology=climatology,
        rechunk_to=rechunk,
        band=band,
    )


@app.command(name="bench-data")
def bench_data(
    file: File,
    set_: Set = None,
    workers: Annotated[int | None, typer.Option(min=0, help="Loader processes; default: the experiment's.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Samples per repeat.")] = 50,
    repeats: Annotated[int, typer.Option(min=1, help="Repeats of loader and bare loop; medians are shown.")] = 3,
    json: Json = False,
) -> None:
    """Measure the speed of data loading.

    The loader is compared with a loop that only reads and decodes the same chunks.
    """
    experiment = _experiment(file, set_)
    from credit_like.data.tools.bench import bench_experiment, print_report

    _log_lines()
    report = bench_experiment(experiment, samples, workers, repeats)
    if json:
        _print_json(report.to_dict())
    else:
        print_report(report)


def _log_lines() -> None:
    import logging

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")


@app.command()
def train(
    file: File,
    set_: Set = None,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh", help="Start a new run in an empty folder, or with --force. Automatic restarts continue it."
        ),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="With --fresh: remove the existing run first.")] = False,
) -> None:
    """Train a model, or continue the run in `save_loc`."""
    if force and not fresh:
        raise UserError("expected --force together with --fresh, got --force alone, add --fresh or leave --force out")
    from credit_like.parallel.environment import read_environment

    experiment = _experiment(file, set_, read_environment().world, training=True, mode="train", fresh=fresh)
    from credit_like import build

    sys.exit(build.train(experiment, fresh=fresh, force=force))


@app.command()
def rollout(
    file: File,
    set_: Set = None,
    share: Annotated[
        str, typer.Option(metavar="I/N", help="Compute the I-th of N parts of the initial times.")
    ] = "1/1",
) -> None:
    """Compute forecasts with a trained model.

    The initial times are those of `inference.init`.
    """
    part, of = _share(share)
    experiment = _experiment(file, set_, forecasting=True, mode="rollout")
    from credit_like import build

    sys.exit(build.rollout(experiment, share=(part - 1, of)))


@app.command()
def forecast(
    export: Annotated[
        Path, typer.Argument(metavar="EXPORT", show_default=False, help="A file or package of `credit-like export`.")
    ],
    source: Annotated[
        list[str],
        typer.Option("--from", metavar="FILE", help="netCDF, GRIB or zarr with the initial state; repeatable."),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="A path that ends in .zarr, .nc or .grib.")],
    lead: Annotated[str, typer.Option(help="Length of the forecast, such as 10d or 36h.")] = "10d",
    init: Annotated[str | None, typer.Option(metavar="TIME", help="Initial time; by default the newest one.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    set_: Set = None,
) -> None:
    """Forecast from analysis files with an exported model.

    Neither the experiment file nor the folder of the run is needed.
    """
    from credit_like.inference.from_files import forecast_from_files

    made = forecast_from_files(export, source, output, lead=lead, init=init, overrides=set_ or [], device=device)
    typer.echo(str(made))


def _share(text: str) -> tuple[int, int]:
    part, slash, of = text.partition("/")
    if not (
        slash and part.isdecimal() and of.isdecimal() and max(len(part), len(of)) < 10 and 1 <= int(part) <= int(of)
    ):
        raise UserError(f"--share: expected I/N with I from 1 to N, such as 2/4, got {text!r}")
    return int(part), int(of)


@app.command()
def evaluate(file: File, set_: Set = None) -> None:
    """Score forecasts against persistence and climatology."""
    experiment = _experiment(file, set_, scoring=True, forecasting=True, mode="evaluate")
    from credit_like import build

    _log_lines()
    sys.exit(build.evaluate(experiment))


@app.command()
def plot(
    file: File,
    set_: Set = None,
    variable: Annotated[str | None, typer.Option(help="Map of this variable only.")] = None,
    level: Annotated[float | None, typer.Option(help="Map at this level, in the units of the data or in hPa.")] = None,
    lead: Annotated[str | None, typer.Option(metavar="DURATION", help="Map at this lead, such as 72h.")] = None,
    init: Annotated[str | None, typer.Option(metavar="TIME", help="Maps from this initial time.")] = None,
    projection: Annotated[
        str | None, typer.Option(help="robinson, plate-carree, orthographic, north-polar or south-polar.")
    ] = None,
    centre: Annotated[
        tuple[float, float] | None, typer.Option(metavar="LAT LON", help="Middle of the map, in degrees.")
    ] = None,
    error_scale: Annotated[
        str, typer.Option(metavar="lead|common", help="Shades of errors: of each lead, or common to all.")
    ] = "lead",
) -> None:
    """Draw score curves and maps."""
    experiment = _experiment(file, set_)
    from credit_like import figures
    from credit_like.evaluation.charts import Style
    from credit_like.evaluation.maps import Choice
    from credit_like.schema.base import parse_duration

    _log_lines()
    try:
        seconds = None if lead is None else int(parse_duration(lead).total_seconds())
    except UserError as error:
        raise UserError(f"--lead: {error}") from error
    choice, style = Choice(variable, level, seconds, init), Style(projection, centre, error_scale)
    sys.exit(figures.plot(experiment, choice, style))


@app.command()
def plan(
    file: File,
    gpus: Annotated[str, typer.Option(metavar="N[,N…]", help="Number of GPUs; one table per number.")],
    set_: Set = None,
    gpu: Annotated[
        str, typer.Option(help="v100-32gb, a100-40gb, a100-80gb, h100, h200, mi250x or a file of `bench`.")
    ] = "a100-40gb",
    memory: Annotated[float | None, typer.Option("--gpu-memory", metavar="GB", help="Memory per GPU.")] = None,
    peak: Annotated[float | None, typer.Option(metavar="TFLOP/s", help="Peak rate in bfloat16.")] = None,
    tf32_peak: Annotated[
        float | None,
        typer.Option(metavar="TFLOP/s", help="Peak rate of products in TensorFloat-32; 0 = that of float32."),
    ] = None,
    wide_peak: Annotated[float | None, typer.Option(metavar="TFLOP/s", help="Peak rate in float32.")] = None,
    bandwidth: Annotated[float | None, typer.Option(metavar="GB/s", help="Memory bandwidth per GPU.")] = None,
    intra: Annotated[
        float | None, typer.Option(metavar="GB/s", help="Network bandwidth within a node, per GPU.")
    ] = None,
    inter: Annotated[
        float | None, typer.Option(metavar="GB/s", help="Network bandwidth between nodes, per GPU.")
    ] = None,
    node: Annotated[int | None, typer.Option(min=1, help="GPUs per node.")] = None,
    latency: Annotated[float | None, typer.Option(metavar="µs", help="Time of a collective without data.")] = None,
    reached: Annotated[float | None, typer.Option(help="Fraction of the peak rates that is achieved.")] = None,
    links: Annotated[float | None, typer.Option(help="Fraction of the network bandwidths that is achieved.")] = None,
    launch: Annotated[float | None, typer.Option(metavar="µs", help="Time to launch an operation.")] = None,
    fused: Annotated[
        float | None, typer.Option(help="Launches of a compiled model, relative to one that is not compiled.")
    ] = None,
    moved: Annotated[
        float | None, typer.Option(help="Memory traffic of a compiled model, relative to one that is not compiled.")
    ] = None,
    floor: Annotated[float | None, typer.Option(metavar="µs", help="Fixed time of an operation on the device.")] = None,
    spread: Annotated[float | None, typer.Option(help="Relative standard deviation of the speeds of GPUs.")] = None,
    reading: Annotated[float | None, typer.Option(metavar="GB/s", help="Speed of reading samples, per GPU.")] = None,
    reserve: Annotated[float | None, typer.Option(help="Fraction of memory taken by driver and libraries.")] = None,
    grid: Annotated[str | None, typer.Option(metavar="ROWSxCOLUMNS", help="Plan without data, on this grid.")] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="Parallel simulations; default: all cores.")] = None,
    json: Json = False,
    plot: Annotated[Path | None, typer.Option(metavar="PNG", help="Plot memory against ranks.")] = None,
) -> None:
    """Estimate memory and time of every layout of N GPUs.

    A training step is simulated without a GPU, and a layout is recommended.
    """
    from credit_like.plan.command import run

    figures = {
        "memory": memory,
        "peak": peak,
        "tf32_peak": tf32_peak,
        "wide_peak": wide_peak,
        "bandwidth": bandwidth,
        "intra": intra,
        "inter": inter,
        "node": node,
        "latency": latency,
        "reached": reached,
        "links": links,
        "launch": launch,
        "fused": fused,
        "moved": moved,
        "floor": floor,
        "spread": spread,
        "reading": reading,
        "reserve": reserve,
    }
    sys.exit(
        run(
            file,
            gpus,
            gpu,
            figures,
            overrides=set_ or (),
            grid=grid,
            processes=processes,
            json=json,
            plot=plot,
        )
    )


@app.command()
def bench(
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="YML", help="File to write.")] = None,
) -> None:
    """Measure this machine for `plan --gpu FILE`.

    Under a launcher (torchrun, srun, mpiexec or mpirun), also measure the network between the processes.
    """
    if output is not None and not output.absolute().parent.is_dir():
        raise UserError(f"expected --output in an existing folder, got {output}, create the folder or change the path")
    from credit_like.plan.calibrate import bench as measured
    from credit_like.plan.show import print_machine

    if machine := measured(output):
        print_machine(machine)


@app.command()
def submit(
    file: File,
    set_: Set = None,
    mode: Annotated[str, typer.Option(help="preprocess, train, rollout or evaluate.")] = "train",
    site: Annotated[
        str | None, typer.Option(help="Site profile: a name in config/site, or the path of a file.")
    ] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Number of nodes; default: the experiment's.")] = None,
    ngpus: Annotated[int | None, typer.Option(min=0, help="GPUs per node.")] = None,
    walltime: Annotated[str | None, typer.Option(metavar="HH:MM:SS", help="Time limit of a job.")] = None,
    queue: Annotated[str | None, typer.Option(help="Queue, or QOS on Slurm.")] = None,
    account: Annotated[str | None, typer.Option(help="Account to charge.")] = None,
    chain: Annotated[str, typer.Option(metavar="N|auto", help="Jobs in sequence; auto = until finished.")] = "1",
    after: Annotated[list[str] | None, typer.Option(metavar="JOB", help="Wait for this job; may be repeated.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the job script and submit nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Submit even though outputs or queued jobs exist.")] = False,
    gpu: Annotated[
        str | None, typer.Option(help="Estimate memory on this GPU first; refuse if it does not fit.")
    ] = None,
) -> None:
    """Submit jobs to the batch system of `site`."""
    from credit_like.check import checked_experiment
    from credit_like.launch.resources import options
    from credit_like.launch.show import print_plan
    from credit_like.launch.submit import chain_of, mode_of
    from credit_like.launch.submit import submit as submit_jobs

    def submission(dry_run: bool) -> Plan:
        return submit_jobs(
            file,
            mode_of(mode),
            options(walltime, nodes=nodes, ngpus=ngpus, queue=queue, account=account),
            chain=chain_of(chain),
            after=after or (),
            overrides=set_ or (),
            site=site,
            dry_run=dry_run,
            force=force,
            check=partial(
                checked_experiment,
                forecasting=mode in ("rollout", "evaluate"),
                training=mode == "train",
                launching=mode == "train" and not (after or dry_run),
                continuing=mode in ("train", "rollout"),
                mode=mode_of(mode),
            ),
        )

    if gpu is not None and mode == "train":
        from credit_like.plan.command import checked_line

        typer.echo(checked_line(file, set_ or (), submission(dry_run=True).resources.world, gpu, force))
    plan = submission(dry_run)
    print_plan(plan, script=dry_run)


@app.command()
def status(save_loc: SaveLoc) -> None:
    """Show the progress of a run and the state of its jobs."""
    from credit_like.launch.show import print_status

    sys.exit(print_status(save_loc))


@app.command()
def runs(
    folder: Annotated[Path, typer.Argument(help="Folder with runs, at any depth.")] = Path("runs"),
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(metavar="A B", help="Compare two runs: experiments, losses and scores.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --compare: write a page that needs no network.")
    ] = None,
) -> None:
    """List the runs below a folder, or compare two of them.

    The table shows state, step, losses, speed, and the keys in which the experiments differ.
    """
    from credit_like.evaluation.compare import print_comparison, print_runs

    if html is not None and compare is None:
        raise UserError("expected --html together with --compare, got --html alone, add --compare or leave --html out")
    if html is not None and compare is not None:
        from credit_like.evaluation.compare_page import write_comparison

        typer.echo(str(write_comparison(html, *compare)))
    elif compare is not None:
        print_comparison(*compare)
    else:
        print_runs(folder)


@app.command()
def cancel(
    save_loc: SaveLoc,
    job: Annotated[str | None, typer.Option("--job", metavar="ID", help="Only this job of the run.")] = None,
) -> None:
    """Cancel the jobs of a run.

    Waiting jobs are cancelled before the running one. With an id, only that job is cancelled.
    """
    from credit_like.launch.show import print_cancelled

    sys.exit(print_cancelled(save_loc, job))


@app.command()
def checkpoints(
    save_loc: SaveLoc,
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte and compare checksums.")] = False,
    json: Json = False,
    prune: Annotated[int | None, typer.Option(min=1, metavar="N", help="Keep the newest N and the best.")] = None,
    diff: Annotated[
        tuple[int, int] | None, typer.Option(metavar="A B", help="Print the differences between steps A and B.")
    ] = None,
) -> None:
    """List, verify, prune or compare the checkpoints of a run."""
    from credit_like.checkpoint import commands

    if diff is not None:
        sys.exit(commands.diff_steps(save_loc, *diff))
    if prune is not None:
        sys.exit(commands.prune_checkpoints(save_loc, prune))
    sys.exit(commands.list_checkpoints(save_loc, verify=verify, json=json))


@app.command()
def export(
    save_loc: SaveLoc,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="The safetensors file to write.")
    ] = None,
    package: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write a model package: card, config.json, weights.")
    ] = None,
    licence: Annotated[str | None, typer.Option(help="Licence on the card of a package, such as apache-2.0.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Export the trained weights, not their moving average.")] = False,
) -> None:
    """Export the weights of a run, or of a checkpoint such as RUN/checkpoints/step-4000, as a file or a model package."""
    from credit_like.checkpoint import commands

    if (output is None) == (package is None):
        raise UserError("expected either --output FILE or --package FOLDER, got both or neither; change the command")
    if package is not None:
        sys.exit(commands.export_package(save_loc, package, raw=raw, licence=licence))
    if licence is not None:
        raise UserError("expected --licence together with --package, got it with --output; remove --licence")
    assert output is not None
    sys.exit(commands.export(save_loc, output, raw=raw))


@app.command(name="import-credit")
def import_credit(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", show_default=False, help="CREDIT's experiment (.yml) or checkpoint file.")
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="The experiment to write; for a checkpoint, the folder to write.")
    ],
    weights: Annotated[Path | None, typer.Option(help="The checkpoint of the experiment, converted beside it.")] = None,
    config: Annotated[Path | None, typer.Option(help="CREDIT's YAML file, if a checkpoint lacks it.")] = None,
) -> None:
    """Translate an experiment or weights of NCAR CREDIT."""
    if file.suffix in (".yml", ".yaml"):
        from credit_like.migrate import report, run

        typer.echo(report(run(file, weights, output), file, output))
        return
    from credit_like.checkpoint.commands import import_credit as convert

    sys.exit(convert(file, config, output))


def _print_json(data: Any) -> None:
    import json

    typer.echo(json.dumps(data, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
