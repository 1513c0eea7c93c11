"""The scripts of examples/ run as they are, on the CPU with a tiny model and small data in place of the hub's."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_engines import tiny
from tiny_runs import chat_model, with_commands

from llmq.cli import launch
from llmq.cli.train import options_of
from llmq.errors import TERMINATED, DataError, MemoryLimitError, NonFiniteError, StorageError, UsageError
from llmq.model.config import to_hf
from llmq.report.read import read_log

ROOT = Path(__file__).parents[1]
SMALL = {"device": "cpu", "seq_len": "64", "batch_size": "2", "grad_accumulation": "1", "steps": "3"}
FLAGS = [f"--{key}={value}" for key, value in SMALL.items()]


@pytest.fixture
def example(tmp_path):
    """A function that runs an example in an empty folder, and returns that folder and what the example printed."""
    model = chat_model(tmp_path / "model")
    (model / "config.json").write_text(json.dumps(to_hf(tiny(num_layers=1, vocab_size=420), "bf16")))
    rows = [{"question": f"What is {n} and 1?", "answer": f"It is {n + 1}."} for n in range(40)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "text.txt").write_text("The ships of the king are at sea, and so is he.\n" * 100)
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": f"Ship {n}."}) + "\n" for n in range(40)))
    environ = {**with_commands(tmp_path), "MODEL": str(model), "MPLCONFIGDIR": str(tmp_path / "cache")}

    def run(name, *arguments, **variables):
        program = "bash" if name.endswith(".sh") else sys.executable
        command = [program, str(ROOT / "examples" / name), *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environ | variables, text=True, capture_output=True)
        assert not done.returncode, done.stdout + done.stderr
        return tmp_path, done.stdout

    return run


def steps(run):
    """Steps of the log in a run's folder."""
    return read_log(run).train["step"].tolist()


SCRATCH = [*FLAGS, "--from-scratch"]
QWEN3 = {"MODEL_PATH": "model", "DATA_PATH": "chats.jsonl", "GPUS": "1", "PROCS": "1"}
TRAINING = {  # what an example is given, its run, and what is said
    "pretrain.sh": (FLAGS, {"TEXT": "text.txt"}, "pretrain", "3 steps in"),
    "finetune_chats.sh": (SCRATCH, {"DATA": "chats.jsonl"}, "chats", "would be tokenized(.|\n)*assistant:\\[\\[ It is"),
    "own_data.py": (
        ["model=model", "from_scratch=true", *(flag[2:] for flag in FLAGS)],
        {},
        "own-data",
        "after 3 steps",
    ),
    # 2 of 6 samples, the nearest to 30%
    "mixture.sh": (SCRATCH, {"CHATS": "chats.jsonl", "TEXT": "texts.jsonl"}, "mixture", "jsonl: 33.33% of the tokens"),
    "finetune_qwen3.sh": (SCRATCH, QWEN3, "qwen3", "3 steps in"),
    "finetune_qwen3_nodes.sh": (SCRATCH, QWEN3, "qwen3", "3 steps in"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINING)
def test_an_example_trains(example, name):
    arguments, variables, run, says = TRAINING[name]
    folder, said = example(name, *arguments, **variables)
    assert steps(folder / "runs" / run) == [1, 2, 3] and re.search(says, said), said
    assert (folder / "runs" / run / "model/model.safetensors").is_file()
    assert name != "pretrain.sh" or (folder / "runs/pretrain/loss.png").is_file()


@pytest.mark.sweep
def test_compare_recipes(example):
    folder, said = example("compare_recipes.sh", *FLAGS, TEXT="text.txt")
    losses = [read_log(folder / "runs" / name).train["loss"].tolist() for name in ("bf16", "bf16-seed-1", "e4m3")]
    assert len({tuple(loss) for loss in losses}) == 3
    assert "bf16-seed-1" in said and (folder / "runs/recipes.png").is_file()


@pytest.mark.slow
def test_compare_states(example):
    small = [f"{key}={value}" for key, value in {"steps": 2, "seq_len": 32, "batch_size": 2, "device": "cpu"}.items()]
    names = ["fp32", "fused-none-int8-e4m3", "bf16-master-bf16"]
    folder, said = example("compare_states.py", "text.txt", f"--only={','.join(names)}", "--jobs=2", *small)
    assert re.findall(r"^\| (\S+)(?: \| \d\.\d{4}){4} \|$", said, re.MULTILINE) == names
    assert steps(folder / "runs/states-fused-none-int8-e4m3-2") == [1, 2]


@pytest.mark.sweep
def test_compare_adapters(example, tmp_path):
    for part, count in (("train", 30), ("test", 10)):
        lines = (tmp_path / "chats.jsonl").read_text().splitlines(keepends=True)[-count:]
        (tmp_path / f"gsm8k-{part}.jsonl").write_text("".join(lines))
    flags = ["--data=.", "--out=out", "--steps=2", "--cpu-small", "--jobs=2"]
    folder, said = example("compare_adapters.py", *flags)
    rows = re.findall(r"^\| (\S+)(?: \| \d\.\d{4}){4} \|$", said, re.MULTILINE)
    assert rows == ["full", "lora", "lora-e4m3", "lora-nf4", "lora-nf4-e4m3", "dora"]
    before = float(re.search(r"^untrained: (.*)$", said, re.MULTILINE)[1])
    assert all(
        0 < read_log(folder / f"out/runs/gsm8k-{name}-{seed}").eval["loss"][-1] < before
        for name in rows
        for seed in (1, 2)
    )


@pytest.mark.slow
def test_slurm(example, tmp_path):
    """The script, where no Slurm is: what srun would start, and that exit code 75 alone sends it back to the queue."""
    for name, script in {"srun": 'shift; "$@"; exit ${CODE:-$?}', "scontrol": 'echo "scontrol $*"'}.items():
        shim = tmp_path / "bin" / name
        shim.write_text(f"#!/bin/bash\n{script}\n")
        shim.chmod(0o755)
    flags = {"MODEL_PATH": "model", "DATA_PATH": "chats.jsonl", "SLURM_JOB_ID": "7"}
    folder, said = example("slurm.sh", *FLAGS, "--from-scratch", **flags)
    assert steps(folder / "runs/slurm-7") == [1, 2, 3] and "scontrol" not in said
    with pytest.raises(AssertionError, match="scontrol requeue 7"):
        example("slurm.sh", *FLAGS, "--from-scratch", **flags, CODE="75")


def _documents(name):
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all((ROOT / "examples" / name).read_text("utf-8")))


def _ranks(text, environ):
    """The flags of `llmq-launch` in a script, once its shell has them, and the options of the run."""
    text = text.replace("llmq-launch", "printf '%s\\n' llmq-launch").replace("exec ", "").replace("cd /work", "")
    done = subprocess.run(["bash", "-euc", text], env=environ, text=True, capture_output=True, check=True)
    program, *arguments = done.stdout.splitlines()
    context = launch.command.make_context(program, arguments)
    return context.params, options_of(context.params["arguments"]).to_flat()


def test_kubernetes():
    """Its second pod starts the ranks of the second machine, which meet at the first pod."""
    service, job = _documents("kubernetes.yaml")
    spec = job["spec"]["template"]["spec"]
    [container] = spec["containers"]
    environ = {one["name"]: one.get("value", "") for one in container["env"]} | {"JOB_COMPLETION_INDEX": "1"}
    flags, options = _ranks(container["args"][0], environ)
    name, domain = job["metadata"]["name"], service["metadata"]["name"]
    assert (flags["nnodes"], flags["node_rank"]) == (job["spec"]["completions"], 1)
    assert flags["master_addr"] == f"{name}-0.{domain}" and spec["subdomain"] == domain
    assert service["spec"]["selector"] == {"job-name": name} and "LLMQ_JOB_TOKEN" in environ
    assert flags["master_port"] == service["spec"]["ports"][0]["port"]
    assert str(flags["gpus"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert options["model"] == "Qwen/Qwen3-8B" and options["continue"] == "auto"
    codes = [
        rule["onExitCodes"]["values"] for rule in job["spec"]["podFailurePolicy"]["rules"] if "onExitCodes" in rule
    ]
    for_good = (UsageError, DataError, MemoryLimitError, NonFiniteError, StorageError)
    assert codes == [[error.exit_code for error in for_good], [TERMINATED]]


def test_skypilot():
    [task] = _documents("skypilot.yaml")
    sky = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    environ = {**task["envs"], **sky, "SKYPILOT_NUM_GPUS_PER_NODE": "8", "PATH": os.environ["PATH"]}
    flags, options = _ranks(task["run"], environ)
    assert (flags["nnodes"], flags["node_rank"], flags["gpus"]) == (2, 1, 8)
    assert flags["master_addr"] == "10.0.0.1" and "LLMQ_JOB_TOKEN" in task["secrets"]
    assert options["model"] == "Qwen/Qwen3-8B" and options["continue"] == "auto"


@pytest.mark.judge
def test_kubernetes_by_its_schema():
    """Every key and every kind of value, by the models of Kubernetes' own client, which are made of its schema."""
    from kubernetes.client import models

    def check(value, kind, path):
        if kind.lower().startswith("list["):
            assert isinstance(value, list), path
            for n, item in enumerate(value):
                check(item, kind[5:-1], f"{path}[{n}]")
        elif kind.lower().startswith("dict"):
            assert isinstance(value, dict), path
        elif hasattr(models, kind):
            model = getattr(models, kind)
            names = {name: attribute for attribute, name in model.attribute_map.items()}
            assert value.keys() <= names.keys(), (path, value.keys() - names.keys())
            for name, item in value.items():
                check(item, model.openapi_types[names[name]], f"{path}.{name}")
            model(**{names[name]: item for name, item in value.items()})  # refuses what is missing
        else:
            assert isinstance(value, {"str": str, "int": int, "bool": bool, "object": object}[kind]), path

    service, job = _documents("kubernetes.yaml")
    check(service, "V1Service", "service")
    check(job, "V1Job", "job")
    job["spec"]["paralelism"] = 2
    with pytest.raises(AssertionError, match="paralelism"):
        check(job, "V1Job", "job")


def test_every_example_has_a_test():
    examples = {path for path in (ROOT / "examples").iterdir() if path.is_file()}
    tested = {name.removeprefix("test_") for name in globals()} | {Path(name).stem for name in TRAINING}
    assert examples and not [path.name for path in examples if path.stem not in tested]
