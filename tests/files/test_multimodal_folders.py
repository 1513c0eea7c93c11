"""Language models inside multimodal folders: keys, names of tensors, what is carried over, and what is refused."""

import json
import shutil
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
from multimodal_models import MULTIMODAL
from safetensors.numpy import load_file, save_file
from small_tokenizers import EOS, byte_level, save

import llmq
from llmq.errors import DataError, UsageError
from llmq.files import carried
from llmq.files.carried import carried_from
from llmq.files.huggingface import checked_tensors
from llmq.files.source import find_source
from llmq.model.config import read_config, to_hf
from llmq.model.parameters import parameter_rows

EVERY = pytest.mark.parametrize("name", MULTIMODAL)
RUN = {"device": "cpu", "model_dtype": "fp32", "batch_size": 2, "seq_len": 16, "steps": 2, "out_dir": "out"}
PARTS = {
    "vision_tower.layers.0.q_proj.weight": np.arange(12, dtype=np.float16).reshape(3, 4),
    "vision_tower.position_ids": np.arange(7)[None],
    "vision_tower.scale": np.array(2.5, np.float32),
    "multi_modal_projector.empty": np.zeros((0, 4), np.int8),
}


TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
ANSWER = {"role": "assistant", "content": "A ship."}


def written(folder, name, *, prefix="language_model.model.", head="language_model.lm_head.", keys=None):
    """A folder whose language model has drawn tensors."""
    config, rng = MULTIMODAL[name] | {"dtype": "float32"} | (keys or {}), np.random.default_rng(0)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tensors = dict(PARTS)
    for row in parameter_rows(read_config(config)):
        for part in row.parts:
            own = part.name.replace("model.language_model.", prefix).replace("lm_head.", head)
            shape = part.shape(row.part_axes)
            tensors[own] = (rng.standard_normal(shape) * 0.1).astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    return tensors


def refused(change, *texts, name="gemma3"):
    mapping = deepcopy(MULTIMODAL[name])
    change(mapping)
    with pytest.raises(DataError) as caught:
        read_config(mapping)
    assert all(text in str(caught.value) for text in texts), caught.value


@EVERY
def test_only_what_changes_is_written(name):
    source = MULTIMODAL[name]
    config = read_config(source)
    assert to_hf(config) == source
    now = to_hf(config.with_vocabulary(90), "fp32")
    inner = "text_config" if "text_config" in source else None
    before, after = (one[inner] if inner else one for one in (source, now))
    changed = {"vocab_size": 90, **({} if inner else {"dtype": "float32", "torch_dtype": "float32"})}
    assert after == before | changed
    assert now["vision_config"] == source["vision_config"] and now["dtype"] == "float32"
    assert read_config(now).vocab_size == 90 and read_config(now).dtype == "fp32"


def test_absent_keys_of_text_config_are_those_of_transformers():
    """As Gemma 3 4B is published, and Qwen2.5-VL."""
    gemma = read_config(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "eos_token_id": [1, 106],
            "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text"}
            | {"num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
            "vision_config": {},
        }
    )
    assert (gemma.vocab_size, gemma.num_heads, gemma.num_kv_heads, gemma.head_dim) == (262208, 8, 4, 256)
    assert gemma.rope.theta == 1e6 and gemma.rope.factor == 8 and gemma.local_rope.theta == 1e4
    assert gemma.windows[:7] == (*[1024] * 5, None, 1024) and gemma.tie_embeddings
    assert gemma.eos_token_ids == (1, 106) and gemma.max_position == 131072
    qwen = read_config({"model_type": "qwen2_5_vl", "vision_config": {}, "text_config": {"hidden_size": 3584 * 2}})
    assert (qwen.vocab_size, qwen.num_layers, qwen.num_kv_heads, qwen.rope.theta) == (152064, 80, 8, 1e6)
    assert not qwen.tie_embeddings and qwen.qkv_bias and qwen.rms_norm_eps == 1e-5


def test_release_4_writes_the_keys_of_qwen_twice():
    flat = MULTIMODAL["qwen2_5_vl"]
    twice = flat | {"text_config": {**flat, "model_type": "qwen2_5_vl_text", "num_hidden_layers": 2}}
    config = read_config(twice)
    assert config.num_layers == 2 and to_hf(config) == twice
    now = to_hf(config.with_vocabulary(90))
    assert now["vocab_size"] == now["text_config"]["vocab_size"] == 90
    refused(lambda c: c.update(twice, text_scale=3), "- text_scale (3): llmq does not know", name="qwen2_5_vl")


def test_keys_that_are_wrong_are_named_by_their_place():
    refused(lambda c: c["text_config"].update(hidden_size="x"), "text_config.hidden_size ('x')")
    refused(lambda c: c["text_config"].update(swiglu=3), "text_config.swiglu (3): llmq does not know this key")
    refused(lambda c: c.update(text_scale=3), "- text_scale (3): llmq does not know this key of Gemma3ForCond")
    refused(lambda c: c.update(tie_word_embeddings=3), "- tie_word_embeddings (3)")
    refused(lambda c: c.pop("text_config"), "text_config (absent): is needed")
    refused(lambda c: c.update(text_config=[1]), "text_config ([1]): must be an object")
    refused(lambda c: c["text_config"].update(model_type="ministral3"), "only mistral is", name="mistral3")
    refused(
        lambda c: c.update(quantization_config={"quant_method": "awq"}), "- quantization_config", "--base-dtype nf4"
    )
    refused(lambda c: c.update(rms_norm_eps=-1), "- rms_norm_eps (-1)", name="qwen2_5_vl")
    refused(lambda c: c.update(rope_scaling={"type": "mrop"}), "rope_type 'mrop' is not supported", name="qwen2_5_vl")


SPELLINGS = [("language_model.model.", "language_model.lm_head."), ("model.", "lm_head."), (carried.INSIDE, "lm_head.")]


@pytest.mark.parametrize(("prefix", "head"), SPELLINGS)
def test_a_run_keeps_names_and_what_lies_beside(tmp_path, monkeypatch, prefix, head):
    """With weights that are not trained at all bit for bit, in pieces."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("llmq.files.tensor_files.CHUNK_BYTES", 5)
    before = written(Path("base"), "mistral3", prefix=prefix, head=head)
    tokens = np.arange(200, dtype=np.int32) % 90
    llmq.Trainer(model="base", learning_rate=0.0, **RUN).train(train=tokens)
    after = load_file("out/model.safetensors")
    assert after.keys() == before.keys()
    for name, value in before.items():
        assert (after[name].dtype, after[name].shape) == (value.dtype, value.shape)
        assert after[name].tobytes() == np.asarray(value).tobytes(), name


@pytest.mark.parametrize("tied", [True, False])
def test_the_files_say_whether_the_head_is_tied(tmp_path, tied):
    """Where no key does, as in Mistral Small 3.1."""
    tensors = written(tmp_path / "base", "mistral3")
    config = {key: value for key, value in MULTIMODAL["mistral3"].items() if key != "tie_word_embeddings"}
    config["text_config"] = {k: v for k, v in config["text_config"].items() if k != "tie_word_embeddings"}
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    if tied:
        tensors.pop("language_model.lm_head.weight")
        save_file(tensors, tmp_path / "base" / "model.safetensors")
    assert find_source(str(tmp_path / "base")).config.tie_embeddings == tied


def test_folders_that_lack_a_part(tmp_path):
    written(tmp_path / "base", "gemma3")
    config = find_source(str(tmp_path / "base")).config
    save_file(PARTS, tmp_path / "base" / "model.safetensors")
    with pytest.raises(DataError, match=r"no tensor of a language model, only .*vision tower alone"):
        checked_tensors(tmp_path / "base", parameter_rows(config))
    with pytest.raises(
        UsageError, match=r"--from-scratch is for language models, and .*Gemma3ForConditionalGeneration"
    ):
        find_source(str(tmp_path / "base"), from_scratch=True)


def test_a_folder_that_changes_while_a_run_trains(tmp_path):
    tensors = written(tmp_path / "base", "gemma3")
    found = carried_from(tmp_path / "base", parameter_rows(find_source(str(tmp_path / "base")).config))
    assert found.check() == 0
    save_file({**tensors, "a": np.zeros(3)}, tmp_path / "base" / "model.safetensors")
    with pytest.raises(DataError, match=r"is no more what it was\. Put the folder back"):
        found.check()
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(DataError, match=r"is not a folder\. Put the folder back"):
        found.check()


@pytest.mark.parametrize("streams", [False, True])
def test_images_in_the_data_are_refused_with_their_row(tmp_path, monkeypatch, streams):
    monkeypatch.chdir(tmp_path)
    of_ids = {"vocab_size": 430, "image_token_id": 323, "video_token_id": 322, "bos_token_id": None, "eos_token_id": 0}
    written(Path("base"), "qwen2_5_vl", prefix="model.", head="lm_head.", keys=of_ids)
    save(byte_level(added=("<|a|>", "<|image_pad|>")), Path("base"), {"eos_token": EOS, "chat_template": TEMPLATE})
    asked = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "a.png"}}]
    Path("rows.jsonl").write_text("".join(f"{json.dumps({'text': text})}\n" for text in ("one", "a <|image_pad|> b")))
    Path("chats.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": asked}, ANSWER]}))
    about = {"model": "base", "streaming": streams, **RUN}
    with pytest.raises(DataError, match=r"(document 2 has the id 323 \(token \d+\),|row 2 has an id) which stands for"):
        llmq.train(data="rows.jsonl", **about)
    with pytest.raises(DataError, match=r"chats.jsonl:1: message 1 has a part of type 'image_url': only text can be"):
        llmq.train(data="chats.jsonl", **about)
    with pytest.raises(DataError, match=r"document 1 has the id 322 \(token 22\)"):
        llmq.Trainer(model="base", **RUN).train(train=np.arange(300, 330, dtype=np.int32))
    assert not Path("out").exists()
