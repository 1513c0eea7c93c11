#!/usr/bin/env bash
# Compare precision recipes: the same data, seed and schedule in bf16 and in fp8, then the losses side by side.
#
#   bash examples/compare_recipes.sh
#   MODEL=my-shape TEXT='texts/*.txt' bash examples/compare_recipes.sh --steps 500
#
# MODEL  folder or hub name: its config.json gives the shape, its tokenizer the ids
# TEXT   file, folder or glob; without it, tiny-shakespeare is downloaded
# Further options go to every llmq-train; they override those below.
set -euo pipefail
model=${MODEL:-Qwen/Qwen2.5-0.5B}

if [ -n "${TEXT:-}" ]; then source=(--input "$TEXT"); else source=(--dataset tiny-shakespeare); fi
tokenize-data "${source[@]}" --tokenizer "$model" --out-dir data/recipes

compare() { # NAME OPTIONS...: one run of that name
    llmq-train --model "$model" --from-scratch --train-file 'data/recipes/train*.bin' \
        --eval-file 'data/recipes/eval*.bin' --steps 160 --learning-rate 6e-4 --warmup-ratio 0.1 --lr-schedule cosine \
        --eval-every-n-steps 20 --name "$@"
}
compare bf16 "$@"
compare bf16-seed-1 --seed 1 "$@"  # how far two runs differ by chance
compare e4m3 --matmul-dtype e4m3 "$@"

# The table has each run's mean loss over its last steps, and the difference from the first run.
llmq-plot runs/bf16 runs/bf16-seed-1 runs/e4m3 -o runs/recipes.png
