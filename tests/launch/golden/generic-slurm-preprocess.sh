#!/bin/bash
#SBATCH --job-name=preprocess-era5-1deg
#SBATCH --partition=gpu
#SBATCH --time=06:00:00
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=/scratch/me/runs/era5-1deg/jobs/logs/%x-%j.log
#SBATCH --mem=128G

# preprocess of era5-1deg on generic-slurm: 1 node × 1 CPU process = 1 process
# Written by `credit-like submit`.

export CREDIT_LIKE_NODES=1  # for the lines below
set -uo pipefail
cd /home/me/credit-like || exit 1

experiment=/scratch/me/runs/era5-1deg/jobs/preprocess-1.yml
save_loc=/scratch/me/runs/era5-1deg
python=/opt/env/bin/python

job="${SLURM_ARRAY_JOB_ID:-${SLURM_JOB_ID:?}}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"
"$python" -m credit_like.launch.chain begin "$save_loc" preprocess "$job" preprocess-1 || exit 1
status=0
"$python" -m credit_like.cli preprocess "$experiment" || status=$?
"$python" -m credit_like.launch.chain end "$save_loc" preprocess "$job" "$status"
