"""The command line: exit statuses, messages, what is imported when, and how soon help comes."""

import json
import os
import resource
import subprocess
import sys

import pytest

from credit_like import cli
from tests.experiments import DEMO, call

COMMANDS = [
    "demo", "new", "check", "schema", "verify", "preprocess", "bench-data", "train", "rollout", "forecast", "evaluate",
    "plot", "plan", "bench", "submit", "status", "runs", "cancel", "checkpoints", "export", "import-credit",
]  # fmt: skip


def run(*arguments, options=(), **environment):
    code = "from credit_like.cli import main; main()"
    return subprocess.run(
        [sys.executable, *options, "-c", code, *map(str, arguments)],
        capture_output=True, text=True, check=False, env={**os.environ, **environment},
    )  # fmt: skip


def test_the_package_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "credit_like", "--help"], capture_output=True, text=True, check=True)
    assert done.stdout == run("--help").stdout


def imported(done):
    """Names of the modules that `python -X importtime` saw."""
    return {line.rsplit("|", 1)[1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """An experiment on a file of its own."""
    import numpy as np
    import xarray as xr

    folder = tmp_path_factory.mktemp("small")
    times = np.datetime64("2000-01-01", "ns") + np.timedelta64(6, "h") * np.arange(40)
    fields = np.random.default_rng(0).normal(size=(40, 32, 64)).astype("f4")
    coordinates = {"time": times, "latitude": np.linspace(-87, 87, 32), "longitude": np.arange(64) * 5.625}
    dims = ("time", "latitude", "longitude")
    xr.Dataset({"a": (dims, fields), "b": (dims, fields + 1)}, coordinates).to_netcdf(folder / "data.nc")
    (folder / "small.yml").write_text(f"""
name: small
save_loc: {folder}/run
data:
  source: {{type: netcdf, path: {folder}/data.nc}}
  timestep: 6h
  prognostic: {{surface: [a]}}
  diagnostic: {{surface: [b]}}
  dynamic_forcing: {{surface: [{{name: sun, compute: solar}}]}}
  history_len: 2
  train: [2000-01-01, 2000-01-05T18]
  valid: [2000-01-06, 2000-01-07T18]
  test: [2000-01-08, 2000-01-10T18]
model:
  type: wxformer
  dim: [8, 16, 32, 64]
  depth: [1, 1, 1, 1]
  dim_head: 8
  cross_embed_kernel_sizes: [[4, 8], [2, 4], [2, 4], [2, 4]]
  global_window_size: [4, 4, 2, 1]
  local_window_size: 2
  padding_conf: {{activate: true, mode: earth, pad_lat: [0, 0], pad_lon: [16, 16]}}
trainer: {{global_batch_size: 4, micro_batch_size: 2, epochs: 3, parallelism: {{data: ddp}}}}
""")
    return folder


def test_help_names_every_command(capsys):
    assert call("--help") == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.split("Commands:")[1].splitlines() if line.strip()]
    assert listed == COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help(command, capsys):
    assert call(command, "--help") == 0
    assert "Usage: credit-like" in capsys.readouterr().out


def test_help_imports_nothing_heavy_and_takes_less_than_three_tenths_of_a_second():
    names = imported(run("--help", options=["-X", "importtime"]))
    assert "typer" in names
    assert not names & {"torch", "numpy", "pydantic", "xarray", "yaml", "rich"}
    best = 10.0
    for _ in range(5):  # of the processor's time, as the machine may be busy with other things
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert run("--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if best < 0.3:
            break
    assert best < 0.3


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "small.yml"],
        ["check", str(DEMO)],  # which has forecasts and scores
        ["schema"],
        ["submit", "small.yml", "--dry-run"],
        ["train", "absent.yml"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_commands_that_compute_nothing_import_no_torch(arguments, small):
    # A path that is absolute stays what it is.
    arguments = [small / argument if argument.endswith(".yml") else argument for argument in arguments]
    done = run(*arguments, options=["-X", "importtime"])
    assert done.returncode == (2 if arguments[0] == "train" else 0), done.stderr[-500:]
    assert not [name for name in imported(done) if name.split(".")[0] == "torch"]


def test_figures_and_runs_need_no_torch():
    code = "import sys, credit_like.figures, credit_like.evaluation.compare; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_check_says_what_would_run(small, capsys):
    assert not call("check", small / "small.yml", "--json")
    said = json.loads(capsys.readouterr().out)
    assert said["channels"] == {"in": 4, "out": 2}
    assert said["grid"]["height"] == 32
    # 20, 8 and 12 times, each window of 2 + 1 of them
    assert said["samples"] == {"train": 18, "valid": 6, "test": 10}
    assert said["layout"] == {
        "world": 1, "data": 1, "ensemble": 1, "tensor": 1, "domain": 1, "global_batch_size": 4,
        "micro_batch_size": 2, "accumulation": 2, "steps_per_epoch": 4, "steps": 12,
    }  # fmt: skip
    assert not call("check", small / "small.yml", "--world-size", "2")
    table = capsys.readouterr().out
    assert "4 in, 2 out" in table
    assert "2 processes = data 2 × tensor 1 × domain 1" in table


def test_a_terminal_that_lacks_characters_gets_others(small):
    done = run("check", small / "small.yml", "--world-size", "2", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "2 processes = data 2 \\xd7 tensor 1 \\xd7 domain 1" in done.stdout


def test_check_writes_nothing(small, capsys):
    before = sorted(small.rglob("*"))
    call("check", small / "small.yml")
    assert sorted(small.rglob("*")) == before


def test_a_layout_that_does_not_fit_is_refused_for_that_world_alone(small, capsys):
    assert call("check", small / "small.yml", "--world-size", "3") == 2
    assert "trainer.global_batch_size: expected a multiple of micro_batch_size" in capsys.readouterr().err


def test_overrides_may_be_repeated_and_are_named_when_wrong(small, capsys):
    sets = ["--set", "trainer.epochs=0", "--set", "trainer.ampp=true"]
    assert call("check", small / "small.yml", *sets) == 2
    messages = capsys.readouterr().err.splitlines()
    assert messages[0].startswith("--set trainer.ampp=true: trainer.ampp: expected a key of trainer")
    assert messages[1].startswith("--set trainer.epochs=0: trainer.epochs: expected a value of at least 1, got 0")


def test_the_schema_is_json(capsys):
    assert not call("schema")
    assert json.loads(capsys.readouterr().out)["title"] == "Experiment"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "small.yml", "--force"], "expected --force together with --fresh"),
        (["rollout", "small.yml", "--share", "3/2"], "--share: expected I/N"),
        (["train", "small.yml", "--set", "trainer.parallelism.tensor=2"], "got 1, change it to 2 processes"),
        (["status", "nowhere"], "expected"),
        (["checkpoints", "nowhere"], "expected the folder of a run"),
    ],
)
def test_what_the_user_can_change_is_one_message_and_status_2(arguments, message, small, capsys):
    before = sorted(small.rglob("*"))
    code = call(*[small / argument if argument.endswith(("yml", "nowhere")) else argument for argument in arguments])
    assert code == 2
    assert message in capsys.readouterr().err
    assert sorted(small.rglob("*")) == before


@pytest.mark.parametrize(
    "arguments", [["chekc"], ["check"], ["train", "x.yml", "--nonsense"], ["check", "x.yml", "--world-size", "0"]]
)
def test_wrong_usage_has_status_2(arguments, capsys):
    assert call(*arguments) == 2
    assert "Usage: credit-like" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["status", "run"], ["train", str(DEMO)]], ids=lambda command: command[0])
def test_a_current_folder_that_was_removed_is_one_message(command, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert call(*command) == 2
    assert "expected a current folder that exists" in capsys.readouterr().err


def test_closed_streams_take_no_data(tmp_path):
    code = f"""
import os, sys
from credit_like.cli import main
try:
    main(["--help"])
except SystemExit:
    pass
file = open({str(tmp_path / "data")!r}, "wb")
print("lost")
print("lost", file=sys.stderr)
os.write(2, b"lost")
assert file.fileno() > 2 and sys.stdin.read() == "" and not sys.stderr.isatty()
assert all(map(os.get_inheritable, range(3)))
open({str(tmp_path / "well")!r}, "x")
"""
    closed = 'exec "$@" 0<&- 1>&- 2>&-'
    subprocess.run(["sh", "-c", closed, "sh", sys.executable, "-c", code], check=True)
    assert (tmp_path / "well").exists()
    assert (tmp_path / "data").read_bytes() == b""


def test_an_exit_in_a_part_of_an_experiment_is_no_success(monkeypatch, small, capsys):
    monkeypatch.setattr("credit_like.check.describe.describe", lambda *_: sys.exit(0))
    assert call("check", small / "small.yml") == 1
    said = capsys.readouterr().err
    assert said.startswith("expected code that returns or raises an error, got an exit with status 0 at ")
    assert __file__ in said


def test_a_mistake_of_the_program_keeps_its_traceback(monkeypatch, small):
    def broken(*_):
        return int("not a number of ours")

    monkeypatch.setattr("credit_like.check.describe.describe", broken)
    with pytest.raises(ValueError, match="invalid literal"):
        cli.main(["check", str(small / "small.yml")])


def _refused(rank, file, folder):
    with (folder / f"{rank}.err").open("w") as said:
        os.dup2(said.fileno(), 2)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        cli.main(["train", str(file)])


def test_of_several_processes_one_speaks(small, launch_ranks, tmp_path):
    launch_ranks(2, _refused, small / "absent.yml", tmp_path)
    said = [(tmp_path / f"{rank}.err").read_text() for rank in range(2)]
    assert sum(text.count("absent.yml") for text in said) == 1, said
    assert any(said[rank].startswith(f"rank {rank}: ") for rank in range(2))


@pytest.mark.parametrize("command", ["status", "plot", "bench-data"])
def test_what_launchers_left_behind_is_nothing_to_a_command_of_one_process(command, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cli, "_end_rank", lambda *_: pytest.fail("this process is taken for a rank"))
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    arguments = [DEMO, "--set", f"save_loc={tmp_path / 'run'}"] if command != "status" else [tmp_path]
    assert call(command, *arguments) == 2
    assert "2 // " not in capsys.readouterr().err  # data-parallel replicas


LONG = "x" * 300


@pytest.mark.parametrize(
    "command",
    [
        ["check", LONG],
        ["new", LONG, "-o", "new.yml"],
        ["import-credit", LONG, "-o", "new.yml"],
        ["evaluate", LONG],
        ["export", LONG, "-o", "a.safetensors"],
        ["forecast", LONG, "--from", LONG, "--lead", "1d", "-o", "a.zarr"],
        ["plot", LONG],
        ["runs", LONG],
        ["status", LONG],
        ["cancel", LONG],
        ["submit", "absent.yml", "--site", LONG],
        ["schema", "--plugins", LONG],
    ],
    ids=lambda command: command[0],
)
def test_a_name_that_no_path_can_have_is_one_message(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert call(*command) in (1, 2)
    assert "Traceback" not in capsys.readouterr().err
    assert not any(tmp_path.iterdir())
