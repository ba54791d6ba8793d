"""Every file of this folder is wrong, and is answered with all that is wrong with it and nothing else.

A file says what it expects: `#! a && b` at the end of a line asks for a message `<file>:<line>: …` that holds all
of the parts; `#!! a && b` for a message anywhere. Each message belongs to one such comment.
"""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from credit_like import cli

HERE = Path(__file__).parent
FILES = sorted(path.name for path in HERE.glob("*.yml"))
IN_A_PROCESS = ["misspelt-key.yml", "variable-misspelt.yml", "zarr-truncated-chunk.yml", "statistics-not-finite.yml"]


def dataset(steps):
    """Fields on a 32 × 64 grid every 6 hours."""
    random = np.random.default_rng(0)
    grid = {"latitude": 90 - (np.arange(32) + 0.5) * 5.625, "longitude": np.arange(64) * 5.625}
    times = np.datetime64("2000-01-01", "ns") + np.timedelta64(6, "h") * np.asarray(steps)
    surface, level = ("time", "latitude", "longitude"), ("time", "level", "latitude", "longitude")
    shape = (len(times), 32, 64)
    data = {name: (level, random.normal(size=(len(times), 2, 32, 64)).astype("f4")) for name in ("U", "V")}
    data |= {name: (surface, random.normal(size=shape).astype("f4")) for name in ("t2m", "rain")}
    data["z"] = (surface[1:], random.normal(size=shape[1:]).astype("f4"))
    return xr.Dataset(data, {**grid, "level": [500.0, 850.0], "time": times})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Stores, whole and broken, that the files name."""
    from credit_like.data.statistics import fit_statistics
    from credit_like.data.store import open_store
    from credit_like.schema.load import load_experiment
    from credit_like.variables import Variables

    folder = tmp_path_factory.mktemp("stores")
    good = dataset(range(60))
    good.to_netcdf(folder / "good.nc")
    dataset([step for step in range(60) if step not in (20, 21, 22)]).to_netcdf(folder / "gap.nc")
    for name in ("chunk", "metadata"):
        good.to_zarr(folder / f"{name}.zarr", encoding={"t2m": {"chunks": (1, 32, 64)}}, zarr_format=2)
    cut = {folder / "chunk.zarr/t2m/59.0.0": 100, folder / "metadata.zarr/.zmetadata": 20}
    for path, length in cut.items():
        path.write_bytes(path.read_bytes()[:length])
    good.drop_vars(["t2m", "rain"]).to_netcdf(folder / "wind.nc")
    north = good["t2m"].where(good["latitude"] > 0)  # with whole rows that have no data, and points
    late = good["t2m"].where((good["latitude"] > 0) | (good["time"] > good["time"][30]))
    odd = good.assign(
        north=north,
        late=late,
        complex=good["t2m"].astype("c8"),
        infinite=good["t2m"] + np.inf,
        filled=good["t2m"] * 0 + np.float32(9.96921e36),
        nothing=good["t2m"] * np.nan,
    )
    odd.to_zarr(folder / "odd.zarr", zarr_format=2)
    cyclic = good.pad(longitude=(0, 1), mode="wrap")
    cyclic.assign_coords(longitude=[*good["longitude"].values, good["longitude"].values[0] + 360]).to_netcdf(
        folder / "cyclic.nc"
    )
    (folder / "notes.txt").write_text("not a store\n")
    (folder / "folder").mkdir()
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "dangling").symlink_to(folder / "nothing")
    os.mkfifo(folder / "pipe")

    os.environ["FOLDER"] = str(folder)
    experiment = load_experiment(HERE / "parts/base.yml")
    variables = Variables(experiment.data)
    fit_statistics(open_store(experiment.data, variables), variables, experiment.data).save(folder / "statistics.nc")
    with xr.open_dataset(folder / "statistics.nc") as statistics:
        statistics = statistics.load()
    spoilt = statistics.copy(deep=True)
    spoilt["mean"].loc["V@850"] = np.nan
    spoilt.to_netcdf(folder / "nan-statistics.nc")
    statistics.isel(channel=slice(0, 2)).to_netcdf(folder / "other-statistics.nc")
    statistics.isel(latitude=slice(0, 16)).to_netcdf(folder / "grid-statistics.nc")
    yield folder
    del os.environ["FOLDER"]


def expectations(path):
    """The parts that some message must hold, for each message."""
    result = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if "#!! " in line:
            result.append(line.split("#!! ")[1].split(" && "))
        elif "#! " in line:
            result.append([f"{path}:{number}: ", *line.split("#! ")[1].split(" && ")])
    return result


def listing(folder):
    return sorted((str(path.relative_to(folder)), path.lstat().st_size) for path in folder.rglob("*"))


CHECK = "from credit_like.cli import main; main()"
COUNTED = """
import sys
calls = 0
def count(frame, event, argument):
    global calls
    calls += 1
sys.setprofile(count)
try:
    exec({code!r})
finally:
    sys.setprofile(None)
    print("calls", calls, file=sys.stderr)
"""


def command(folder, code, *path):
    """Exit status, lines on stderr and seconds of `code` for `credit-like check`, run in a process of its own.

    The seconds are the processor's: a clock on the wall would time whatever else the machine does.
    """
    environment = {**os.environ, "FOLDER": str(folder), "OMP_NUM_THREADS": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, "check", *map(str, path)],
        capture_output=True, text=True, env=environment, cwd=folder, check=False,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return done.returncode, done.stderr.splitlines(), seconds


def calls(folder, code, *path):
    """Number of calls of functions, from Python or to C, that `code` makes for `credit-like check`; the same on any machine."""
    _, lines, _ = command(folder, COUNTED.format(code=code), *path)
    return int(lines[-1].removeprefix("calls "))


def judge(path, status, lines):
    assert status == 2, lines
    wanted = expectations(path)
    assert wanted, f"{path.name} does not say what it expects"
    left = list(lines)
    for parts in wanted:
        matching = [line for line in left if all(part in line for part in parts)]
        assert matching, f"no message with {parts} in\n" + "\n".join(lines)
        left.remove(matching[0])
    assert not left, "messages that nothing asked for:\n" + "\n".join(left)


def concerned(text):
    """The command that would do what is wrong with an experiment, and its options."""
    if "  baselines:" in text or "  truth:" in text or "  metrics:" in text or "  regions:" in text:
        return ["evaluate"]
    if "inference:" in text:
        return ["rollout"]
    if "pbs:" in text or "site:" in text:
        return ["submit", "--dry-run", "--mode", "rollout" if "rollout:" in text else "train"]
    return ["train"]


def _message(line):
    """Return what follows the place and the key, which a command may give in another form."""
    return line[line.index("expected") :] if "expected" in line else line.partition(": ")[2]


@pytest.mark.parametrize("name", FILES)
def test_each_problem_is_named_with_its_line_and_nothing_is_written(name, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    before = listing(folder)
    answers = {}
    command, *options = concerned((HERE / name).read_text())
    for run in (["check"], [command, *options]):
        with pytest.raises(SystemExit) as end:
            cli.main([*run, str(HERE / name)])
        answers[run[0]] = end.value.code, capsys.readouterr().err.splitlines()
    judge(HERE / name, *answers["check"])
    assert listing(folder) == before
    said, said_too = ({_message(line) for line in lines} for _, lines in answers.values())
    assert answers[command][0] == 2
    # Training knows how many processes it has, and may find more wrong; a submission may end with the first problem.
    assert said <= said_too or (command == "submit" and said_too <= said)


@pytest.mark.parametrize(
    "name", [IN_A_PROCESS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in IN_A_PROCESS[1:])]
)
def test_the_answer_takes_less_than_two_seconds(name, folder):
    """On a machine that is too slow or busy for that, it takes not many more calls than importing the libraries does."""
    status, lines, seconds = command(folder, CHECK, HERE / name)
    judge(HERE / name, status, lines)
    if seconds >= 2:
        # How long a call takes depends on the load of the machine, their number does not. Importing torch would add 0.7.
        libraries = "import xarray, dask.array, netCDF4, zarr, pydantic, typer"
        assert calls(folder, CHECK, HERE / name) < 1.8 * calls(folder, libraries)


def test_there_are_a_hundred():
    assert len(FILES) >= 100


def test_the_file_that_the_others_include_is_right(folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["credit-like", "check", str(HERE / "parts/base.yml"), "--json"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code, capsys.readouterr().err


def test_points_that_have_data_at_some_times_are_no_gaps(folder, tmp_path, capsys):
    text = (HERE / "zonal-filter-of-a-variable-with-gaps.yml").read_text().replace("north", "late")
    file = tmp_path / "late.yml"
    file.write_text(text.replace("parts/base.yml", str(HERE / "parts/base.yml")))
    with pytest.raises(SystemExit) as end:
        cli.main(["check", str(file)])
    assert not end.value.code, capsys.readouterr().err


@pytest.mark.parametrize("command", [["rollout"], ["evaluate"], ["submit", "--dry-run", "--mode", "rollout"]])
def test_default_forecasts_that_do_not_fit_are_told_by_check_and_refused_by_who_makes_them(folder, capsys, command):
    """The default lead is 5 days, the test period not four; a training may ignore this."""
    path = str(HERE / "parts/base.yml")
    with pytest.raises(SystemExit) as end:
        cli.main(["check", path, "--json"])
    assert not end.value.code
    told = json.loads(capsys.readouterr().out)["forecasts"]["refused"]
    assert told.startswith("inference.lead: expected a lead that fits into the data after a time of the test period")
    with pytest.raises(SystemExit) as end:
        cli.main([*command, path])
    assert end.value.code == 2
    assert _message(capsys.readouterr().err.strip()) == _message(told)
    assert not (folder / "run").exists()
