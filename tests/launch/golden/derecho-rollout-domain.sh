#!/bin/bash
#PBS -N rollout-era5-1deg
#PBS -A NAML0001
#PBS -q main
#PBS -l walltime=12:00:00
#PBS -j oe
#PBS -k eod
#PBS -o /scratch/me/runs/era5-1deg/jobs/logs/
#PBS -l select=1:ncpus=64:ngpus=4:mem=480GB
#PBS -J 0-2

# rollout of era5-1deg on derecho: 1 node × 4 GPUs = 4 processes; 3 jobs, 6 shares
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

experiment=/scratch/me/runs/era5-1deg/jobs/rollout-1.yml
save_loc=/scratch/me/runs/era5-1deg
python=/opt/env/bin/python
per_node=2
shares=6

job="${PBS_JOBID:?}"
"$python" -m credit_like.launch.chain begin "$save_loc" rollout "$job" rollout-1 || exit 1
index=${PBS_ARRAY_INDEX:-${CREDIT_LIKE_INDEX:-0}}
IFS=, read -ra devices <<< "${CUDA_VISIBLE_DEVICES:-0,1,2,3}"

pids=()
for (( k = 0; k < per_node; k++ )); do
    share=$((index * per_node + k + 1))
    (( share <= shares )) || break
    CUDA_VISIBLE_DEVICES=$(IFS=,; echo "${devices[*]:k * 2:2}") "$python" -m torch.distributed.run --standalone --local-addr=127.0.0.1 --nproc-per-node=2 \
        -m credit_like.cli rollout "$experiment" --share "$share/$shares" &
    pids+=($!)
done
status=0
for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
"$python" -m credit_like.launch.chain end "$save_loc" rollout "$job" "$status"
