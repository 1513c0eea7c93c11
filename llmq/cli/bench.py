"""`llmq-bench`: how fast this machine trains a model shape, and where the time goes; `llmq-bench op`: its ops alone."""

import shlex
from typing import Any

import click
from click.core import ParameterSource

from llmq.cli import shell
from llmq.cli.train import option_elsewhere, own_option
from llmq.errors import UsageError
from llmq.options.commands import OF_RUNS, BenchOptions
from llmq.options.field import describe, section_of
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
OF_TRAINED = (*SEARCH, "host_memory_limit", "memcpy_all_gather")  # not for single ops
SHARED = (*OF_DEVICE, *(key for key in RECIPE if key not in SEARCH))
OWN = {d.key: d for d in describe("bench", BenchOptions)}


class Bench(click.Group):
    """A command that measures training where no subcommand is given; it keeps its command line for the results."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keeps the command line as typed."""
        ctx.meta["command"], ctx.meta[ARGUMENTS] = shlex.join(["llmq-bench", *args]), tuple(args)
        return super().parse_args(ctx, args)


def _asked(given: dict[str, Any]) -> tuple[BenchOptions, dict[str, Any]]:
    """The options of the bench, and those of llmq-train. UsageError for bad values of the former."""
    typed = {key: value for key, value in given.items() if value not in (None, ())}
    training = {key: value for key, value in typed.items() if key not in OWN}
    return section_of(BenchOptions, {key: typed[key] for key in OWN if key in typed}), training


@click.group("llmq-bench", cls=Bench, invoke_without_command=True, context_settings=shell.SETTINGS)
@click.pass_context
def command(context: click.Context, **given: Any) -> int:
    """Time training from scratch on generated tokens: the programs of llmq-train.

    \b
    llmq-bench
    llmq-bench --models Qwen2.5-0.5B,Qwen2.5-1.5B --dtypes bf16,e4m3 --save today.json
    llmq-bench --models Qwen2.5-0.5B --batch-size 1,2,4,8
    llmq-bench --models Qwen2.5-0.5B --gpus 2 --zero-levels 1,3
    llmq-bench --models Qwen2.5-7B --lora-rank 16 --base-dtype nf4 --dtypes bf16,e4m3
    llmq-bench --models Qwen2.5-7B --dtypes e4m3 --recompute block --offload-residual --offload-optimizer
    llmq-bench --models Qwen2.5-7B --dtypes e4m3 --memory-limit 16GiB --fit
    llmq-bench op 'rmsnorm_*'

    Weights and moments are bf16 (fp32 with --dtypes fp32), adapters and theirs fp32. The command prints tokens per
    second, measured and as llmq-estimate predicts them, the shares of the speed of light and of the measured ceilings
    of this device, memory, clock and power, and the milliseconds of a micro-batch by family of ops, each beside its
    roofline. On one GPU, without --models, it takes less than three minutes. With --gpus it prints scaling, and what
    of communication shows. With --fit it measures the plan that
    llmq-train --fit takes for steps of --tokens-per-step.
    """
    if context.invoked_subcommand:
        source, command_line = context.get_parameter_source, ParameterSource.COMMANDLINE
        typed = [parameter for parameter in context.command.params if source(parameter.name or "") is command_line]
        if typed:  # `llmq-bench --save FILE op` would save nothing
            names = ", ".join(p.opts[0] for p in typed)
            raise UsageError(f"{names}: not for llmq-bench {context.invoked_subcommand}, which has options of its own")
        return 0
    asked = _asked(given)
    from llmq.bench.run import run, started

    if (exit_code := started(*asked, context.meta[ARGUMENTS])) is None:
        run(*asked, context.meta["command"])
    return exit_code or 0


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
    asked = _asked(given)
    from llmq.bench.op import run

    return run(*asked, pattern, listed=listed)


of_runs, of_both = ([own_option(d) for d in OWN.values() if (d.key in OF_RUNS) == alone] for alone in (True, False))
shared, of_trained = (
    [option_elsewhere(d, *d.aliases) for d in map(descriptions().__getitem__, keys)] for keys in (SHARED, OF_TRAINED)
)
command.params += [*of_runs, *of_both, *shared, *of_trained]
op.params += [*of_both, *shared]
shell.version_option(command)

if __name__ == "__main__":
    shell.main(command)
