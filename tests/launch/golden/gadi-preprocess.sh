#!/bin/bash
#PBS -N preprocess-era5-1deg
#PBS -P xy12
#PBS -q normal
#PBS -l walltime=48:00:00
#PBS -l jobfs=100GB
#PBS -l storage=gdata/xy12+scratch/xy12
#PBS -l wd
#PBS -j oe
#PBS -k oed
#PBS -o /scratch/me/runs/era5-1deg/jobs/logs/
#PBS -l ncpus=48
#PBS -l mem=190GB

# preprocess of era5-1deg on gadi: 1 node × 1 CPU process = 1 process
# Written by `credit-like submit`.

export CREDIT_LIKE_NODES=1  # for the lines below
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
set -uo pipefail
cd /home/me/credit-like || exit 1

experiment=/scratch/me/runs/era5-1deg/jobs/preprocess-1.yml
save_loc=/scratch/me/runs/era5-1deg
python=/opt/env/bin/python

job="${PBS_JOBID:?}"
"$python" -m credit_like.launch.chain begin "$save_loc" preprocess "$job" preprocess-1 || exit 1
status=0
"$python" -m credit_like.cli preprocess "$experiment" || status=$?
"$python" -m credit_like.launch.chain end "$save_loc" preprocess "$job" "$status"
