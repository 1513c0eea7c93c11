#!/usr/bin/env bash
# Fine-tune Qwen3 on the GPUs of one machine.
#
#   bash examples/finetune_qwen3.sh
#   MODEL_PATH=models/qwen3-8b DATA_PATH=chats.jsonl GPUS=4 bash examples/finetune_qwen3.sh --epochs 2
#
# MODEL_PATH  folder or hub name of the model
# DATA_PATH   chats or questions with answers: a file, folder, glob, or data set of the Hugging Face Hub
# GPUS        how many; 0, the default, takes all
# Further options go to llmq-train; they override those below.
set -euo pipefail

llmq-train --model "${MODEL_PATH:-Qwen/Qwen3-8B}" --data "${DATA_PATH:-gsm8k}" --chat-template tokenizer \
    --gpus "${GPUS:-0}" --restart-failed 3 --name qwen3 \
    --seq-len 1024 --learning-rate 1e-5 --warmup-ratio 0.03 --lr-schedule cosine "$@"
