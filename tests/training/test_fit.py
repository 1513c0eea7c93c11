"""`--fit` and `--memory-limit`: what is chosen beside every choice there is, what is kept, and what is refused."""

import json
import re
import time

import pytest
from tiny_engines import tiny

from llmq import screen
from llmq.backends.opening import open_backend
from llmq.cli import shell
from llmq.cli.train import command as train_command
from llmq.disk import GIB, MIB
from llmq.engine import advice, cost
from llmq.errors import MemoryLimitError, UsageError
from llmq.files.source import find_source
from llmq.hardware import cards, device
from llmq.hardware.device import pick_device
from llmq.model.config import to_hf
from llmq.model.presets import preset
from llmq.options.parse import Options
from llmq.options.run import SystemOptions
from llmq.plan.plan import make_plan
from llmq.plan.remedies import Terms, changes, typed
from llmq.training import fit
from llmq.training.fit import fitted
from llmq.training.ready import Facts

SHAPE = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512, "num_layers": 3}
CONTEXT = cards.CONTEXT_BYTES
SIZES = {"global_batch_size": 8, "seq_len": 256}
UNCUT = {"lmhead_chunks": 1, "attn_bwd_chunks": 1, "seq_tiles": 1}
NUMBERS = ("model_dtype", "matmul_dtype", "opt_m_dtype", "opt_v_dtype", "master_dtype", "grad_accum_dtype")


def folder(path, **shape):
    """A model folder without weights."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(to_hf(tiny(**shape), "bf16")))
    return str(path)


@pytest.fixture
def model(tmp_path, few_remedies):
    return folder(tmp_path / "model", **SHAPE)


@pytest.fixture
def few(tmp_path, few_remedies):
    """A model of one layer, for which little is tried."""
    return folder(tmp_path / "few", **{**SHAPE, "num_layers": 1})


def options_of(model, **more):
    """Options of an estimate on a card that has fp8."""
    given = {"model": model, "from_scratch": True, "dry_run": True, "train_file": "none", "gpu": "RTX 4090"}
    return Options.parse({**given, **SIZES, "fit": True, **more})


def about(options):
    """Options, and how they are resolved and planned: arguments of `fitted`."""
    where = pick_device(options.system)
    facts = Facts(find_source(options.model.model, from_scratch=True).config, where)
    backend = open_backend("planned", **device.backend_settings(options.system, where))
    return options, facts.spec, where, backend, options.data.batch_size * options.data.grad_accumulation


def flags(given):
    """Options as typed."""
    return [f"--{key.replace('_', '-')}={value}" for key, value in given.items()]


def within(mib, **more):
    """An option for a card that has this many MiB beside CUDA's context, and others."""
    return {"memory_limit": f"{CONTEXT / MIB + mib}MiB", **more}


def refused(options):
    """The error of a search that finds nothing."""
    with pytest.raises(MemoryLimitError) as caught:
        fitted(*about(options))
    return str(caught.value)


@pytest.mark.slow
def test_what_is_printed_are_settings_of_one_step(model):
    chosen = fitted(*about(options_of(model, **within(40))))
    flat = chosen.options.to_flat()
    assert flat["batch_size"] * flat["grad_accumulation"] == 8, "the tokens of a step stay"
    assert not flat["fit"] and {**flat, **chosen.changes} == flat and chosen.changes["batch_size"] == flat["batch_size"]
    assert chosen.plan.total_bytes <= 40 * MIB and 3 <= len(chosen.lines) <= 7
    assert chosen.lines[2].endswith(typed(chosen.changes))


@pytest.mark.parametrize(
    ("may", "changing"),
    [
        ((), set()),
        (("states",), {"opt_m_dtype", "opt_v_dtype", "master_dtype"}),
        (fit.ALL_MAY, {"opt_m_dtype", "opt_v_dtype", "master_dtype", "matmul_dtype"}),
    ],
)
def test_numbers_change_only_where_they_may(model, may, changing):
    options, spec_of, where, *_ = about(options_of(model))
    spec, terms = spec_of(options), Terms(8, (8, 1))
    alternatives = fit._alternatives(spec, terms, fit._other_matmuls(options, spec, spec_of, where), may)
    found = {key for alternative in alternatives for key in changes(spec, alternative.of(spec), terms)}
    assert found & {*NUMBERS} == changing


@pytest.mark.slow
def test_e4m3_is_taken_where_it_may_and_is_faster(tmp_path, few_remedies):
    wide = {"hidden_size": 1024, "head_dim": 128, "intermediate_size": 4096, "num_layers": 1}
    model = folder(tmp_path / "wide", **wide)
    for may, dtype in ((None, "bf16"), ("matmul", "e4m3")):
        options = options_of(model, fit_may=may, seq_len=1024, batch_size=8, **UNCUT)
        assert fitted(*about(options)).options.precision.matmul_dtype == dtype


@pytest.mark.quick("given1")
@pytest.mark.parametrize("given", [{"batch_size": 2}, {"batch_size": 4}, {"grad_accumulation": 2}])
def test_the_size_of_a_micro_batch_stays_where_it_is_given(few, given):
    """At its default, too, and where it follows from what is given."""
    sizes = {"global_batch_size": None, "batch_size": 4, "grad_accumulation": 2, **given}
    only = {key: value for key, value in sizes.items() if key in ("global_batch_size", *given)}
    chosen = fitted(*about(options_of(few, **UNCUT, **only)))
    assert "batch_size" not in chosen.changes and chosen.options.data.batch_size == sizes["batch_size"]


@pytest.mark.slow
def test_a_search_says_now_and_then_how_many_it_tried(few, monkeypatch, planned):
    """Off a terminal, too; here at every one."""
    monkeypatch.setattr(screen, "PLAIN_S", 0.0)
    code, said = planned(few, "--gpu=RTX 4090", "--fit", "--batch-size=2", *flags(UNCUT))
    lines = said.err.splitlines()
    assert code == 0 and lines[:2] == [f"{fit.SEARCHING}: {n}" for n in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "room"),
    [
        ({"recompute_norm": True, "offload_residual": True, "lmhead_chunks": 2, "opt_m_dtype": "bf16"}, {}),
        ({"recompute_block": False, "offload_gradients": False, "opt_m_dtype": "fp32"}, within(45, fit_may="states")),
    ],
    ids=["values", "defaults"],
)
def test_what_is_given_stays(model, given, room):
    chosen = fitted(*about(options_of(model, seq_tiles=1, **given, **room)))
    flat, given = chosen.options.to_flat(), {**given, "seq_tiles": 1}
    assert chosen.changes and chosen.changes.keys().isdisjoint(given) and {key: flat[key] for key in given} == given
    assert flat["global_batch_size"] == 8 == flat["batch_size"] * flat["grad_accumulation"]


@pytest.mark.slow
def test_where_nothing_fits_the_nearest_is_named_with_what_would_help(few):
    found = refused(options_of(few, **UNCUT, **within(1)))
    assert found.startswith("--fit: no setting fits: the nearest, --") and "--batch-size 1" in found
    assert "1.0 MiB are free" in found and "MiB are missing" in found and "\n" not in found
    hosted = options_of(few, offload_optimizer=True, **UNCUT, **within(1, host_memory_limit="1MiB"))
    assert "MiB of the host, 1.0 MiB are free" in refused(hosted)
    little_less = float(re.search(r"needs ([\d.]+) MiB", found)[1]) - 0.1  # than what fits if no number changes
    assert refused(options_of(few, **UNCUT, **within(little_less))).endswith(
        ": --fit-may states,matmul allows one that does"
    )
    sized = options_of(few, global_batch_size=None, batch_size=4, fit_may="states,matmul", **UNCUT, **within(1))
    assert "--global-batch-size in place of --batch-size and --grad-accumulation" in refused(sized)


@pytest.mark.slow
def test_a_resumed_run_keeps_its_numbers(few):
    kept = {"matmul_dtype": "bf16", "opt_m_dtype": "int8", "opt_v_dtype": "e4m3", "master_dtype": "bf16"}
    flat = fitted(*about(options_of(few, fit_may="states,matmul", **UNCUT, **within(50))), kept=kept).options.to_flat()
    assert {key: flat[key] for key in kept} == kept


def test_what_a_search_cannot_compare_is_refused(model):
    options = options_of(model, matmul_dtype="auto")
    with pytest.raises(UsageError, match="--matmul-dtype auto times them first: use e4m3"):
        fitted(options, None, pick_device(options.system), None, 8)


@pytest.mark.slow
def test_a_size_has_the_rates_of_a_card_which_is_named(few):
    given = {**UNCUT, "batch_size": 1}
    title, *rows = fitted(*about(options_of(few, gpu="24GiB", **given))).lines
    assert "with the rates of the RTX 4090, as those of 24 GiB are not known, and" in title
    assert rows[1] == fitted(*about(options_of(few, **given))).lines[2]


def test_a_limit_is_the_memory_that_a_card_has():
    for limit in ("16GiB", "16 gib", "16384MiB"):
        total, free = device.memory_bytes(pick_device(options_of("m", gpu="H200", memory_limit=limit).system))
        assert (total, free) == (16 * GIB, 16 * GIB - CONTEXT)
    above = options_of("m", gpu="A2", memory_limit="1000GiB")
    card = cards.named("A2")
    assert device.memory_bytes(pick_device(above.system)) == (card.total_bytes, card.free_bytes)
    assert device.memory_bytes(device.pick_device(SystemOptions(device="cpu", memory_limit="64MiB")))[1] <= 64 * MIB
    with pytest.raises(UsageError, match="--memory-limit 1GiB leaves nothing beside CUDA's context"):
        pick_device(options_of("m", memory_limit="1GiB").system)


def test_a_limit_counts_what_is_in_use(monkeypatch):
    """Of a GPU that is there: a plan replaces another within the limit."""
    gpu = object()
    monkeypatch.setattr(device.cuda_driver, "memory_bytes", lambda gpu: (80 * GIB, 70 * GIB))
    limited = device.Device("cuda", gpu=gpu, limit_bytes=16 * GIB)
    assert device.memory_bytes(limited) == (16 * GIB, 6 * GIB)


@pytest.fixture
def planned(estimated):
    """Estimates of steps of eight rows."""
    return lambda model, *more: estimated(f"--model={model}", "--global-batch-size=8", "--seq-len=256", *more)


@pytest.mark.slow
def test_an_estimate_takes_the_first(planned, model, monkeypatch):
    given = ("--gpu=RTX 4090", f"--memory-limit={CONTEXT // MIB + 40}MiB", *flags(UNCUT))
    with monkeypatch.context() as patched:
        patched.setattr(advice, "remedies", lambda plan, room: [])
        code, said = planned(model, *given)
    assert code == 4 and "are missing" in said.err
    code, said = planned(model, *given, "--fit")
    assert code == 0 and "1 is taken:" in said.out and "within --memory-limit" in said.out
    first = next(line for line in said.out.splitlines() if line.startswith("1 "))
    again = first[first.index("--") :].split()
    code, plain = planned(model, *given, *again)
    assert code == 0 and plain.out.splitlines() == said.out.splitlines()[-len(plain.out.splitlines()) :]


@pytest.mark.slow
def test_many_gpus_offload_what_their_level_leaves(planned, model):
    """Gradients are whole on each at level 1, and so are weights."""
    room = f"--memory-limit={CONTEXT // MIB + 40}MiB"
    code, said = planned(model, "--gpu=RTX 4090", "--gpus=2", "--zero-level=1", room, *flags(UNCUT), "--fit")
    assert code == 0, said.err
    first = next(line for line in said.out.splitlines() if line.startswith("1 "))
    assert "--offload-gradients" in first and "--stream-weights" in first


def dry_run(capsys, *arguments):
    return shell.run(train_command(), ["--dry-run", "--from-scratch", "--fit", *arguments]), capsys.readouterr()


@pytest.mark.slow
def test_a_dry_run_fits_and_says_what_it_took(capsys, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    limit = f"--memory-limit={CONTEXT // MIB + 40}MiB"
    code, said = dry_run(capsys, "--gpu=RTX 4090", "--seq-len=256", f"--model={model}", limit, *flags(UNCUT))
    assert code == 0 and "1 is taken:" in said.out and "On disk:" in said.out, said.err


def test_the_cpu_is_not_searched_for(capsys, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, said = dry_run(capsys, f"--model={model}", "--device=cpu")
    assert code == 2 and "has no rates of the CPU: name the card" in said.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "most"),
    [
        pytest.param({}, 8, marks=pytest.mark.sweep, id="all open"),
        pytest.param({**UNCUT, "batch_size": 16, "grad_accumulation": 32, "global_batch_size": None}, 4, id="uncut"),
    ],
)
def test_a_search_for_the_largest_models_takes_as_long_as_a_few_plans(given, most, monkeypatch):
    """72B, streamed, inside half of an H200: where all is open about four times as long as the plan of the whole, which
    it makes once."""
    whole = []

    def timed(spec, scratch_bytes):
        began = time.process_time()
        plan = make_plan(spec, scratch_bytes)
        if spec.config.num_layers == preset("Qwen2.5-72B").num_layers == 80:
            whole.append(time.process_time() - began)
        return plan

    monkeypatch.setattr(cost, "make_plan", timed)
    sizes = {"gpu": "H200", "memory_limit": "80GiB", "global_batch_size": 512, "seq_len": 1024}
    arguments = about(options_of("Qwen2.5-72B", **{**sizes, **given}))
    began = time.process_time()
    found = fitted(*arguments)
    took = time.process_time() - began
    assert len(whole) == 1 and took < most * whole[0]
    assert found.plan.total_bytes <= 80 * GIB - CONTEXT
