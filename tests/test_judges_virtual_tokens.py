"""Prompt tuning and prefix tuning against PEFT, live: losses, gradients, steps of AdamW, folders both ways, logits."""

from functools import partial

import numpy as np
import pytest
from golden import families, transformers_judge
from golden.engines import FP32, FP64
from golden.peft_judge import (
    adamw_of,
    assert_close,
    assert_peft_reads,
    assert_same_logits,
    assert_same_tensors,
    drawn,
    export_base,
    hyper,
    loaded,
    loaded_from,
    merged_with,
    peft,
    spec_of,
    step_of,
    torch,
)

from llmq.adapters.resolve import open_adapter
from llmq.adapters.virtual_tokens import Prefix, Prompt
from llmq.data.batches.batch import Batch
from llmq.errors import DataError
from llmq.generation.prompts import Question
from llmq.generation.text import Writer
from llmq.model.config import read_config
from llmq.options.commands import GenerateOptions

pytestmark = pytest.mark.judge
COUNT = 5
OURS = {"prompt": Prompt, "prefix": Prefix}
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


def led(tokens, marks):
    """A batch with room for the virtual tokens."""
    zeros = np.zeros((len(tokens), COUNT), np.int32)
    return Batch(np.hstack([zeros, tokens]), np.hstack([zeros - 100, marks]).astype(np.int32))


def engine_of(parsed, weights, adapters, precision, parameter):
    """Our engine with the model's weights, and PEFT's virtual tokens."""
    value, count = parameter.detach().to(torch.float64).numpy(), parsed.num_layers if adapters.name == "prefix" else 1
    own = iter(np.split(value, count, axis=1))
    spec = spec_of(parsed, adapters, precision, hyper(), COUNT)
    return loaded(spec, lambda row: {row.parts[0].name: next(own)} if row.trainable else weights)


def whole(engine, read):
    """Our virtual tokens, or their gradient, in PEFT's form."""
    return np.concatenate([read(row.name) for row in engine.plan.rows if row.trainable], axis=1).astype(np.float64)


@pytest.mark.parametrize("family", families.FAMILIES)
@pytest.mark.parametrize("method", CONFIGS)
def test_losses_gradients_and_steps_are_those_of_peft(method, family):
    """In f64 and in f32: a batch, then 20 steps of AdamW."""
    config, adapters = families.FAMILIES[family], OURS[method](COUNT)
    parsed, weights = read_config(config), families.weights(config)
    with transformers_judge.doubled():
        model, parameter = theirs_of(config, method, "float64")
        runs = [engine_of(parsed, weights, adapters, precision, parameter) for precision in (FP64, FP32)]
        optimizer = adamw_of(model)
        for step in range(1, families.STEPS + 1):
            tokens, marks = drawn(config, step)
            loss = transformers_judge.backward(model, tokens, marks)
            for run, close, bound in zip(runs, (1e-9, 1e-5), (1e-6, 1e-4), strict=True):
                run.micro_step(led(tokens, marks))
                if step == 1:
                    found = whole(run, run.gradient) / np.count_nonzero(marks != -100)
                    assert_close({"": found}, {"": parameter.grad.numpy()}, close)
                assert run.update(step, families.learning_rate(step)).loss == pytest.approx(
                    loss, rel=close if step == 1 else bound
                )
            step_of(optimizer, step)
    for run, bound in zip(runs, (1e-6, 1e-4), strict=True):
        assert_close({"": whole(run, run.parameter)}, {"": parameter.detach().numpy()}, bound)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("method", CONFIGS)
def test_folders_are_read_both_ways(method, family, tmp_path):
    config = families.FAMILIES[family]
    parsed, (tokens, _) = read_config(config), drawn(config, 1)
    adapters, (theirs, _) = OURS[method](COUNT), theirs_of(config, method, "float32")
    export_base(config, tmp_path / "base")
    theirs.save_pretrained(tmp_path / "theirs")
    read = open_adapter(tmp_path / "theirs", parsed)
    assert read.adapters == adapters
    run = loaded_from(tmp_path / "base", adapters, read.values, COUNT)
    assert_same_logits(run, theirs, tokens, COUNT)
    found = assert_peft_reads(run, adapters, tmp_path, tokens, num_virtual=COUNT)
    assert_same_tensors(tmp_path / "ours", tmp_path / "theirs")
    about = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    written = found.generate(input_ids=torch.from_numpy(tokens[:1, :7]).long(), **about)[0, 7:].tolist()
    settings = GenerateOptions(
        model=str(tmp_path / "base"), adapter=str(tmp_path / "ours"), max_tokens=6, device="cpu", ignore_end=True
    )
    questions = [Question({}, tokens=tuple(tokens[0, :7].tolist()))]
    (answer,) = Writer(settings, reads_text=False).answers(questions)
    assert list(answer.tokens) == written
    with pytest.raises(DataError, match="virtual tokens, which are a part of no weight"):
        merged_with(tmp_path, "ours")


@pytest.mark.parametrize(
    ("made", "method"),
    [(peft.PromptEncoderConfig, "prompt"), (partial(peft.PrefixTuningConfig, prefix_projection=True), "prefix")],
    ids=["p-tuning", "projected"],
)
def test_what_an_encoder_made_is_read(made, method, tmp_path):
    """PEFT stores the vectors and not the encoder."""
    config = families.FAMILIES["qwen2"]
    parsed, (tokens, _) = read_config(config), drawn(config, 1)
    export_base(config, tmp_path / "base")
    torch.manual_seed(3)
    about = made(task_type="CAUSAL_LM", num_virtual_tokens=COUNT, encoder_hidden_size=16)
    model = transformers_judge.model_of(config, families.weights(config), "float32")
    theirs = peft.get_peft_model(model, about).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    read = open_adapter(tmp_path / "theirs", parsed)
    assert read.adapters == OURS[method](COUNT)
    run = loaded_from(tmp_path / "base", read.adapters, read.values, COUNT)
    assert_same_logits(run, theirs, tokens, COUNT)
