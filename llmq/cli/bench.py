"""`llmq-bench`: how fast this machine trains a model shape, and where the time goes; `llmq-bench op`: its ops alone."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from llmq.cli import shell
from llmq.cli.train import click_option
from llmq.errors import UsageError
from llmq.options.field import flag
from llmq.options.parse import descriptions

ARGUMENTS = "llmq.arguments"  # in a context's meta: all of them
LEFT_OUT = ("model_dtype", "matmul_dtype", "log_fp8_every", "fp8_fallback")  # --dtypes; watching a run
OF_ADAPTERS = ("lora_rank", "lora_targets", "lora_dropout", "dora", "base_dtype")
OF_DEVICE = ("device", "memory_limit", "deterministic")
# options that mean what they mean in llmq-train; those of recomputing are one, --recompute
RECIPE = tuple(
    d.key
    for d in descriptions().values()
    if (d.section == "precision" and d.key not in LEFT_OUT)
    or (d.section == "memory" and not d.key.startswith("recompute_"))
    or d.key in OF_ADAPTERS
)
SEARCH = ("fit", "fit_may")  # of RECIPE: not for single ops, which need no settings that fit
OF_RUNS = (*SEARCH, "host_memory_limit", "memcpy_all_gather")  # not for single ops
SHARED = (*OF_DEVICE, *(key for key in RECIPE if key not in SEARCH))
HELP = {
    "memcpy_all_gather": "With --gpus: gather weights by copy engines, or by NCCL, as in llmq-train. [default: what is "
    "faster]",
}


def _names(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
    names = tuple(os.path.expanduser(name.strip()) for name in (value or "").split(",") if name.strip())
    if value is not None and not names:
        raise click.BadParameter("the list is empty: give one name or more, with commas, or leave the option out")
    return names


def _sizes(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...]:
    names = _names(context, parameter, value)
    if wrong := [name for name in names if not name.isdecimal() or int(name) < 1]:
        raise click.BadParameter(f"{', '.join(wrong)}: give whole numbers from 1 on, such as 1,2,4,8")
    return tuple(dict.fromkeys(map(int, names)))


def _levels(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...]:
    names = _names(context, parameter, value)
    if wrong := [name for name in names if name not in ("0", "1", "2", "3")]:
        raise click.BadParameter(f"{', '.join(wrong)}: levels are 0 to 3, such as 1,3")
    return tuple(dict.fromkeys(map(int, names)))


def _path(context: click.Context, parameter: click.Parameter, value: str | None) -> Path | None:
    return Path(value) if value else None


class Bench(click.Group):
    """A command that measures training where no subcommand is given; it keeps its command line for the results."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keeps the command line as typed."""
        ctx.meta["command"], ctx.meta[ARGUMENTS] = shlex.join(["llmq-bench", *args]), tuple(args)
        return super().parse_args(ctx, args)


def _as_in_training(*keys: str) -> list[click.Parameter]:
    """Options of llmq-train."""
    found: list[click.Parameter] = []
    for d in map(descriptions().__getitem__, keys):
        option = click_option(d, d.key, hidden=False)
        option.metavar, option.help = d.metavar, HELP.get(d.key, f"As in llmq-train: {d.help}")
        option.opts += map(flag, d.aliases)
        found.append(option)
    return found


def _shared() -> list[click.Parameter]:
    """The options of both commands: what is trained, and how llmq-train would train it."""
    return [
        click.Option(
            ["--models"],
            callback=_names,
            help="Presets or folders, separated by commas. [default: models that fit this device]",
        ),
        click.Option(
            ["--dtypes"],
            callback=_names,
            help="Matmul dtypes, separated by commas: fp32, bf16, e4m3. [default: bf16; without --models also e4m3]",
        ),
        click.Option(
            ["--batch-size"],
            type=click.IntRange(1),
            help="Sequences in a micro-batch. [default: as many as fit, up to 32]",
        ),
        click.Option(
            ["--seq-len"], type=click.IntRange(1), help="Tokens in a sequence. [default: 1024; on the CPU 128]"
        ),
        click.Option(
            ["--recompute"],
            callback=_names,
            help="Recompute flags without their prefix, separated by commas: ffn,att.",
        ),
        click.Option(
            ["--adapters-at-once"],
            callback=_sizes,
            metavar="N,N,...",
            help="With --lora-rank: train so many equal adapters at once, which share the rows of a micro-batch; "
            "1,8 measures one alone, then eight. [default: 1]",
        ),
        *_as_in_training(*SHARED),
    ]


def _with_training(given: dict[str, Any]) -> dict[str, Any]:
    """The fields of a BenchRequest: those options of llmq-train that were given are one field."""
    training = {key: given.pop(key) for key in (*SHARED, *OF_RUNS) if key in given}
    return {**given, "training": {key: value for key, value in training.items() if value is not None}}


@click.group("llmq-bench", cls=Bench, invoke_without_command=True, context_settings=shell.SETTINGS)
@click.option(
    "--tokens-per-step", type=click.IntRange(1), help="Tokens in an optimizer step. [default: 524288; on the CPU 1024]"
)
@click.option("--steps", type=click.IntRange(1), default=10, show_default=True, help="Optimizer steps to time.")
@click.option(
    "--warmup",
    type=click.IntRange(0),
    default=3,
    show_default=True,
    help="Optimizer steps before those; two capture the graphs.",
)
@click.option(
    "--batch-sizes",
    callback=_sizes,
    metavar="N,N,...",
    help="Measure each of these sizes of a micro-batch, and print one table.",
)
@click.option(
    "--gpus",
    type=click.IntRange(0),
    default=1,
    show_default=True,
    help="Measure one GPU, then this many together, with a process for each; 0 takes all.",
)
@click.option(
    "--zero-levels",
    callback=_levels,
    metavar="N,N,...",
    help="With --gpus: what they share out, --zero-level of llmq-train, one after the other. [default: 1]",
)
@click.option("--save", type=shell.Home(), callback=_path, metavar="FILE", help="Write the results as JSON.")
@click.option(
    "--compare",
    type=shell.Home(),
    callback=_path,
    metavar="FILE",
    help="Print the changes since the results that --save wrote to FILE.",
)
@click.option(
    "--tolerance",
    type=shell.Number(0),
    metavar="PERCENT",
    help="With --compare: exit with 1 if a model is slower by more than this.",
)
@click.option(
    "--single-ops/--no-single-ops",
    default=True,
    show_default=True,
    help="Time each op of a micro-step on its own, too, for the time by family.",
)
@click.option("--markdown", is_flag=True, help="Print the results as Markdown, and everything else to stderr.")
@click.pass_context
def command(context: click.Context, **given: Any) -> int:
    """Time training from scratch on generated tokens: the programs of llmq-train.

    \b
    llmq-bench
    llmq-bench --models Qwen2.5-0.5B,Qwen2.5-1.5B --dtypes bf16,e4m3 --save today.json
    llmq-bench --models Qwen2.5-7B --batch-size 16 --compare yesterday.json --tolerance 2
    llmq-bench --models Qwen2.5-0.5B --batch-sizes 1,2,4,8
    llmq-bench --models Qwen2.5-0.5B --gpus 2 --zero-levels 1,3
    llmq-bench --models Qwen2.5-7B --lora-rank 16 --base-dtype nf4 --dtypes bf16,e4m3
    llmq-bench --models Qwen2.5-7B --lora-rank 16 --batch-size 16 --adapters-at-once 1,8
    llmq-bench --models Qwen2.5-7B --dtypes e4m3 --recompute block --offload-residual --offload-optimizer
    llmq-bench --models Qwen2.5-7B --dtypes e4m3 --memory-limit 16GiB --fit
    llmq-bench op 'rmsnorm_*'

    Weights and moments are bf16 (fp32 with --dtypes fp32), adapters and theirs fp32. The command prints tokens per
    second, measured and as llmq-estimate predicts them, the shares of the speed of light and of the measured ceilings
    of this device, memory, clock and power, and the milliseconds of a micro-batch by family of ops, each beside its
    roofline. On one GPU, without --models, it takes less than three minutes. With --gpus it prints scaling, the
    bandwidth of a layer's collectives, and what of communication shows. With --fit it measures the plan that
    llmq-train --fit takes for steps of so many tokens.
    """
    if context.invoked_subcommand:
        _refuse_options_before(context)
        return 0
    from llmq.bench.request import BenchRequest
    from llmq.bench.run import run
    from llmq.bench.start import started

    request = BenchRequest(**_with_training(given), command=context.meta["command"])
    exit_code = started(request, context.meta[ARGUMENTS])
    return run(request) if exit_code is None else exit_code


def _refuse_options_before(context: click.Context) -> None:
    """UsageError for `llmq-bench --save FILE op`, which would save nothing."""
    typed = [
        parameter
        for parameter in context.command.params
        if context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
    ]
    if typed:
        names = ", ".join(p.opts[0] for p in typed)
        raise UsageError(f"{names}: not for llmq-bench {context.invoked_subcommand}, which has options of its own")


@command.command("op", context_settings=shell.SETTINGS)
@click.argument("pattern", default="*")
@click.option("--list", "listed", is_flag=True, help="List the calls without timing them.")
def op(pattern: str, listed: bool, **given: Any) -> int:
    """Time single ops of a training step with cold caches, beside their rooflines: all, or those that match PATTERN.

    \b
    llmq-bench op swiglu_backward
    llmq-bench op 'linear_*' --models Qwen2.5-7B --dtypes e4m3 --batch-size 16

    The command plans a model with one layer as for training, and times each different call of a micro-step and an
    optimizer step. Shapes and dtypes are those of the first output and the first input. Ops that such a step does not
    call, for generation, offload or the errors of fp8 copies, cannot be timed.
    """
    from llmq.bench.op import run
    from llmq.bench.request import BenchRequest

    return run(BenchRequest(**_with_training(given)), pattern, listed=listed)


command.params += [*_shared(), *_as_in_training(*OF_RUNS)]
op.params += _shared()
shell.version_option(command)

main = shell.console_script(command)

if __name__ == "__main__":
    main()
