#!/bin/bash

# rollout of era5-1deg on local: 1 node × 2 CPU processes = 2 processes; 3 jobs, 6 shares
# Written by `credit-like submit`.

export CREDIT_LIKE_NODES=1  # for the lines below
set -uo pipefail
cd /home/me/credit-like || exit 1

experiment=/scratch/me/runs/era5-1deg/jobs/rollout-1.yml
save_loc=/scratch/me/runs/era5-1deg
python=/opt/env/bin/python
per_node=2
shares=6

job="${CREDIT_LIKE_JOB:?}"
"$python" -m credit_like.launch.chain begin "$save_loc" rollout "$job" rollout-1 || exit 1
index=${CREDIT_LIKE_INDEX:-0}

pids=()
for (( k = 0; k < per_node; k++ )); do
    share=$((index * per_node + k + 1))
    (( share <= shares )) || break
    "$python" -m credit_like.cli rollout "$experiment" --share "$share/$shares" &
    pids+=($!)
done
status=0
for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
"$python" -m credit_like.launch.chain end "$save_loc" rollout "$job" "$status"
