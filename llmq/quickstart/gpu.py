"""What the quickstart does on a GPU beside training: sizes for the card, its speed, and whether a large model fits.

Batch and steps depend on the card's free memory and speed, but the training must not: they are chosen once, written
down, and from then on are settings like the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from llmq.backends import open_backend
from llmq.disk import shown, write_whole
from llmq.engine.measure import Clock, CudaClock, Speed, measure
from llmq.errors import MemoryLimitError
from llmq.hardware import device
from llmq.hardware.cards import TERA
from llmq.hardware.device import Device
from llmq.model import speed_of_light as sol
from llmq.model.config import ModelConfig, from_folder
from llmq.model.optimizer import Hyperparameters
from llmq.model.parameters import padded_vocab
from llmq.model.presets import preset
from llmq.options.parse import Options
from llmq.plan import memory, precision
from llmq.plan.advice import refuse_if_too_large
from llmq.plan.memory import Memory
from llmq.plan.plan import Plan, make_plan
from llmq.plan.precision import Precision
from llmq.plan.spec import Spec
from llmq.quickstart.settings import Fit, Places, Settings, options
from llmq.tensor import DTYPES

ROOM = 0.9  # of the free memory: cuDNN's workspaces are only known to a few percent
LEAST_WARMUP = 2  # steps: a program runs eagerly once, and is captured before its second run


@dataclass(frozen=True)
class Fitted:
    """What was chosen for a card, and what it was chosen by."""

    batch_size: int
    grad_accumulation: int
    steps: int
    tokens_per_second: float
    first_step_s: float  # with kernels compiled and algorithms chosen
    free_bytes: int  # before anything ran


@dataclass(frozen=True)
class OnGpu:
    """What the last screen tells of a GPU. The speed is that of `bench_seconds` of steps after the training."""

    name: str
    peak_tflops: float
    cold_first_step_s: float
    bench_seconds: float
    tokens_per_second: float  # median, smallest and largest over the steps
    least_tokens_per_second: float
    most_tokens_per_second: float
    sol: float
    verdict_model: str
    verdict: str


def fitted(settings: Settings, places: Places) -> Settings:
    """`settings` with what was chosen for the card, if something was."""
    chosen = _read(places) if settings.fit else None
    if chosen is None:
        return settings
    return replace(
        settings, batch_size=chosen.batch_size, grad_accumulation=chosen.grad_accumulation, steps=chosen.steps
    )


def fit_to_card(settings: Settings, places: Places, where: Device, tell: Callable[[str], None]) -> Settings:
    """As `fitted`; chooses, and writes down, what is not there yet: the batch by the memory, the steps by a trial."""
    if settings.fit is None or _read(places):
        return fitted(settings, places)
    tell("Compiling kernels, choosing matmul algorithms, and timing a few steps: the first time takes longest")
    free = device.memory_bytes(where)[1]
    roomy = with_room(settings, places, ROOM * free)
    trial = timed(roomy, places, where, settings.fit.trial_steps)
    rate = trial.tokens_per_second[0]
    steps = int(settings.fit.train_seconds * rate / settings.tokens_per_step)
    steps = min(max(steps, settings.fit.least_steps), settings.steps)
    chosen = Fitted(roomy.batch_size, roomy.grad_accumulation, steps, rate, trial.first_step_s, free)
    write_whole(places.fitted, json.dumps(asdict(chosen), indent=1).encode())
    return fitted(settings, places)


def with_room(settings: Settings, places: Places, free_bytes: float) -> Settings:
    """`settings` with the largest micro-batch, halved as often as it must be, whose plan takes up to `free_bytes`.

    The tokens of a step stay what they are. If nothing has room, the smallest one: training will say what is missing.
    """
    config = from_folder(places.shape)
    while plan_of(config, _parsed(settings, places)).total_bytes > free_bytes and settings.batch_size % 2 == 0:
        half, twice = settings.batch_size // 2, settings.grad_accumulation * 2
        settings = replace(settings, batch_size=half, grad_accumulation=twice)
    return settings


def timed(settings: Settings, places: Places, where: Device, steps: int) -> Speed:
    """`steps` optimizer steps of the trainer's programs, at the sizes of `settings`, on generated tokens."""
    config, chosen = from_folder(places.shape), _parsed(settings, places)
    spec = Spec(config, *_resolved(config, chosen), Hyperparameters(), settings.batch_size, settings.seq_len)
    return measure(
        spec,
        open_backend(where.kind),
        CudaClock() if where.kind == "cuda" else Clock(),
        tokens_per_step=settings.tokens_per_step,
        steps=steps,
        warmup=LEAST_WARMUP,
    )


def measured_on(settings: Settings, places: Places, where: Device, rate: float) -> OnGpu:
    """Measures the speed of the card, for which `rate` tokens/s are expected, and plans for a large model on it."""
    chosen = _read(places)
    assert settings.fit is not None and chosen is not None and where.gpu is not None
    steps = max(round(settings.fit.bench_seconds * rate / settings.tokens_per_step), 1)
    speed = timed(settings, places, where, steps)
    median, least, most = speed.tokens_per_second
    peaks = device.peaks(where)
    share = sol.fraction(median, speed.plan.spec.config, settings.seq_len, peaks, speed.plan.spec.precision.dtype)
    return OnGpu(
        name=where.gpu.name,
        peak_tflops=peaks["bf16"] / TERA,
        cold_first_step_s=chosen.first_step_s,
        bench_seconds=sum(speed.seconds),
        tokens_per_second=median,
        least_tokens_per_second=least,
        most_tokens_per_second=most,
        sol=share,
        verdict_model=settings.fit.verdict_model,
        verdict=verdict(settings.fit, places, chosen.free_bytes),
    )


def verdict(fit: Fit, places: Places, free_bytes: int) -> str:
    """Whether training the model of `fit` with the options' defaults fits into `free_bytes`, and what would help.

    Nothing is allocated; cuDNN's workspaces are those of a model of them.
    """
    plan = plan_of(preset(fit.verdict_model), Options.parse(verdict_options(fit, places)))
    batch = f"{plan.spec.batch_size} x {plan.spec.seq_len} tokens a micro-batch"
    try:
        refuse_if_too_large(plan, free_bytes, open_backend("planned").scratch_bytes)
    except MemoryLimitError as error:
        return f"does not fit with {batch}: {error}"
    needed, spare = shown(plan.total_bytes), shown(free_bytes - plan.total_bytes)
    return f"fits with {batch}: the run needs {needed}, and {spare} stay free"


def verdict_options(fit: Fit, places: Places) -> dict[str, str | bool]:
    """The options of `llmq-train` that the verdict is on."""
    return {"model": fit.verdict_model, "from_scratch": True, "train_file": str(places.train_file), "dry_run": True}


def plan_of(config: ModelConfig, chosen: Options) -> Plan:
    """The plan of a training on a GPU, which is not asked."""
    flat = chosen.to_flat()
    sizes = {name: flat[name] for name in ("batch_size", "seq_len")}
    scratch = open_backend("planned").scratch_bytes
    return make_plan(Spec(config, *_resolved(config, chosen), Hyperparameters(), **sizes), scratch)


def _parsed(settings: Settings, places: Places) -> Options:
    return Options.parse(options(settings, places))


def _resolved(config: ModelConfig, chosen: Options) -> tuple[Precision, Memory]:
    dtypes, flat = precision.resolve(chosen.precision, config), chosen.to_flat()
    logit_bytes = padded_vocab(config) * DTYPES[dtypes.model].itemsize
    sizes = {name: flat[name] for name in ("batch_size", "seq_len")}
    return dtypes, memory.resolve(chosen.memory, **sizes, logit_bytes=logit_bytes)


def _read(places: Places) -> Fitted | None:
    try:
        return Fitted(**json.loads(places.fitted.read_text("utf-8")))
    except (OSError, ValueError, TypeError):  # not there, not whole, or of another version
        return None
