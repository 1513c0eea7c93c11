"""Wrong inputs of all commands, and of `llmq.train` and `llmq.generate`: what is given, and what the error says.

A line is a command line, and words of the message after a bar. A block is of one command and one exit code, and `BASE`
is given before each of its lines. In Python a row has keywords.
"""

from pathlib import Path
from typing import Any

import numpy as np

BASE = {
    "llmq-train": "--model m --train-file train.bin --device cpu --steps 1 --batch-size 1 --seq-len 16",
    "llmq-generate": "--model m --device cpu --max-tokens 2",
    "tokenize-data": "--model m --out-dir out",
    "llmq-merge": "--model m --out-dir out",
    "llmq-eval": "--model m --data rows.jsonl --device cpu",
    "llmq-estimate": "--model m --gpu H200",
    "llmq-bench": "--device cpu --models tiny_llama3_50m",
    "llmq-bench op": "op --device cpu --models tiny_llama3_50m",
    "llmq-plot": "",
    "llmq-report": "",
    "llmq-doctor": "",
    "llmq-export-wandb": "--offline",
    "llmq-launch": "",
}
COMMAND_LINES = {
    ("llmq-train", 2): r"""
--seq-len 0 | --seq-len 0 is below the least value: use 1
--bf16-layers layers.9 --matmul-dtype e4m3 | --bf16-layers layers.9: no such layer or site
--bf16-layers 9,9 --matmul-dtype e4m3 | --bf16-layers 9,9: two numbers are the first
--bf16-layers ' ' --matmul-dtype e4m3 | --bf16-layers : no such layer or site in a
--zero-level 0 --shard-weights | --zero-level 0 shares out nothing, and
--memcpy-all-gather | --memcpy-all-gather: copy engines are parts
--fused-update | --fused-update needs one micro-batch a step
--fused-update --grad-accumulation 1 | --fused-update: the norm that --grad-clip 1
--seq-tiles 7 | --seq-tiles 7 does not divide the 16 tokens
--lmhead-chunks 7 | --lmhead-chunks 7 does not divide the 16
--attn-bwd-chunks 3 | --attn-bwd-chunks 3 does not divide
--offload-quants --no-persistent-quants | --no-persistent-quants leaves no copies for
--fit-may states | --fit-may states says what --fit may choose
--host-memory-limit -1GiB | --host-memory-limit -1GiB: give a size above
--gpu H200 | --gpu H200 plans for a GPU, but --device is
--packing most | --packing most: give windows, true (the same
--packing --no-packing | --packing and --no-packing are both given
--max-docs 3 | --max-docs 3 is for packed rows: add
--model m-places --from-scratch --seq-len 32 | rows of 32 tokens have more positions than the model's 24
--max-docs 99 --packing | --max-docs 99 is more than the --seq-len 16
--weight 1 --weight 2 | --weight is given 2 times and --train-file 1
--weight -1 | the weight -1.0 is not a number above 0
--eval-fraction 0.5 | --eval-fraction 0.5 is for --data: give that
--lora-rank 4 --lora-targets q_porj | --lora-targets q_porj: no such linear map in
--lora-rank 4 --lora-targets '' | --lora-targets '': no such linear map in a
--lora-rank 4 --lora-targets 'layers.[0-' | --lora-targets layers.[0-: no such linear map
--lora-rank 4 --lora-rank-pattern q_proj | --lora-rank-pattern q_proj: write
--lora-rank 4 --lora-rank-pattern q_proj=0 | --lora-rank-pattern q_proj=0: write PATTERN=NUMBER
--lora-rank 4 --lora-rank-pattern =3 | --lora-rank-pattern =3: write PATTERN=NUMBER
--lora-rank 4 --lora-rank-pattern q_proj=1.5 | --lora-rank-pattern q_proj=1.5: write PATTERN=NUMBER
--lora-rank 4 --lora-rank-pattern q_proj=2, | : write PATTERN=NUMBER with a number above 0
--lora-rank 4 --lora-rank-pattern q_proj=4,q_proj=2 | --lora-rank-pattern gives q_proj twice, as 4 and as 2:
--lora-rank 4 --lora-alpha-pattern q_proj=4,q_proj=2 | --lora-alpha-pattern gives q_proj twice, as 4
--optimizer sgd --beta-1 0.9 | --beta-1 0.9 is for --optimizer adamw
--momentum 0.9 --nesterov | --nesterov is for --optimizer sgd
--optimizer sgd --nesterov | looks ahead along the momentum, which is 0: add --momentum 0.9
--optimizer sgd --momentum 0.9 --opt-v-dtype bf16 | is of no use, as the optimizer keeps m (Momentum)
--optimizer sgd --opt-m-dtype int8 | keeps nothing but the master weights
--optimizer sgd --momentum 0.9 --offload-opt-v | --offload-opt-v frees no memory, as the optimizer keeps m (Momentum)
--optimizer sgd --offload-opt-m | --offload-opt-m frees no memory
--optimizer sgd --offload-optimizer | --offload-optimizer frees no memory, as the optimizer keeps nothing
--memory-limit 0GiB | --memory-limit 0GiB: give a size above 0
--lora-rank 4 --lora-alpha-pattern q_proj=nan | --lora-alpha-pattern q_proj=nan: write
--lora-rank 4 --lora-rank-pattern nothing=3 | --lora-rank-pattern nothing: no linear map
--lora-rank 4 --train-also nothing | --train-also nothing: nothing in the model has
--lora-rank 4 --adalora --adalora-target-rank 9 | --adalora-target-rank 9 is not below
--lora-rank 999999 | --lora-rank 999999 is larger than
--ia3 nothing | --ia3 nothing: no such linear map in a model
--lisa 2 | LISA is no longer there: use --lora-rank 16
--prompt-tuning 16 | --seq-len 16 counts the 16 virtual tokens
--prompt-tuning 2 --merge | --merge adds adapters to weights
--train-only nothing | --train-only nothing: nothing in the model
--sample-prompts prompts.txt --eval-every-n-steps 0 | --sample-prompts prompts.txt shows
--sample-prompts prompts-ids.jsonl | token 100000 of a prompt is not in the
--sample-length 1 | --sample-length 1 is below the least value: use 2
--sample-length 9999999 | positions of
--sample-temperature -1 | --sample-temperature -1
--reset data | --reset data is for a run that resumes: add
--revision v1 | --revision v1 is for models of the Hub, but m
--model Qwen2.5-0.6B | --model Qwen2.5-0.6B: no such folder, and
--model Qwen2.5-7B | Qwen2.5-7B is a preset, which is a shape
--model Qwen2.5-7B --from-scratch --revision main | --revision main is for models of the Hub, but
--model 'org name' | --model org name: no such folder, and there
--model 'a/b c' | 'a/b c' is neither a local folder nor a name
--model ü/ü | 'ü/ü' is neither a local folder nor a name on
--optim adafactor | unknown option --optim: use --optimizer adamw or sgd
--overwrite true | unexpected true: a flag takes no value
--from-scratch=1 | Option '--from-scratch' does not take a value.
--lr | Option '--lr' requires an argument.
--model | Option '--model' requires an argument.
--config m | --config m cannot be read: Is a directory
--config unknown.yaml | unknown.yaml:3: unknown option --bacth-size
--config /dev/null/x | --config /dev/null/x cannot be read: Not a
""",
    ("llmq-train", 3): r"""
--model ./absent | there is no folder ./absent
--model org/absent | there is no folder org/absent, and the model
--model text.txt | text.txt is a file: give the folder that it
--model m-none | m-none/config.json is absent: a Hugging Face
--model m-json | m-json/config.json is not valid JSON
--model m-moe | num_experts (8): mixtures of experts are not
--model m-arch | architectures (['BertForMaskedLM']): is not
--model m-eps | rms_norm_eps (-1): must be greater than 0
--model m-less | missing: model.embed_tokens.weight
--model m-shape | model.embed_tokens.weight has shape [5, 32]
--model m-int | model.embed_tokens.weight is stored as I32
--model m-pickle | m-pickle has no model.safetensors or
--model m-torn | m-torn/model.safetensors is not a valid
--model m-index | m-index/model.safetensors.index.json is not
--model m-map | m-map/model.safetensors.index.json has no
--model m-shard | m-shard/model.safetensors.index.json: 'b' in
--model m-out | m-out/model.safetensors.index.json: '../b' in
--model bare | bare has no model.safetensors or
--model a | a is an adapter of its base model (it has
--model bare --from-scratch --tokenizer t-torn | t-torn/tokenizer.json is not valid JSON
--model bare --from-scratch --tokenizer t-list | t-list/tokenizer.json holds a JSON list, not
--model bare --from-scratch --tokenizer t-spm | t-spm has only a sentencepiece
--model bare --from-scratch --tokenizer text.txt | text.txt is a file: give the folder that it
--train-file absent.bin | absent.bin: cannot be read (No such file or
--train-file 'absent*.bin' | no file matches absent*.bin: check the path
--train-file m | m is not a file: give the path of a token
--train-file text.bin | text.bin is not a token file: it starts with
--train-file short.bin | the training data (3 tokens) has no sample of
--train-file wide.bin | wide.bin: token 420 has the id 420, but the
--train-file sidecar.bin | sidecar.bin.json is not a sidecar of a token
--train-file /dev/null | /dev/null is not a file: give the path of a
--eval-file absent.bin | absent.bin: cannot be read (No such file or
--eval-file wide.bin | wide.bin: token 420 has the id 420, but the
--seq-len 5000 | the training data (600 tokens) has no sample
--adapter absent | absent has no adapter_config.json: give a
--adapter m | m has no adapter_config.json: give a folder
--adapter a-empty | a-empty has no adapter_model.safetensors
--adapter a-json | a-json/adapter_config.json is not valid JSON
--adapter a-torn | a-torn/adapter_model.safetensors is not a
--adapter a-list | a-list/adapter_config.json holds a JSON list
--adapter a-none | a-none/adapter_config.json: peft_type None is
--adapter a-vera | a-vera/adapter_config.json: peft_type VERA is
--adapter a-type | a-type/adapter_config.json: peft_type
--adapter a-rank | r ('two'): must be a valid integer
--adapter a-null | r (None): must be a valid integer
--adapter a-zero | r (0): must be greater than or equal to 1
--adapter a-alpha | lora_alpha ({}): must be a valid number
--adapter a-drop | lora_dropout ('much'): must be a valid number
--adapter a-targets | target_modules (5): must be a pattern, a list
--adapter a-regex | target_modules ('(q_proj'): '(q_proj' is not
--adapter a-pattern | rank_pattern (['q_proj']): must be an object
--adapter a-pattern-regex | rank_pattern ({'(q': 3}): '(q' is not a
--adapter a-pattern-text | alpha_pattern ({'q_proj': 'x'}): must be an
--adapter a-save | modules_to_save (5): must be a valid list
--adapter a-init | a-init does not fit the model
--adapter a-base | base_model_name_or_path (['x']): must be a
--adapter a-foreign | a-foreign does not fit the model: missing
--adapter a-adalora | init_r ('x'): must be a valid integer
--adapter a-ia3 | feedforward_modules (3): must be a pattern, a
--adapter a-prompt | num_virtual_tokens ('x'): must be a valid
--sample-prompts absent.txt | --sample-prompts absent.txt: cannot be read
--continue | there is no checkpoint in runs/m/checkpoints
--continue 5 | there is no checkpoint of step 5 in
--continue absent/folder | there is no checkpoint at absent/folder; in
--continue m | the checkpoint m cannot be read: No such file
""",
    ("llmq-train", 7): r"""
--out-dir /proc/x | /proc/x: cannot be written (/proc takes no
--out-dir text.txt | is a file: give another --out-dir
--out-dir text.txt/x | cannot be written
--out-dir /dev/null/x | /dev/null/x: cannot be written (/dev/null is
--out-dir taken/model | already holds a model (config.json
--log-file /proc/x | /proc/x: cannot be written (/proc takes no
--log-file m | --log-file m is a folder: name a file, such
--log-file text.txt | --log-file text.txt is a file that is no log
--checkpoint-dir text.txt | cannot be written
--debug-memory m | m: the list of --debug-memory cannot be
""",
    ("llmq-generate", 2): r"""
--prompt hi --prompts prompts.txt | give one of --prompt, --prompts and --chat
--batch-size 1 | give one of --prompt, --prompts and --chat, not none
--prompt hi --chat | not --prompt and --chat
--prompt hi --system b | --system goes with --chat, not with --prompt
--chat --json --samples 2 --temperature 1 | --json, --samples: not with --chat
--prompt '' | prompt 1 has no tokens
--prompt hi --samples 2 | --samples 2 would be the same answer each time
--prompt hi --stop '' | --stop '': use a text that is not empty
--prompt hi --max-tokens 0 | --max-tokens 0 is below the least value
--prompt hi --temperature -1 | --temperature -1 is below the least value
--prompt hi --top-p 0 | --top-p 0 is too small: use more than 0
--prompt hi --top-k 5 | cut what is drawn from: give a --temperature above 0
--prompt hi --device tpu | --device tpu is not one of auto, cuda, cpu, and no plug-in has this name
--prompt hi --out answers | --out takes JSON lines: give --json
--prompt hi --bogus | --bogus
--prompt hi --max-tokens 99999999 | the longest prompt and --max-tokens 99999999
--prompts prompts-ids.jsonl | token 100000 of a prompt is not in the
--prompts prompts-minus.jsonl | token -1 of a prompt is not in the vocabulary
--prompts prompts-chat.jsonl --chat-template latin.jinja | --chat-template latin.jinja: cannot be read
--prompts prompts-chat.jsonl --chat-template '' | --chat-template '' is empty: give a path
""",
    ("llmq-generate", 3): r"""
--prompt hi --model ./absent | there is no folder ./absent
--prompt hi --adapter a-foreign | a-foreign does not fit the model: missing
--prompt hi --tokenizer t-torn | t-torn/tokenizer.json cannot be loaded
--prompt hi --tokenizer t-config | t-config/tokenizer_config.json is not valid
--prompt hi --tokenizer t-eos | t-eos/tokenizer_config.json names the
--prompts absent.txt | --prompts absent.txt: cannot be read (No such
--prompts m | --prompts m: cannot be read (Is a directory)
--prompts nothing.txt | --prompts nothing.txt: has no prompt
--prompts blank.txt | --prompts blank.txt: has no prompt
--prompts latin.txt | --prompts latin.txt: cannot be read (it is
--prompts prompts.jsonl | prompts.jsonl:1: has no prompt (text)
--prompts prompts-torn.jsonl | prompts-torn.jsonl:1: is no JSON
--prompts prompts-deep.jsonl | prompts-deep.jsonl:1: is no JSON
--prompts prompts-huge.jsonl | prompts-huge.jsonl:1: has no prompt (text)
--prompts prompts-chat.jsonl --chat-template broken.jinja | broken.jinja: the chat template is not Jinja
--prompts prompts-chat.jsonl --chat-template raises.jinja | raises.jinja: cannot render the chat: no
--prompts prompts-chat.jsonl --chat-template unknown.jinja | unknown.jinja: cannot render the chat
""",
    ("llmq-generate", 7): r"""
--prompts prompts.txt --out /proc/x | --out /proc/x: cannot be written (No such
--prompts prompts.txt --out m | --out m: cannot be written (Is a directory)
--prompts prompts.txt --out text.txt/x | --out text.txt/x: cannot be written (Not a
""",
    ("tokenize-data", 2): r"""
--input text.txt --dataset gsm8k | give the data either as --dataset or as
--out-dir out | give the data either as --dataset or as
--dataset '' | is neither a path nor a data set of the Hub
--dataset text.txt | --dataset text.txt is a file: give it as
--dataset 'org/name:a:b:c:d' | org/name:a:b:c:d is neither a path nor a data
--dataset 'wikitext:x:train[:1000%]' | train[:1000%] is neither a path nor a data set
--dataset 'wikitext:x:train[a:b]' | train[a:b] is neither a path nor a data set
--input text.txt --model '' | it is empty: give a path.
--input text.txt --eval-fraction 1 | --eval-fraction 1 is too large: use less than 1
--input text.txt --eval-fraction nan | nan is not a finite number
--input text.txt --overlong drop | --overlong drop is for rows of more than
--input text.txt --overlong most --seq-len 8 | most is not one of turns, truncate
--input text.txt --show 3 | --show is for data in rows, but text.txt is
--input text.txt --train-on assistant | --train-on assistant: for data in rows, but
--input text.txt --seq-len 9 --overlong split | --seq-len 9 with --overlong split: for data in rows
--input text.txt --data-format messages | --data-format messages: for data in rows, but
--input text.txt --map x | --map x: give OURS=THEIRS, for example
--input text.txt --map a=b --map a=c | --map: a is given twice: give each of our
--input text.txt --eos-token '<none>' | --eos-token <none> is not in the vocabulary
--input text.txt --revision v1 | --revision v1 is for models of the Hub, but m
--input chats.jsonl --train-on robot | --train-on robot: 'robot' is not a role: give
--input chats.jsonl --train-on '' | --train-on : '' is not a role: give all
--input chats.jsonl --data-format xml | --data-format xml is not one of tokens
--input chats.jsonl --chat-template '' | --chat-template '' is empty: give a path
--input chats.jsonl --chat-template latin.jinja | --chat-template latin.jinja: cannot be read
--input chats.jsonl --prompt-template broken.jinja | --prompt-template is not Jinja: Expected an
--input chats.jsonl --prompt-template absent.jinja | --prompt-template absent.jinja cannot be
--input chats.jsonl --prompt-template m | --prompt-template m cannot be read: Is a
""",
    ("tokenize-data", 3): r"""
--dataset gsm9k | and HF_HUB_OFFLINE forbids looking it up
--input text.txt --model Qwen2.5-0.5B-x | there is no folder Qwen2.5-0.5B-x, and the
--input chats.jsonl --data-format text | chats.jsonl:1: the columns (messages) match
--input chats.jsonl --data-format alpaca | chats.jsonl:1: the columns (messages) match
--input chats.jsonl --map messages=absent | chats.jsonl:1: the columns (messages) match
--input chats.jsonl --chat-template broken.jinja | broken.jinja: the chat template is not Jinja
--input chats.jsonl --chat-template raises.jinja | chats.jsonl:1: the chat template
--input columns.jsonl --prompt-template unknown.jinja --map answer=b | columns.jsonl:1: the prompt template fails
--input 'absent*' | no file matches absent*: check the path (the
--input nothing.txt | there is no text in nothing.txt (0 bytes)
--input latin.txt | latin.txt has no line break within, so no
--input columns.jsonl | columns.jsonl:1: the columns (a, b) match no
--input robot.jsonl | robot.jsonl:1: message 1 has no role: its
--input messages.jsonl | messages.jsonl:1: the columns (messages)
--input tokens.jsonl | tokens.jsonl:1: the columns (tokens) match no
--input train.bin | train.bin is not UTF-8: byte 32 is 0xa4
--input m | m/tokenizer.json: not an array of rows
--input text.txt --model t-spm | t-spm has only a sentencepiece
--input text.txt --model m-none | m-none has no tokenizer.json: give a folder
""",
    ("tokenize-data", 7): r"""
--input text.txt --out-dir /proc/x | /proc/x/.partial.lock: cannot be written or
--input text.txt --out-dir text.txt | --out-dir text.txt is a file: name a folder
--input text.txt --out-dir text.txt/x | is not a folder): choose a folder on another
""",
    ("llmq-eval", 2): r"""
--metrics loss,lost | --metrics lost: known are loss, perplexity
--metrics '' --answers out.jsonl | no metric is of answers
--limit 0 | 0 is not in the range x>=1
--data '' | it is empty: give a path.
--seq-len 1 | 1 is not in the range x>=2
--tasks a | give --data or --tasks, not both
--fewshot 1 --apply-chat-template | --fewshot, --apply-chat-template: not with --data
""",
    ("llmq-eval", 3): r"""
--data absent.jsonl | absent.jsonl
--data absent.bin | absent.bin
--adapter absent | absent has no adapter_config.json: give a
""",
    ("llmq-merge", 2): r"""
--adapter a --adapter a | --adapter a is given twice: give it once
--adapter a --weight nan | nan is not a finite number.
--adapter a --weight 1 --weight 2 | 2 --weight for 1 --adapter: give one for
--adapter a --export-dtype int8 | 'int8' is not one of 'bf16', 'fp16', 'fp32'.
--adapter a --base-dtype int4 | 'int4' is not one of 'fp32', 'bf16', 'e4m3'
--adapter '' | it is empty: give a path.
--adapter a stray | Got unexpected extra argument (stray)
--out-dir x | Missing option '--adapter'.
""",
    ("llmq-merge", 3): r"""
--adapter absent | absent has no adapter_config.json: give a
--adapter a-foreign | a-foreign does not fit the model: missing
--adapter a --model m-less | missing: model.embed_tokens.weight
""",
    ("llmq-merge", 7): r"""
--adapter a --out-dir /proc/x | /proc is not a folder that can be written to
--adapter a --out-dir text.txt | is a file: give another --out-dir
--adapter a --out-dir text.txt/x | is not a folder that can be written to: give
--adapter a --out-dir m | already holds a model (config.json
--adapter a --out-dir . | is the current folder, which cannot be
""",
    ("llmq-estimate", 2): r"""
--gpu 'RTX 9999' | --gpu RTX 9999 is not a known card: give a
--gpu -1GiB | --gpu -1GiB is not a known card: give a size
--gpus 0 | --gpus 0 counts the GPUs of this machine, and
--seq-tiles 7 | --seq-tiles 7 does not divide the 4096 tokens
--bogus | --bogus
stray | Got unexpected extra argument (stray)
--longest --fit | --longest looks for the length in the
--gpu 'RTX 3060' --matmul-dtype e4m3 --fp8-scaling rowwise | --matmul-dtype e4m3 needs a GPU of compute
""",
    ("llmq-estimate", 3): r"""
--model ./absent | there is no folder ./absent
--model m-moe | num_experts (8): mixtures of experts are not
--adapter a-foreign | a-foreign does not fit the model: missing
""",
    ("llmq-bench", 2): r"""
--models nothing | --models nothing: there is no preset
--models '' | --models ('',) is empty: give one value or
--models m-json | --models m-json: m-json/config.json is not
--dtypes int4 | --dtypes int4: known are fp32, bf16, e4m3
--dtypes '' | --dtypes ('',) is empty: give one value or
--recompute everything | --recompute everything: known are swiglu
--steps x | --steps x is not a whole number: Optimizer
--batch-size 3 --seq-len 100 --tokens-per-step 524288 | --tokens-per-step 524288 is not a multiple of
--gpus 2 | --gpus 2 counts GPUs, but --device is cpu
--zero-levels 9 | --zero-levels 9 is above the largest value
--zero-levels 1,3 | --zero-levels is for several GPUs: add --gpus
--save '' | --save '' is empty: give a path, or leave
--fp8-scaling current | --fp8-scaling current is for e4m3 matmuls
--fit --batch-size 3 | --fit chooses the size of a micro-batch
--bogus | --bogus
stray | No such command 'stray'.
--save x.json op | --save, --models, --device: not for
--batch-size 1,3 --seq-len 16 --tokens-per-step 64 | micro-batches of 3 x 16: use 48
--seq-len 100 --tokens-per-step 128 | --tokens-per-step 128 is not a multiple of 100
--no-memcpy-all-gather | --memcpy-all-gather is for several GPUs: add
""",
    ("llmq-bench", 7): r"""
--save absent/x.json | absent/x.json: cannot be written (No such file
--save m | m: cannot be written (Is a directory)
--save /proc/x | /proc/x: cannot be written (
""",
    ("llmq-bench op", 2): r"""
--dtypes int4 | --dtypes int4: known are fp32, bf16, e4m3
'nothing_*' | no op of a training step matches 'nothing_*'
a b | Got unexpected extra argument (b)
""",
    ("llmq-plot", 2): r"""
run.jsonl --last 0 | 0 is not in the range x>=1.
run.jsonl -o out.gif | out.gif does not end in one of .png, .svg
run.jsonl -o '' | it is empty: give a path.
run.jsonl --bogus | --bogus
'' | it is empty: give a path.
""",
    ("llmq-plot", 3): r"""
absent | there is no run folder or log at absent
nothing.txt | nothing.txt is not a log of llmq: its first
m | the folder m has no log.jsonl, and no .jsonl
runs | the log runs/one/log.jsonl has no steps yet
several | the folder several has no log.jsonl, and
log.txt | the log log.txt is corrupt
schema.jsonl | the log schema.jsonl has schema 99, this llmq
steps.jsonl | the log steps.jsonl has no steps yet
nan.jsonl | the log nan.jsonl is corrupt
deep.jsonl | the log deep.jsonl is corrupt
run.jsonl absent | there is no run folder or log at absent
""",
    ("llmq-plot", 7): r"""
run.jsonl -o /proc/x.png | /proc/x.png: cannot be written (No such file
run.jsonl -o text.txt/x.png | is not a folder): choose another folder
""",
    ("llmq-doctor", 2): r"""
here | Got unexpected extra argument (here)
--jsn | No such option '--jsn'
--json=yes | Option '--json' does not take a value
-json | -json: options have two dashes
""",
    ("llmq-report", 2): r"""
run.jsonl --port 8000 | --port 8000 is for --watch: add it
run.jsonl --port 70000 --watch | 70000 is not in the range 0<=x<=65535.
run.jsonl --watch --out x.html | --out x.html is for a file, and --watch serves
run.jsonl --out '' | it is empty: give a path.
run.jsonl --bogus | --bogus
'' | it is empty: give a path.
""",
    ("llmq-report", 3): r"""
absent | there is no run folder or log at absent
absent --watch | there is no run folder or log at absent
nothing.txt | nothing.txt is not a log of llmq: its first
several | the folder several has no log.jsonl, and
deep.jsonl | the log deep.jsonl is corrupt
run.jsonl log.txt | the log log.txt is corrupt
run.jsonl --bench absent | absent cannot be read: No such file
run.jsonl --bench run.jsonl | run.jsonl is no file of llmq-bench --save
""",
    ("llmq-report", 7): r"""
run.jsonl -o /proc/x.html | /proc/x.html: cannot be written (No such file
run.jsonl -o text.txt/x.html | is not a folder): choose another folder
""",
    ("llmq-export-wandb", 2): r"""
--log-file run.jsonl --run-id 'a b' | --run-id 'a b' is not an id for W&B: use up
--log-file run.jsonl --project a/b | 'a/b' is not a project of W&B: use up
--log-file run.jsonl --project '' | '' is not a project of W&B: use up to
--log-file run.jsonl --bogus | --bogus
--log-file run.jsonl stray | Got unexpected extra argument (stray)
--log-file '' | it is empty: give a path.
""",
    ("llmq-export-wandb", 3): r"""
--log-file absent | there is no run folder or log at absent
--log-file log.txt | the log log.txt is corrupt
""",
    ("llmq-launch", 2): r"""
--procs 2 | --model is needed: Model to train: a folder
--procs 0 -- --model m --train-file train.bin | 0 is not in the range x>=1.
--procs 2 --gpus 2 -- --model m --train-file train.bin | give --gpus N for GPUs, or --procs N for
--nodes 2 --procs 1 -- --model m --train-file train.bin | --nnodes 2 needs --master-addr and
--nnodes 2 --node-rank 2 --procs 1 -- --model m --train-file train.bin | --node-rank 2 of --nnodes 2 is none: machines
--join-timeout nan --procs 1 -- --model m --train-file train.bin | nan is not a finite number.
--procs 2 -- --model m --train-file train.bin --dry-run | --dry-run plans for one process: use
--procs 2 -- --model m --train-file train.bin --gpus 3 | --gpus is 3 for llmq-train, and llmq-launch
--procs 2 -- --model m --train-file train.bin --print-config | --print-config is for llmq-train itself
--procs 2 -- --model m --train-file train.bin --seq-len 0 | --seq-len 0 is below the least value: use 1
--procs 2 -- train.bin | unexpected train.bin: every option starts
""",
}

OPTIONS = {"model": "m", "train_file": "train.bin", "device": "cpu", "steps": 1, "batch_size": 1, "seq_len": 16}
CHATS = {"train_file": None, "data": "chats.jsonl"}
TRAIN: list[tuple[dict[str, Any], str]] = [
    ({"model": []}, "--model [] is not text"),
    ({"model": True}, "--model True is not text"),
    ({"model": Path("absent/a/b")}, "there is no folder absent/a/b"),
    ({"model": "\ud800"}, "no path has"),
    ({"seq_len": None}, "--seq-len None is not a whole number"),
    ({"seq_len": np.int64(0)}, "below the least value"),
    ({"seq_len": object()}, "is not a whole number"),
    ({"train_file": 5}, "--train-file 5 is not a list"),
    ({"train_file": None}, "--train-file is needed"),
    ({"train_file": [None]}, "--train-file None is not text"),
    ({"train_file": b"train.bin"}, "is not a list"),
    ({"train_file": "a\0b"}, "no path has"),
    ({"from_scratch": None}, "--from-scratch None is not true or false"),
    ({"packing": 3}, "--packing 3: give windows"),
    ({"lora_rank": 4, "lora_targets": ["q_proj"]}, "is not text"),
    ({"batch size": 3}, "unknown option --batch size"),
    ({"": 3}, "unknown option --"),
    ({"bf16": 3}, "use --model-dtype fp32"),
    ({"config": 5}, "--config 5 is not the path of a file"),
    ({"config": {"model": "m"}}, "is not the path of a file"),
    ({"config": Path("m")}, "--config m cannot be read"),
    ({"config": "a\0b"}, "is not the path of a file"),
    ({"callbacks": [5]}, "5 is no callback: give a function f(run, record)"),
    ({"console": "out.txt"}, "console is 'out.txt'"),
    ({"out_dir": Path("/proc/x")}, "/proc takes no new files"),
    ({"name": "\ud800"}, "cannot be part of a path"),
    ({"continue": 2.5}, "there is no checkpoint at 2.5"),
    ({"continue": [1]}, "--continue [1] is not text"),
    ({"device": 0}, "--device 0 is not one of"),
    ({"launcher": "ray"}, "launcher='ray' is for the command"),
    ({"memory_limit": 16}, "give a size above 0 with its unit"),
    ({"reset": "all"}, "--reset all is not one of optimizer, data or lr"),
    ({"reset": 5}, "--reset 5 is not a list"),
    ({"save_best": True}, "is not one of eval_loss"),
    ({"fit": True, "fit_may": "x"}, "--fit-may x is not one of states or matmul"),
    ({"sample_prompts": ["hi"]}, "is not text"),
    ({**CHATS, "data": 5}, "--data 5 is not a list"),
    ({**CHATS, "data": [{"text": "x"}]}, "is not text"),
    ({**CHATS, "data": "absent.txt"}, "absent.txt: cannot be read"),
    ({**CHATS, "chat_template": "{% for"}, "the chat template is not Jinja"),
    ({**CHATS, "map": {"a": "b"}}, "is not a list"),
    ({**CHATS, "map": ["x"]}, "--map x: give OURS=THEIRS"),
    ({**CHATS, "train_on": ["user"]}, "is not text"),
    ({**CHATS, "prompt_template": "absent"}, "--prompt-template absent cannot be read"),
]
ASKED = {"model": "m", "prompts": ["hi"], "device": "cpu", "max_tokens": 2}
GENERATE: list[tuple[dict[str, Any], str]] = [
    ({"model": "absent/x/y"}, "there is no folder absent/x/y"),
    ({"model": "bare"}, "the model has no tokenizer"),
    ({"model": None}, "the model is None"),
    ({"prompts": [""]}, "has no tokens"),
    ({"prompts": None}, "prompt 1 is None"),
    ({"prompts": 5.5}, "prompt 1 is 5.5"),
    ({"prompts": [b"x"]}, "prompt 1 is b'x'"),
    ({"prompts": [["a"]]}, "prompt 1 is ['a']"),
    ({"prompts": [[10**9]]}, "not in the vocabulary"),
    ({"adapter": 5}, "5 has no adapter_config.json"),
    ({"tokenizer": ["m"]}, "--tokenizer ['m'] is not text"),
    ({"max_tokens": 1.5}, "--max-tokens 1.5 is not a whole number"),
    ({"temperature": float("nan")}, "--temperature nan is not a finite number"),
    ({"repetition_penalty": np.inf}, "--repetition-penalty inf is not a finite number"),
    ({"bogus": 1}, "no setting bogus"),
    ({"sampling": 5}, "sampling is 5"),
    ({"max_new_tokens": 3}, "did you mean max_tokens?"),
    ({"stop": 5}, "--stop 5"),
    ({"max_tokens": 10**9}, "positions"),
]
