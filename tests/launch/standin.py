"""A stand-in for PBS on this machine: `qsub`, `qstat`, `qdel`, `mpiexec`, `pbsdsh`, and a server that runs jobs.

It answers to `sbatch`, `squeue`, `scancel` and `scontrol` too, as far as a Slurm without accounting and with one node goes.

As PBS does, it copies the script at submission, runs it in the home folder with the PBS variables, waits for `afterany`
dependencies, runs an array's jobs side by side, sends SIGTERM to all processes of a job at its walltime and SIGKILL
some seconds later, as after `qdel`. The environment of the submitting shell does not reach a job. Two "nodes" are two names of
this machine. Where a file `tardy` lies in the spool, `qsub` tells a job's id only when that job is over; jobs named in a
file `keep` are deleted for nobody.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.launch import slurm as local_slurm

HOSTS = ("127.0.0.1", "localhost")

_CLIENT = r"""
import json, os, re, sys, time
spool, name, arguments = {spool!r}, os.path.basename(sys.argv[0]), sys.argv[1:]

def fail(message, code):
    sys.stderr.write(name + ": " + message + "\n")
    sys.exit(code)

def jobs():
    found = {{}}
    for entry in sorted(os.listdir(spool)):
        if entry.endswith(".json"):
            with open(os.path.join(spool, entry)) as file:
                job = json.load(file)
            found[job["id"]] = job
    return found

def save(job):
    path = os.path.join(spool, job["id"].split(".")[0].replace("[]", "") + ".json")
    with open(path + ".tmp", "w") as file:
        json.dump(job, file)
    os.rename(path + ".tmp", path)

if name == "qsub":
    if os.path.exists(os.path.join(spool, "refuse")):
        after = int(open(os.path.join(spool, "refuse")).read() or 0)
        if len(jobs()) >= after:
            fail("Job violates queue and/or server resource limits", 38)
    variables, after, files = {{}}, [], []
    while arguments:
        word = arguments.pop(0)
        if word == "-W":
            kind, _, ids = arguments.pop(0).partition("=")[2].partition(":")
            if kind != "afterany":
                fail("illegal -W value", 2)
            after = ids.split(":")
        elif word == "-v":
            variables.update(pair.split("=", 1) for pair in arguments.pop(0).split(","))
        elif word.startswith("-"):
            fail("illegal option " + word, 2)
        else:
            files.append(word)
    known = jobs()
    for job in after:
        if job not in known:
            fail("Unknown Job Id " + job, 153)
    text = open(files[0]).read()
    array = re.search(r"^#PBS -J 0-(\d+)$", text, re.M)
    if array and int(array[1]) == 0:
        fail("illegal -J value", 2)
    number = 1 + max([int(re.match(r"\d+", job)[0]) for job in known] + [{first} - 1])
    job = {{"id": "%d%s.standin" % (number, "[]" if array else ""), "text": text, "after": after,
           "variables": variables, "array": int(array[1]) + 1 if array else 0,
           "state": "H" if after else "Q", "code": None, "path": files[0]}}
    save(job)
    while os.path.exists(os.path.join(spool, "tardy")) and not job["after"] and jobs()[job["id"]]["state"] != "F":
        time.sleep(0.05)
    print(job["id"])
elif name == "qstat":
    known = jobs()
    for job in (word for word in arguments if not word.startswith("-")):
        if job not in known:
            sys.stderr.write("qstat: Unknown Job Id %s\n" % job)
            continue
        print("Job Id: %s\n    Job_Name = standin\n    job_state = %s" % (job, known[job]["state"]))
        if known[job]["code"] is not None:
            print("    Exit_status = %d" % known[job]["code"])
        print()
elif name in ("qdel", "scancel"):
    kept = open(os.path.join(spool, "keep")).read().split() if os.path.exists(os.path.join(spool, "keep")) else []
    for job in arguments:
        known = jobs()
        if job not in known:
            fail("Unknown Job Id " + job, 153)
        if job in kept:
            fail("Unauthorized Request " + job, 159)
        if known[job]["state"] == "F" and name == "qdel":
            fail("Job has finished " + job, 35)
        with open(os.path.join(spool, "deleted"), "a") as file:
            file.write(job + " " + known[job]["state"] + "\n")
        if known[job]["state"] == "R":
            open(os.path.join(spool, job + ".TERM"), "w").close()
            continue
        gone = [job]
        while gone:  # those that wait for a job that never began go with it, on PBS
            entry = known[gone.pop()]
            entry["state"], entry["code"] = "F", 271
            save(entry)
            if name == "qdel":
                gone += [other for other in known if entry["id"] in known[other]["after"] and known[other]["state"] != "F"]
elif name == "sbatch":
    after = []
    for word in arguments[:-1]:
        if word.startswith("--dependency=afterany:"):
            after = word.partition(":")[2].split(":")
        elif word != "--parsable":
            fail("unrecognized option " + word, 1)
    text = open(arguments[-1]).read()
    number = 1 + max([int(job) for job in jobs()] + [{first} - 1])
    save({{"id": str(number), "text": text, "after": after, "variables": {{}}, "array": 0,
          "state": "H" if after else "Q", "code": None, "path": arguments[-1]}})
    print(number)
elif name == "squeue":
    words = {{"H": "PENDING", "Q": "PENDING", "R": "RUNNING"}}
    for job, entry in jobs().items():
        if job in arguments[-1].split(","):
            over = {{0: "COMPLETED", 271: "CANCELLED"}}.get(entry["code"], "FAILED")
            print(job + "|" + words.get(entry["state"], over))
elif name == "scontrol":
    print("localhost")
elif name in ("mpiexec", "pbsdsh"):
    import subprocess
    count, rank = None, None
    while arguments and arguments[0].startswith("-"):
        word = arguments.pop(0)
        if word == "-n":
            count = int(arguments.pop(0))
        elif word != "--":
            arguments.pop(0)
    if name == "pbsdsh":  # one process on the node of that line, with only the environment that PBS itself sets
        keep = {{key: value for key, value in os.environ.items() if key.startswith("PBS_") or key == "HOME"}}
        sys.exit(subprocess.call(arguments, env={{**keep, "PATH": "/usr/bin:/bin"}}))
    size = {{"PMI_SIZE": str(count)}}
    running = [subprocess.Popen(arguments, env={{**os.environ, **size, "PMI_RANK": str(i)}}) for i in range(count)]
    sys.exit(max([process.wait() for process in running]))
"""


class StandIn:
    """The server: a context manager that runs jobs in a thread while it is open."""

    def __init__(
        self, folder: Path, hosts: tuple[str, ...] = HOSTS, lines_per_host: int = 1, kill_delay: float = 3.0
    ) -> None:
        self.spool, self.bin, self.home = folder / "spool", folder / "bin", folder / "home"
        self.kill_delay = kill_delay
        self.first = local_slurm.free_job_number()
        """The number of the first job."""
        for path in (self.spool, self.bin, self.home):
            path.mkdir(parents=True)
        self.nodefile = folder / "nodefile"
        self.nodefile.write_text("".join(f"{host}\n" * lines_per_host for host in hosts))
        client = f"#!{sys.executable} -IS\n" + _CLIENT.format(spool=str(self.spool), first=self.first)
        for name in ("qsub", "qstat", "qdel", "mpiexec", "pbsdsh", "sbatch", "squeue", "scancel", "scontrol"):
            (self.bin / name).write_text(client)
            (self.bin / name).chmod(0o755)
        self.path = f"{self.bin}:/usr/local/bin:/usr/bin:/bin"
        self.over: Callable[[str], str | None] = lambda job: None
        """A walltime set by the test: returns `TERM` or `KILL` when a job's time is over, `USR1` to tell its script, else None."""
        self.overtime = 0.0
        """Seconds after its walltime at which a job is ended; long where a job has to stop by itself on a slow machine."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self.outputs: dict[str, str] = {}
        self.killed: list[str] = []

    def __enter__(self) -> StandIn:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def forget(self) -> None:
        """Forget all jobs, as a server does some time after their ends, and begin no others."""
        self.__exit__()
        for path in self.spool.glob("*.json"):
            path.unlink()

    def jobs(self) -> dict[str, dict]:
        found = [json.loads(path.read_text()) for path in sorted(self.spool.glob("*.json"))]
        return {job["id"]: job for job in sorted(found, key=lambda job: int(re.match(r"\d+", job["id"])[0]))}

    def wait(self, timeout: float = 900.0) -> dict[str, dict]:
        """Return when every job has ended, including jobs submitted by jobs."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            jobs = self.jobs()
            if jobs and all(job["state"] == "F" for job in jobs.values()):
                return jobs
            time.sleep(0.1)
        raise TimeoutError(f"{ {job: entry['state'] for job, entry in self.jobs().items()} } {self.outputs}")

    def _serve(self) -> None:
        while not self._stop.is_set():
            jobs = self.jobs()
            for job in jobs.values():
                if job["state"] in "QH" and all(jobs[other]["state"] == "F" for other in job["after"]):
                    self._run(job)
                    break
            time.sleep(0.05)

    def _set(self, job: dict, **changes: object) -> None:
        job.update(changes)
        path = self.spool / (re.match(r"\d+", job["id"])[0] + ".json")
        temporary = path.with_suffix(".server")
        temporary.write_text(json.dumps(job))
        temporary.rename(path)

    def _run(self, job: dict) -> None:
        self._set(job, state="R")
        script = self.spool / f"{job['id']}.SC"
        script.write_text(job["text"])
        hours, minutes, seconds = map(
            int, re.search(r"^#(?:PBS -l wall|SBATCH --)time=(\d+):(\d+):(\d+)$", job["text"], re.M).groups()
        )
        walltime = hours * 3600 + minutes * 60 + seconds
        members = [job["id"].replace("[]", f"[{i}]") for i in range(job["array"])] or [job["id"]]
        running = {}
        for i, member in enumerate(members):
            env = {
                "HOME": str(self.home), "USER": "standin", "PATH": self.path, "PBS_ENVIRONMENT": "PBS_BATCH",
                "PBS_JOBID": member, "PBS_NODEFILE": str(self.nodefile), "PBS_O_WORKDIR": os.getcwd(),
                "PBS_ARRAY_INDEX": str(i), **job["variables"],
            }  # fmt: skip
            if not job["array"]:
                del env["PBS_ARRAY_INDEX"]
            if "#SBATCH" in job["text"]:
                env = {name: value for name, value in env.items() if not name.startswith("PBS_")}
                env |= {"SLURM_JOB_ID": member, "SLURM_JOB_NODELIST": "localhost"}
            out = (self.spool / f"{member}.OU").open("wb")
            running[member] = subprocess.Popen(
                ["bash", str(script)],
                cwd=self.home,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            out.close()
        deadline = time.monotonic() + walltime + self.overtime
        told: set[str] = set()
        while any(process.poll() is None for process in running.values()):
            late = time.monotonic() > deadline or self._stop.is_set()
            for member, process in running.items():
                deleted = (self.spool / f"{job['id']}.TERM").exists()
                how = "TERM" if late or deleted else self.over(member)
                if how is None or process.poll() is not None:
                    continue
                if how == "USR1":
                    if member not in told:
                        process.send_signal(signal.SIGUSR1)
                        told.add(member)
                else:
                    self._end(member, process, self.kill_delay if how == "TERM" else 0.0)
            time.sleep(0.05)
        for member in members:
            self.outputs[member] = (self.spool / f"{member}.OU").read_text(errors="replace")
        self._set(job, state="F", code=max((process.returncode for process in running.values()), key=abs))

    def _end(self, member: str, process: subprocess.Popen, kill_delay: float) -> None:
        if kill_delay:
            self._kill(process.pid, signal.SIGTERM)
        limit = time.monotonic() + kill_delay
        while process.poll() is None and time.monotonic() < limit:
            time.sleep(0.05)
        if process.poll() is None:
            self.killed.append(member)
            self._kill(process.pid, signal.SIGKILL)
            process.wait()

    @staticmethod
    def _kill(top: int, number: signal.Signals) -> None:
        table = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
        pairs = [tuple(map(int, line.split())) for line in table.splitlines()]
        pids = [top]
        for pid in pids:
            pids += [child for child, parent in pairs if parent == pid]
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
