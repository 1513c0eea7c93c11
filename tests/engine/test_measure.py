"""What is measured is training: losses are those of llmq-train, every op is timed, a GPU is timed on its own stream."""

import dataclasses
import io
import json
import math
import statistics

import numpy as np
import pytest
from tiny_engines import BF16, FP32, arrays, plan_of, spec_of, tiny

import llmq
from llmq.backends.host import HostBackend
from llmq.bench.configuration import MATMULS
from llmq.data.batches.loader import open_data
from llmq.data.tokens.token_file import TokenWriter
from llmq.engine import measure as module
from llmq.engine.engine import Engine
from llmq.engine.measure import Clock, CudaClock, measure, measure_plan, random_parameters, zipf_batch
from llmq.files.source import open_parameters, open_source
from llmq.hardware import nvml
from llmq.model.config import from_folder, to_hf
from llmq.ops.seam import record
from llmq.options.parse import Options
from llmq.plan.memory import Memory
from llmq.plan.precision import resolve
from llmq.tensor import DTYPES
from llmq.training.records import TrainRecord

RUN = {"tokens_per_step": 64, "steps": 3, "warmup": 1}


class FakeClock(Clock):
    """Every moment is 1 ms after the last; says whether steps or single ops were asked for."""

    def __init__(self):
        self.now, self.followed = 0, []

    def follow(self, backend):
        self.followed.append(backend)

    def mark(self):
        self.now += 1
        return self.now

    def elapsed_ms(self, start, end):
        return float(end - start)


def each_takes(ms, clock, ran=None):
    """A backend whose ops take some time by the clock, and are noted in `ran`."""
    backend = HostBackend()

    def timed(name, op):
        def call(*arguments, **numbers):
            clock.now += ms
            if ran is not None:
                ran.append(name)
            op(*arguments, **numbers)

        return call

    backend.ops = {name: timed(name, op) for name, op in backend.ops.items()}
    return backend


def test_measured_steps_are_training_steps():
    speed = measure(spec_of(FP32), HostBackend(), Clock(), **RUN)
    assert len(speed.seconds) == 3 and speed.tokens_per_step == 64 and len(speed.losses) == 4
    median, low, high = speed.tokens_per_second
    assert low <= median <= high and high == pytest.approx(64 / min(speed.seconds))
    assert speed.micro_batch_ms == pytest.approx(1e3 * statistics.median(speed.seconds) / 2)
    assert speed.readings == () and speed.peak_bytes > 0
    assert speed.calls and not measure(spec_of(FP32), HostBackend(), Clock(), **RUN, single_ops=False).calls


@pytest.mark.parametrize("dtype", ["fp32", "e4m3"])
def test_losses_are_those_of_llmq_train(dtype, tmp_path, monkeypatch):
    """The same tokens, weights and options: bit by bit the same loss in every step."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shape").mkdir()
    (tmp_path / "shape" / "config.json").write_text(json.dumps(to_hf(tiny(), "fp32")))
    tokens, _ = arrays(zipf_batch(97, 1, 40 * 16 + 1, seed=3))
    with TokenWriter("train.bin", vocab_size=97) as file:
        file.append(tokens[0])
    steps, accumulation, rate = 5, 2, 3e-3
    given = {"model": "shape", "from_scratch": True, "train_file": "train.bin", "batch_size": 2, "seq_len": 16}
    given |= {"grad_accumulation": accumulation, "steps": steps, "learning_rate": rate, "lr_schedule": "constant"}
    given |= {**MATMULS[dtype], "seed": 7, "eval_every_n_steps": 0, "device": "cpu"}
    records = []
    llmq.train(**given, callbacks=[lambda run, record: records.append(record)], console=io.StringIO())
    trained = [record.loss for record in records if isinstance(record, TrainRecord)]

    options = Options.parse(given)
    config = from_folder(tmp_path / "shape")
    plan = plan_of(resolve(options.precision, config), config=config, batch_size=2, seq_len=16, seed=7)
    with open_data(options.data, 97, 7).loader() as loader:
        batches = [loader.next() for _ in range(steps * accumulation)]
    speed = measure_plan(
        plan,
        HostBackend(),
        Clock(),
        tokens_per_step=accumulation * 32,
        steps=steps - 2,
        warmup=2,
        learning_rate=rate,
        batches=batches,
        parameters=open_parameters(open_source(options.model), 7)(plan.rows),
    )
    assert len(trained) == steps and trained[-1] < trained[0]
    assert list(speed.losses) == trained


def test_every_step_of_both_programs_is_timed_once():
    speed = measure(spec_of(BF16), HostBackend(), FakeClock(), **RUN)
    expected = [(n, i) for n in ("middle", "update") for i in range(len(speed.plan.programs[n].calls))]
    assert [(call.program, call.index) for call in speed.calls] == expected
    assert {call.ms for call in speed.calls} == {1.0} and speed.seconds == (1e-3,) * 3


def test_the_time_of_an_op_is_the_median_of_its_runs(monkeypatch):
    """The first run binds products and compiles, another may be interrupted."""
    rounds, traced = [], module.Engine.traced

    def counted(self, name, wrap):
        run = traced(self, name, wrap)
        return lambda: (rounds.append(name), run())

    class Uneven(FakeClock):
        def elapsed_ms(self, start, end):
            return {1: 100.0, 2: 5.0, 3: 7.0}.get(rounds.count("middle"), 1.0)

    monkeypatch.setattr(module.Engine, "traced", counted)
    speed = measure(spec_of(FP32, config=tiny(num_layers=1)), HostBackend(), Uneven(), **RUN)
    assert {call.ms for call in speed.calls} == {7.0} and rounds == ["middle", "update"] * 3


def test_the_device_is_given_work_ahead_of_single_ops(monkeypatch):
    """About AHEAD_S of micro-steps before each round, where ops are queued."""
    ran = []
    original = module.Engine.run
    monkeypatch.setattr(module.Engine, "run", lambda self, name: ran.append(name) or original(self, name))

    class Queued(FakeClock):
        is_queued = True

        def calls(self, engine, ahead):
            ran.append(ahead)
            return super().calls(engine, ahead)

    monkeypatch.setattr(module, "AHEAD_S", 2e-3)
    clock, backend = Queued(), HostBackend()
    measure(spec_of(FP32, config=tiny(num_layers=1)), backend, clock, **RUN)
    asked = ran.index(4)  # a step of 1 ms has two micro-steps
    assert ran[asked + 1 :] == ["middle"] * 4 * module.REPEATS and clock.followed == [backend]


def test_the_optimizers_calls_are_timed_together_where_ops_are_queued(monkeypatch):
    """A call costs 1 ms, an event 9 and a graph 4: of these only the graph's are left, shared by all calls of an op."""
    clock, ran = FakeClock(), []
    backend = each_takes(1, clock)
    clock.is_queued, clock.mark = True, lambda: setattr(clock, "now", clock.now + 9) or clock.now
    part = module.Engine.part

    def launched(self, name, indices):
        steps = [self.plan.programs[name].calls[index].op for index in indices]
        run = part(self, name, indices)
        return lambda: (ran.append(steps), setattr(clock, "now", clock.now + 4), run())

    monkeypatch.setattr(module.Engine, "part", launched)
    speed = measure(spec_of(BF16), backend, clock, **RUN)
    rows = len(speed.plan.rows)
    squares, adamw = (["sum_squares"] * rows, ["adamw"] * rows)
    assert ran == [squares, adamw] * (2 + module.REPEATS), "eagerly, captured, and timed"
    for call in speed.calls:
        op = speed.plan.programs[call.program].calls[call.index].op
        assert call.ms == pytest.approx(1 + (13 / rows if record(op).for_each_row else 9))
    with_events = measure(spec_of(BF16), backend, FakeClock(), **RUN)
    assert [(c.program, c.index) for c in speed.calls] == [(c.program, c.index) for c in with_events.calls]


@pytest.mark.parametrize("is_queued", [False, True])
def test_a_call_alone_is_what_it_adds_to_the_sweeps(is_queued, monkeypatch):
    """A sweep costs 7 ms, a start 5, a call 3: of these only the call's are left. What is not wanted runs once."""
    clock, ran = FakeClock(), []
    backend = each_takes(3, clock, ran)
    kind = CudaClock if is_queued else Clock
    clock.is_queued, clock.copies, clock.replays = kind.is_queued, kind.copies, kind.replays
    clock.mark = lambda: setattr(clock, "now", clock.now + 5) or clock.now
    clock.sweep = lambda: lambda: setattr(clock, "now", clock.now + 7)
    plan = plan_of(FP32, config=tiny(num_layers=1))
    wanted = [("middle", 1), ("update", 0)]
    assert [*module.cold_calls(plan, backend, clock, wanted)] == [module.TimedCall(*place, 3.0) for place in wanted]
    times = (2 + 15) * 8 if is_queued else 3
    calls = [(name, index, call.op) for name in module.TIMED for index, call in enumerate(plan.programs[name].calls)]
    expected = [op for name, index, op in calls for _ in range(times if (name, index) in wanted else 1)]
    assert ran[-len(expected) :] == expected, "in order, so that operands are those of training"


def test_clock_and_power_are_read_during_the_measured_steps_only(monkeypatch):
    seen = []

    class Background:
        def __init__(self, uuid, *, every_s):
            seen.append((uuid, every_s, len(losses)))

        def stop(self):
            return (nvml.Reading(sm_mhz=1500),)

    losses = []
    update = module.Engine.update
    monkeypatch.setattr(module.Engine, "update", lambda self, *a: losses.append(a) or update(self, *a))
    monkeypatch.setattr(module, "Background", Background)
    plan = plan_of(FP32, config=tiny(num_layers=1))
    run = {"tokens_per_step": 32, "steps": 2, "warmup": 3}
    speed = measure_plan(plan, HostBackend(), Clock(), **run, uuid="GPU-1")
    assert seen == [("GPU-1", module.SAMPLE_S, 3)] and speed.readings == (nvml.Reading(sm_mhz=1500),)


def test_the_parts_timed_one_by_one_are_the_whole():
    """On a clock that counts calls of ops: a forgotten one would be missing."""
    clock = FakeClock()
    clock.mark = lambda: clock.now
    speed = measure(spec_of(BF16), each_takes(1, clock), clock, **RUN)
    parts = sum(call.ms * (2 if call.program == "middle" else 1) for call in speed.calls)
    assert {round(1e3 * seconds) for seconds in speed.seconds} == {parts}


def test_the_clock_stops_steps_and_warm_up(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])

    def made(warmup, steps, end, least=1):
        now[0], found = 0.0, []
        for counts in module.paced(warmup, steps, least=least, end=end):
            found.append(counts)
            now[0] += 10
        return "".join("w1"[counts] for counts in found), now[0]

    assert made(3, 5, math.inf) == ("www11111", 80) and made(0, 2, math.inf) == ("11", 20)
    assert made(3, 5, 60) == ("www111", 60) and made(3, 5, 69) == ("www111", 60)
    assert made(3, 5, 25) == ("ww1", 30), "one step counts, whatever it takes"
    assert made(3, 5, -1) == ("w1", 20) and made(3, 5, -1, least=3) == ("www1", 40) and made(0, 5, -1) == ("1", 10)


def test_a_measurement_ends_by_the_clock():
    speed = measure(spec_of(FP32, config=tiny(num_layers=1)), HostBackend(), Clock(), **RUN, limit_s=0.0)
    assert len(speed.seconds) == 1 and len(speed.losses) == 2


def test_generated_tokens_repeat_like_words():
    tokens, targets = arrays(zipf_batch(1000, 4, 256, seed=0))
    assert np.array_equal(tokens[:, 1:], targets[:, :-1]) and tokens.min() >= 0 and tokens.max() < 1000
    counts = np.sort(np.bincount(tokens.ravel(), minlength=1000))[::-1]
    assert counts[0] > 10 * counts[50] > 0


def test_weights_are_random_with_padding_of_zero_and_on_the_host_in_the_dtype_that_holds_them():
    plan, homes = plan_of(BF16, Memory(host=("master",))), set()
    hosted, plain = (
        {row.name: np.asarray(value) for row, value in random_parameters(one, 0)} for one in (plan, plan_of(FP32))
    )
    assert plain["layers.0.mlp.up.weight"].std() == pytest.approx(0.02, rel=0.1)
    assert (plain["head.norm"] == 1).all() and not plain["embed.weight"][97:].any()
    for name, value in plain.items():
        held = plan.held(name)
        dtype = DTYPES[held.dtype if held.home == "host" else "fp32"]
        assert hosted[name].dtype == dtype
        np.testing.assert_array_equal(hosted[name], value.astype(dtype))
        homes.add((held.home, held.dtype))
    assert ("host", "bf16") in homes


@pytest.mark.gpu
@pytest.mark.parametrize("precision", [FP32, BF16], ids=["fp32", "bf16"])
def test_a_gpu_makes_the_weights_that_the_host_makes(precision):
    """Those of more than 1 MiB by itself, padded rows among them, and values of another dtype."""
    from llmq.backends.cuda import CudaBackend

    config = tiny(hidden_size=512, head_dim=64, intermediate_size=1024, vocab_size=2000, num_layers=1)
    drawn = np.random.default_rng(3).standard_normal
    given = [
        random_parameters,
        lambda plan, seed: ((row, drawn(row.shape, np.float32)) for row in plan.rows),
        lambda plan, seed: ((row, drawn(row.shape, np.float32).astype(DTYPES["bf16"])) for row in plan.rows),
    ]
    for values in given:
        backend = CudaBackend()
        plan = plan_of(precision, config=config, batch_size=4, seq_len=256, scratch_bytes=backend.scratch_bytes)
        parameters = [(row, np.asarray(value)) for row, value in values(plan, 0)]
        engine = Engine(plan, backend)
        engine.load(parameters if values is not random_parameters else values(plan, 0))
        for row, value in parameters:
            found = engine.parameter(row.name)
            assert found.tobytes() == value.astype(found.dtype).tobytes(), row.name


@pytest.mark.gpu
def test_a_gpu_is_timed_by_its_own_events():
    from llmq.backends.cuda import CudaBackend

    config = tiny(hidden_size=64, head_dim=16, intermediate_size=96)  # what cuDNN and 16-byte accesses take
    backend, clock = CudaBackend(), CudaClock()
    speed = measure(spec_of(BF16, config=config), backend, clock, **{**RUN, "warmup": 3})
    assert all(0 < s < 1 for s in speed.seconds) and all(0 < call.ms < 100 for call in speed.calls)
    assert speed.peak_bytes and len(set(speed.losses)) == 6  # of the whole card: other processes may free memory
    start = clock.mark()
    with backend.stream:
        import cupy

        x = cupy.ones((4096, 4096), np.float32)
        for _ in range(50):
            x = x @ x * 1e-4
    assert clock.elapsed_ms(start, clock.mark()) > 1  # 50 products of 137 GFLOP, whatever waits for them
    assert dataclasses.replace(speed, seconds=(1.0,)).micro_batch_ms == 500
