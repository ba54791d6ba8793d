#!/bin/bash
#SBATCH --job-name=train-era5-1deg
#SBATCH --partition=gpu
#SBATCH --time=06:00:00
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=/scratch/me/runs/era5-1deg/jobs/logs/%x-%j.log
#SBATCH --gres=gpu:4
#SBATCH --mem=256G

# train of era5-1deg on generic-slurm: 2 nodes × 4 GPUs = 8 processes = data 8 × tensor 1 × domain 1
# Written by `credit-like submit`.

export CREDIT_LIKE_NODES=2  # for the lines below
set -uo pipefail
cd /home/me/credit-like || exit 1

experiment=/scratch/me/runs/era5-1deg/jobs/train-1.yml
save_loc=/scratch/me/runs/era5-1deg
python=/opt/env/bin/python
script=/scratch/me/runs/era5-1deg/jobs/train-1.sh
nodes=2
per_node=4
walltime=21600
stop_before=300

# One node: torchrun's agent, and a watch that tells its workers when to stop, and ends them after another node's.
node() {
    local rank=$1 master=$2 port=$3 deadline=$4 stop=$5 agent watch status=0
    trap '' TERM USR1  # for the workers to take at the end of a step, not for the agent or this shell
    [[ $rank == launcher ]] && rank=${PMI_RANK:-${OMPI_COMM_WORLD_RANK:-${SLURM_PROCID:?}}}
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
job="${SLURM_ARRAY_JOB_ID:-${SLURM_JOB_ID:?}}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"
started=$(date +%s)
"$python" -m credit_like.launch.chain begin "$save_loc" train "$job" train-1
case $? in 0) ;; 3) exit 0 ;; *) exit 1 ;; esac

# The next job waits for the end of this one, however it comes.
"$python" -m credit_like.launch.chain extend "$save_loc" train "$job" -- sbatch --parsable "--dependency=afterany:$job" "$script"

mapfile -t hosts < <(scontrol show hostnames "${SLURM_JOB_NODELIST:?}")
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

( trap '' TERM USR1; exec srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --cpu-bind=none bash "$script" node launcher "${hosts[0]}" "$port" "$deadline" "$stop" ) &
status=0
await $! || status=$?
rm -f "$stop" "$stop.failed"
"$python" -m credit_like.launch.chain end "$save_loc" train "$job" "$status"
