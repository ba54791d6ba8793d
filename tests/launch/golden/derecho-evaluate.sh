#!/bin/bash
#PBS -N evaluate-era5-1deg
#PBS -A NAML0001
#PBS -q main
#PBS -l walltime=12:00:00
#PBS -j oe
#PBS -k eod
#PBS -o /scratch/me/runs/era5-1deg/jobs/logs/
#PBS -l select=1:ncpus=128:mem=235GB

# evaluate of era5-1deg on derecho: 1 node × 1 CPU process = 1 process
# Written by `credit-like submit`.

export CREDIT_LIKE_NODES=1  # for the lines below
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

experiment=/scratch/me/runs/era5-1deg/jobs/evaluate-1.yml
save_loc=/scratch/me/runs/era5-1deg
python=/opt/env/bin/python

job="${PBS_JOBID:?}"
"$python" -m credit_like.launch.chain begin "$save_loc" evaluate "$job" evaluate-1 || exit 1
status=0
"$python" -m credit_like.cli evaluate "$experiment" || status=$?
"$python" -m credit_like.launch.chain end "$save_loc" evaluate "$job" "$status"
