#!/bin/bash

# evaluate of era5-1deg on local: 1 node × 1 CPU process = 1 process
# Written by `credit-like submit`.

export CREDIT_LIKE_NODES=1  # for the lines below
set -uo pipefail
cd /home/me/credit-like || exit 1

experiment=/scratch/me/runs/era5-1deg/jobs/evaluate-1.yml
save_loc=/scratch/me/runs/era5-1deg
python=/opt/env/bin/python

job="${CREDIT_LIKE_JOB:?}"
"$python" -m credit_like.launch.chain begin "$save_loc" evaluate "$job" evaluate-1 || exit 1
status=0
"$python" -m credit_like.cli evaluate "$experiment" || status=$?
"$python" -m credit_like.launch.chain end "$save_loc" evaluate "$job" "$status"
