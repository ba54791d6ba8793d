"""torchrun's agent in little, for tests that need it to start at once: one worker per process of the node."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for option in ("--nnodes", "--nproc-per-node", "--node-rank"):
        parser.add_argument(option, type=int, required=True)
    for option in ("--master-addr", "--master-port", "--signals-to-handle"):
        parser.add_argument(option, required=True)
    parser.add_argument("-m", dest="module", required=True)
    arguments, rest = parser.parse_known_args()
    world = arguments.nnodes * arguments.nproc_per_node
    workers = []
    for local in range(arguments.nproc_per_node):
        rank = arguments.node_rank * arguments.nproc_per_node + local
        environ = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(local)}
        command = [sys.executable, "-S", "-m", arguments.module, *rest]
        workers.append(subprocess.Popen(command, env=environ, start_new_session=True))
    raise SystemExit(max(abs(worker.wait()) for worker in workers))
