#!/usr/bin/env bash
# Fine-tune Qwen3 under Slurm, with a task for each GPU: sbatch examples/slurm.sh
#
#   sbatch --nodes 4 examples/slurm.sh --epochs 2
#   MODEL_PATH=models/qwen3-8b DATA_PATH=chats.jsonl sbatch examples/slurm.sh
#
# Ahead of the time limit Slurm sends SIGUSR1 to the tasks: they end their step, save, and exit with 75. The job then
# goes back into the queue and resumes from there. Options after the script go to llmq-train.
#SBATCH --job-name=llmq
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=04:00:00
#SBATCH --signal=USR1@180
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log
set -uo pipefail

srun --kill-on-bad-exit=0 llmq-train --model "${MODEL_PATH:-Qwen/Qwen3-8B}" --data "${DATA_PATH:-gsm8k}" \
    --chat-template tokenizer --name "slurm-$SLURM_JOB_ID" --continue auto \
    --seq-len 1024 --learning-rate 1e-5 --warmup-ratio 0.03 --lr-schedule cosine "$@"
code=$?

if [ "$code" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
