#!/bin/bash
#SBATCH --job-name=rollout-era5-1deg
#SBATCH --partition=gpu
#SBATCH --time=06:00:00
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=/scratch/me/runs/era5-1deg/jobs/logs/%x-%j.log
#SBATCH --gres=gpu:4
#SBATCH --mem=256G
#SBATCH --array=0-2

# rollout of era5-1deg on generic-slurm: 1 node × 4 GPUs = 4 processes; 3 jobs, 12 shares
# Written by `credit-like submit`.

export CREDIT_LIKE_NODES=1  # for the lines below
set -uo pipefail
cd /home/me/credit-like || exit 1

experiment=/scratch/me/runs/era5-1deg/jobs/rollout-1.yml
save_loc=/scratch/me/runs/era5-1deg
python=/opt/env/bin/python
per_node=4
shares=12

job="${SLURM_ARRAY_JOB_ID:-${SLURM_JOB_ID:?}}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"
"$python" -m credit_like.launch.chain begin "$save_loc" rollout "$job" rollout-1 || exit 1
index=${SLURM_ARRAY_TASK_ID:-${CREDIT_LIKE_INDEX:-0}}
IFS=, read -ra devices <<< "${CUDA_VISIBLE_DEVICES:-0,1,2,3}"

pids=()
for (( k = 0; k < per_node; k++ )); do
    share=$((index * per_node + k + 1))
    (( share <= shares )) || break
    CUDA_VISIBLE_DEVICES=${devices[k]:?} "$python" -m credit_like.cli rollout "$experiment" --share "$share/$shares" &
    pids+=($!)
done
status=0
for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
"$python" -m credit_like.launch.chain end "$save_loc" rollout "$job" "$status"
