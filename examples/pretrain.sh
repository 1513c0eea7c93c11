#!/usr/bin/env bash
# Pre-train from random weights: text to token files, token files to a model, its log to a plot.
#
#   bash examples/pretrain.sh
#   MODEL=my-shape TEXT='texts/*.txt' bash examples/pretrain.sh --steps 2000 --batch-size 32
#
# MODEL  folder or hub name: its config.json gives the shape, its tokenizer the ids (its weights are not read)
# TEXT   file, folder or glob; without it, tiny-shakespeare is downloaded
# Further options go to llmq-train; they override those below.
set -euo pipefail
model=${MODEL:-Qwen/Qwen2.5-0.5B}

if [ -n "${TEXT:-}" ]; then source=(--input "$TEXT"); else source=(--dataset tiny-shakespeare); fi
tokenize-data "${source[@]}" --tokenizer "$model" --out-dir data/pretrain

# --matmul-dtype auto times each kind of matmul on a GPU and uses fp8 where it is faster; elsewhere it is bf16.
llmq-train --model "$model" --from-scratch --name pretrain \
    --train-file 'data/pretrain/train*.bin' --eval-file 'data/pretrain/eval*.bin' \
    --matmul-dtype auto --opt-m-dtype bf16 --opt-v-dtype bf16 \
    --steps 200 --learning-rate 6e-4 --warmup-ratio 0.1 --lr-schedule cosine "$@"

llmq-plot runs/pretrain -o runs/pretrain/loss.png
