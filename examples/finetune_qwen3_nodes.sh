#!/usr/bin/env bash
# Fine-tune Qwen3 on several machines: run this on each of them, with the same variables but for NODE_RANK.
#
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node1 MASTER_PORT=29400 bash examples/finetune_qwen3_nodes.sh
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=node1 MASTER_PORT=29400 bash examples/finetune_qwen3_nodes.sh
#
# MODEL_PATH  folder or hub name of the model, the same everywhere
# DATA_PATH   chats or questions with answers: a file, folder, glob, or data set of the Hugging Face Hub
# NNODES, NODE_RANK         how many machines there are, and which this is, from 0
# MASTER_ADDR, MASTER_PORT  machine 0, and a port that is free on it
# GPUS        how many on each machine; 0, the default, takes all
# PROCS       instead of GPUs: processes on each machine, with --device cpu
# LLMQ_JOB_TOKEN  where the machines do not share your home folder: the same random text on each
# The folder runs/ is shared by all machines. Further options go to llmq-train; they override those below.
set -euo pipefail

if [ -n "${PROCS:-}" ]; then ranks=(--procs "$PROCS"); else ranks=(--gpus "${GPUS:-0}"); fi
llmq-launch --nnodes "${NNODES:-1}" --node-rank "${NODE_RANK:-0}" \
    --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${MASTER_PORT:-29400}" "${ranks[@]}" -- \
    --model "${MODEL_PATH:-Qwen/Qwen3-8B}" --data "${DATA_PATH:-gsm8k}" --chat-template tokenizer \
    --restart-failed 3 --name qwen3 \
    --seq-len 1024 --learning-rate 1e-5 --warmup-ratio 0.03 --lr-schedule cosine "$@"
