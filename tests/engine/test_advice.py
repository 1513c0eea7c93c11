"""What is said of a plan that does not fit: what is missing, and which remedies fit, the fastest first."""

import re
from dataclasses import replace

import pytest
from tiny_engines import BF16, FP8_HEAD, plan_of, tiny

from llmq.cli import estimate, shell
from llmq.disk import GIB, MIB, shown, size_bytes
from llmq.engine import advice
from llmq.engine.advice import Limits, lacking, refuse_if_too_large, remedies, requests
from llmq.engine.cost import Cost
from llmq.engine.search import Setting
from llmq.errors import MemoryLimitError
from llmq.hardware import cards
from llmq.plan.memory import Memory
from llmq.stores.sharding import Sharding

SCRATCH = 1 << 20
WIDE = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512}
H200 = cards.named("H200")


def workspace(call):
    """As attention's workspaces: the more sequences, the more."""
    return SCRATCH * call.inputs[0].shape[0] if call.op == "attention_backward" else 0


def nothing(call):
    """Of an attention that need not repeat its bits."""
    return 0


def refused(plan, room):
    """The lines of the error."""
    with pytest.raises(MemoryLimitError) as caught:
        refuse_if_too_large(plan, room)
    assert "\n" not in caught.value.args[0]
    return str(caught.value).splitlines()


def flags(found):
    return [one.flags for one in found]


def test_a_plan_that_fits_is_let_through(few_remedies):
    plan = plan_of(BF16, config=tiny(num_layers=1))
    refuse_if_too_large(plan, Limits(plan.total_bytes))
    assert refused(plan, Limits(plan.total_bytes - 1))[0].endswith("1 bytes are missing")


def test_what_is_missing_comes_with_what_is_asked_for(few_remedies):
    """By segment, the largest first."""
    plan = plan_of(BF16, Memory(host=("m",)), tiny(num_layers=1))
    said = refused(plan, Limits(plan.total_bytes - 1))
    *rows, last = said[next(n for n, line in enumerate(said) if "segment" in line) + 1 :]
    sizes = [plan.table()[row[:16].strip()] for row in rows]
    assert sizes == sorted(sizes, reverse=True) and sum(sizes) == plan.total_bytes and min(sizes) > 0
    assert last.split() == ["all", f"{plan.total_bytes / MIB:,.1f}"]
    assert "Adam M" in requests(plan, "host") and "Adam V" not in requests(plan, "host")


@pytest.mark.slow
def test_at_most_three_fit_and_change_numbers_only_where_that_is_faster():
    plan = plan_of(replace(BF16, m="fp32", v="fp32"), config=tiny(num_layers=1, **WIDE))
    room = Limits(int(0.9 * plan.total_bytes), card=H200, micro_steps=4)
    found = remedies(plan, room)
    assert 2 <= len(found) <= 3 and all(one.cost.num_bytes <= room.free_bytes for one in found)
    *keeping, changing = found
    assert changing.flags.startswith("--opt-m-dtype bf16 --opt-v-dtype bf16") and changing.flags.endswith("numbers)")
    assert not any("dtype" in text for text in flags(keeping))
    assert 1.01 * changing.cost.seconds <= keeping[0].cost.seconds
    said = refused(plan, room)
    assert said[1] == "What fits, by predicted speed:" and said[2].split() == ["tokens/s", "device", "host", "settings"]
    rate = f"{found[0].tokens / found[0].cost.seconds:,.0f}"
    assert said[3].split()[:2] == ["1", rate] and said[3].endswith(found[0].flags)
    assert said[3 + len(found)] == "--fit compares more settings"


@pytest.mark.slow
def test_without_a_card_there_is_an_order_and_no_rate():
    plan = plan_of(BF16, config=tiny(num_layers=3))
    said = refused(plan, Limits(plan.total_bytes - 1))
    assert said[1] == "What fits, the fastest first:" and said[3].split()[:2] == ["1", "-"]
    assert not any("--fit" in line for line in said)


@pytest.mark.slow
def test_what_the_host_has_no_room_for_is_not_proposed(few_remedies):
    plan = plan_of(BF16, config=tiny(num_layers=2, **WIDE))
    free = plan.total_bytes // 2
    plenty = remedies(plan, Limits(free, card=H200))
    most = max(one.cost.host_bytes for one in plenty)
    less = remedies(plan, Limits(free, card=H200, host_bytes=most - 1))
    assert most > 0 and less and all(one.cost.host_bytes < most for one in less)
    assert all(not one.cost.host_bytes for one in remedies(plan, Limits(free, card=H200, host_bytes=0)))


def test_the_host_of_many_processes_is_said_of_all():
    plan = plan_of(BF16, Memory(host=("m", "v")), tiny(num_layers=1), sharding=Sharding(0, 2))
    room = Limits(1 << 40, host_bytes=plan.host_bytes - 10, processes=2)
    assert not lacking(plan, replace(room, host_bytes=plan.host_bytes)) and not lacking(
        plan, replace(room, host_bytes=None)
    )
    needs, free = shown(2 * plan.host_bytes), shown(2 * plan.host_bytes - 20)
    each = f", {shown(plan.host_bytes)} in each of 2 processes"
    assert (
        lacking(plan, room)
        == f"the run keeps {needs} in host memory{each}, {free} are free there, 20 bytes are missing"
    )
    one = Setting({"zero_level": 3}, Cost(5, 7, 1.0), 1)
    assert advice.table([one], 2)[0].split() == ["tokens/s", "device", "host", "of", "2", "settings"]
    assert advice.table([one], 2)[1] == "1         1  5 bytes   14 bytes  --zero-level 3"


@pytest.mark.slow
def test_what_leaves_the_host_is_named_where_that_is_small(few_remedies):
    hosted = Memory(("recompute_block",), offload=("residual",), host=("m", "v", "grad"))
    plan = plan_of(BF16, hosted, tiny(num_layers=1))
    found = remedies(plan, Limits(1 << 40, host_bytes=0))
    assert flags(found)[0] == "--no-offload-gradients --no-offload-optimizer --no-offload-residual"
    assert found[0].cost.host_bytes == 0
    room = Limits(plan.total_bytes, host_bytes=plan.host_bytes - 1)
    assert all(
        one.cost.num_bytes <= plan.total_bytes and one.cost.host_bytes < plan.host_bytes for one in remedies(plan, room)
    )
    alone = plan_of(BF16, Memory(host=("v",)), tiny())
    assert flags(remedies(alone, Limits(1 << 40, host_bytes=0)))[0] == "--no-offload-opt-v"


@pytest.mark.slow
def test_copies_of_weights_may_be_made_for_each_use(few_remedies):
    memories = (Memory(), Memory(persistent_quants=False))
    plan, small = (plan_of(FP8_HEAD, memory, tiny(num_layers=1)) for memory in memories)
    assert "--no-persistent-quants" in flags(remedies(plan, Limits(small.total_bytes, host_bytes=0)))
    hosted = plan_of(FP8_HEAD, Memory(host=("quant",)), tiny(num_layers=1))
    assert "--no-offload-quants" in flags(remedies(hosted, Limits(plan.total_bytes, host_bytes=0)))
    found = flags(remedies(hosted, Limits(small.total_bytes, host_bytes=0)))
    assert "--no-offload-quants --no-persistent-quants" in found


@pytest.mark.slow
def test_watching_fp8_is_counted_and_may_be_left(few_remedies):
    plan = plan_of(FP8_HEAD, config=tiny(num_layers=1), batch_size=8, seq_len=32, observe=True)
    plain = plan_of(FP8_HEAD, config=tiny(num_layers=1), batch_size=8, seq_len=32)
    assert plain.total_bytes < plan.total_bytes
    assert flags(remedies(plan, Limits(plain.total_bytes, host_bytes=0)))[0].endswith("--log-fp8-every 0")


@pytest.mark.slow
def test_the_other_attention_is_proposed_where_its_workspace_is_what_is_missing(few_remedies):
    plan = plan_of(BF16, Memory((), attention_chunks=8), tiny(num_layers=1), batch_size=8, scratch_bytes=workspace)
    room = Limits(plan.total_bytes - SCRATCH // 2, workspace, nothing, host_bytes=0)
    assert "--no-deterministic" in flags(remedies(plan, room))
    assert not any("deterministic" in text for text in flags(remedies(plan, replace(room, relaxed_scratch=None))))
    chunked = plan_of(BF16, Memory((), attention_chunks=2), tiny(num_layers=1), batch_size=8, scratch_bytes=workspace)
    room = Limits(chunked.total_bytes - 1, workspace, host_bytes=0)
    assert "--attn-bwd-chunks 8" in flags(remedies(chunked, room))
    automatic = flags(remedies(chunked, replace(room, auto_chunks=True)))
    assert automatic and not any("--attn-bwd-chunks" in text for text in automatic)


def test_on_the_cpu_nothing_is_gained_by_what_moves_to_the_host(few_remedies):
    plan = plan_of(BF16, config=tiny(num_layers=1), batch_size=4)
    for one in remedies(plan, Limits(int(0.95 * plan.total_bytes), host_bytes=1 << 40, in_one=True)):
        assert not one.cost.host_bytes and one.cost.num_bytes <= 0.95 * plan.total_bytes
    hosted = plan_of(BF16, Memory(host=("m", "v")), tiny())
    both = hosted.total_bytes + hosted.host_bytes
    assert not lacking(hosted, Limits(both, host_bytes=both, in_one=True))
    assert "in host memory" in lacking(hosted, Limits(both, host_bytes=both - 1, in_one=True))


def test_where_nothing_fits_that_is_said(few_remedies):
    plan = plan_of(BF16, config=tiny())
    assert refused(plan, Limits(1))[1].startswith("No memory option makes it fit: train an adapter")


@pytest.mark.slow
def test_the_level_that_shares_all_is_a_remedy_of_many_ranks(few_remedies):
    plan = plan_of(BF16, config=tiny(num_layers=1, **WIDE), sharding=Sharding(0, 2, states=True))
    shared = plan_of(BF16, config=tiny(num_layers=1, **WIDE), sharding=Sharding(0, 2, True, True, True))
    found = remedies(plan, Limits(shared.total_bytes, host_bytes=0, processes=2, card=H200))
    assert flags(found)[0] == "--zero-level 3"


def estimated(capsys, *arguments):
    """The settings of the error of an estimate: lines without their numbers, bytes of the device, and of the host."""
    with pytest.raises(SystemExit) as ended:
        shell.main(estimate.command, arguments)
    said = capsys.readouterr().err
    rows = re.findall(
        r"^\d +([\d,]+) +([\d.]+ \w+) +([\d,.]+ \w+)  (--.*)$", said.replace("0 bytes", "0 B"), re.MULTILINE
    )
    assert ended.value.code == 4 and rows, said
    number = lambda text: size_bytes(text.replace(",", "").replace(" ", "")) or 0  # noqa: E731
    return [(text, number(device), number(host)) for _, device, host, text in rows]


@pytest.mark.slow
def test_the_smallest_remedy_of_a_large_model_is_first(capsys):
    """QLoRA of 7B misses 0.8 GiB of 24: residuals on the host cost less than to make everything again."""
    found = estimated(capsys, "--model=Qwen2.5-7B", "--gpu=RTX 4090", "--lora-rank=16", "--base-dtype=nf4")
    assert found[0][0] == "--offload-residual" and found[0][2] < 2 * GIB


@pytest.mark.slow
@pytest.mark.parametrize("limit", [pytest.param(None, marks=pytest.mark.sweep), 400])
def test_every_number_is_within_the_machine(capsys, limit):
    """70B on eight cards needs level 3 first; without it the processes would keep 2.7 TiB."""
    limits = [] if limit is None else [f"--host-memory-limit={limit}GiB"]
    found = estimated(capsys, "--model=llama3_70b", "--gpu=H100", "--gpus=8", *limits)
    for text, on_device, on_host in found:
        assert "--zero-level 3" in text and on_device <= cards.named("H100").free_bytes
        assert on_host <= (limit or 800) * GIB
