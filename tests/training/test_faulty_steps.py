"""Steps that are not finite: left out, the end of the run, or undone, with the same bits on resuming."""

import io
import math
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from in_process import train_on
from safetensors.numpy import load_file, save_file
from tiny_runs import ON_TOKENS, T, change_manifest, folder, hash_of, weights_of, write_weights

from llmq.data.tokens.token_file import TokenWriter
from llmq.errors import NonFiniteError, RefusedStepError, UsageError
from llmq.files.checkpoint import load
from llmq.options.parse import Options
from llmq.report.read import read_log
from llmq.training.hooks import Ask, Hook
from llmq.training.progress import Progress

BAD = 96  # the token that some rows have
SAVED, LOG = Path("runs/run/checkpoints"), Path("runs/run/log.jsonl")
OPTIONS = {
    **ON_TOKENS,
    "model": "base",
    "name": "run",
    "grad_accumulation": 2,
    "learning_rate": 1e-2,
    "warmup": 0,
    "steps": 9,
    "ckpt_interval": 2,
    "ckpt_keep_n": 0,
    "eval_every_n_steps": 0,
    "export_anyway": True,
}
SHAPE = {"tie_embeddings": False, "hidden_size": 64, "head_dim": 16, "intermediate_size": 128}  # a GPU takes it
AT = 4  # the step that meets BAD
BACK = {"on_nonfinite": "rollback"}
WAYS = {
    "plain": {},
    "two ranks": {"size": 2, "zero_level": 3, "grad_accumulation": 1},
    "lora": {"lora_rank": 2},
    "adalora": {"lora_rank": 4, "adalora": True, "adalora_interval": 2},
    "fp8": {"model_dtype": "bf16", "matmul_dtype": "e4m3"},
    "offload": {"offload_optimizer": True, "recompute_block": True, "offload_gradients": True},
    "last norm": {"clip_by": "last"},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two models: in one the embedding of BAD is infinite; a token file, in which one row has BAD."""
    path = tmp_path_factory.mktemp("faulty")
    write_weights(folder(path / "source", **SHAPE), path / "sound")
    shutil.copytree(path / "sound", path / "base")
    tensors = load_file(path / "base/model.safetensors")
    tensors["model.embed_tokens.weight"][BAD] = math.inf
    save_file(tensors, path / "base/model.safetensors", {"format": "pt"})
    tokens = np.random.default_rng(0).zipf(1.5, 60 * T + 1) % BAD
    tokens[17 * T + 3] = BAD
    write(path / "train.bin", tokens)
    return path


@pytest.fixture
def place(made, tmp_path, monkeypatch):
    """A folder of its own, in which these are."""
    for one in made.iterdir():
        (tmp_path / one.name).symlink_to(one)
    monkeypatch.chdir(tmp_path)


def write(path, tokens):
    with TokenWriter(str(path), vocab_size=97) as file:
        file.append(tokens.astype(np.int32))


def train(console=None, size=1, hooks=(), **changes):
    return train_on(size, {**OPTIONS, **changes}, console, hooks)


def events(kind):
    return [event for event in read_log(LOG).events if event["type"] == kind]


@pytest.mark.quick("two ranks")
@pytest.mark.parametrize("way", WAYS)
def test_a_rollback_is_a_resume_with_the_data_that_follows(place, way):
    """The run equals one that is resumed by hand from the checkpoint before the fault, at the data after it."""
    console = io.StringIO()
    result = train(console, **WAYS[way], **BACK)
    assert (result.exit_code, result.steps) == (0, 9) and np.isfinite(result.history["loss"]).all()
    assert "Step 4 changed nothing" in console.getvalue()
    rows = 4 * AT  # read until then
    assert f"Back to the checkpoint of step 2, 1 of at most 3 times; the data goes on after sample {rows}\n" in (
        console.getvalue()
    )
    assert [event["step"] for event in events("rollback")] == [2]
    log = read_log(LOG).train
    assert log["step"].tolist() == [*range(1, 10)] == result.history.steps("loss").tolist()
    rolled = weights_of(result.checkpoint_path)
    for step in SAVED.iterdir():
        if step.name not in ("step-00000002", "saves"):
            shutil.rmtree(step)
    change_manifest(SAVED / "step-00000002", lambda record: record["state"].update(position=rows))
    by_hand = train(**WAYS[way], overwrite=True, **{"continue": 2})
    assert weights_of(by_hand.checkpoint_path) == rolled


class Ends(Hook):
    """Sends SIGTERM after a step, once the run has gone back."""

    def __init__(self, step):
        self.step, self.is_back = step, False

    def on_rollback(self, run):
        self.is_back = True
        self.after_step(run, run.progress)

    def after_step(self, run, record):
        if self.is_back and record.step == self.step:
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 3, 7])
def test_a_run_that_ends_after_a_rollback_resumes_with_the_same_bits(place, step):
    whole = train(**BACK, name="whole")
    assert train(hooks=[Ends(step)], **BACK).exit_code == 75
    parts = train(**BACK, **{"continue": "newest"})
    assert weights_of(parts.checkpoint_path) == weights_of(whole.checkpoint_path)


class Saves(Hook):
    """Asks for a checkpoint of step 3, which is not due."""

    def after_step(self, run, record):
        return Ask.SAVE if record.step == 3 else None


def test_what_was_saved_after_the_checkpoint_is_saved_again(place):
    train(hooks=[Saves()], **BACK)
    state, _ = load(SAVED / "step-00000003")
    assert state["position"] == 4 * (AT + 1)


@pytest.mark.slow
def test_sites_that_have_left_fp8_since_are_back(place, monkeypatch):
    """They leave it again, as they would in a run that is resumed from there."""
    monkeypatch.setattr("llmq.training.fp8.LEAST_SNR_DB", {"e4m3": 99.0, "e5m2": 99.0})
    more = {"model_dtype": "bf16", "matmul_dtype": "e4m3", "log_fp8_every": 1, "fp8_fallback": True, "ckpt_interval": 0}
    rolled = train(**BACK, **more)
    left = [event["step"] for event in events("notice") if "fell_back" in event]
    assert left == [1, 1] and events("rollback")[0]["step"] == 0
    monkeypatch.setattr("llmq.training.ready.Progress", lambda: Progress(position=4 * AT))
    by_hand = train(name="by hand", **more)
    assert weights_of(by_hand.checkpoint_path) == weights_of(rolled.checkpoint_path)


def test_without_a_checkpoint_a_rollback_goes_to_the_beginning(place, monkeypatch):
    console = io.StringIO()
    result = train(console, **BACK, ckpt_interval=0)
    assert "Back to its beginning, 1 of at most 3 times" in console.getvalue()
    assert events("rollback")[0]["step"] == 0 and result.history.steps("loss").tolist() == [*range(1, 10)]
    monkeypatch.setattr("llmq.training.ready.Progress", lambda: Progress(position=4 * AT))
    by_hand = train(name="by hand", ckpt_interval=0)
    assert weights_of(by_hand.checkpoint_path) == weights_of(result.checkpoint_path)


def test_a_run_that_meets_faults_again_and_again_ends(place):
    tokens = np.full(60 * T + 1, 5)
    tokens[16 * T :: T] = BAD
    write("late.bin", tokens)
    with pytest.raises(
        NonFiniteError, match=r"went back to .* 2 times, each time with other data.* than to step"
    ) as why:
        train(**BACK, train_file="late.bin", rollback_limit=2, ckpt_interval=0)
    assert why.value.exit_code == 5 and not list(SAVED.glob("step*"))
    assert len(events("rollback")) == 2 and events("end")[0]["reason"] == "failed"


@pytest.mark.quick("plain")
@pytest.mark.parametrize("way", ["plain", "two ranks"])
def test_stop_ends_the_run_as_it_was_before_the_step(place, way):
    skipped = train(**WAYS[way], name="skipped", ckpt_interval=1)
    with pytest.raises(RefusedStepError, match=f"step {AT} is not finite: loss (nan|inf)") as why:
        train(**WAYS[way], on_nonfinite="stop", ckpt_interval=0)
    assert why.value.exit_code == 5 and [path.name for path in SAVED.glob("step*")] == ["step-00000003"]
    assert weights_of(SAVED / "step-00000003") == weights_of("runs/skipped/checkpoints/step-00000003")
    with pytest.raises(RefusedStepError, match=f"step {AT} is not finite"):
        train(**WAYS[way], on_nonfinite="stop", **{"continue": "newest"})
    done = train(**WAYS[way], **{"continue": "newest"})
    assert weights_of(done.checkpoint_path) == weights_of(skipped.checkpoint_path)


HUGE = {"layers.0.mlp.gate_proj": 1e21, "layers.0.mlp.up_proj": 1e21}
FINITE = "numbers are not finite, made of finite ones"
FIRST = {  # factors of weights, and the first that is not finite; without factors that is the embedding of BAD
    "embedding": (
        {},
        {},
        r"embedding_forward \(forward of micro-batch 1\): 0.attention.res of layer 0: 64 of 2,048 .*embed",
    ),
    "activation": (HUGE, {}, rf"swiglu_forward \(forward of micro-batch 1\): 0.mlp.act of layer 0: .*{FINITE}"),
    "norm": ({"lm_head": 1e21}, {}, rf"sum_squares \(update\): partials: .*{FINITE}"),
    "one rank": ({}, WAYS["two ranks"], r"all_gather \(forward\): embed.weight: 64 of .*; so is what it read"),
    "replay": (HUGE, {"recompute_block": True, "offload_optimizer": True}, r"swiglu_forward \(forward"),
    "fused": (HUGE, {"fused_update": True, "grad_accumulation": 1, "grad_clip": 0.0}, r"swiglu_forward \(forward\)"),
    "fused gradient": (
        {"lm_head": 1e21},
        {"fused_update": True, "grad_accumulation": 1, "grad_clip": 0.0},
        "gradient alone",
    ),
}


def scaled(factors):
    """A model whose tensors are so much larger than those of the sound one; without factors the other model."""
    if not factors:
        return "base"
    shutil.copytree("sound", "scaled")
    tensors = load_file("sound/model.safetensors")
    for name, factor in factors.items():
        tensors[f"model.{name}.weight".replace("model.lm_head", "lm_head")] *= np.float32(factor)
    save_file(tensors, "scaled/model.safetensors", {"format": "pt"})
    return "scaled"


@pytest.mark.quick("embedding", "one rank")
@pytest.mark.parametrize("case", FIRST)
def test_the_first_bad_op_is_named(place, case):
    factors, options, words = FIRST[case]
    with pytest.raises(RefusedStepError, match=words):
        train(model=scaled(factors), on_nonfinite="stop", debug_nan=True, **options)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "more", [{}, {"recompute_block": True, "offload_optimizer": True}, {"use_cuda_graphs": False}], ids=str
)
@pytest.mark.parametrize("case", ["embedding", "activation"])
def test_the_first_bad_op_is_named_on_a_gpu(place, case, more):
    """After steps that ran as graphs; and with the bits of steps that nothing has looked at."""
    factors, _, words = FIRST[case]
    more = {"device": "cuda", "model_dtype": "bf16", **more}
    with pytest.raises(RefusedStepError, match=words):
        train(model=scaled(factors), on_nonfinite="stop", debug_nan=True, **more)
    if case == "embedding":
        looked = train(debug_nan=True, name="looked", **more)
        assert weights_of(looked.checkpoint_path) == weights_of(train(name="plain", **more).checkpoint_path)


@pytest.mark.gpu
@pytest.mark.parametrize("more", [{}, {"matmul_dtype": "e4m3"}, {"offload_optimizer": True}], ids=str)
def test_a_run_on_a_gpu_goes_back(place, more):
    more = {"device": "cuda", "model_dtype": "bf16", **more}
    rolled = train(**BACK, **more)
    assert [event["step"] for event in events("rollback")] == [2] and np.isfinite(rolled.history["loss"]).all()
    whole = weights_of(rolled.checkpoint_path)
    shutil.rmtree(SAVED.parent)
    assert train(hooks=[Ends(7)], **BACK, **more).exit_code == 75
    assert weights_of(train(**BACK, **more, **{"continue": "newest"}).checkpoint_path) == whole


class Looks(Hook):
    """Looks for what is bad in every step, though there is nothing."""

    def __init__(self):
        self.found = []

    def after_update(self, run, done):
        before = self.state_of(run)
        self.found.append(run.engine._find(run.engine._batches))
        assert self.state_of(run) == before

    def state_of(self, run):
        """All but the norms, which are others of other weights."""
        norms = ("cell:norm", "cell:last_norm")
        return hash_of((name, value) for name, value in run.engine.state() if name not in norms)


SOUND = {
    **{way: options for way, options in WAYS.items() if "size" not in options},
    "seq tiles": {"seq_tiles": 2},
    "packed": {"packing": True},
    "chunks": {"lmhead_chunks": 4, "attn_bwd_chunks": 2},
    "rowwise": {"model_dtype": "bf16", "matmul_dtype": "e4m3", "fp8_scaling": "rowwise", "opt_m_dtype": "int8"},
    "nf4": {"lora_rank": 2, "base_dtype": "nf4"},
}


@pytest.mark.quick("fp8")
@pytest.mark.parametrize("way", SOUND)
def test_looking_finds_nothing_in_sound_steps_and_changes_none(place, way):
    about = {**SOUND[way], "model": "sound", "steps": 3}
    looks = Looks()
    train(hooks=[looks], debug_nan=True, **about)
    assert looks.found == [None] * 3


def test_rollback_limit_needs_a_rollback():
    with pytest.raises(UsageError, match="--rollback-limit 2 is for --on-nonfinite rollback or --on-spike rollback"):
        Options.parse({"model": "m", "train_file": "t", "rollback_limit": 2})
