import datetime as dt
import gc
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from credit_like import build
from credit_like.errors import UserError, of_another_rank
from credit_like.parallel import collectives, device
from credit_like.parallel.environment import Environment, device_index, first_host, read_environment
from credit_like.parallel.mesh import data_parallel_coords, degrees
from credit_like.parallel.runtime import Runtime
from credit_like.schema.experiment import Experiment
from credit_like.schema.load import load_experiment
from credit_like.schema.trainer import Parallelism
from tests.launch.slurm import free_ports

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Environment()),
        (
            {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "n0", "MASTER_PORT": "1234"},
            Environment(3, 8, 1, "n0", 1234),
        ),
        (
            {"PMI_RANK": "5", "PMI_SIZE": "8", "PMI_LOCAL_RANK": "1", "MASTER_ADDR": "n0", "PBS_JOBID": "77.desched1"},
            Environment(5, 8, 1, "n0", 29577),
        ),
        (
            {
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            },
            Environment(1, 2, 1),
        ),
        (
            {
                "SLURM_PROCID": "7",
                "SLURM_STEP_NUM_TASKS": "8",
                "SLURM_LOCALID": "3",
                "SLURM_STEP_NODELIST": "nid[0012-0013]",
                "SLURM_JOB_ID": "4001",
            },
            Environment(7, 8, 3, "nid0012", 29501),
        ),
        # torchrun started by a launcher: torchrun's names win
        (
            {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "PMI_RANK": "1", "PMI_SIZE": "2"},
            Environment(0, 4, 0, "a"),
        ),
    ],
)
def test_launchers(environ, expected):
    assert read_environment(environ) == expected


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"RANK": "x"},
            "RANK to be an integer from 0 to 999999999, got 'x'; unset it, or start the ranks with torchrun",
        ),
        ({"RANK": "4"}, "RANK below WORLD_SIZE = 4, got 4; check the torchrun launch, or unset both"),
        ({"RANK": "1" * 5000}, "RANK to be an integer from 0 to 999999999, got '1"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE to be an integer from 1 to 999999999, got ''"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE to be an integer from 1 to 999999999, got '0'"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK to be an integer from 0 to 999999999, got '-1'"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT to be an integer from 1 to 65535, got '99999'"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR for 4 ranks, got none"),
    ],
)
def test_a_variable_that_no_launcher_sets_so_is_named(changed, message):
    environ = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "n0", "MASTER_PORT": "1234"}
    with pytest.raises(UserError, match=message):
        read_environment({**environ, **changed})


def test_a_process_alone_may_be_on_any_gpu_and_needs_no_port():
    """As independent runs, one on each GPU of a node, are started."""
    environ = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "3", "MASTER_PORT": "0"}
    assert read_environment(environ) == Environment(0, 1, 3)
    assert read_environment({**environ, "MASTER_PORT": "1234"}).port == 1234


def test_nodefile_of_pbs_is_for_one_node(tmp_path):
    """On the other nodes of a job the file is not there, so it is not what all ranks could agree on."""
    environ = {"PMI_RANK": "1", "PMI_SIZE": "8", "PBS_NODEFILE": str(tmp_path / "nodes")}
    (tmp_path / "nodes").write_text("dec0001\ndec0001\n")
    assert read_environment(environ).address == "dec0001"
    (tmp_path / "nodes").write_text("dec0001\ndec0001\ndec0002\n")
    with pytest.raises(ValueError, match="MASTER_ADDR for 8 ranks"):
        read_environment(environ)


@pytest.mark.parametrize(("rank", "devices", "index"), [(0, 1, 0), (3, 1, 0), (3, 4, 3), (0, 4, 0)])
def test_a_rank_takes_its_own_gpu_or_the_only_one_it_sees(rank, devices, index):
    assert device_index(rank, devices) == index


def test_a_gpu_that_torch_cannot_use_is_told(monkeypatch, tmp_path):
    driver = tmp_path / "nvidiactl"
    monkeypatch.setattr(device, "_NVIDIA", driver)
    cpu = torch.device("cpu")
    assert device.unused_gpu(cpu) is None
    driver.touch()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in device.unused_gpu(cpu)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "no device for CUDA 13.0" in device.unused_gpu(cpu)
    assert device.unused_gpu(torch.device("cuda")) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # the user chose the CPU
    assert device.unused_gpu(cpu) is None


@pytest.mark.parametrize(("precision", "convolutions"), [("highest", "ieee"), ("high", "tf32"), ("medium", "tf32")])
def test_matrix_products_and_convolutions_have_one_precision(precision, convolutions):
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    device.set_precision(precision)
    assert torch.get_float32_matmul_precision() == precision
    assert (torch.backends.cudnn.conv.fp32_precision == "tf32") == (convolutions == "tf32")
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


@pytest.mark.parametrize(
    "first", ["", pytest.param("import torch._inductor.config", marks=[pytest.mark.slow, pytest.mark.long])]
)
@pytest.mark.slow
def test_deterministic_algorithms_are_those_of_the_compiler_too(first):
    """In a process of its own, because the settings hold for a whole process; whether it has imported the compiler or not."""
    code = f"""
import os, torch
from credit_like.parallel.device import set_deterministic
{first}
set_deterministic(False)
print(torch.are_deterministic_algorithms_enabled(), os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
set_deterministic(True)
import torch._inductor.config as compiler
print(torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
      torch.utils.deterministic.fill_uninitialized_memory, compiler.deterministic, os.environ["CUBLAS_WORKSPACE_CONFIG"])
"""
    own = ("CUBLAS_WORKSPACE_CONFIG", "TORCHINDUCTOR_DETERMINISTIC")
    environment = {name: value for name, value in os.environ.items() if name not in own}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.splitlines() == ["False None", "True False False True :4096:8"], done.stderr


@pytest.mark.parametrize("on", [True, False])
def test_a_run_on_a_gpu_is_deterministic_unless_it_says_otherwise(on, monkeypatch):
    """A GPU is claimed, and the run ends where it would be used."""
    seen = []
    monkeypatch.setattr(build, "pick_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(build, "set_precision", lambda _: None)
    monkeypatch.setattr(build, "set_deterministic", seen.append)
    monkeypatch.setattr(build.Runtime, "start", _no_device)
    experiment = load_experiment(ROOT / "config" / "demo.yml")
    assert experiment.trainer.deterministic
    document = experiment.to_dict()
    document["trainer"]["deterministic"] = on
    with pytest.raises(UserError, match="no device"):
        build.start(Experiment.model_validate(document))
    assert seen == [on]


def _no_device(*_):
    raise UserError("no device")


def test_more_ranks_than_gpus_are_refused():
    with pytest.raises(UserError, match="at most 4 ranks on this node"):
        device_index(4, 4)


def test_several_nodes_need_an_address():
    with pytest.raises(ValueError, match="MASTER_ADDR for 8 ranks"):
        read_environment({"PMI_RANK": "1", "PMI_SIZE": "8", "PMI_LOCAL_SIZE": "4"})


@pytest.mark.parametrize(("nodes", "host"), [("a1", "a1"), ("a[01-04,09],b2", "a01"), ("x1,x2", "x1"), ("n[7]", "n7")])
def test_first_host(nodes, host):
    assert first_host(nodes) == host


@pytest.mark.parametrize(
    ("conf", "world", "message"),
    [
        ({"data": "fsdp2", "tensor": 2, "domain": 3}, 8, "tensor × domain = 2 × 3 = 6 divides, got 8"),
        (
            {"data": "fsdp2", "domain": 0},
            8,
            r"domain: expected an integer of at least 1, or \[rows, columns\] of such, got 0",
        ),
        ({"data": "fsdp2", "tensor": True}, 8, "tensor: expected an integer"),
        ({"data": "fsdp2", "tensor": "2"}, 8, "tensor: expected an integer"),
        ({"data": "fsdp"}, 8, "expected fsdp2, ddp or none, got 'fsdp'"),
        ({"data": "fsdp2", "pipeline": 2}, 8, "pipeline"),
        ({"data": "none", "domain": 2}, 8, r"fsdp2 or ddp for 8 // \(1 × 2\) = 4 data-parallel replicas, got none"),
        ({"data": "fsdp2", "replicate": 3}, 8, r"replicate: expected a divisor of the 8 data-parallel replicas, got 3"),
    ],
)
def test_degrees_that_do_not_fit(conf, world, message):
    with pytest.raises(ValueError, match=message):
        degrees(conf, world)


def test_coordinates_follow_the_mesh(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    conf = {"trainer": {"parallelism": {"data": "fsdp2", "tensor": 2, "domain": 2}}}
    got = []
    for rank in range(8):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("MASTER_ADDR", "here")
        got.append(data_parallel_coords(conf))
    assert got == [(0, 2)] * 4 + [(1, 2)] * 4


def _decide(rank):
    runtime = Runtime.start(Parallelism(data="fsdp2", tensor=2, domain=2), torch.device("cpu"))
    total = runtime.sum_over_data(torch.tensor(float(1 + runtime.domain_rank + 10 * runtime.dp_rank)))
    x = torch.tensor([1.0 + runtime.domain_rank], requires_grad=True)
    y = runtime.sum_over_domain(x)
    (y * (1 + runtime.domain_rank)).backward()
    runtime.check_same({"seed": "7", "data": "long" * 100})
    agreed, told = runtime.agree(rank), runtime.broadcast({"rank": rank})
    runtime.barrier()
    runtime.close()
    place = (runtime.dp_rank, runtime.tensor_rank, runtime.domain_rank)
    return place, float(total), float(y.detach()), float(x.grad), agreed, told


def test_decisions_of_eight_ranks(run_ranks):
    results = run_ranks(8, _decide)
    assert [r[0] for r in results] == [(d, t, o) for d in range(2) for t in range(2) for o in range(2)]
    for _, total, y, grad, agreed, told in results:
        assert total == ((1 + 2) + (11 + 12)) / 2
        assert (y, grad, agreed, told) == (3.0, 3.0, 7, {"rank": 0})


def test_one_process_needs_no_group():
    runtime = Runtime.start(Parallelism(), torch.device("cpu"), environment=Environment())
    assert (runtime.world, runtime.mesh, runtime.gradient_scale) == (1, None, 1.0)
    assert float(runtime.sum_over_data(torch.tensor(2.0))) == 2.0
    assert runtime.agree(3) == 3
    assert not torch.distributed.is_initialized()


def _mismatched(rank):
    runtime = Runtime.start(Parallelism(data="fsdp2", tensor=2), torch.device("cpu"))
    runtime.check_same({"version": "1.0", "seed": str(7 + (rank == 2)), "data": "long" * 100 + str(rank)})


def test_ranks_that_differ_in_a_fact_are_an_error_everywhere(launch_ranks):
    answers = launch_ranks(4, _mismatched)
    assert [a[0] for a in answers] == ["error"] * 4
    expected = "seed: expected the same on all 4 ranks, got 7 on rank 0 and 8 on rank 2 (1 ranks differ from rank 0)"
    assert all(expected in a[1] for a in answers)


def _wrong_world(rank):
    Runtime.start(Parallelism(data="fsdp2", tensor=2), torch.device("cpu"))


def test_a_world_that_does_not_divide_is_an_error_everywhere(launch_ranks):
    answers = launch_ranks(3, _wrong_world)
    assert all("tensor × domain = 2 × 1 = 2 divides, got 3" in a[1] for a in answers)


def _one_dies(rank):
    Runtime.start(Parallelism(data="ddp"), torch.device("cpu"), timeout=dt.timedelta(hours=1))
    if rank == 1:
        raise KeyError("gone")
    try:
        torch.distributed.all_reduce(torch.ones(1))
    except RuntimeError as error:
        return str(error)
    return None


def test_a_rank_that_dies_ends_the_others_before_the_timeout(launch_ranks):
    answers = launch_ranks(2, _one_dies)
    assert "gone" in answers[1][1]
    assert answers[0][0] == "ok"
    assert "closed by peer" in answers[0][1] or "reset by peer" in answers[0][1]


def _absent(rank, done):
    """Wait for rank 1 in two collectives at a time, for 3 s once both ranks are connected; return both errors."""
    runtime = Runtime.start(Parallelism(data="ddp"), torch.device("cpu"), timeout=dt.timedelta(seconds=900))
    runtime.barrier()
    torch.distributed.all_reduce(torch.ones(1))
    torch.distributed.distributed_c10d._set_pg_timeout(dt.timedelta(seconds=3))
    if rank == 1:
        while not done.exists():
            time.sleep(0.05)
        return None
    errors = []
    for work in [torch.distributed.all_reduce(torch.ones(1), async_op=True) for _ in range(2)]:
        try:
            work.wait()
        except RuntimeError as error:
            errors.append(error)
    done.touch()
    return [(of_another_rank(error), str(error)) for error in errors]


def test_each_collective_that_waits_for_an_absent_rank_says_that_it_is_silent(launch_ranks, tmp_path):
    """Gloo reports the time-out in one of the two collectives, and mostly in the other that the connections were closed."""
    status, said, *_ = launch_ranks(2, _absent, tmp_path / "done")[0]
    assert status == "ok"
    assert [kind for kind, _ in said] == ["silent", "silent"], said
    assert any("imed out" in text for _, text in said), said


def _start_again(rank):
    sums = []
    for late in (None, 0, 1):
        if rank == late:
            time.sleep(0.3)
        runtime = Runtime.start(Parallelism(data="ddp"), torch.device("cpu"), timeout=dt.timedelta(seconds=900))
        x = torch.ones(1)
        torch.distributed.all_reduce(x)
        runtime.close()
        sums.append(float(x))
    return sums


def test_a_start_meets_none_of_the_starts_before_it(run_ranks):
    """The store outlives them, as that of torchrun's agent does."""
    assert run_ranks(2, _start_again) == [[2.0] * 3] * 2


def _without_torchrun(rank, port):
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE")
    os.environ["MASTER_PORT"] = str(port)
    Runtime.start(Parallelism(data="ddp"), torch.device("cpu"), timeout=dt.timedelta(seconds=900))
    x = torch.ones(1)
    torch.distributed.all_reduce(x)
    return float(x)


def test_rank_0_keeps_the_store_where_no_agent_does(run_ranks):
    (port,) = free_ports(1)
    assert run_ranks(2, _without_torchrun, port) == [2.0, 2.0]


def _last_one_missing(rank, folder):
    if rank < 2:
        (folder / str(rank)).touch()
        while len(list(folder.iterdir())) < 2:  # so that the time limit counts from when both run
            time.sleep(0.01)
        Runtime.start(Parallelism(data="ddp"), torch.device("cpu"), timeout=dt.timedelta(seconds=15))


def test_a_rank_that_never_comes_is_missed(launch_ranks, tmp_path):
    answers = launch_ranks(3, _last_one_missing, tmp_path)
    assert answers[0][1] == "RunError: expected 3 ranks within 0:00:15, got 2; start all, or raise trainer.timeout"


def _average(rank):
    Runtime.start(Parallelism(data="ddp"), torch.device("cpu"))
    grads = [torch.full((3,), float(rank)), torch.full((2, 2), 2.0 * rank, dtype=torch.float64), torch.empty(0)]
    collectives.allreduce_grads_avg(grads, torch.distributed.group.WORLD)
    return [g.tolist() for g in grads]


def test_plain_gradients_are_averaged(run_ranks):
    for grads in run_ranks(4, _average):
        assert grads == [[1.5] * 3, [[3.0] * 2] * 2, []]


def test_a_rank_finalises_nothing_of_the_process_it_was_forked_from(run_ranks, dropped):
    """An unclosed file's complaint, amid a step, would keep what the step's frames hold, and change its peak of memory."""
    assert run_ranks(1, lambda rank: (gc.collect(), list(dropped))[1]) == [[]]
