#!/bin/bash
#PBS -N train-era5-1deg
#PBS -P xy12
#PBS -q gpuvolta
#PBS -l walltime=48:00:00
#PBS -l jobfs=100GB
#PBS -l storage=gdata/xy12+scratch/xy12
#PBS -l wd
#PBS -j oe
#PBS -k oed
#PBS -o /scratch/me/runs/era5-1deg/jobs/logs/
#PBS -l ncpus=96
#PBS -l ngpus=8
#PBS -l mem=760GB

# train of era5-1deg on gadi: 2 nodes × 4 GPUs = 8 processes = data 8 × tensor 1 × domain 1
# Written by `credit-like submit`.

export CREDIT_LIKE_NODES=2  # for the lines below
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
set -uo pipefail
cd /home/me/credit-like || exit 1

experiment=/scratch/me/runs/era5-1deg/jobs/train-1.yml
save_loc=/scratch/me/runs/era5-1deg
python=/opt/env/bin/python
script=/scratch/me/runs/era5-1deg/jobs/train-1.sh
nodes=2
per_node=4
walltime=172800
stop_before=300

# One node: torchrun's agent, and a watch that tells its workers when to stop, and ends them after another node's.
node() {
    local rank=$1 master=$2 port=$3 deadline=$4 stop=$5 agent watch status=0
    trap '' TERM USR1  # for the workers to take at the end of a step, not for the agent or this shell
    [[ $rank == launcher ]] && rank=${PMI_RANK:-${OMPI_COMM_WORLD_RANK:-${SLURM_PROCID:?}}}
    export PATH=$CREDIT_LIKE_PATH LD_LIBRARY_PATH=$CREDIT_LIKE_LD_LIBRARY_PATH  # pbsdsh passes none
    "$python" -m torch.distributed.run --nnodes="$nodes" --nproc-per-node="$per_node" --node-rank="$rank" \
        --master-addr="$master" --master-port="$port" --signals-to-handle=SIGINT \
        -m credit_like.cli train "$experiment" &
    agent=$!
    (
        until [[ -e $stop || -e $stop.failed ]] || (( $(date +%s) >= deadline )); do sleep 1; done
        until [[ -e $stop.failed ]]; do pkill -USR1 -P "$agent"; sleep 5; done
        sleep 60; pkill -KILL -P "$agent"; kill -KILL "$agent"
    ) >/dev/null 2>&1 &
    watch=$!
    wait "$agent" || status=$?
    { kill -KILL "$watch"; wait "$watch"; } 2>/dev/null
    (( status == 0 )) || touch "$stop.failed"
    return "$status"
}
if [[ ${1:-} == node ]]; then node "${@:2}"; exit $?; fi

# The job: is there anything left to do?
job="${PBS_JOBID:?}"
started=$(date +%s)
"$python" -m credit_like.launch.chain begin "$save_loc" train "$job" train-1
case $? in 0) ;; 3) exit 0 ;; *) exit 1 ;; esac

mapfile -t hosts < <(awk '!seen[$0]++' "${PBS_NODEFILE:?}")
if (( ${#hosts[@]} != nodes )); then
    echo "expected $nodes nodes, got ${#hosts[@]}: ${hosts[*]}" >&2
    exit 1
fi
digits=${job%%[!0-9]*}
port=$((20000 + 10#${digits:-$$} % 20000))
deadline=$((started + walltime - stop_before))
stop=$save_loc/jobs/stop.$job
rm -f "$stop" "$stop.failed"
interrupted=no
trap 'interrupted=yes; touch "$stop"' TERM USR1

# Wait for a child through any number of signals; its exit status.
await() {
    local status
    while true; do
        interrupted=no status=0
        wait "$1" || status=$?
        [[ $interrupted == yes ]] || return "$status"
    done
}

pids=()
for (( rank = 0; rank < nodes; rank++ )); do
    # pbsdsh counts the lines of the node file, of which a node may have several
    slot=$(awk -v host="${hosts[rank]}" '$0 == host { print NR - 1; exit }' "$PBS_NODEFILE")
    ( trap '' TERM USR1; exec pbsdsh -n "$slot" -- env "CREDIT_LIKE_PATH=$PATH" \
        "CREDIT_LIKE_LD_LIBRARY_PATH=${LD_LIBRARY_PATH:-}" \
        bash -l "$script" node "$rank" "${hosts[0]}" "$port" "$deadline" "$stop" ) &
    pids+=($!)
done
status=0
for pid in "${pids[@]}"; do await "$pid" || status=$?; done
rm -f "$stop" "$stop.failed"
"$python" -m credit_like.launch.chain end "$save_loc" train "$job" "$status"
