"""Prompt tuning and prefix tuning against PEFT, live: losses, gradients, steps of AdamW, folders both ways, logits."""

import numpy as np
import pytest

pytest.importorskip("peft", reason="the judge is PEFT")
pytest.importorskip("torch", reason="the judges are torch and transformers")

import peft
import torch
from adapter_cases import export_of
from golden import families, transformers_judge
from golden.engines import FP32, FP64, relative_errors
from golden.peft_judge import LENGTH, drawn, export_base, hyper, model_in
from safetensors.numpy import load_file
from tiny_engines import next_logits

from llmq.adapters.merge import merge
from llmq.adapters.resolve import open_adapter
from llmq.adapters.virtual_tokens import Prefix, Prompt
from llmq.backends.host import HostBackend
from llmq.data.batches.batch import Batch
from llmq.engine.engine import Engine
from llmq.errors import DataError
from llmq.files.source import find_source, open_parameters
from llmq.generation.prompts import Question
from llmq.generation.text import Writer
from llmq.model.config import read_config
from llmq.options.commands import GenerateOptions
from llmq.plan.memory import Memory
from llmq.plan.plan import make_plan
from llmq.plan.spec import Spec

pytestmark = pytest.mark.judge
COUNT = 5
CONFIGS = {"prompt": peft.PromptTuningConfig, "prefix": peft.PrefixTuningConfig}


def theirs_of(config, method, dtype, **about):
    """PEFT's model, whose virtual tokens are drawn, and the parameter that they are."""
    torch.manual_seed(3)
    made = CONFIGS[method](task_type="CAUSAL_LM", num_virtual_tokens=COUNT, **about)
    model = peft.get_peft_model(transformers_judge.model_of(config, families.weights(config), dtype), made)
    (parameter,) = [p for p in model.parameters() if p.requires_grad]
    with torch.no_grad():
        parameter.mul_(0.3)
    return model, parameter


def backward(model, tokens, marks):
    """Leaves gradients; the loss. PEFT's own logits of a prompt have the virtual tokens' before the others."""
    model.zero_grad(set_to_none=True)
    logits = model(torch.from_numpy(tokens).long()).logits[:, -tokens.shape[1] :].float()
    flat = torch.from_numpy(marks).long().reshape(-1)
    loss = torch.nn.functional.cross_entropy(logits.reshape(flat.numel(), -1), flat, ignore_index=-100)
    loss.backward()
    return loss.item()


def led(tokens, marks):
    """A batch with room for the virtual tokens."""
    zeros = np.zeros((len(tokens), COUNT), np.int32)
    return Batch(np.hstack([zeros, tokens]), np.hstack([zeros - 100, marks]).astype(np.int32))


def engine_of(parsed, weights, adapters, precision, values):
    """Our engine with the model's weights, and virtual tokens `values` in PEFT's form."""
    spec = Spec(parsed, precision, Memory(), hyper(), families.BATCH, LENGTH + COUNT, adapters=adapters)
    engine = Engine(make_plan(spec), HostBackend())
    rows = []
    for row in engine.plan.rows:
        value = np.zeros(row.shape)
        if row.trainable:
            rows.append((row, next(values)))
            continue
        for part in row.parts:
            value.reshape(row.part_axes)[part.start : part.stop] = weights[part.name]
        rows.append((row, value))
    engine.load(rows)
    return engine


def pieces(parameter, parsed, method):
    """What our rows have of PEFT's parameter, in order."""
    value = parameter.detach().to(torch.float64).numpy()
    return iter(np.split(value, parsed.num_layers if method == "prefix" else 1, axis=1))


def whole(engine, read):
    """Our virtual tokens, or their gradient, in PEFT's form."""
    return np.concatenate([read(row.name) for row in engine.plan.rows if row.trainable], axis=1).astype(np.float64)


def assert_same_logits(run, model, tokens):
    wanted = transformers_judge.logits_of(model, tokens)[:, -tokens.shape[1] :]
    for row, count in ((0, 3), (1, tokens.shape[1])):
        found = next_logits(run, np.concatenate([np.zeros(COUNT, np.int32), tokens[row, :count]]))
        right = wanted[row, count - 1]
        assert np.linalg.norm(found - right) < 1e-5 * np.linalg.norm(right)


@pytest.mark.parametrize("family", families.FAMILIES)
@pytest.mark.parametrize("method", CONFIGS)
def test_losses_gradients_and_steps_are_those_of_peft(method, family):
    """In f64 and in f32: a batch, then 20 steps of AdamW."""
    config, a = families.FAMILIES[family], families.ADAMW
    parsed, weights = read_config(config), families.weights(config)
    adapters = {"prompt": Prompt, "prefix": Prefix}[method](COUNT)
    with transformers_judge.doubled():
        model, parameter = theirs_of(config, method, "float64")
        runs = [
            engine_of(parsed, weights, adapters, precision, pieces(parameter, parsed, method))
            for precision in (FP64, FP32)
        ]
        about = {"betas": (a["beta_1"], a["beta_2"]), "eps": a["epsilon"], "weight_decay": a["weight_decay"]}
        optimizer = torch.optim.AdamW([parameter], lr=0.0, foreach=False, **about)
        for step in range(1, families.STEPS + 1):
            tokens, marks = drawn(config, step)
            loss, rate = backward(model, tokens, marks), families.learning_rate(step)
            optimizer.param_groups[0]["lr"] = rate
            for run, close, bound in zip(runs, (1e-9, 1e-5), (1e-6, 1e-4), strict=True):
                run.micro_step(led(tokens, marks))
                if step == 1:
                    found = whole(run, run.gradient) / np.count_nonzero(marks != -100)
                    errors = relative_errors({"": found}, {"": parameter.grad.numpy()})
                    assert errors[""] < close
                assert run.update(step, rate).loss == pytest.approx(loss, rel=close if step == 1 else bound)
            optimizer.step()
        right = parameter.detach().numpy()
    for run, bound in zip(runs, (1e-6, 1e-4), strict=True):
        assert relative_errors({"": whole(run, run.parameter)}, {"": right})[""] < bound


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("method", CONFIGS)
def test_folders_are_read_both_ways(method, family, tmp_path):
    config = families.FAMILIES[family]
    parsed, (tokens, _) = read_config(config), drawn(config, 1)
    adapters = {"prompt": Prompt, "prefix": Prefix}[method](COUNT)
    export_base(config, tmp_path / "base")
    source, (theirs, parameter) = find_source(str(tmp_path / "base")), theirs_of(config, method, "float32")
    theirs.save_pretrained(tmp_path / "theirs")
    read = open_adapter(tmp_path / "theirs", parsed)
    assert read.adapters == adapters
    run = engine_of(parsed, families.weights(config), adapters, FP32, pieces(parameter * 0, parsed, method))
    run.load(read.values(open_parameters(source, 0))(run.plan.rows))
    assert_same_logits(run, theirs, tokens)
    export_of(adapters, run, tmp_path / "ours", tmp_path / "base").write(lambda row: run.parameter(row.name))
    one, other = (load_file(tmp_path / side / "adapter_model.safetensors") for side in ("ours", "theirs"))
    assert one.keys() == other.keys() and all(np.array_equal(value, other[name]) for name, value in one.items())
    found = peft.PeftModel.from_pretrained(model_in(tmp_path / "base"), tmp_path / "ours")
    assert_same_logits(run, found, tokens)
    about = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    written = found.generate(input_ids=torch.from_numpy(tokens[:1, :7]).long(), **about)[0, 7:].tolist()
    settings = GenerateOptions(
        model=str(tmp_path / "base"), adapter=str(tmp_path / "ours"), max_tokens=6, device="cpu", ignore_end=True
    )
    questions = [Question({}, tokens=tuple(tokens[0, :7].tolist()))]
    (answer,) = Writer(settings, reads_text=False).answers(questions)
    assert list(answer.tokens) == written
    with pytest.raises(DataError, match="virtual tokens, which are a part of no weight"):
        merge(source, {tmp_path / "ours": 1.0}, tmp_path / "merged", dtype=None, overwrite=False)


@pytest.mark.parametrize(
    ("made", "method"),
    [
        (peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=COUNT, encoder_hidden_size=16), "prompt"),
        (
            peft.PrefixTuningConfig(
                task_type="CAUSAL_LM", num_virtual_tokens=COUNT, prefix_projection=True, encoder_hidden_size=16
            ),
            "prefix",
        ),
    ],
    ids=["p-tuning", "projected"],
)
def test_what_an_encoder_made_is_read(made, method, tmp_path):
    """PEFT stores the vectors and not the encoder."""
    config = families.FAMILIES["qwen2"]
    parsed, (tokens, _) = read_config(config), drawn(config, 1)
    export_base(config, tmp_path / "base")
    torch.manual_seed(3)
    theirs = peft.get_peft_model(transformers_judge.model_of(config, families.weights(config), "float32"), made).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    read = open_adapter(tmp_path / "theirs", parsed)
    assert read.adapters == {"prompt": Prompt, "prefix": Prefix}[method](COUNT)
    spec = Spec(parsed, FP32, Memory(), hyper(), families.BATCH, LENGTH + COUNT, adapters=read.adapters)
    run = Engine(make_plan(spec), HostBackend())
    run.load(read.values(open_parameters(find_source(str(tmp_path / "base")), 0))(run.plan.rows))
    assert_same_logits(run, theirs, tokens)
