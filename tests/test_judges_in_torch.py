"""`llmq.torch` beside transformers, its Trainer, TRL and PEFT, live, on tiny models of every family."""

import copy
import importlib
import io
import re
import shutil
import sys
import threading
from functools import wraps
from itertools import product
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the judges are torch, transformers, TRL and PEFT")

import peft
import torch
import transformers
import trl
from datasets import Dataset
from golden import families
from ops.emulated.gpu import install
from small_tokenizers import EOS, byte_level

from llmq.errors import UsageError
from llmq.torch import kernels as on_memory
from llmq.torch import patch as patch_of_torch
from llmq.torch import patch_model, unpatch_model
from llmq.torch.fp8 import COLUMNS, ROWS, input_copies
from llmq.torch.head import chunk_tokens, linear_cross_entropy

pytestmark = pytest.mark.judge

FAMILIES = pytest.mark.parametrize("family", families.FAMILIES)
LENGTH = 32
MADE = ["model", "lora", "trained"]  # LoRA, and LoRA of weights that are trained as well
EVERYTHING = ["head with loss", "RMSNorm", "RoPE", "SwiGLU"]


def made(family="qwen2", **changed):
    """A tiny model with random weights in f32."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**{**families.FAMILIES[family], **changed})
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def adapted(model, **changed):
    """The model with PEFT's LoRA, whose B is not zero."""
    torch.manual_seed(1)
    about = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False, **changed}
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **about))


def batch(rows=2):
    """Tokens, and labels of which the first are not trained."""
    tokens = torch.randint(0, families.VOCAB, (rows, LENGTH), generator=torch.Generator().manual_seed(2))
    labels = tokens.clone()
    labels[:, :5] = -100
    return {"input_ids": tokens, "labels": labels}


def step(model, call=None, **more):
    """Loss and gradients."""
    model.zero_grad()
    loss = (model if call is None else call)(**batch(), **more).loss
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(found, right, bound=1e-5):
    """The same loss and the same gradients, of the same parameters."""
    assert found[0] == pytest.approx(right[0], rel=bound) and found[1].keys() == right[1].keys()
    errors = {name: ((found[1][name] - one).norm() / one.norm()).item() for name, one in right[1].items() if one.any()}
    assert errors and max(errors.values()) < bound, errors


def assert_same(found, right):
    """The same bits."""
    assert found[0] == right[0] and all(torch.equal(found[1][name], one) for name, one in right[1].items())


def losses(model, folder, **options):
    """Of 20 steps of transformers' Trainer."""
    rows = [{name: column[0] for name, column in batch(1).items()}]
    rows = [{name: (column + n) % families.VOCAB for name, column in rows[0].items()} for n in range(40)]
    for n, row in enumerate(rows):
        row["labels"][: 1 + n % 7] = -100  # so that micro-batches have other numbers of tokens
    about = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-3, **options}
    arguments = transformers.TrainingArguments(
        folder,
        max_steps=20,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        **about,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@FAMILIES
def test_loss_and_gradients_are_transformers(family):
    model = made(family)
    right, counted = step(model), step(model, num_items_in_batch=torch.tensor(17))
    patch = patch_model(model, strict=True)
    assert sorted(patch.replaced) == sorted(EVERYTHING) and not patch.left
    assert len(patch.replaced["RMSNorm"]) == sum("norm" in name for name, _ in model.named_modules())
    assert_close(step(model), right)
    assert_close(step(model, num_items_in_batch=torch.tensor(17)), counted)
    assert_close(step(model, num_items_in_batch=17), counted)
    unpatch_model(model)
    assert_same(step(model), right)
    assert not any("forward" in vars(module) for module in model.modules())


def test_padded_rows_and_labels_that_are_shifted():
    model, given = made(), batch()
    mask = torch.ones_like(given["input_ids"])
    mask[0, :7] = 0
    shifted = torch.nn.functional.pad(given["labels"], (0, 1), value=-100)[:, 1:]
    calls = [
        {**given, "attention_mask": mask},
        {"input_ids": given["input_ids"], "labels": None, "shift_labels": shifted},
    ]
    right = [model(**call) for call in calls[:1]] + [model(**given)]
    patch_model(model)
    found = [model(**call) for call in calls]
    assert [one.loss.item() for one in found] == pytest.approx([one.loss.item() for one in right], rel=1e-6)
    assert [one.logits for one in found] == [None, None]


@pytest.mark.parametrize("is_frozen", [False, True])
def test_chunks_of_tokens_are_the_whole(is_frozen, monkeypatch):
    torch.manual_seed(0)
    x, weight = torch.randn(37, 32, requires_grad=True), torch.randn(97, 32, requires_grad=not is_frozen)
    targets = torch.randint(0, 97, (37,), dtype=torch.int32)
    targets[5:9] = -100
    right = torch.nn.functional.cross_entropy(x @ weight.T, targets.long(), reduction="sum")
    wanted = torch.autograd.grad(right * 0.3, [x] if is_frozen else [x, weight])
    monkeypatch.setattr("llmq.torch.head.CHUNK_BYTES", 1)
    assert chunk_tokens(97, 32, 4) == 16
    found = linear_cross_entropy(x, weight, targets)
    assert found.item() == pytest.approx(right.item(), rel=1e-6)
    for one, other in zip(torch.autograd.grad(found * 0.3, [x] if is_frozen else [x, weight]), wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)


def test_logits_are_there_where_no_loss_takes_their_place():
    model, given = made("qwen3"), batch()
    right = model(**given)
    texts = model.generate(given["input_ids"][:, :4], max_new_tokens=6, do_sample=False, pad_token_id=0)
    patch_model(model)
    assert torch.allclose(model(input_ids=given["input_ids"]).logits, right.logits, atol=1e-5)
    assert torch.allclose(model.eval()(**given).logits, right.logits, atol=1e-5)  # for metrics
    assert torch.equal(
        model.generate(given["input_ids"][:, :4], max_new_tokens=6, do_sample=False, pad_token_id=0), texts
    )
    assert model.train()(**given, return_dict=False)[0].item() == pytest.approx(right.loss.item(), rel=1e-6)
    assert model(**given, output_hidden_states=True).hidden_states is not None
    unpatch_model(model)
    assert torch.equal(model(**given).logits, right.logits)


@pytest.fixture(scope="module")
def right_losses(tmp_path_factory):
    """Of 20 steps of the Trainer without llmq."""
    return losses(made(), tmp_path_factory.mktemp("right"))


def test_the_trainer_runs_unchanged(right_losses, tmp_path):
    model = made()
    patch_model(model)
    assert losses(model, tmp_path) == pytest.approx(right_losses, abs=1e-4) and len(right_losses) == 20


def test_under_autocast_the_trainer_wraps_the_model_and_it_can_be_unpatched(tmp_path):
    model = made()
    right = step(model)
    plain = losses(copy.deepcopy(model), tmp_path, bf16=True, learning_rate=0.0)
    patch_model(model)
    assert losses(model, tmp_path, bf16=True, learning_rate=0.0) == pytest.approx(plain, abs=1e-3)
    unpatch_model(model)
    assert model(**batch()).logits is not None
    assert patch_model(model, strict=True) and model(**batch()).logits is None
    unpatch_model(model)
    del model.forward  # accelerate's
    assert_same(step(model), right)


@pytest.fixture(scope="module")
def right_losses_of_lora(tmp_path_factory):
    """Of 20 steps of the Trainer with PEFT alone."""
    return losses(adapted(made()), tmp_path_factory.mktemp("right"))


@pytest.mark.parametrize("before", [True, False], ids=["before-peft", "after-peft"])
def test_lora_is_pefts(before, right_losses_of_lora, tmp_path):
    right = step(adapted(made()))
    model = made()
    patch = patch_model(model) if before else None
    model = adapted(model)
    patch = patch or patch_model(model, strict=True)
    assert_close(step(model), right)
    assert len(patch.replaced["LoRA"]) == 14 and not patch.left
    with model.disable_adapter():
        base = model(**batch()).loss.item()
    assert base == pytest.approx(made()(**batch()).loss.item(), rel=1e-6)
    assert losses(model, tmp_path) == pytest.approx(right_losses_of_lora, abs=1e-4)


def test_lora_of_trained_weights_and_a_bias():
    model = adapted(made())
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    right = step(model)
    patch_model(model)
    assert_close(step(model), right)


def test_what_is_left_is_named():
    model = adapted(made(), lora_dropout=0.1)
    patch = patch_model(model)
    assert "LoRA" not in patch.replaced and len(patch.left) == 14
    assert "model.layers.*.mlp.up_proj (2): left, it has a dropout: use lora_dropout=0" in str(patch)
    with pytest.raises(UsageError, match=r"up_proj.*it has a dropout"):
        patch_model(model, strict=True)
    assert model.get_base_model()(**batch()).logits is not None  # the refused call left what unpatch_model leaves

    class Own(torch.nn.Module):
        def forward(self, x):
            return x

    model = made(hidden_act="gelu")
    model.model.norm = Own()
    model.model.layers[0].input_layernorm.half()
    patch, half = patch_model(model), "its parameters are in torch.float16, which llmq's kernels lack: use bf16"
    assert patch.left == {
        "model.norm": "a Own of test_judges_in_torch, which llmq does not know",
        "model.layers.0.input_layernorm": half,
        **{f"model.layers.{n}.mlp": "its activation is gelu, not silu" for n in range(2)},
    }
    assert len({*patch_model(model.half()).left.values()} - {half}) == 2 and not patch_model(made().half()).replaced
    other = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=9))
    patch = patch_model(other)
    assert not patch.replaced and "a GPT2LMHeadModel of transformers: llmq has kernels for Llama" in patch.left[""]
    with pytest.raises(UsageError, match="GPT2LMHeadModel"):
        patch_model(other, strict=True)
    with pytest.raises(UsageError, match="linear='int8'"):
        patch_model(made(), linear="int8")


def test_a_norm_whose_weight_is_added_to_one_is_left(monkeypatch):
    monkeypatch.setitem(patch_of_torch.MODEL_TYPES, "GemmaForCausalLM", "gemma")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": families.VOCAB}
    config = transformers.GemmaConfig(**sizes, num_attention_heads=1, num_key_value_heads=1, head_dim=16)
    patch = patch_model(transformers.GemmaForCausalLM(config))
    assert "RMSNorm" not in patch.replaced
    assert patch.left["model.norm"] == "GemmaRMSNorm is not the RMSNorm of Llama"


def test_libraries_that_are_missing_are_named(monkeypatch):
    model = made()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match="pip install transformers"):
        patch_model(model)
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "llmq.torch")
    with pytest.raises(UsageError, match="pip install torch"):
        importlib.import_module("llmq.torch")


def test_ops_are_what_torch_asks_of_them():
    """Schema, fake kernel, gradient and tracing of each op."""
    torch.manual_seed(0)

    def drawn(*shape):
        return torch.randn(*shape, requires_grad=True)

    cases = {
        "rmsnorm": (drawn(2, 3, 16), drawn(16), 1e-5),
        "rope": (drawn(2, 3, 4, 8), drawn(2, 3, 1, 8), torch.rand(1, 3, 8), torch.rand(1, 3, 8)),
        "swiglu": (drawn(2, 3, 16), drawn(2, 3, 16)),
        "linear_cross_entropy": (
            drawn(6, 16),
            drawn(24, 16),
            torch.randint(0, 24, (6,), dtype=torch.int32),
            True,
            True,
        ),
        "lora_linear": (
            drawn(2, 3, 16),
            drawn(24, 16),
            drawn(24),
            drawn(4, 16),
            drawn(24, 4),
            2.0,
            None,
            None,
            None,
            None,
        ),
        "quantize_e4m3": (torch.randn(2, 3, 16), True),
    }
    for name, given in cases.items():
        torch.library.opcheck(getattr(torch.ops.llmq, name).default, given)
    x, weight = drawn(2, 8, 16), drawn(32, 16)
    rows, columns, scale = torch.ops.llmq.quantize_e4m3(x.detach(), True)
    w_rows, _, w_scale = torch.ops.llmq.quantize_e4m3(weight.detach(), False)
    given = (x, weight, drawn(32), rows, columns, scale, w_rows, w_scale)
    torch.library.opcheck(torch.ops.llmq.linear_e4m3.default, given)


def test_a_quantized_map_is_left():
    import bitsandbytes as bnb

    model = made()
    parent = model.model.layers[0].mlp
    parent.down_proj = bnb.nn.Linear8bitLt(64, 32, bias=False)
    patch = patch_model(model)
    assert patch.left == {"model.layers.0.mlp.down_proj": "a Linear8bitLt of bitsandbytes, which llmq does not know"}
    patch = patch_model(adapted(model, target_modules=["down_proj"]))
    assert "Linear8bitLt" in patch.left["model.layers.0.mlp.down_proj"] and len(patch.replaced["LoRA"]) == 1


def test_a_forward_that_another_library_has_replaced():
    model = made()
    patch = patch_model(model)
    model.model.norm.forward = lambda x: x
    with pytest.raises(UsageError, match="forwards of Qwen2RMSNorm were replaced again"):
        patch.undo()
    model = made()
    own = model.model.norm.forward
    model.model.norm.forward = wraps(own)(lambda x: own(x))
    reason = "its forward was replaced by another library: call patch_model before"
    assert patch_model(model).left == {"model.norm": reason}
    model.model.norm.forward = own  # as accelerate leaves it when it removes its hooks
    model.forward = torch.autocast("cpu", torch.bfloat16)(type(model).forward).__get__(model)  # as accelerate does
    patch = patch_model(model)
    assert patch.left == {"": reason}  # a loss beside it would be without autocast
    model = adapted(model)
    assert model(**batch()).logits.dtype is torch.bfloat16 and len(patch.replaced["LoRA"]) == 14


def test_calls_that_the_head_with_loss_does_not_take():
    model, given = made(), batch()
    patch_model(model)
    keep = torch.arange(8)
    with pytest.raises(UsageError, match=r"linear_cross_entropy has no second gradient \(create_graph=True\)"):
        torch.autograd.grad(model(**given).loss, [model.model.norm.weight], create_graph=True)
    assert model(given["input_ids"], labels=given["labels"][:, :8], logits_to_keep=keep).logits.shape[1] == 8
    with torch.autocast("cpu", torch.float16):
        assert model(**given).logits.dtype is torch.float16
    hook = model.lm_head.register_forward_hook(lambda head, inputs, logits: 2 * logits)
    assert model(**given).logits is not None
    hook.remove()
    model.lm_head.forward = lambda x: x @ model.lm_head.weight.T
    assert model(**given).logits is not None
    del model.lm_head.forward
    for label in (-1, families.VOCAB):
        given["labels"][0, 9] = label
        with pytest.raises(RuntimeError, match=r"labels are -100 \(not trained\) or from 0 to 96"):
            model(**given)


@pytest.mark.parametrize("items", [None, 0, 5])
def test_no_label_is_trained(items):
    """Gradients are 0, as they are in transformers where the loss is NaN."""
    given = {"input_ids": batch()["input_ids"], "labels": torch.full((2, LENGTH), -100), "num_items_in_batch": items}
    found = []
    for patch in (lambda model: None, patch_model):
        model = made()
        patch(model)
        loss = model(**given).loss
        loss.backward()
        assert not any(parameter.grad.any() for parameter in model.parameters())
        found.append(loss.item())
    assert found == pytest.approx([0.0 if items else float("nan")] * 2, nan_ok=True)


def test_adapters_that_come_and_go_after_the_first():
    model = adapted(made())
    patch = patch_model(model)
    step(model)
    about = {"target_modules": ["q_proj"], "init_lora_weights": False}
    model.add_adapter("second", peft.LoraConfig(**about, use_dora=True))
    model.set_adapter("second")
    found = step(model)
    assert len(patch.replaced["LoRA"]) == 12 and {*patch.left.values()} == {"it is a DoraLinearVariant, not plain LoRA"}
    unpatch_model(model)
    assert_close(found, step(model))
    patch = patch_model(model)
    model.delete_adapter("second")
    model.set_adapter("default")
    assert_close(step(model), step(adapted(made())))
    assert len(patch.replaced["LoRA"]) == 14 and not patch.left
    again = adapted(model.unload())  # under the same name
    step(again)
    assert len(patch.replaced["LoRA"]) == 14
    assert sum(hasattr(module, "base_layer") and "forward" in vars(module) for module in again.modules()) == 14


def test_unpatching_reaches_copies_that_peft_has_made():
    model = made()
    patch_model(model, linear="e4m3")
    model = adapted(model, modules_to_save=["norm", "lm_head"])
    step(model)
    unpatch_model(model)
    assert not any({"forward", "_llmq_copy"} & vars(module).keys() for module in model.modules())
    assert_same(step(model), step(adapted(made(), modules_to_save=["norm", "lm_head"])))


def test_a_copy_for_another_gpu_computes_with_its_own_weights():
    """As torch.nn.DataParallel makes them, which transformers' Trainer uses for the GPUs of one process."""
    model = made()
    patch_model(model)
    copies = [module._replicate_for_data_parallel() for module in model.modules()]
    assert all(one.forward.__self__ is one for one in copies)


def test_a_copy_of_a_patched_model_is_one():
    model = made()
    right = step(model)
    patch_model(model)
    other = copy.deepcopy(model)
    assert_close(step(other), right)
    with torch.no_grad():
        other.lm_head.weight.mul_(2)
    tokens = {"input_ids": batch()["input_ids"]}
    assert torch.allclose(other(**tokens).logits, 2 * model(**tokens).logits, atol=1e-6)
    unpatch_model(other)
    assert model(**batch()).logits is None and other(**batch()).logits is not None
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    stored = torch.load(stored, weights_only=False)
    assert_close(step(stored), right)
    assert len(patch_model(stored, strict=True).replaced) == 4
    unpatch_model(stored)
    assert_same(step(stored), right)


@pytest.mark.parametrize("linear", ["bf16", "e4m3"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_of_activations(linear, use_reentrant):
    model = adapted(made())
    patch_model(model, linear=linear)
    right = step(model)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    assert_same(step(model), right)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "linear", "backend"),
    [
        ("trained", "bf16", "aot_eager"),
        *(pytest.param(*case, marks=pytest.mark.sweep) for case in product(MADE, ["e4m3"], ["aot_eager"])),
        *(pytest.param(*case, marks=pytest.mark.sweep) for case in product(MADE, ["bf16"], ["inductor"])),
    ],
)
def test_compiled_without_a_break(make, linear, backend):
    model = made("llama3", num_hidden_layers=1)
    model = model if make == "model" else adapted(model)
    if make == "trained":
        model.requires_grad_(True)
    right = step(model)
    patch_model(model, linear=linear)
    right = step(model) if linear == "e4m3" else right
    torch.compiler.reset()
    assert_close(step(model, torch.compile(model, fullgraph=True, backend=backend)), right)


def test_in_e4m3(right_losses, tmp_path):
    model = made()
    right = step(model)
    patch = patch_model(model, linear="e4m3", strict=True)
    assert len(patch.replaced["maps in e4m3"]) == 14
    found = step(model)
    assert found[0] == pytest.approx(right[0], rel=1e-3) and found[0] != right[0]
    errors = [((found[1][name] - one).norm() / one.norm()).item() for name, one in right[1].items()]
    assert max(errors) < 0.25 and sum(errors) / len(errors) < 0.08
    assert losses(model, tmp_path) == pytest.approx(right_losses, rel=1e-2)
    with torch.inference_mode():
        assert model.generate(batch()["input_ids"], max_new_tokens=2, pad_token_id=0).shape[1] == LENGTH + 2
    found = step(model)
    model.model.layers[0].mlp.up_proj.weight.data.mul_(3)
    patch_model(model, linear="e4m3")
    assert step(model)[0] != found[0]
    small = made(intermediate_size=40)
    assert "its size 40 is no multiple of 16" in str(patch_model(small, linear="e4m3"))


def test_threads_have_copies_of_their_own():
    """As torch.nn.DataParallel calls models: the other thread comes between a copy and its use."""
    x, other, calls = torch.randn(8, 32), torch.randn(8, 32), []
    right = input_copies(x, True, True)
    thread = threading.Thread(target=lambda: calls.append(input_copies(other, True, True)))
    thread.start()
    thread.join()
    assert calls and input_copies(x, True, True) is right


@pytest.mark.parametrize("optimizer", [{"fused": True}, {"foreach": True}, {}])
def test_copies_in_e4m3_are_those_of_the_last_step(optimizer):
    """A fused optimizer leaves the version of a weight as it is."""
    model = made()
    patch_model(model, linear="e4m3")
    update = torch.optim.AdamW(model.parameters(), lr=0.1, **optimizer)
    step(model)
    update.step()
    found = step(model)
    for module in model.modules():
        vars(module).pop("_llmq_copy", None)
    assert_same(step(model), found)


@pytest.mark.parametrize("before", [True, False], ids=["before-peft", "after-peft"])
def test_lora_over_maps_in_e4m3(before):
    right = step(adapted(made()))
    model = made()
    if before:
        patch_model(model, linear="e4m3")
    model = adapted(model)
    if not before:
        patch_model(model, linear="e4m3", strict=True)
    found = step(model)
    assert found[0] == pytest.approx(right[0], rel=1e-3) and found[0] != right[0]
    errors = [((found[1][name] - one).norm() / one.norm()).item() for name, one in right[1].items()]
    assert found[1].keys() == right[1].keys() and max(errors) < 0.25


def test_adapters_that_are_merged_into_maps_in_e4m3():
    model = adapted(made())
    patch_model(model, linear="e4m3")
    before = step(model)[0]
    model.merge_adapter()
    merged = model(**batch()).loss.item()
    model.unmerge_adapter()
    assert merged == pytest.approx(before, rel=1e-3) and step(model)[0] == pytest.approx(before, rel=1e-5)
    with model.disable_adapter():
        base = model(**batch()).loss.item()
    merged = model.merge_and_unload().train()(**batch()).loss.item()
    assert merged == pytest.approx(before, rel=1e-3) and abs(merged - base) > 3 * abs(merged - before)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="kernels run on the CPU as C++")
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.sweep), torch.bfloat16])
def test_kernels_that_were_planned_run_on_other_memory(dtype, monkeypatch, tmp_path_factory):
    """Emulated: what a launcher chose on made-up addresses computes on a call's own what the reference does."""
    torch.manual_seed(0)
    x, d_y = (torch.randn(2, 37, 48).to(dtype) for _ in range(2))
    q, angles = torch.randn(2, 4, 37, 16).to(dtype).transpose(1, 2), torch.rand(1, 37, 16).to(dtype)
    weight, rstd, scale = torch.randn(48).to(dtype), torch.rand(2, 37) + 0.5, torch.tensor([0.01])

    def copies():
        row, col = torch.zeros(74, 48, dtype=torch.uint8), torch.zeros(48, 80, dtype=torch.uint8)
        about = (74, 48), on_memory.NAMES[dtype]
        return on_memory.Copy(row, scale, ROWS, *about), on_memory.Copy(col[:, :74], scale, COLUMNS, *about)

    calls = [
        ("rmsnorm_backward", lambda: (x.clone(), weight.clone()), (d_y, None, x, weight, rstd), {}),
        ("rmsnorm_backward", lambda: (x.clone(), None), (d_y, None, x, weight, rstd), {}),
        ("rope_heads_forward", lambda: (torch.empty(2, 37, 4, 16, dtype=dtype),) * 2, (q, q, angles, angles), {}),
        ("cast", lambda: (copies(),), (x.view(74, 48),), {}),
    ]
    right = []
    for op, outputs, inputs, numbers in calls:
        right.append(outputs())
        on_memory.run(op, right[-1], inputs, **numbers)
    install(monkeypatch, tmp_path_factory.getbasetemp())
    for (op, outputs, inputs, numbers), wanted in zip(calls, right, strict=True):
        plan, found = on_memory.planned(op, outputs(), inputs, numbers), outputs()
        on_memory.put(plan, [tensor for operand in (*found, *inputs) for tensor in on_memory._tensors(operand)])
        for one, other in zip(found, wanted, strict=True):
            for a, b in zip(on_memory._tensors(one), on_memory._tensors(other), strict=True):
                assert torch.allclose(
                    a.float(), b.float(), rtol=2e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-4
                ), op


@pytest.mark.slow
def test_the_page_runs(tmp_path, monkeypatch):
    made().save_pretrained(tmp_path / "model")
    (block,) = re.findall(r"```python\n(.*?)```", Path("docs/torch.md").read_text("utf-8"), re.DOTALL)
    names = {}
    exec(block.replace("Qwen/Qwen2.5-0.5B", str(tmp_path / "model")), names)
    assert names["loss"].item() > 0


def test_trl_runs_unchanged(tmp_path):
    def trained(patch_before=False, patch_after=False):
        model = made()
        if patch_before:
            patch_model(model)
        rows = Dataset.from_list(
            [{"input_ids": [n % 97, 3, 5, n % 7], "labels": [-100, 3, 5, n % 7]} for n in range(8)]
        )
        arguments = trl.SFTConfig(
            tmp_path, max_steps=4, logging_steps=1, report_to=[], save_strategy="no", use_cpu=True, bf16=False
        )
        words = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token=EOS, pad_token=EOS)
        trainer = trl.SFTTrainer(model, arguments, train_dataset=rows, processing_class=words)
        if patch_after:
            patch_model(model)
        trainer.train()
        return [log[name] for log in trainer.state.log_history if "entropy" in log for name in ("loss", "entropy")]

    right = trained()
    assert len(right) == 8
    assert trained(patch_before=True) == pytest.approx(right, abs=1e-4)
    assert trained(patch_after=True) == pytest.approx(right, abs=1e-4)
