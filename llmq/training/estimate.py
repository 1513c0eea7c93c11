"""What a run would take on a card: the plan that training runs, by segment, and a predicted step time."""

from collections.abc import Iterator

from llmq.backends.opening import open_backend
from llmq.data.batches.batch import step_of
from llmq.data.tokens.tokenizer import num_ids
from llmq.disk import MIB, shown
from llmq.engine.advice import refuse_if_too_large
from llmq.engine.predict import assumed, rates_of, step_seconds
from llmq.errors import UsageError
from llmq.files.source import open_source
from llmq.files.tensor_files import Piece
from llmq.files.writers import checkpoint_bytes
from llmq.hardware import device
from llmq.model.parameters import num_parameters, rows_of_file
from llmq.options.parse import Options
from llmq.plan import memory, precision
from llmq.plan.plan import make_plan
from llmq.plan.remedies import with_fitting_chunks
from llmq.plan.slots import listed
from llmq.screen import StartTask, unshown
from llmq.tensor import DTYPES
from llmq.training.fit import Fit, fitted, with_longest
from llmq.training.ready import Facts


def estimate(options: Options, *, longest: bool = False, start_task: StartTask = unshown) -> Iterator[str]:
    """Lines of an estimate; of the `longest` sequence that fits, if asked for. A search is shown by `start_task`.

    MemoryLimitError, after the table, with what would make the plan fit where it does not.
    """
    where, gpus = device.pick_device(options.system), options.to_flat()["gpus"]
    if gpus < 1:
        raise UsageError("--gpus 0 counts the GPUs of this machine, and an estimate is for others: use 1 or more")
    notices = list[str]()
    source = open_source(options.model, notices.append, num_ids)
    yield from notices
    dtypes = precision.resolve(options.precision, source.config)
    device.refuse_dtypes(where, dtypes.matmul, dtypes.head, scaling=dtypes.scaling)
    facts = Facts(source.config, where, size=gpus)
    backend = open_backend("planned", **device.backend_settings(options.system, where))
    if longest:
        found = with_longest(options, facts.spec, facts.limits(options, backend, 1))
    elif memory.is_to_fit(options.memory):
        size, _, micro_steps = step_of(options.data, gpus)
        found = fitted(options, facts.spec, where, backend, size * micro_steps, task=start_task)
    else:
        found = Fit(options)
    yield from found.lines
    options, plan = found.options, found.plan or make_plan(facts.spec(found.options), backend.scratch_bytes)
    if memory.chooses_attention_chunks(options.memory):
        plan = with_fitting_chunks(plan, device.memory_bytes(where)[1], backend.scratch_bytes)
    micro_steps = step_of(options.data, gpus)[-1]
    yield from listed(plan, options.to_flat()["debug_memory"])
    spec, card = plan.spec, where.planned
    assert card is not None
    free = shown(device.memory_bytes(where)[1])
    rows = rows_of_file(plan.rows)
    each = f", each of {gpus} GPUs" if gpus > 1 else ""
    yield f"{num_parameters(rows):,} parameters, {spec.batch_size} x {spec.seq_len} tokens on {card.name}{each}"
    device_table, host_table = plan.table(), plan.table("host")
    yield f"{'':<14}{'device MiB':>14}{'host MiB':>14}"
    for name, size in device_table.items():
        yield f"  {name:<12}{size / MIB:>14,.1f}{host_table[name] / MIB:>14,.1f}"
    yield f"  {'all':<12}{plan.total_bytes / MIB:>14,.1f}{plan.host_bytes / MIB:>14,.1f}"
    limited = "" if where.limit_bytes is None else f" within --memory-limit {shown(where.limit_bytes)}"
    yield f"  of {free} that an idle {card.name} has free{limited}"
    pieces = [Piece(name, one.whole, DTYPES[one.dtype]) for name, one in plan.saved().items()]
    model = num_parameters(rows) * DTYPES["bf16"].itemsize
    yield f"On disk: a checkpoint {shown(checkpoint_bytes(pieces))}, the model in bf16 {shown(model)}"
    seconds = step_seconds(plan, rates_of(where), micro_steps)
    tokens = spec.batch_size * spec.text_len * micro_steps * gpus
    yield (
        f"A step of {tokens:,} tokens takes about {seconds:.3f} s, {tokens / seconds:,.0f} tokens/s: a model, with the "
        f"shares of the card's peaks that an H200 sustains{assumed(where)}"
    )
    refuse_if_too_large(plan, facts.limits(options, backend, micro_steps))
