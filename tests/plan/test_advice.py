"""A plan without room: what is missing, and the mildest option that helps, with the scratch that it needs itself."""

from dataclasses import replace

import pytest
from tiny_engines import BF16, FP8_HEAD, plan_of, tiny

from llmq.backends import open_backend
from llmq.backends.planned import planned_scratch
from llmq.blocks.attention import Packing
from llmq.disk import MIB, shown
from llmq.errors import MemoryLimitError
from llmq.model.parameters import padded_vocab
from llmq.model.presets import preset
from llmq.ops.record import Call
from llmq.optimizers import adamw
from llmq.options.maths import MemoryOptions
from llmq.plan import advice
from llmq.plan.advice import refuse_if_host_is_small, refuse_if_too_large, with_fitting_chunks
from llmq.plan.few_layers import least_bytes
from llmq.plan.levels import at_level
from llmq.plan.memory import Memory, resolve
from llmq.stores.sharding import Sharding
from llmq.tensor import Ref

SCRATCH = 1 << 20


def scratch_bytes(call):
    """As attention's workspaces: the more sequences, the more."""
    return SCRATCH * call.inputs[0].shape[0] if call.op == "attention_backward" else 0


def per_batch(call):
    """Of a backend whose workspace does not get smaller in pieces."""
    return SCRATCH * call.inputs[0].shape[0] if call.op == "rope_backward" else 0


def test_a_plan_that_fits_is_let_through():
    plan = plan_of(BF16, config=tiny())
    refuse_if_too_large(plan, plan.total_bytes)
    with pytest.raises(MemoryLimitError, match="missing"):
        refuse_if_too_large(plan, plan.total_bytes - 1)


def test_what_is_missing_comes_with_what_is_asked_for():
    """By segment, the largest first; the message alone has one line."""
    plan = plan_of(BF16, Memory(host=("m",)), tiny())
    with pytest.raises(MemoryLimitError) as caught:
        refuse_if_too_large(plan, plan.total_bytes - 1)
    message, _, *rows, last = str(caught.value).splitlines()
    assert message == caught.value.args[0] and "1 bytes are missing" in message
    sizes = [plan.table()[row[:16].strip()] for row in rows]
    assert sizes == sorted(sizes, reverse=True) and sum(sizes) == plan.total_bytes and min(sizes) > 0
    assert last.split() == ["all", f"{plan.total_bytes / MIB:,.1f}"]
    assert "Adam M" in advice.requests(plan, "host") and "Adam V" not in advice.requests(plan, "host")


@pytest.mark.slow
def test_offloading_is_advised_where_recomputing_is_not_enough():
    plan = plan_of(replace(BF16, m="bf16"), Memory(("recompute_block",)), tiny(num_layers=6))
    hosted = Memory(("recompute_block",), offload=("residual",), host=("m", "v"))
    fits = plan_of(replace(BF16, m="bf16"), hosted, tiny(num_layers=6)).total_bytes
    with pytest.raises(MemoryLimitError, match="--offload-optimizer, which needs host memory instead, needs"):
        refuse_if_too_large(plan, fits)
    least = replace(hosted, host=("master", "m", "v", "grad", "weight"))
    fits = plan_of(BF16, least, tiny(num_layers=6)).total_bytes
    with pytest.raises(MemoryLimitError, match="--stream-weights, which needs host memory instead, needs"):
        refuse_if_too_large(plan, fits)


@pytest.mark.slow
def test_streamed_weights_are_proposed_to_many_ranks_too():
    """Where no level of sharing is enough."""
    sharding = at_level(Sharding(0, 2), 3)
    config = tiny(num_layers=6)
    plan = plan_of(BF16, Memory(("recompute_block",)), config, sharding=sharding)
    least = Memory(("recompute_block",), offload=("residual",), host=("master", "m", "v", "grad", "weight"))
    fits = plan_of(BF16, least, config, sharding=sharding).total_bytes
    with pytest.raises(MemoryLimitError, match="--stream-weights, which needs host memory instead, needs"):
        refuse_if_too_large(plan, fits)


def test_what_the_host_has_no_room_for_is_refused():
    plan = plan_of(BF16, Memory(host=("m", "v")), tiny())
    refuse_if_host_is_small(plan, plan.host_bytes)
    refuse_if_host_is_small(plan_of(BF16, config=tiny()), -1)
    with pytest.raises(MemoryLimitError, match=r"are missing: --opt-m-dtype int8 --opt-v-dtype e4m3 \(which changes"):
        refuse_if_host_is_small(plan, plan.host_bytes - 1)
    with pytest.raises(MemoryLimitError, match=r"are missing: leave out --offload flags \(Adam [MV] takes most"):
        refuse_if_host_is_small(plan, 1000)


def test_the_nearest_setting_that_fits_on_the_host_is_named():
    """The first that leaves the host enough, and that the device has room for."""
    hosted = Memory(("recompute_block",), offload=("residual",), host=("m", "v", "grad"))
    plan = plan_of(replace(BF16, m="fp32"), hosted, tiny(num_layers=3))

    def said(missing, room):
        with pytest.raises(MemoryLimitError) as caught:
            refuse_if_host_is_small(plan, plan.host_bytes - missing, room)
        return str(caught.value).splitlines()[0]

    without = {
        "--offload-residual": plan_of(replace(BF16, m="fp32"), replace(hosted, offload=()), tiny(num_layers=3)),
        "--offload-opt-m": plan_of(replace(BF16, m="fp32"), replace(hosted, host=("v", "grad")), tiny(num_layers=3)),
    }
    assert "without --offload-residual needs" in said(1, 1 << 40)
    m = without["--offload-opt-m"]
    large = plan.host_bytes - m.host_bytes
    assert "without --offload-opt-m needs" in said(large, m.total_bytes)
    assert f"{shown(m.host_bytes)} of the host and {shown(m.total_bytes)} of the device" in said(large, m.total_bytes)
    assert "without" not in said(large, m.total_bytes - 1) and "--opt-m-dtype" in said(1, plan.total_bytes)


def test_copies_of_weights_may_be_made_for_each_use():
    """Which costs least of what changes no bit; in place of copies on the host, too."""
    plan, small = (plan_of(FP8_HEAD, memory, tiny()) for memory in (Memory(), Memory(persistent_quants=False)))
    with pytest.raises(MemoryLimitError, match="are missing: --no-persistent-quants needs"):
        refuse_if_too_large(plan, small.total_bytes)
    hosted = plan_of(FP8_HEAD, Memory(host=("quant",)), tiny())
    for room, change in (
        (plan.total_bytes, "without --offload-quants"),
        (small.total_bytes, "--no-persistent-quants in place of --offload-quants"),
    ):
        with pytest.raises(MemoryLimitError, match=f"are missing: {change} needs 0 bytes of the host"):
            refuse_if_host_is_small(hosted, 0, room)
    with pytest.raises(MemoryLimitError) as caught:
        refuse_if_too_large(plan_of(BF16, config=tiny()), 1)
    assert "--no-persistent-quants" not in str(caught.value)


def test_advice_counts_the_scratch_of_the_smaller_run():
    """Every other remedy but fewer sequences leaves the workspace of 1 MiB for each sequence as it is."""
    plan = plan_of(BF16, Memory((), attention_chunks=8), config=tiny(), batch_size=8, scratch_bytes=per_batch)
    assert plan.total_bytes > 8 * SCRATCH
    with pytest.raises(MemoryLimitError, match="missing: --batch-size 1"):
        refuse_if_too_large(plan, 8 * SCRATCH, per_batch)
    with pytest.raises(MemoryLimitError, match="no memory option"):
        refuse_if_too_large(plan, SCRATCH, per_batch)


def test_advice_counts_what_watching_fp8_takes():
    """What is advised has the program that measures the copies, unless leaving that out is the advice."""
    plan = plan_of(FP8_HEAD, config=tiny(), batch_size=8, seq_len=32, observe=True)
    plain = plan_of(FP8_HEAD, config=tiny(), batch_size=8, seq_len=32)
    assert plain.total_bytes < plan.total_bytes
    with pytest.raises(MemoryLimitError, match=r"missing: --log-fp8-every 0 needs"):
        refuse_if_too_large(plan, plain.total_bytes)
    block = plan_of(FP8_HEAD, Memory(("recompute_block",)), tiny(), batch_size=8, seq_len=32, observe=True)
    with pytest.raises(MemoryLimitError) as caught:
        refuse_if_too_large(plan, min(block.total_bytes, plain.total_bytes) - 1)
    assert "--recompute-block needs" not in str(caught.value)


def test_a_workspace_that_is_too_large_names_what_makes_it_smaller():
    packing = Packing(max_docs=4, longest=8)
    plan = plan_of(BF16, config=tiny(), batch_size=8, packing=packing, scratch_bytes=scratch_bytes)
    with pytest.raises(MemoryLimitError, match=r"missing: --no-deterministic needs .*, --attn-bwd-chunks 8 needs"):
        refuse_if_too_large(plan, 8 * SCRATCH, scratch_bytes, lambda call: 256)
    with pytest.raises(MemoryLimitError, match="missing: --attn-bwd-chunks 8 needs"):
        refuse_if_too_large(plan, 8 * SCRATCH, scratch_bytes)
    chunked = plan_of(BF16, Memory((), attention_chunks=8), tiny(), batch_size=8, scratch_bytes=scratch_bytes)
    with pytest.raises(MemoryLimitError, match=r"missing: --no-deterministic needs [0-9,]+ bytes\n"):
        refuse_if_too_large(chunked, chunked.total_bytes - 1, scratch_bytes, lambda call: 256)


def fitting(free_bytes, scratch=scratch_bytes, **numbers):
    """A plan for 12 rows that chooses its chunks."""
    plan = plan_of(BF16, config=tiny(), batch_size=12, scratch_bytes=scratch, **numbers)
    return plan, with_fitting_chunks(plan, free_bytes, scratch)


def test_the_fewest_chunks_that_fit_are_taken():
    whole, same = fitting(2**40)
    assert same is whole and whole.spec.memory.attention_chunks == 1
    for chunks in (2, 3, 4, 6, 12):
        expected = plan_of(BF16, Memory((), 1, chunks), tiny(), batch_size=12, scratch_bytes=scratch_bytes)
        for room in (0, SCRATCH // 2):
            _, found = fitting(expected.total_bytes + room)
            assert found.spec.memory == expected.spec.memory and found.total_bytes == expected.total_bytes
    _, least = fitting(expected.total_bytes - 1)
    assert least.spec.memory.attention_chunks == 12, "the error then counts from here"


def test_chunks_that_save_nothing_are_not_taken():
    """On the CPU, whose attention takes no workspace, and where another op needs as much."""
    for scratch in (None, per_batch):
        plan, same = fitting(2**20, scratch)
        assert same is plan


def test_candidates_that_cannot_fit_are_not_planned(monkeypatch):
    """A plan of a large model takes up to a second."""
    made, real = [], advice.make_plan
    monkeypatch.setattr(advice, "make_plan", lambda *a, **k: made.append(a[0].memory.attention_chunks) or real(*a, **k))
    fits_in_4 = plan_of(BF16, Memory((), 1, 4), tiny(), batch_size=12, scratch_bytes=scratch_bytes).total_bytes
    fitting(fits_in_4)
    assert made == [4]
    made.clear()
    fitting(1000)
    assert made == [12]


SEVEN = {"batch_size": 4, "seq_len": 4096}
CONFIG = replace(preset("Qwen2.5-7B"), num_layers=2)
ROOM = int(8.4 * 2**30)  # what an H200 has free beside all 28 layers of it


def seven(packing, free_bytes=2**40, deterministic=True):
    """A plan of Qwen2.5-7B in bf16, 4x4096."""
    limits = resolve(
        MemoryOptions(), adamw.DEFAULT, **SEVEN, logit_bytes=2 * padded_vocab(CONFIG), gpu_bytes=141 * 10**9
    )
    scratch = open_backend("planned", deterministic=deterministic).scratch_bytes
    found = plan_of(BF16, limits, CONFIG, packing=packing, scratch_bytes=scratch, **SEVEN)
    return with_fitting_chunks(found, free_bytes, scratch)


def test_what_fits_dense_fits_packed():
    dense = seven(None)
    free = dense.total_bytes + ROOM
    assert dense.spec.memory.attention_chunks == 1
    for packing in (Packing(8, 4096), Packing(16, 1500), Packing(4, 4096), Packing(60, 400)):
        packed = seven(packing, free)
        assert packed.total_bytes <= free
        assert (packed.spec.memory.attention_chunks > 1) == (packing != Packing(60, 400))


def test_what_chunks_do_not_make_fit_the_other_attention_does():
    """One document that fills a row, and rows of 30: 24 GiB too much in 4 chunks, none when not deterministic."""
    free = seven(None).total_bytes + ROOM
    packed = seven(Packing(30, 4096), free)
    assert packed.spec.memory.attention_chunks == 4 and packed.total_bytes > free
    scratch, relaxed = (open_backend("planned", deterministic=strict).scratch_bytes for strict in (True, False))
    with pytest.raises(MemoryLimitError, match=r"with attention's backward in 4 chunks, .*: --no-deterministic needs"):
        refuse_if_too_large(packed, free, scratch, relaxed)
    assert seven(Packing(30, 4096), free, deterministic=False).total_bytes <= free


def test_the_workspace_of_packed_rows_goes_with_the_longest_document():
    """Measured with cuDNN 9.19, deterministic and not, at 16x2048: 8 documents of up to 2048, 20 of up to 537."""
    shapes = {"d_att": 896, "qkv": 1152, "att": 896}
    refs = [Ref(name, "activation", (16, 2048, width), "bf16") for name, width in shapes.items()]
    refs.append(Ref("lse", "activation", (16, 2048, 14), "fp32"))
    numbers = {"num_heads": 14, "num_kv_heads": 2, "window": None, "softmax_scale": 0.125}
    for max_docs, longest, measured in ((8, 2048, [15.97, 2.11]), (20, 2048, [36.97, 2.11]), (20, 537, [5.51, 2.11])):
        borders = Ref("borders", "batch", (16, max_docs + 1), "int32")
        call = Call("attention_backward", (None,), (*refs, borders), {**numbers, "longest": longest}, "backward")
        found = [planned_scratch(call, deterministic) / 2**30 for deterministic in (True, False)]
        assert found == pytest.approx(measured, rel=0.01)


def at_two_levels():
    """Plans of a rank of two that share out states, and all they have."""
    config = tiny(num_layers=13, hidden_size=256, intermediate_size=512, head_dim=64)
    shardings = (at_level(Sharding(0, 2), level) for level in (1, 3))
    return [plan_of(BF16, config=config, sharding=one, scratch_bytes=scratch_bytes) for one in shardings]


def planned_by_advice(monkeypatch):
    """The shardings of the plans that advice will make."""
    planned, make = [], advice.make_plan
    monkeypatch.setattr(advice, "make_plan", lambda spec, scratch: planned.append(spec.sharding) or make(spec, scratch))
    return planned


@pytest.mark.slow
def test_more_sharing_is_the_first_advice_of_many_ranks(monkeypatch):
    one, three = at_two_levels()
    assert three.total_bytes < one.total_bytes
    planned = planned_by_advice(monkeypatch)
    with pytest.raises(MemoryLimitError, match="missing: --zero-level 3 needs"):
        refuse_if_too_large(one, three.total_bytes, scratch_bytes)
    assert planned[-1] == three.spec.sharding and len(planned) <= 3


@pytest.mark.slow
def test_what_plans_of_few_layers_exclude_is_not_planned(monkeypatch):
    one, three = at_two_levels()
    planned = planned_by_advice(monkeypatch)
    with pytest.raises(MemoryLimitError, match="no memory option makes it fit"):
        refuse_if_too_large(one, three.total_bytes // 10, scratch_bytes)
    assert len(planned) <= 2, "the changes of the workspace alone"


@pytest.mark.slow
def test_without_plans_of_few_layers_the_advice_is_the_same(monkeypatch):
    config = tiny(num_layers=14, hidden_size=256, intermediate_size=512, head_dim=64)
    one = plan_of(BF16, config=config, sharding=at_level(Sharding(0, 2), 1), scratch_bytes=scratch_bytes)
    monkeypatch.setattr(advice, "least_bytes", lambda spec, scratch: 0)
    with pytest.raises(MemoryLimitError, match="no memory option makes it fit"):
        refuse_if_too_large(one, one.total_bytes // 20, scratch_bytes)


@pytest.mark.parametrize("level", [3, *(pytest.param(level, marks=pytest.mark.slow) for level in range(3))])
def test_few_layers_say_less_than_a_plan_or_the_same(level):
    config = tiny(num_layers=14, hidden_size=256, intermediate_size=512, head_dim=64)
    plan = plan_of(BF16, config=config, sharding=at_level(Sharding(0, 2), level))
    assert 0.95 * plan.total_bytes < least_bytes(plan.spec, None) <= 1.01 * plan.total_bytes


def test_a_plan_of_few_layers_is_as_fast_as_an_estimate():
    assert least_bytes(plan_of(BF16, config=tiny()).spec, None) == 0
