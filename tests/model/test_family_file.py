"""Described families: what a file says gives the model of a known family, and what it cannot say is refused."""

import json
from dataclasses import fields, replace

import pytest
from more_families import DESCRIPTIONS, MORE, unknown

from llmq.errors import DataError
from llmq.model.config import from_folder, read_config, to_hf
from llmq.model.family_file import KEY, described, read_description
from llmq.model.family_table import FAMILIES
from llmq.model.parameters import parameter_rows
from llmq.model.wiring import LLAMA


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_a_description_has_the_rows_of_the_family(name):
    right, found = read_config(MORE[name]), read_config(unknown(name, **{KEY: DESCRIPTIONS[name]}))
    assert parameter_rows(found) == parameter_rows(right)
    assert replace(found, architecture=right.architecture) == right
    family = replace(found.family.wiring, names=right.family.wiring.names)
    assert family == right.family.wiring
    assert found.identity()[KEY] == DESCRIPTIONS[name]
    written = to_hf(found)
    assert (written["architectures"], written["model_type"]) == (["OwnForCausalLM"], "own")
    assert read_config(written) == found


def test_every_fact_of_the_wiring_can_be_described():
    facts = {
        "norm": "layernorm",
        "where": "post",
        "norm_offset": 1.0,
        "norm_bias": False,
        "parallel": True,
        "activation": "gelu",
        "gated": False,
        "scaled_embedding": True,
        "qk_norm": "all",
        "biases": "all",
        "transposed": True,
        "names": {"embed": "wte"},
    }
    wiring = described(facts).wiring(LLAMA)
    assert not [one.name for one in fields(LLAMA) if getattr(wiring, one.name) == getattr(LLAMA, one.name)]
    none = {"norm": "rmsnorm", "qk_norm": "none", "biases": "none", "gated": True, "parallel": False}
    assert described(none).wiring(LLAMA) == LLAMA and described(none).facts() == {"qk_norm": False, "qkv_bias": False}


def test_two_descriptions_of_one_name_are_apart():
    one, other = (
        read_config(unknown("olmo2", **{KEY: {**DESCRIPTIONS["olmo2"], "rope": {"interleaved": False}, **more}}))
        for more in ({}, {"gated": False, "names": {**DESCRIPTIONS["olmo2"]["names"], "up": ["mlp.fc"]}})
    )
    assert (one.family.wiring.gated, other.family.wiring.gated) == (True, False)
    assert one.family is one.family and "OwnForCausalLM" not in FAMILIES
    with pytest.raises(DataError, match=r"OwnForCausalLM.* is not supported"):
        read_config(unknown("olmo2"))


def test_keys_have_the_names_of_the_file():
    keys = {"hidden_size": "d_model", "num_hidden_layers": "depth", "rms_norm_eps": "eps"}
    config = {**MORE["olmo2"], "rms_norm_eps": 1e-4}
    named = {keys.get(key, key): value for key, value in unknown("olmo2", rms_norm_eps=1e-4).items()}
    found = read_config({**named, KEY: {**DESCRIPTIONS["olmo2"], "keys": keys}})
    assert replace(found, architecture="Olmo2ForCausalLM") == read_config(config)
    written = to_hf(found)
    assert (written["d_model"], written["depth"], written["eps"]) == (32, 3, 1e-4)
    assert not {"hidden_size", "num_hidden_layers", "rms_norm_eps"} & written.keys()


def test_what_is_known_needs_no_description_and_harmless_keys_are_named():
    with pytest.raises(DataError, match="llmq knows Olmo2ForCausalLM: leave the description out"):
        read_config({**MORE["olmo2"], KEY: {}})
    with pytest.raises(DataError, match=r"config\.json needs architectures"):
        read_config({**unknown("olmo2", **{KEY: {}}), "model_type": None})
    config = unknown("olmo2", own_key=3, **{KEY: DESCRIPTIONS["olmo2"]})
    with pytest.raises(DataError, match=r"own_key \(3\): llmq does not know this key of OwnForCausalLM"):
        read_config(config)
    assert read_config({**config, KEY: {**DESCRIPTIONS["olmo2"], "harmless": ["own_key"]}})


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"norm": "groupnorm"}, r"norm \('groupnorm'\): must be 'rmsnorm' or 'layernorm'"),
        ({"where": "after"}, r"where \('after'\): must be 'pre', 'post' or 'pre\+post'"),
        ({"activation": "xielu"}, r"activation \('xielu'\): must be 'silu'"),
        ({"experts": 8}, "experts is no fact that llmq has an object for"),
        ({"activations": "silu"}, "activations is no fact .*: did you mean activation"),
        ({"rope": {"partials": 0.5}}, r"rope.partials is no fact .*: did you mean partial"),
        ({"rope": {"partial": 1.5}}, r"rope.partial \(1.5\): must be less than or equal to 1"),
        ({"names": {"embedding": "wte"}}, "names.embedding is no part of a model: did you mean embed"),
        ({"names": {"qkv": "attn.c_attn"}}, r"names.qkv \('attn.c_attn'\): must be a list of names"),
        ({"names": {"o": ["attn.c_proj"]}}, r"names.o \(\['attn.c_proj'\]\): must be one name"),
        ({"keys": {"hidden": "d"}}, "keys.hidden is no key of config.json that llmq reads: did you mean hidden_size"),
        ({"norm": "layernorm", "where": "post"}, "norm: layernorm after a sublayer, .*: use rmsnorm"),
        ({"norm": "layernorm", "norm_offset": 1}, "norm: layernorm after a sublayer, and with a norm_offset"),
        ({"parallel": True, "where": "post"}, "parallel: true is for where: pre"),
        ({"qk_norm": "all", "rope": {"interleaved": True}}, r"qk_norm: all with rope.interleaved has no object"),
        ({"where": "pre+post"}, r"names.attention_post_norm and names.mlp_post_norm are needed"),
        ({"names": {"qkv": ["q", "kv"]}}, r"names.qkv must be three names, or one"),
        ({"gated": False}, r"names.up must be one name without a gate"),
        ({"names": {"o": "self_attn.q_proj"}}, "names: two tensors have one name"),
        ({"names": {"qkv": ["q", "q", "q"]}}, "names: two tensors have one name"),
        ({"names": {"embed": "model.norm"}}, "names: two tensors have one name"),
        ({"names": {"o": ""}}, "names: a tensor has an empty name"),
        ({"norm_bias": False}, "norm_bias: false is for norm: layernorm"),
        ({"norm_offset": float("nan")}, "a value that config.json cannot have"),
        ({"defaults": {"x": {1, 2}}}, "a value that config.json cannot have: .* set"),
        ({"like": "lama"}, r"like \('lama'\): llmq knows llama, .*: did you mean llama"),
        ({"gated": "yes"}, r"gated \('yes'\): must be a valid boolean"),
        ([], "must be a valid dictionary"),
    ],
)
def test_a_wrong_fact_is_named(facts, said):
    with pytest.raises(DataError, match=said):
        read_config(unknown("olmo2", **{KEY: facts}))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"- norm\n", "must hold lines of the form"),
        (b"", "must hold lines of the form"),
        (b"norm: rmsnorm\nnorm: layernorm\n", "norm is given a second time"),
        (b"rope:\n  partial: 0.5\n  partial: 1\n", "partial is given a second time"),
        (b"\tnorm: rmsnorm\n", "is not YAML"),
        (b"\xff\xfe\x00", r"is not text in UTF-8 \(byte 0\)"),
        (b"norm: !!python/object/apply:os.system [ls]\n", "is not YAML"),
        (b"rope: &a {}\nnames: *a\n", r"has an alias \(\*name\): write out"),
        (b"a: &a {b: 1}\n" + b"".join(b"k%d: &k%d [*a, *a]\n" % (n, n) for n in range(99)), "has an alias"),
        (b"norm_offset: .nan\n", "a value that config.json cannot have"),
        (b"defaults: {x: 2020-01-01}\n", "a value that config.json cannot have: .* date"),
        (b"a: 1\n" * 300_000, r"has 1,500,000 bytes, and 1,048,576 can be read"),
        (b"norm: groupnorm\n", r"--family .*: not a family that llmq can make:\n  - norm"),
    ],
)
def test_a_file_that_is_none(content, said, tmp_path):
    path = tmp_path / "family.yaml"
    path.write_bytes(content)
    with pytest.raises(DataError, match=said):
        read_description(path)


def test_a_file_and_a_folder_together(tmp_path):
    (tmp_path / "family.yaml").write_text(
        "where: post\nqk_norm: all\nnames: {attention_post_norm: a, mlp_post_norm: m}\n", "utf-8"
    )
    facts = read_description(tmp_path / "family.yaml")
    assert described(facts).where == "post"
    (tmp_path / "numbers.yaml").write_text("norm_offset: 1e-3\ndefaults: {rms_norm_eps: 1e-5}\n", "utf-8")
    assert read_description(tmp_path / "numbers.yaml") == {"norm_offset": 1e-3, "defaults": {"rms_norm_eps": 1e-5}}
    (tmp_path / "config.json").write_text(json.dumps(unknown("olmo2")), "utf-8")
    with pytest.raises(DataError, match="OwnForCausalLM"):
        from_folder(tmp_path)
    names = {part.name for row in parameter_rows(from_folder(tmp_path, facts)) for part in row.parts}
    assert "model.layers.0.a.weight" in names
    with pytest.raises(DataError, match=r"absent\.yaml"):
        read_description(tmp_path / "absent.yaml")
