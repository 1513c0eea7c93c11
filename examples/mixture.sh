#!/usr/bin/env bash
# Train on a mixture: each source gets its share of the tokens, whatever its size.
#
#   bash examples/mixture.sh
#   MODEL=my-model CHATS=chats.jsonl TEXT='notes/*.jsonl' bash examples/mixture.sh --steps 500
#
# MODEL  folder or hub name
# CHATS  chats or questions with answers, 30% of the tokens
# TEXT   rows of text, 70% of the tokens
# Further options go to llmq-train; they override those below.
set -euo pipefail

# The dataset section of the log has each source's share, and how often it is repeated.
llmq-train --model "${MODEL:-Qwen/Qwen2.5-0.5B}" --name mixture \
    --data "${CHATS:-gsm8k}" --weight 0.3 \
    --data "${TEXT:-wikitext:wikitext-2-raw-v1:train[:10%]}" --weight 0.7 \
    --seq-len 1024 --steps 100 --learning-rate 1e-5 --warmup-ratio 0.1 "$@"
