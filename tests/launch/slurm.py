"""A private Slurm on this machine: a controller and two node daemons from Debian's slurm-wlm, in a temporary folder."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
OVER = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "BOOT_FAIL")


def missing() -> str | None:
    """Return why Slurm cannot run here, or None if it can."""
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    if absent:
        return f"{', '.join(absent)} not installed (apt-get install slurm-wlm)"
    if os.geteuid() != 0:
        return "slurmd needs to be root to start jobs"
    return None


def free_ports(count: int) -> list[int]:
    """Return ports that are free now and stay so: they are below those that the kernel hands out to other sockets."""
    first = 20000 + free_job_number(count)
    return list(range(first, first + count))


def free_job_number(count: int = 20) -> int:
    """Return the first of `count` job numbers whose ports are free now.

    A job script derives its port from its number (20000 + number), so servers that all begin at 1 collide on one machine.
    The ports stay below those that the kernel hands out.
    """
    while True:
        first = random.SystemRandom().randrange(1, 12000 - count)
        with contextlib.ExitStack() as stack:
            try:
                for number in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("", 20000 + number))
            except OSError:
                continue
            return first


class Slurm:
    """A context manager; `environ` is the environment of its commands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "state").mkdir(parents=True)
        # a socket's path has at most 108 characters, and the spool folder is part of it
        self.spool = tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True)
        host, ports = socket.gethostname().split(".")[0], free_ports(3)
        self.config = folder / "slurm.conf"
        self.config.write_text(
            f"""ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
KillWait=5
OverTimeLimit=10
MinJobAge=3600
FirstJobId={free_job_number()}
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={self.spool.name}/%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
NodeName=nid1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 RealMemory=512000 State=UNKNOWN
NodeName=nid2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 RealMemory=512000 State=UNKNOWN
PartitionName=normal Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
        )
        self.environ = {"SLURM_CONF": str(self.config)}
        self.daemons: list[subprocess.Popen] = []

    def __enter__(self) -> Slurm:
        commands = [["slurmctld", "-D"], ["slurmd", "-D", "-N", "nid1"], ["slurmd", "-D", "-N", "nid2"]]
        out = (self.folder / "daemons.log").open("wb")
        for command in commands:
            self.daemons.append(subprocess.Popen(command, env={**os.environ, **self.environ}, stdout=out, stderr=out))
        out.close()
        deadline = time.monotonic() + 300
        while self.ask("sinfo", "--noheader", "--format=%T %D").strip() != "idle 2":
            if time.monotonic() > deadline:
                self.__exit__()
                raise TimeoutError((self.folder / "daemons.log").read_text() + self.ask("sinfo", "--long"))
            time.sleep(0.2)
        return self

    def __exit__(self, *exception: object) -> None:
        for job in self.states():
            self.ask("scancel", "--signal=KILL", job)
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            daemon.wait(900)
        self.spool.cleanup()

    def ask(self, *command: str) -> str:
        done = subprocess.run(command, env={**os.environ, **self.environ}, capture_output=True, text=True)
        return done.stdout

    def states(self) -> dict[str, str]:
        """Return the state of every job, and of every task of an array."""
        lines = self.ask("squeue", "--noheader", "--states=all", "--array", "--format=%i|%T").splitlines()
        return dict(sorted(line.split("|") for line in lines))

    def wait(self, timeout: float = 900.0) -> dict[str, str]:
        """Return when every job has ended, including jobs submitted by jobs."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            states = self.states()
            if states and all(state in OVER for state in states.values()):
                return states
            time.sleep(0.3)
        raise TimeoutError(str(self.states()))
