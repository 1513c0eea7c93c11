"""What lives on the host: optimizer states and residual streams change no bit, and free the device's memory."""

from dataclasses import replace

import numpy as np
import pytest
from random_plans import drawn
from ranks import Run, on_ranks, same
from tiny_engines import (
    BF16,
    FP8,
    FP8_HEAD,
    PRECISIONS,
    batch,
    bits,
    engine_of,
    plan_of,
    result_of,
    tiny,
    train_steps,
)  # fmt: skip

from llmq.backends.planned import PlannedBackend
from llmq.errors import UsageError
from llmq.model.presets import preset
from llmq.optimizers import adamw
from llmq.options.maths import MemoryOptions
from llmq.plan import memory as memories
from llmq.plan.memory import RESIDUAL, Memory
from llmq.stores.hosted import MOST_PIECES, size_of_pieces
from llmq.tensor import Ref

CONFIG = tiny(vocab_size=300, intermediate_size=176)  # matrices of several tiles of 128 rows, the last one short
STATES = ("master", "m", "v")
SLOW = pytest.mark.sweep
MARKS = {"fp8-e5m2-delayed": (), "bf16": pytest.mark.slow}  # by precision
EVERY = pytest.mark.parametrize(
    "precision", [pytest.param(p, id=name, marks=MARKS.get(name, SLOW)) for name, p in PRECISIONS.items()]
)
RESIDUALS = Memory(("recompute_block",), offload=(RESIDUAL,))


@EVERY
@pytest.mark.parametrize("host", [pytest.param(("m", "v"), marks=SLOW), STATES], ids="-".join)
@pytest.mark.parametrize("piece_bytes", [1, pytest.param(2**26, marks=SLOW)])
@pytest.mark.parametrize("mixed", [True, pytest.param(False, marks=SLOW)])
def test_states_on_the_host_are_bit_equal(precision, host, piece_bytes, mixed):
    """In one piece for each row, and in as many as it has tiles of 128 rows."""
    dtypes = replace(precision, m="fp32", v="bf16", master="fp32") if mixed else precision
    plan = plan_of(dtypes, Memory(host=host, piece_bytes=piece_bytes), CONFIG)
    assert result_of(plan) == result_of(plan_of(dtypes, None, CONFIG))
    assert {ref.home for state in plan.moments.values() for ref in state.values() if ref.space in host} == {"host"}


@pytest.mark.parametrize("space", STATES)
def test_a_state_on_the_host_takes_no_place_on_the_device(space):
    precision, category = replace(BF16, master="fp32"), {"master": "Master", "m": "Adam M", "v": "Adam V"}[space]
    plain, plan = (plan_of(precision, Memory(host=host), CONFIG) for host in ((), (space,)))
    assert plan.table()[category] == 0 and plan.table("host")[category] == plain.table()[category] > 0
    others = {name: size for name, size in plan.table().items() if name not in (category, "Activations")}
    assert others == {name: plain.table()[name] for name in others}


def test_the_weights_of_an_fp8_run_leave_the_device_with_their_masters():
    """What stays of a matrix are its copies, of one byte each."""
    plain, plan = (plan_of(FP8["e4m3", "delayed"], Memory(host=host), CONFIG) for host in ((), ("master",)))
    sites = [row for row in plan.rows if row.site is not None and len(row.shape) == 2]
    assert plain.table()["Weights"] - plan.table()["Weights"] == sum(2 * np.prod(row.shape) for row in sites)


def test_pieces_bound_what_is_fetched_of_a_large_row():
    """The states of 7B's embedding alone are 4.4 GB; its pieces are of whole tiles, in order, and few at a time."""
    config = replace(preset("Qwen2.5-7B"), num_layers=2)
    precision = replace(BF16, m="fp32", v="fp32")
    plan = plan_of(precision, Memory(host=("m", "v")), config, scratch_bytes=PlannedBackend().scratch_bytes)
    update = plan.programs["update"]
    first = [c.numbers["first"] for c in update.calls if c.op == "adamw" and c.outputs[0].ref.name == "embed.weight"]
    assert len(first) > 60 and first == sorted(first) and all(at % (128 * config.hidden_size) == 0 for at in first)
    assert update.live_bytes["device"] <= 4 * plan.spec.memory.piece_bytes


def test_a_scale_over_the_whole_is_measured_of_the_whole():
    """Rows whose copies have one are updated whole, the others in pieces."""
    for scaling, pieces in (("delayed", 2), ("current", 1), ("rowwise", 1), ("blockwise", 1)):
        plan = plan_of(FP8["e4m3", scaling], Memory(host=("m",), piece_bytes=1), CONFIG)
        calls = [call for call in plan.programs["update"].calls if call.op == "adamw"]
        counts = {name: sum(c.outputs[0].ref.name == name for c in calls) for name in plan.moments}
        assert counts["embed.weight"] == 3 and counts["layers.1.mlp.up.weight"] == max(1, 3 * (pieces - 1))


@pytest.mark.parametrize("level", [1, *(pytest.param(n, marks=SLOW) for n in (0, 2, 3))])
@pytest.mark.parametrize("name", ["bf16", pytest.param("fp8", marks=SLOW)])
def test_shares_of_ranks_live_on_the_host_too(name, level):
    precision = {"bf16": replace(BF16, master="fp32"), "fp8": FP8_HEAD}[name]
    hosted = Memory(host=STATES, piece_bytes=1, offload=(RESIDUAL,))
    assert all(map(same, *(on_ranks(Run(precision, level, memory)) for memory in (None, hosted))))


ALL = (*STATES, "grad", "weight")
LAYERS = {"gradients": ("grad",), "quants": ("quant",), "weights": ("weight", "master"), "all": ALL}


@EVERY
@pytest.mark.parametrize("host", [pytest.param(h, id=n, marks=() if n == "all" else SLOW) for n, h in LAYERS.items()])
def test_what_layers_hold_on_the_host_is_bit_equal(precision, host):
    """Three micro-steps: the first overwrites gradients, the others fetch them; the tied head adds to one, too."""

    def result(memory):
        engine = engine_of(plan_of(precision, memory, CONFIG))
        return train_steps(engine, accumulation=3), bits(engine), engine.evaluate(batch(9))

    assert result(Memory(host=host, piece_bytes=1)) == result(Memory())


@pytest.mark.parametrize("precision", [pytest.param(BF16, marks=SLOW), FP8["e4m3", "delayed"]], ids=["bf16", "fp8"])
def test_two_layers_of_what_is_streamed_are_on_the_device(precision):
    """Nothing on the device grows with the number of layers but what is counted in bytes: scales, partial sums."""
    memory = replace(RESIDUALS, host=ALL)
    plans = [plan_of(precision, memory, tiny(num_layers=depth)) for depth in (4, 8)]
    tables = [{**plan.table(), "Other": 0} for plan in plans]
    assert tables[0] == tables[1] and plans[0].host_bytes < plans[1].host_bytes
    assert max(plan.table()["Other"] for plan in plans) < 2**16


def test_gradients_of_a_first_micro_step_are_not_fetched():
    """But for the embedding's, to which the head has added."""
    plan = plan_of(BF16, Memory(host=("grad",)), CONFIG)
    first, middle = (
        [c.inputs[0].name for c in plan.programs[name].calls if c.op == "copy_to_device"]
        for name in ("first", "middle")
    )
    assert first == ["embed.weight"] and len(middle) == len(plan.grads) + 1


def test_only_what_e4m3_reads_are_quants():
    plan = plan_of(FP8["e4m3", "delayed"], Memory(host=("quant",)), CONFIG)
    hosted = {name for name, ref in plan.weights.items() if ref.home == "host"}
    assert hosted == {row.name for row in plan.rows if row.site is not None and len(row.shape) == 2}
    assert plan.table("host")["Weights"] == sum(2 * np.prod(plan.shape(name)) for name in hosted)


def test_errors_of_copies_are_measured_of_masters_on_the_host():
    """And of weights that are fetched."""
    hosts = ((), ALL)
    plain, *others = (
        engine_of(plan_of(FP8_HEAD, Memory(host=host), CONFIG, observe=True)).observe(batch()) for host in hosts
    )
    assert all(other.tobytes() == plain.tobytes() for other in others)


@EVERY
def test_offloaded_residuals_are_bit_equal(precision):
    expected = result_of(plan_of(precision))
    for memory in (
        RESIDUALS,
        Memory(offload=(RESIDUAL,)),
        Memory(("recompute_ffn",), offload=(RESIDUAL,), host=STATES),
    ):
        plan = plan_of(precision, memory)
        assert result_of(plan) == expected and plan.arena_bytes("host") > 0


@pytest.mark.parametrize(
    "precision", [BF16, pytest.param(FP8["e4m3", "delayed"], marks=pytest.mark.slow)], ids=["bf16", "fp8"]
)
def test_activation_memory_does_not_grow_with_depth(precision):
    """With the block recomputed and its input offloaded; the host has an input of each layer more."""
    plans = [plan_of(precision, RESIDUALS, tiny(num_layers=depth)) for depth in (4, 8, 16)]
    device = [(p.programs["middle"].live_bytes["device"], p.arena_bytes()) for p in plans]
    assert device[0] == device[1] == device[2]
    host = [plan.arena_bytes("host") for plan in plans]
    stream = Ref("", "activation", (2, 16, 48), "bf16")
    assert host[2] - host[1] == 2 * (host[1] - host[0]) == 8 * 2 * np.prod(stream.shape)


def test_without_the_flag_it_does_grow():
    plans = [plan_of(BF16, Memory(("recompute_block",)), tiny(num_layers=depth)) for depth in (4, 8)]
    assert plans[0].arena_bytes() < plans[1].arena_bytes()


def resolved(own_master=True, **flags):
    options = MemoryOptions(**flags)
    return memories.resolve(options, adamw.DEFAULT, batch_size=2, seq_len=16, logit_bytes=1, own_master=own_master)


def test_options_become_homes():
    assert resolved().host == resolved().offload == ()
    assert resolved(offload_opt_v=True).host == ("v",)
    assert resolved(offload_master=True, offload_opt_m=True).host == ("master", "m")
    assert resolved(offload_optimizer=True).host == STATES
    assert resolved(own_master=False, offload_optimizer=True).host == ("m", "v")
    assert resolved(offload_residual=True).offload == (RESIDUAL,)
    assert resolved(own_master=False, stream_weights=True).host == ("master", "weight")
    assert resolved(offload_gradients=True, offload_quants=True).host == ("grad", "quant")
    with pytest.raises(UsageError, match=r"--offload-master frees no memory .* use --master-dtype fp32"):
        resolved(own_master=False, offload_master=True)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 30))])
def test_random_combinations_are_bit_equal(seed):
    """With poisoned arenas of both homes, on plans whose living slots share no bytes."""
    precision, plain, hosted = drawn(seed)
    plan = plan_of(precision, hosted, CONFIG)
    assert plan.arena_bytes("host") or not hosted.offload
    assert result_of(plan) == result_of(plan_of(precision, plain, CONFIG))


def test_many_states_come_in_larger_pieces():
    """No more than about MOST_PIECES of them, as each takes calls of the update."""
    refs = [Ref(f"r{index}", "m", (2**14, 2**14), "fp32") for index in range(8)]
    assert size_of_pieces(refs, 2**26) == 2**26
    assert size_of_pieces(refs * 64, 2**26) == 512 * 2**30 // MOST_PIECES > 2**26
