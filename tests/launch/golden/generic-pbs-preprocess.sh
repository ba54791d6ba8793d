#!/bin/bash
#PBS -N preprocess-era5-1deg
#PBS -l walltime=06:00:00
#PBS -l place=scatter
#PBS -j oe
#PBS -k oed
#PBS -o /scratch/me/runs/era5-1deg/jobs/logs/
#PBS -l select=1:ncpus=32

# preprocess of era5-1deg on generic-pbs: 1 node × 1 CPU process = 1 process
# Written by `credit-like submit`.

export CREDIT_LIKE_NODES=1  # for the lines below
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
