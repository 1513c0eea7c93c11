"""`llmq.torch` on a GPU beside transformers on the same GPU: `pytest -m gpu tests/test_judges_in_torch_gpu.py`."""

import copy

import pytest

pytest.importorskip("torch", reason="the judges are torch, transformers and PEFT")

import peft
import torch
import transformers
from golden import families

from llmq.torch import kernels, patch_model, unpatch_model

pytestmark = [pytest.mark.judge, pytest.mark.gpu]

FAMILIES = pytest.mark.parametrize("family", families.FAMILIES)
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 3, "vocab_size": 1003}
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def made(family, dtype, **changed):
    """A model with random weights on the GPU."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**{**families.FAMILIES[family], **changed})
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).cuda().train()


def adapted(model, rank=16):
    """The model with PEFT's LoRA, whose B is not zero."""
    torch.manual_seed(1)
    about = {"r": rank, "lora_alpha": 8, "target_modules": list(LINEARS), "init_lora_weights": False}
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **about))


def step(model, call=None):
    """Loss and gradients of a batch, some of which is not trained."""
    draw = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, families.VOCAB, (3, 48), generator=draw).cuda()
    labels = tokens.clone()
    labels[:, :5] = -100
    model.zero_grad()
    loss = (model if call is None else call)(input_ids=tokens, labels=labels).loss
    loss.backward()
    return loss.item(), {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def worst(found, right):
    """The largest relative error of a gradient; there are the same ones."""
    assert found[1].keys() == right[1].keys()
    return max(((found[1][name] - one).norm() / one.norm()).item() for name, one in right[1].items() if one.any())


def whole(found, right):
    """The relative error of all gradients together."""
    assert found[1].keys() == right[1].keys()
    errors = sum((found[1][name] - one).square().sum() for name, one in right[1].items())
    return (errors / sum(one.square().sum() for one in right[1].values())).sqrt().item()


@FAMILIES
def test_f32_is_transformers(family):
    model = made(family, torch.float32)
    right = step(model)
    patch_model(model, strict=True)
    found = step(model)
    assert found[0] == pytest.approx(right[0], rel=1e-5) and worst(found, right) < 1e-5
    unpatch_model(model)
    assert step(model)[0] == right[0]


@pytest.mark.parametrize("make", [lambda model: model, adapted], ids=["model", "lora"])
@pytest.mark.parametrize("family", ["llama3", "qwen2.5_tied", "qwen3"])
def test_bf16_is_as_near_to_f64_as_transformers(family, make):
    model = make(made(family, torch.bfloat16, **WIDE))
    exact = step(copy.deepcopy(model).double())
    theirs = whole(step(model), exact)
    patch_model(model, strict=True)
    found = step(model)
    assert theirs < 0.03 and whole(found, exact) < 1.5 * theirs and found[0] == pytest.approx(exact[0], rel=1e-3)
    patch_model(model, linear="e4m3", strict=True)
    found = step(model)
    assert whole(found, exact) < 0.15 and found[0] == pytest.approx(exact[0], rel=1e-2)


@pytest.mark.parametrize("linear", ["bf16", "e4m3"])
@pytest.mark.parametrize("make", [lambda model: model, adapted], ids=["model", "lora"])
def test_compiled_without_a_break(make, linear):
    model = make(made("qwen2", torch.bfloat16, **WIDE))
    patch_model(model, linear=linear)
    right = step(model)
    torch.compiler.reset()
    found = step(model, torch.compile(model, fullgraph=True))
    assert found[0] == pytest.approx(right[0], rel=1e-2) and worst(found, right) < 0.1


def test_another_stream_and_a_captured_graph():
    model = made("llama3", torch.bfloat16, **WIDE)
    patch_model(model)
    right = step(model)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert step(model)[0] == right[0]
    tokens = torch.arange(96, device="cuda").reshape(2, 48)
    loss = torch.zeros((), device="cuda")
    with torch.no_grad(), torch.cuda.stream(side):
        wanted = model(input_ids=tokens, labels=tokens).loss.item()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            loss.copy_(model(input_ids=tokens, labels=tokens).loss)
        graph.replay()
    torch.cuda.synchronize()
    assert loss.item() == wanted


def test_memory_of_kernels_is_torchs():
    import cupy

    model, pool = made("qwen3", torch.bfloat16, **WIDE), cupy.get_default_memory_pool()
    before = pool.total_bytes()
    patch_model(model)
    step(model)
    assert kernels._plans and pool.total_bytes() == before
