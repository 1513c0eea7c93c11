"""Model sources: which of folder, preset and Hub is meant, and that initial values are a function of their address."""

import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from llmq.errors import DataError, UsageError
from llmq.files import source as source_module
from llmq.files.huggingface import Export
from llmq.files.source import BLOCK, INIT_STD, ModelSource, drawn, drawn_block, open_parameters, open_source
from llmq.model.config import ModelConfig, from_folder
from llmq.model.parameters import VOCAB_MULTIPLE, parameter_rows
from llmq.model.presets import PRESETS
from llmq.options.data import ModelOptions
from llmq.row import Part, Row
from llmq.tensor import DTYPES

CONFIG = ModelConfig(
    "Qwen2ForCausalLM", 3001, 128, 352, 2, 4, 2, 32, 1e-6, 64, qkv_bias=True, tie_embeddings=False, dtype="bf16"
)
SCRATCH = ModelSource("x", CONFIG, None, None, True, False)


def options(model, **more):
    return ModelOptions.model_validate({"model": model, **more})


def write(folder, config=CONFIG):
    values = {row.name: value.astype(DTYPES[config.dtype]) for row, value in open_parameters(SCRATCH, 3)(rows(config))}
    Export(folder, config, rows(config), config.dtype).write(lambda row: values[row.name])
    return values


def rows(config=CONFIG):
    return parameter_rows(config)


def test_a_folder_is_read_as_stored(tmp_path):
    values = write(tmp_path / "m")
    source = open_source(options(tmp_path / "m"))
    assert (source.config, source.folder, source.tokenizer_folder) == (CONFIG, tmp_path / "m", None)
    read = {row.name: value for row, value in open_parameters(source, 0)(rows())}
    assert list(read) == [row.name for row in rows()]
    for name, value in read.items():
        assert value.dtype == DTYPES[CONFIG.dtype]
        np.testing.assert_array_equal(value, values[name])
    (tmp_path / "m" / "tokenizer.json").write_text("{}")
    assert open_source(options(tmp_path / "m")).tokenizer_folder == tmp_path / "m"


def test_a_folder_from_scratch_needs_no_weights(tmp_path):
    write(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").unlink()
    source = open_source(options(tmp_path / "m", from_scratch=True))
    assert source.from_scratch and source.config == CONFIG
    with pytest.raises(DataError, match=r"--from-scratch"):
        open_parameters(open_source(options(tmp_path / "m")), 0)(rows())  # by the call


def test_a_config_without_dtype_takes_that_of_the_weights(tmp_path):
    write(tmp_path / "m", replace(CONFIG, dtype="fp16"))
    path = tmp_path / "m" / "config.json"
    path.write_text(path.read_text().replace('"dtype"', '"_a"').replace('"torch_dtype"', '"_b"'))
    assert from_folder(tmp_path / "m").dtype == "fp32"
    assert open_source(options(tmp_path / "m")).config.dtype == "fp16"


def test_presets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = open_source(options("QWEN2.5-0.5b", from_scratch=True, init_proj_to_zero=True))
    assert source.config is PRESETS["Qwen2.5-0.5B"] and source.init_proj_to_zero
    assert source.folder is None and source.tokenizer_folder is None
    with pytest.raises(UsageError, match="add --from-scratch"):
        open_source(options("Qwen2.5-0.5B"))
    with pytest.raises(UsageError, match=r"nearest: Qwen2\.5-0\.5B.*ORG/NAME"):
        open_source(options("Qwen2.5-0.5", from_scratch=True))
    with pytest.raises(UsageError, match="--revision v2"):
        open_source(options("tinyllama", from_scratch=True, revision="v2"))
    write(tmp_path / "tinyllama")  # a folder of that name comes first
    assert open_source(options("tinyllama")).config == CONFIG


def test_every_preset_knows_a_tokenizer_and_fetches_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(source_module, "model_folder", lambda *arguments, **kind: pytest.fail("asked the Hub"))
    names = {name: open_source(options(name, from_scratch=True)).preset_tokenizer for name in PRESETS}
    assert all(name.count("/") == 1 for name in names.values())
    assert names["tiny_llama3_50m"] == names["llama3_405b"] == "NousResearch/Meta-Llama-3-8B"
    assert names["tinyllama"] == names["llama1_7b"] == "unsloth/llama-2-7b" and names["Qwen3-4B"] == "Qwen/Qwen3-0.6B"


def test_a_tokenizer_of_its_own_is_that_of_the_data_and_the_export(tmp_path):
    write(tmp_path / "m")
    (tmp_path / "m" / "tokenizer.json").write_text("{}")
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "tokenizer.json").write_text("{}")
    own = open_source(options(tmp_path / "m", from_scratch=True))
    assert (own.tokenizer_folder, own.required_tokenizer) == (tmp_path / "m", None)
    other = open_source(options(tmp_path / "m", from_scratch=True, tokenizer=tmp_path / "t"))
    assert (other.tokenizer_folder, other.required_tokenizer) == (tmp_path / "t", tmp_path / "t")
    assert open_source(options(tmp_path / "m")).required_tokenizer == tmp_path / "m"
    with pytest.raises(DataError, match=r"has no tokenizer\.json"):
        open_source(options(tmp_path / "m", from_scratch=True, tokenizer=tmp_path))


def test_an_adapters_folder_is_said_to_be_one(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    for scratch in (False, True):
        with pytest.raises(DataError, match=r"/a is an adapter of org/base .*: give org/base with --adapter"):
            open_source(options(tmp_path / "a", from_scratch=scratch))
    write(tmp_path / "m")
    (tmp_path / "m" / "adapter_config.json").write_text("{}")  # beside a whole model
    assert open_source(options(tmp_path / "m")).config == CONFIG


def test_a_folder_that_hides_a_known_name_is_noticed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder, hidden in (("qwen2.5-0.5b", "preset"), ("Qwen/mine", "model of the Hub"), ("runs/mine", None)):
        write(tmp_path / folder)
        said = []
        assert open_source(options(folder, from_scratch=True), said.append).folder == Path(folder)
        assert said == (
            [f"--model {folder} is the folder {tmp_path / folder}, not the {hidden} of that name"] * bool(hidden)
        )
        open_source(options(f"./{folder}", from_scratch=True), pytest.fail)


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """What the Hub is asked for, which always gives the same folder."""
    write(tmp_path / "m")
    found = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(source_module, "model_folder", lambda *given: found.append(given[:3]) or tmp_path / "m")
    return found


def test_the_instruct_models_of_llama_3_are_names_of_hub_models(asked):
    names = [f"meta-llama/Meta-Llama-3-{size}-Instruct" for size in ("8B", "70B")]
    assert [open_source(options(f"llama3_{size}_Instruct")).name for size in ("8b", "70b")] == names
    assert asked == [(name, None, "model") for name in names]
    for given, plan_only in (({}, True), ({"from_scratch": True}, False)):  # have the shape of their base
        source = open_source(options("llama3_70b_instruct", **given), plan_only=plan_only)
        assert source.config is PRESETS["llama3_70b"] and source.from_scratch
        assert source.preset_tokenizer == "NousResearch/Meta-Llama-3-8B-Instruct"
    assert len(asked) == 2


def test_the_hub_is_asked_for_no_weights_from_scratch(asked):
    assert open_source(options("org/name", revision="v1")).place == "org/name (v1, m)"
    open_source(options("org/name", from_scratch=True))
    assert asked == [("org/name", "v1", "model"), ("org/name", None, "config")]


def test_a_model_from_scratch_has_the_vocabulary_that_is_asked_for(tmp_path):
    source = open_source(options("llama3_8b", from_scratch=True, vocab_size=1000))
    assert source.config == replace(PRESETS["llama3_8b"], vocab_size=1000, bos_token_id=None, eos_token_ids=())
    asked = []
    counted = lambda name: asked.append(name) or 256  # noqa: E731
    source = open_source(options("llama3_8b", from_scratch=True, vocab_size="tokenizer"), num_ids=counted)
    assert source.config.vocab_size == 256 and asked == [source.preset_tokenizer]
    write(tmp_path / "m")
    with pytest.raises(UsageError, match="has no tokenizer: name one with --tokenizer, or give a number"):
        open_source(options(tmp_path / "m", from_scratch=True, vocab_size="tokenizer"), num_ids=counted)


def test_absent_folders_and_revisions_of_folders(tmp_path):
    (tmp_path / "model-a").mkdir()
    with pytest.raises(DataError, match=r"no folder .*nearest: .*model-a"):
        open_source(options(tmp_path / "model-b"))
    with pytest.raises(DataError, match=r"config\.json is absent"):
        open_source(options(tmp_path / "model-a"))
    with pytest.raises(UsageError, match="--revision v1"):
        open_source(options(tmp_path / "model-a", revision="v1"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match="is a file"):
        open_source(options(tmp_path / "config.json"))


def test_initial_distribution():
    for row, value in open_parameters(SCRATCH, 7)(rows()):
        assert value.shape == row.shape and value.dtype == np.float32
        used = value[: row.parts[-1].stop].astype(np.float64)
        assert not value[row.parts[-1].stop :].any()
        if row.init in ("ones", "zeros"):
            assert (used == (row.init == "ones")).all()
            continue
        std = INIT_STD / math.sqrt(2 * CONFIG.num_layers) if row.init == "residual" else INIT_STD
        # Five standard errors of the mean, the standard deviation and the fourth moment of n normal values.
        n = used.size
        assert abs(used.mean()) < 5 * std / math.sqrt(n)
        assert abs(used.std() / std - 1) < 5 / math.sqrt(2 * n)
        assert abs((used**4).mean() / std**4 - 3) < 5 * math.sqrt(96 / n)


def test_projections_can_start_at_zero():
    source = replace(SCRATCH, init_proj_to_zero=True)
    zero = {row.name for row, value in open_parameters(source, 7)(rows()) if not value.any()}
    expected = {row.name for row in rows() if row.init == "residual" or row.init == "zeros"}
    assert zero == expected and "layers.0.mlp.down.weight" in zero and "layers.1.attention.o.weight" in zero


def test_a_value_is_a_function_of_seed_name_and_element():
    named = {row.name: row for row in rows()}
    whole = {row.name: value for row, value in open_parameters(SCRATCH, 7)(rows())}
    for row, value in open_parameters(SCRATCH, 7)([*named.values()][::-1]):  # any order
        np.testing.assert_array_equal(value, whole[row.name])
    weights = [name for name in named if named[name].init in ("normal", "residual")]
    other = drawn_alone(named[weights[0]], 8)
    assert np.mean(other == whole[weights[0]]) < 0.1
    scaled = [whole[name].ravel()[:1000] / whole[name].std() for name in weights]
    for a in range(len(scaled)):
        for b in range(a):
            assert abs(np.corrcoef(scaled[a], scaled[b])[0, 1]) < 0.2


def drawn_alone(row, seed=1):
    [(_, value)] = drawn(SCRATCH, [row], seed)
    return value


def test_padding_blocks_threads_and_what_is_drawn_ahead_do_not_change_a_value(monkeypatch):
    rows_of = 2 * BLOCK // 128 + 10
    plain = Row("embed.weight", (rows_of, 128), (Part("e", 0, rows_of),), "normal", True)
    padded = replace(plain, shape=(rows_of + VOCAB_MULTIPLE, 128))
    value = drawn_alone(plain)
    for count, ahead in product((1, 4), (0, value.nbytes, 1 << 40)):
        monkeypatch.setattr(source_module, "num_cores", lambda count=count: count)
        monkeypatch.setattr(source_module, "DRAWN_AHEAD", ahead)
        for row, found in drawn(SCRATCH, [plain, padded, plain], 1):
            np.testing.assert_array_equal(found[:rows_of], value)
            assert found.shape == row.shape and not found[rows_of:].any()
    assert value.ravel()[-1] != 0
    block = drawn_block(1, "embed.weight", 1, 64) * np.float32(INIT_STD)
    np.testing.assert_array_equal(value.ravel()[BLOCK : BLOCK + 64], block)
    assert not np.array_equal(value.ravel()[:64], block)
