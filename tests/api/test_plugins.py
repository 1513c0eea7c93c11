"""Plug-ins, registered in a process or installed as entry points: each kind in a run, and what wrong ones say."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from installed_plugins import EXAMPLE, install, tables_kept, write_metadata
from safetensors.numpy import load_file
from tiny_runs import hash_of, on_weights, tiny_options, with_commands

import llmq
from llmq.adapters.ia3 import Gains, scaled
from llmq.adapters.resolve import METHODS
from llmq.adapters.targets import chosen
from llmq.api.ranks import refuse_local
from llmq.backends.host import HostBackend
from llmq.blocks.head import CrossEntropy
from llmq.errors import DataError, PluginError, UsageError
from llmq.model.families import Family
from llmq.optimizers.sgd import Sgd
from llmq.options.parse import Options


@pytest.fixture
def given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with tables_kept():
        yield {**on_weights(tmp_path), "steps": 4, "device": "cpu", "eval_every_n_steps": 2}


@pytest.fixture
def installed(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(install(tmp_path / "site"))


def weights(result):
    return hash_of(load_file(result.model_path / "model.safetensors").items())


def test_the_example_trains(given, installed):
    lion = "lion:beta_1=0.95"
    about = {"optimizer": lion, "loss": "focal:gamma=1.5", "adapter_method": "layer_rates:decay=0.5", "callback": "csv"}
    run = llmq.train(**{**given, "steps": 8}, **about)
    losses = run.history["loss"]
    assert losses[-1] < losses[0] - 0.1
    lines = Path("runs/run/losses.csv").read_text().splitlines()
    assert lines[0] == f"1,loss,{float(losses[0])}" and len(lines) == 8 + 4
    again = {**given, "steps": 9, "continue": "newest"}
    with pytest.raises(UsageError) as error:
        llmq.train(**again)
    for said in ("--optimizer: lion", "--loss: focal", "--adapter-method: layer_rates", "layer_rates: 0.5"):
        assert f"{said} in the checkpoint, not set now" in str(error.value)
    assert llmq.train(**again, **about).steps == 9


def test_lion_by_hand(given, installed):
    """A step of the example's optimizer on weights that nothing else changes."""
    about = {"steps": 1, "learning_rate": 1e-3, "weight_decay": 0, "grad_clip": 0, "warmup": 0}
    run = llmq.train(**{**given, **about}, optimizer="lion")
    before, after = load_file("base/model.safetensors"), load_file(run.model_path / "model.safetensors")
    for name, value in before.items():
        moved = np.abs(after[name] - value)
        assert np.all((moved < 1e-9) | np.isclose(moved, 1e-3, rtol=1e-3)), name
        assert (moved > 1e-9).mean() > 0.5 or "embed" in name


def test_focal_loss_without_focus_is_cross_entropy(given, installed):
    ours, focal = llmq.train(**given), llmq.train(**{**given, "name": "focal"}, loss="focal:gamma=0")
    np.testing.assert_allclose(focal.history["loss"], ours.history["loss"], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_pip_installs_the_example_for_the_command(given, tmp_path):
    site, environ = tmp_path / "pip", with_commands(tmp_path)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--target", str(site), "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, str(EXAMPLE)], check=True, capture_output=True)
    environ["PYTHONPATH"] += f":{site}"
    flags = ["--model=base", "--train-file=train.bin", "--steps=2", "--device=cpu", "--seq-len=16", "--batch-size=2"]
    flags += ["--model-dtype=fp32", "--optimizer=lion", "--loss=focal:gamma=2", "--callback=csv"]
    two = ["llmq-launch", "--procs", "2", "--", *flags, "--global-batch-size=4", "--name=two"]
    for command, name in ((["llmq-train", *flags, "--name=one"], "one"), (two, "two")):
        done = subprocess.run(command, env=environ, capture_output=True, text=True)
        assert not done.returncode, done.stdout + done.stderr
        assert Path("runs", name, "losses.csv").is_file()


class Slow(CrossEntropy):
    """A reader of logits: half of cross-entropy's z-loss."""

    def __init__(self, vocab_size, z_loss, half=0.5):
        super().__init__(vocab_size, half * z_loss)


def test_an_optimizer_a_reader_and_a_callback_of_this_process(given):
    seen = []
    llmq.register("optimizer", "plain", lambda options, momentum=0.0: Sgd(momentum, False, options["weight_decay"]))
    llmq.register("loss", "slow", Slow)
    llmq.register("callback", "seen", lambda start=0: lambda run, record: seen.append(start + record.step))
    plain = llmq.train(**given, optimizer="plain:momentum=0.5", loss="slow", z_loss=0.2, callback=["seen:start=10"])
    ours = llmq.train(**{**given, "name": "sgd"}, optimizer="sgd", momentum=0.5, weight_decay=0.1, z_loss=0.1)
    assert weights(plain) == weights(ours)
    assert seen == [11, 12, 12, 13, 14, 14]


def test_a_family_and_a_backend_of_this_process(given):
    tiny = json.loads(Path("base/config.json").read_text()) | {
        "architectures": ["TinyForCausalLM"],
        "model_type": "tiny",
    }
    Path("base/config.json").write_text(json.dumps(tiny))
    with pytest.raises(DataError, match=r"known are .*LlamaForCausalLM"):
        llmq.train(**given)
    opened = []

    class Counting(HostBackend):
        """NumPy's, counted."""

    def counting(asked, log=False):
        opened.append((asked.use_graphs, log))
        return Counting(world=asked.world)

    llmq.register(
        "family", "TinyForCausalLM", Family("tiny", facts={"qkv_bias": True}, takes=frozenset({"attention_bias"}))
    )
    llmq.register("backend", "counting", counting)
    run = llmq.train(**{**given, "device": "counting:log=true"})
    assert opened == [(True, True)] and run.steps == 4
    assert json.loads((run.model_path / "config.json").read_text())["architectures"] == ["TinyForCausalLM"]
    assert llmq.load(run.model_path, device="counting", batch_size=1, seq_len=8).logits([[1, 2]]).shape == (1, 2, 97)
    (answer,) = llmq.generate(run.model_path, [1, 2], device="counting", max_tokens=2)
    assert len(answer.tokens) == 2 and len(opened) == 3
    with pytest.raises(UsageError, match="family TinyForCausalLM is registered in this process alone, and gpus=2"):
        refuse_local(Options.parse({**{key: given[key] for key in ("model", "train_file")}, "gpus": 2}))


class OutGains(Gains):
    """Gains on the outputs of maps by a name of its own in PEFT's files."""

    peft_types = ("OUT_GAINS",)

    @classmethod
    def of_options(cls, options, config, steps, *, names="k_proj"):
        return cls(scaled(chosen(names, config, "out_gains"), ()), base=options.base_dtype)

    def peft_config(self, config):
        return {**super().peft_config(config), "peft_type": "OUT_GAINS"}


@pytest.mark.filterwarnings("ignore:The weights of the layers are held")
def test_a_method_of_this_process_has_files(given):
    llmq.register("method", "out_gains", OutGains)
    given |= {"learning_rate": 0.1, "base_dtype": "int8", "merge": True}
    run = llmq.train(**given, adapter_method="out_gains:names=v_proj")
    assert len(load_file(run.model_path / "adapter_model.safetensors")) == 1
    ids = [[1, 2, 3, 4]]
    base, adapted = (
        llmq.load("base", adapter=adapter, base_dtype="int8").logits(ids) for adapter in (None, run.model_path)
    )
    merged = llmq.load(run.model_path / "merged").logits(ids)
    assert np.abs(adapted - base).max() > 10 * np.abs(adapted - merged).max()
    more = llmq.train(**{**given, "name": "more", "adapter": str(run.model_path), "base_dtype": None})
    assert more.history["loss"][0] < run.history["loss"][0]
    del METHODS["out_gains"]
    with pytest.raises(DataError, match="peft_type OUT_GAINS is not read, only LORA, "):
        llmq.load("base", adapter=run.model_path)


def test_what_cannot_be_registered():
    with pytest.raises(UsageError, match=r"'optimiser' is no kind of plug-in: known are .*: did you mean optimizer?"):
        llmq.register("optimiser", "lion", None)
    with pytest.raises(UsageError, match="optimizer adamw is llmq's own: register yours under another name"):
        llmq.register("optimizer", "adamw", None)
    with pytest.raises(UsageError, match="cannot be called 'a:b'"):
        llmq.register("loss", "a:b", None)
    for kind, lacks in {"loss": "__call__", "family": "model_type", "method": "of_options", "op": "record"}.items():
        with pytest.raises(PluginError, match=f"the plug-in {kind} x is 3, which has no {lacks}"):
            llmq.register(kind, "x", 3)


class Failing(llmq.Callback):
    """One with a fault."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_step(self, run, record):
        if record.step == self.at:
            raise ZeroDivisionError("none left")


def test_an_error_names_its_plugin(given):
    llmq.register("callback", "failing", Failing)
    with pytest.raises(
        PluginError, match=r"plug-in callback failing failed in .*test_plugins.py, line \d+: ZeroDiv.*none left"
    ):
        llmq.train(**given, callback="failing:at=3")
    assert "plug-in callback failing" in Path("runs/run/log.jsonl").read_text()
    assert Path("runs/run/checkpoints/step-00000003").is_dir()
    with pytest.raises(PluginError, match=r"the plug-in callback failing:of=3 failed: TypeError: .*'of'"):
        llmq.train(**{**given, "name": "other"}, callback="failing:of=3")
    llmq.register("optimizer", "none", lambda options: None)
    with pytest.raises(PluginError, match="the plug-in optimizer none gives None, which has no states, update"):
        llmq.train(**{**given, "name": "none"}, optimizer="none")
    with pytest.raises(ZeroDivisionError, match="mine"):
        llmq.train(**{**given, "name": "mine"}, callback="failing:at=9", callbacks=[lambda *about: _raise("mine")])


def _raise(text):
    raise ZeroDivisionError(text)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {"optimizer": "lino"},
            "--optimizer lino is not one of adamw, sgd, .*lion, and no plug-in .*: did you mean lion?",
        ),
        ({"optimizer": "lion:beta=1"}, "plug-in optimizer lion:beta=1 failed: TypeError: .*'beta'"),
        ({"optimizer": "lion:beta"}, "lion:beta: a plug-in and its options are NAME:key=value,key=value"),
        ({"optimizer": "adamw:beta_1=1"}, "the options of adamw are flags of their own"),
        ({"optimizer": "lion", "beta_1": 0.5}, "--beta-1 0.5 is for --optimizer adamw, but it is lion: leave it out"),
        ({"optimizer": "lion", "opt_v_dtype": "bf16"}, "--opt-v-dtype bf16 is of no use"),
        (
            {"optimizer": "lion", "dry_run": True, "gpu": "H200", "device": "cuda"},
            "the op lion of a plug-in has no kernel",
        ),
        ({"loss": "focl"}, "--loss focl is not one of cross_entropy, .*focal, .*did you mean focal?"),
        ({"callback": "cvs"}, "--callback cvs is not one of early_stopping, .*csv, .*did you mean csv?"),
        (
            {"adapter_method": "layer_rate"},
            "--adapter-method layer_rate is not one of .*layer_rates.*did you mean layer_rates",
        ),
        ({"adapter_method": "lora"}, "--adapter-method lora is not one of .*layer_rates"),
        ({"device": "planned"}, "--device planned is not one of auto, cuda, cpu, and no plug-in has this name"),
        ({"adapter_method": "layer_rates:decay=2"}, "layer_rates:decay=2 is not between 0 and 1"),
        (
            {"adapter_method": "layer_rates", "lora_rank": 2},
            "--adapter-method layer_rates is a plug-in, .*--lora-rank is of",
        ),
        ({"device": "gpu"}, "--device gpu is not one of auto, cuda, cpu, and no plug-in has this name"),
        ({"optimizer": "broken"}, "the plug-in optimizer broken of llmq-broken 0.1.0 is not imported: ModuleNotFound"),
        ({"loss": "two"}, "loss two is a plug-in of .* and .*: uninstall one"),
    ],
)
def test_wrong_names_and_options(given, installed, tmp_path, monkeypatch, changes, match):
    write_metadata(tmp_path / "other", "llmq-broken", "optimizer.broken = no_such_module:f\nloss.two = math:sin\n")
    write_metadata(tmp_path / "other", "llmq-second", "loss.two = math:cos\n")
    monkeypatch.syspath_prepend(tmp_path / "other")
    with pytest.raises((UsageError, PluginError), match=match) as caught:
        llmq.train(**{**given, **changes})
    assert isinstance(caught.value, PluginError) == (
        " of llmq-" in str(caught.value) or " failed: " in str(caught.value)
    )


def test_other_ranks_find_what_is_installed_alone(given, installed):
    parsed = {**{key: given[key] for key in ("model", "train_file")}, "gpus": 2}
    refuse_local(Options.parse({**parsed, "optimizer": "lion", "callback": ["csv"]}))
    llmq.register("callback", "mine", Failing)
    with pytest.raises(UsageError, match="callback mine is registered in this process alone, and gpus=2 starts others"):
        refuse_local(Options.parse({**parsed, "callback": ["csv", "mine:at=3"]}))


def test_entry_points_are_read_for_unknown_names_alone(tmp_path, monkeypatch):
    """So that a run without plug-ins does not wait for them."""
    from importlib import metadata

    monkeypatch.chdir(tmp_path)
    with tables_kept(), monkeypatch.context() as patch:
        patch.setattr(metadata, "entry_points", lambda **about: _raise("read"))
        llmq.train(**{**tiny_options(tmp_path), "steps": 2})
        with pytest.raises(ZeroDivisionError, match="read"):
            Options.parse({"model": "m", "data": "d", "optimizer": "lion"})
