#!/bin/bash
#SBATCH --job-name=evaluate-era5-1deg
#SBATCH --account=m1234_g
#SBATCH --qos=regular
#SBATCH --time=12:00:00
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=/scratch/me/runs/era5-1deg/jobs/logs/%x-%j.log
#SBATCH --constraint=cpu
#SBATCH --cpus-per-task=256

# evaluate of era5-1deg on perlmutter: 1 node × 1 CPU process = 1 process
# Written by `credit-like submit`.

export CREDIT_LIKE_NODES=1  # for the lines below
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

experiment=/scratch/me/runs/era5-1deg/jobs/evaluate-1.yml
save_loc=/scratch/me/runs/era5-1deg
python=/opt/env/bin/python

job="${SLURM_ARRAY_JOB_ID:-${SLURM_JOB_ID:?}}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"
"$python" -m credit_like.launch.chain begin "$save_loc" evaluate "$job" evaluate-1 || exit 1
status=0
"$python" -m credit_like.cli evaluate "$experiment" || status=$?
"$python" -m credit_like.launch.chain end "$save_loc" evaluate "$job" "$status"
