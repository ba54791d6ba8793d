#!/bin/bash
#PBS -N train-era5-1deg
#PBS -A NAML0001
#PBS -q main
#PBS -l walltime=12:00:00
#PBS -j oe
#PBS -k eod
#PBS -o /scratch/me/runs/era5-1deg/jobs/logs/
#PBS -l select=8:ncpus=64:ngpus=4:mem=480GB

# train of era5-1deg on derecho: 8 nodes × 4 GPUs = 32 processes = data 32 × tensor 1 × domain 1
# Written by `credit-like submit`.

export CREDIT_LIKE_NODES=8  # for the lines below
module reset
module load cuda cray-mpich
export NCCL_IB_DISABLE=1
export NCCL_CROSS_NIC=1
export NCCL_NET_GDR_LEVEL=PHB
export FI_CXI_DISABLE_HOST_REGISTER=1
export FI_CXI_DEFAULT_CQ_SIZE=131072
export FI_MR_CACHE_MONITOR=userfaultfd
export NCCL_SOCKET_IFNAME=hsn
export GLOO_SOCKET_IFNAME=hsn0
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
set -uo pipefail
cd /home/me/credit-like || exit 1

experiment=/scratch/me/runs/era5-1deg/jobs/train-1.yml
save_loc=/scratch/me/runs/era5-1deg
python=/opt/env/bin/python
script=/scratch/me/runs/era5-1deg/jobs/train-1.sh
nodes=8
per_node=4
walltime=43200
stop_before=600

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
job="${PBS_JOBID:?}"
started=$(date +%s)
"$python" -m credit_like.launch.chain begin "$save_loc" train "$job" train-1
case $? in 0) ;; 3) exit 0 ;; *) exit 1 ;; esac

# The next job waits for the end of this one, however it comes.
"$python" -m credit_like.launch.chain extend "$save_loc" train "$job" -- qsub -W "depend=afterany:$job" "$script"

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

( trap '' TERM USR1; exec mpiexec -n "$nodes" --ppn 1 --cpu-bind none bash "$script" node launcher "${hosts[0]}" "$port" "$deadline" "$stop" ) &
status=0
await $! || status=$?
rm -f "$stop" "$stop.failed"
"$python" -m credit_like.launch.chain end "$save_loc" train "$job" "$status"
