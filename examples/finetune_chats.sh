#!/usr/bin/env bash
# Fine-tune a chat model: look at what is trained, check that the run fits, then train the assistant's answers.
#
#   bash examples/finetune_chats.sh
#   MODEL=my-model DATA=chats.jsonl bash examples/finetune_chats.sh --epochs 2 --learning-rate 5e-6
#
# MODEL  folder or hub name of a model whose tokenizer has a chat template
# DATA   chats or questions with answers: a file, folder, glob, or data set of the Hugging Face Hub
# Further options go to llmq-train; they override those below.
set -euo pipefail
model=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}
data=${DATA:-gsm8k}

# --chat-template tokenizer makes chats of questions and answers; rows that are chats use that template anyway.
train=(llmq-train --model "$model" --data "$data" --chat-template tokenizer --name chats
    --seq-len 1024 --learning-rate 1e-5 --warmup-ratio 0.03 --lr-schedule cosine "$@")

"${train[@]}" --dry-run  # tokens, steps, memory and disk, before anything is tokenized or allocated
"${train[@]}"
