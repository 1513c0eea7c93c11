"""Adapters in the plan: which maps have one, what else is trained, and what they make of a base in few bits."""

from dataclasses import replace

import numpy as np
import pytest
from tiny_engines import (
    BF16,
    FP8,
    FP32,
    FP64,
    batch,
    engine_of,
    next_logits,
    parameters,
    plan_of,
    spec_of,
    tiny,
)  # fmt: skip

from llmq.adapters.ia3 import scaled
from llmq.adapters.lora import Lora
from llmq.adapters.part import PartOfModel
from llmq.adapters.targets import chosen, targets, trained_in_full
from llmq.backends.host import HostBackend
from llmq.backends.planned import PlannedBackend
from llmq.engine.cost import Costs
from llmq.engine.engine import Engine
from llmq.engine.predict import sustained
from llmq.errors import UsageError
from llmq.hardware import cards
from llmq.model.held import room_bytes
from llmq.model.presets import preset
from llmq.plan.memory import Memory
from llmq.plan.precision import Precision
from llmq.plan.spec import Completions, Regularization

UNTIED = tiny(tie_embeddings=False)


def adapters(text="all", config=None, rank=4, alpha=6.0, *, rslora=False, ranks=None, alphas=None, also=None, **about):
    """Adapters of the modules that `text` names."""
    modules = chosen(text, config or tiny())
    every = targets(modules, rank, alpha, rslora=rslora, ranks=ranks, alphas=alphas)
    full = trained_in_full(also, config or tiny(), modules) if also else frozenset()
    return Lora(rank, alpha, every, rslora=rslora, also=full, **about)


def placed(index=1, num_virtual=0):
    """A batch that knows its samples, with `num_virtual` virtual tokens before each, which is one document."""
    one = batch(index)
    one.tokens[:, :num_virtual], one.targets[:, :num_virtual] = 0, -100
    return replace(one, num_virtual=num_virtual, places=np.array([2**33 + 5, 17]) + 2 * index)


def steps(engine, count=2, micro_steps=2, rate=1e-2):
    """Losses of steps, with what a method does between them."""
    losses, tracked, num_virtual = [], engine.plan.tracked, engine.plan.spec.adapters.num_virtual
    for step in range(1, count + 1):
        engine.start_step(step, rate)
        tracked.before_step(engine, step)
        for n in range(micro_steps):
            engine.micro_step(placed(10 * step + n, num_virtual), first=n == 0, last=n == micro_steps - 1)
        losses.append(engine.update(step, rate).loss)
        tracked.after_update(engine, step)
    return losses


def warm(plan, values=None):
    """An engine with settled scales, of a plan with dropout too, on random parameters but for `values` by name."""
    engine = Engine(plan, HostBackend(), poison=True)
    engine.load([(row, (values or {}).get(row.name, value)) for row, value in parameters(plan)])
    engine.warm_up(placed())
    return engine


def summed_loss(engine, one):
    """The training loss of a micro-batch, over its tokens."""
    engine.micro_step(one)
    result = engine.update(1, 0.0)
    return result.loss * result.num_tokens


@pytest.mark.parametrize("rslora", [False, True])
def test_it_computes_what_the_merged_weights_do(rslora):
    chosen_adapters = adapters("q_proj,v_proj,mlp,lm_head", UNTIED, rslora=rslora)
    engine = engine_of(plan_of(FP64, config=UNTIED, adapters=chosen_adapters))
    plain = engine_of(plan_of(FP64, config=UNTIED))
    values = {row.name: engine.parameter(row.name) for row in engine.plan.rows}
    for site, found in chosen_adapters.by_site.items():
        first = 0
        for target in found:
            of = target.module
            a = values[f"{site}.lora_a"][first : first + target.rank]
            scale = 6 / np.sqrt(4) if rslora else 6 / 4
            values[f"{site}.weight"][of.start : of.stop] += scale * values[f"{site}.lora_b.{of.key}"] @ a
            first += target.rank
    plain.load([(row, values[row.name]) for row in plain.plan.rows])
    assert engine.evaluate(batch(9)) == pytest.approx(plain.evaluate(batch(9)), rel=1e-12)
    np.testing.assert_allclose(next_logits(engine, np.arange(7)), next_logits(plain, np.arange(7)), rtol=1e-9)


@pytest.mark.parametrize(
    ("op", "drawn", "without"),
    [
        ("dropout", {"adapters": adapters(dropout=0.5)}, {"adapters": adapters()}),
        ("embedding_noise", {"regularization": Regularization(neftune_alpha=5.0)}, {}),
    ],
)
def test_what_is_drawn_is_in_training_and_nowhere_else(op, drawn, without):
    plain, noisy = (warm(plan_of(FP32, **about)) for about in (without, drawn))
    assert noisy.evaluate(batch()) == plain.evaluate(batch())
    assert summed_loss(noisy, placed()) == summed_loss(noisy, placed()) != summed_loss(plain, placed())
    assert summed_loss(noisy, replace(placed(), places=placed(2).places)) != summed_loss(noisy, placed())
    writing = plan_of(FP32, completions=Completions(2, 16, 16, packed=False), **drawn)
    names = {name for name, p in writing.programs.items() if op in {call.op for call in p.calls}}
    assert names == {"only", "first", "middle", "last"}


def test_what_is_read_in_fp8_is_made_in_one_pass_with_a_scale_that_is_known():
    """No amax is taken while training, and each pass writes the one copy that it reads."""
    plan = plan_of(FP8["e4m3", "delayed"], adapters=adapters(base="nf4"))
    calls = [call for call in plan.programs["only"].calls if call.op in ("cast", "quantize", "amax_scale")]
    weights = [call for call in calls if call.inputs[0].name.endswith("weight")]
    forms = [(call.inputs[0].form.dtype, call.phase, [ref.form.key for ref in call.written]) for call in weights]
    assert {call.op for call in weights} == {"cast"} and {dtype for dtype, _, _ in forms} == {"nf4"}
    # Nothing below the first layer is trained, so its first map has no gradient of x.
    assert [found for _, _, found in forms] == [["e4m3/row/current"]] * 8 + [["e4m3/col/current"]] * 7
    engine = warm(plan)
    for name in ("layers.0.attention.qkv.weight", "layers.1.mlp.down.weight"):
        largest = np.abs(engine.parameter(name).astype(np.float32)).max()
        assert engine.read(plan.persistent[f"scale:{name}@e4m3"]) == largest / np.float32(448)


def test_70b_in_nf4_fits_into_46_gib():
    """With adapters of rank 16 on all maps, in fp32 as their moments, and 2048 tokens, whose blocks are made again."""
    config = preset("llama3_70b")
    about = {"adapters": adapters("all", config, rank=16, alpha=32.0, base="nf4"), "batch_size": 1, "seq_len": 2048}
    spec = spec_of(Precision("bf16", "bf16"), Memory(("recompute_block",), head_chunks=8), config, **about)
    scratch = PlannedBackend().scratch_bytes
    assert 36 * 2**30 < Costs(scratch, scratch, sustained(cards.named("H200"))).of(spec, 4).num_bytes < 46 * 2**30


@pytest.mark.parametrize("base", ["e4m3", "int8", "nf4", "mxfp4"])
def test_the_arena_has_room_for_what_makes_the_base(base):
    """Where it is larger than all activations, of one layer's largest matrix, and of no more for a deeper model."""
    arenas = []
    for layers in (1, 3):
        plan = plan_of(BF16, adapters=adapters(base=base), config=tiny(num_layers=layers), batch_size=1, seq_len=4)
        programs = max(program.arena_bytes["device"] for program in plan.programs.values())
        held = [ref for ref in plan.weights.values() if ref.form is not None]
        assert plan.arena_bytes() == max(room_bytes(ref) for ref in held) > programs
        assert plan.table()["Activations"] == plan.arena_bytes()
        arenas.append(plan.arena_bytes())
    assert arenas[0] == arenas[1] and arenas[0] > plan_of(BF16, batch_size=1, seq_len=4).arena_bytes()


def test_a_base_in_bf16_is_that_of_a_model_in_bf16():
    assert plan_of(BF16, adapters=adapters(base="bf16")).table() == plan_of(BF16, adapters=adapters()).table()
    with pytest.raises(UsageError, match="--base-dtype bf16 does not multiply with --model-dtype fp32"):
        plan_of(FP32, adapters=adapters(base="bf16"))


def test_fused_maps_read_their_input_once():
    """One product with all A of a site, and one for each B, to which the site's own adds."""
    plan = plan_of(BF16, adapters=adapters("attention"), config=tiny(num_layers=1))
    calls = [call for call in plan.programs["only"].calls if call.op == "linear_forward"]
    weights = [call.inputs[1].name for call in calls]
    at = "layers.0.attention"
    qkv = [f"{at}.qkv.lora_a", *(f"{at}.qkv.lora_b.{p}_proj" for p in "qkv"), f"{at}.qkv.weight"]
    assert weights[:7] == [*qkv, f"{at}.o.lora_a", f"{at}.o.lora_b.o_proj"]


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("all", {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        ("attention", {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ("mlp, lm_head", {"gate_proj", "up_proj", "down_proj", "lm_head"}),
        ("self_attn.q_proj", {"q_proj"}),
        ("*_proj", {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
    ],
)
def test_targets_are_named_as_by_hugging_face(text, keys):
    found = chosen(text, tiny())
    assert {module.key for module in found} == keys
    assert len(found) == sum(1 if key == "lm_head" else 2 for key in keys)


def test_one_layer_or_some_can_be_named():
    names = [module.name for module in chosen("layers.1.mlp.up_proj,layers.[0].*.k_proj", tiny())]
    assert names == ["model.layers.0.self_attn.k_proj", "model.layers.1.mlp.up_proj"]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: chosen("qproj,o_proj,layers.2.mlp", tiny()),
            r"--lora-targets qproj, layers\.2\.mlp: .* 2 layers: use",
        ),
        (lambda: adapters(rank=25), r"--lora-rank 25 is larger than model\.layers\.0\.self_attn\.k_proj \(24 x 48\)"),
        (lambda: adapters(ranks={"k_proj": 25}), r"--lora-rank-pattern's 25 is larger than .*k_proj \(24 x 48\)"),
        (lambda: adapters("q_proj", ranks={"o_proj": 2}), r"--lora-rank-pattern o_proj: no linear map with an adapter"),
        (lambda: adapters("q_proj", alphas={"mlp": 2.0}), r"--lora-alpha-pattern mlp: no linear map with an adapter"),
        (
            lambda: plan_of(FP32, adapters=adapters("q_proj", bias="lora_only")),
            r"lora_only would train a part of .*q_proj\.bias, .*k_proj\.bias",
        ),
        (
            lambda: scaled(chosen("q_proj", tiny()), {"model.layers.0.self_attn.q_proj"}),
            r"IA3 scales the inputs of .*q_proj, which llmq reads once for several maps",
        ),
        (lambda: adapters("q_proj", also="heads"), r"--train-also heads: nothing in the model has such a name"),
        (lambda: adapters("q_proj", also="q_proj"), r"q_proj trains .*q_proj in full, which has an adapter"),
        (lambda: adapters("q_proj", also="k_proj"), r"k_proj trains .*q_proj in full, which has an adapter"),
        (
            lambda: adapters("q_proj", also="layers.0.mlp.up_proj"),
            r"names a part of .*: name model\.layers\.0\.mlp\.gate_proj too, or none",
        ),
        (
            lambda: adapters("lm_head", also="embed_tokens"),
            r"embed_tokens trains lm_head in full, which has an adapter",
        ),
        (
            lambda: PartOfModel.named("biases,layers.0", tiny()),
            r"--train-only biases: nothing in the model has such a name; some are model\.embed",
        ),
        (
            lambda: PartOfModel.named("q_proj", tiny()),
            r"names a part of model\..*\.self_attn\.q_proj\.weight, .*as one",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused(make, says):
    with pytest.raises(UsageError, match=says):
        make()


@pytest.mark.parametrize(
    ("text", "bias", "count"),
    [("all", "none", 0), ("mlp", "all", 2), ("attention", "lora_only", 2), ("mlp", "lora_only", 0)],
)
def test_biases_are_trained_as_asked(text, bias, count):
    plan = plan_of(FP32, adapters=adapters(text, bias=bias))
    assert len([name for name in plan.grads if name.endswith(".bias")]) == count


def test_the_first_pattern_that_matches_says_rank_and_alpha():
    found = adapters("attention", ranks={"layers.1.*": 2, "q_proj": 8}, alphas={"attention": 3.0}, alpha=9.0).targets
    of_q = [(t.rank, t.alpha, t.scale) for t in found if t.module.key == "q_proj"]
    assert of_q == [(8, 3.0, 3 / 8), (2, 3.0, 3 / 2)]
    assert {t.rank for t in found if t.module.key == "k_proj"} == {2, 4}


@pytest.mark.parametrize(
    ("text", "config", "rows"),
    [
        ("lm_head", tiny(), {"embed.weight"}),
        ("embed_tokens", tiny(), {"embed.weight"}),
        ("lm_head", UNTIED, {"head.weight"}),
        ("embed_tokens,model.norm", UNTIED, {"embed.weight", "head.norm"}),
        ("layers.0.mlp.*", tiny(), {"layers.0.mlp.up.weight", "layers.0.mlp.down.weight"}),
    ],
)
def test_modules_are_trained_in_full_beside_adapters(text, config, rows):
    about = adapters("q_proj", config, also=text)
    plan = plan_of(BF16, config=config, adapters=about)
    assert {row.name for row in plan.rows if row.trainable and row.file == "model"} == rows == about.also
    assert rows <= set(plan.grads)
    other = adapters("q_proj", config)
    assert about.identity() != other.identity()


def test_b_and_vectors_have_the_rate_of_lora_plus():
    rows = plan_of(FP32, adapters=adapters("attention", plus=16.0, bias="all", also="embed_tokens,model.norm")).rows
    rates = {row.name.removeprefix("layers.0.attention."): row.rate for row in rows if row.trainable}
    assert (rates["qkv.lora_a"], rates["embed.weight"]) == (1.0, 1.0)
    assert {rates[name] for name in ("qkv.lora_b.q_proj", "o.lora_b.o_proj", "qkv.bias", "head.norm")} == {16.0}


@pytest.mark.parametrize("precision", [FP64, BF16, FP8["e4m3", "delayed"]], ids=["fp64", "bf16", "fp8"])
def test_a_part_of_the_model_has_the_gradients_of_the_whole(precision):
    biases = PartOfModel.named("*.bias,layers.1.mlp", tiny())
    part, whole = engine_of(plan_of(precision, adapters=biases)), engine_of(plan_of(precision))
    trained = [row.name for row in part.plan.rows if row.trainable]
    of_mlp = [f"layers.1.mlp.{name}.weight" for name in ("up", "down")]
    assert trained == ["layers.0.attention.qkv.bias", "layers.1.attention.qkv.bias", *of_mlp]
    for engine in (part, whole):
        engine.micro_step(batch())
    assert all(np.array_equal(part.gradient(name), whole.gradient(name)) for name in trained)
    assert set(part.plan.grads) == set(trained)


def test_a_layer_below_what_is_trained_has_no_backward_pass():
    plan = plan_of(BF16, adapters=PartOfModel.named("layers.1", tiny()))
    backward = [call for call in plan.programs["only"].calls if call.phase == "backward"]
    assert {call.outputs[0].ref.layer for call in backward if call.outputs[0] is not None} == {1, None}


def test_a_quantized_base_is_not_kept_from_forward_to_backward():
    """Its layers' values are cast again, so that recomputing a block frees memory here, too."""
    lora = adapters(base="e4m3")
    plain, block = (plan_of(BF16, Memory(flags), adapters=lora) for flags in ((), ("recompute_block",)))
    assert not [name for plan in (plain, block) for name in plan.kept if name.endswith("weight")]
    assert sum(block.kept.values()) < sum(plain.kept.values())
