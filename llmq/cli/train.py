"""`llmq-train`: trains a model. Flags, help and checks come from the description in `llmq.options.parse`."""

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import click

from llmq.cli import shell
from llmq.errors import UsageError
from llmq.options.field import Description, asks_nothing, flag, truth, unknown_option, written
from llmq.options.parse import SECTIONS, Options, descriptions, spellings
from llmq.training.interrupt import terminable

COMMON = (  # what --help shows; --help-all has the others
    *("model", "data", "from_scratch", "seq_len", "batch_size", "epochs", "learning_rate", "matmul_dtype"),
    *("out_dir", "continue"),
)
COLUMN = 34  # where its explanations begin
STRAY = "every option starts with --; quote a glob ('--train-file=data/*.bin'), or repeat the flag for each file"
ALL = "llmq.help_all"  # in a context's meta: the help is that of --help-all
ARGUMENTS = "llmq.arguments"  # in a context's meta: all of them
REPEATED = "llmq.repeated"  # in a context's meta: notices of flags that are given more than once
NO_VALUE = "a flag takes no value: --overwrite turns it on, --no-overwrite off"
# click stops at the first unknown flag; here all of them are reported with the bad values
UNKNOWN_ALLOWED = {**shell.SETTINGS, "ignore_unknown_options": True, "allow_extra_args": True}


def train(
    context: click.Context, *, config: str | None, print_config: bool, more: bool, less: int, **given: Any
) -> int:
    """Reads the options, and prints them, or trains here or in processes that it starts; returns the exit code."""
    options = _options(context, config, more, less, given)
    if print_config:
        click.echo(options.to_yaml(), nl=False)
        return 0
    from llmq.cli.launch import started

    with terminable():
        exit_code = started(options, context.meta[ARGUMENTS])
        if exit_code is not None:
            return exit_code
        from llmq.training.train import run

        return run(options).exit_code


def _options(context: click.Context, config: str | None, more: bool, less: int, given: dict[str, Any]) -> Options:
    """The options that the arguments of a command line give."""
    values = {key: value for key, value in given.items() if value not in (None, ())}
    if more or less:
        if (more and less) or "verbosity" in values:
            raise UsageError("-v, -q and --verbosity say the same: give one of them")
        values["verbosity"] = 1 if more else -min(less, 2)
    return Options.parse({**values, "config": config}, _problems(context.args), context.meta.get(REPEATED, ()))


def options_of(arguments: Sequence[str]) -> Options:
    """The options of a run from the arguments of `llmq-train`. UsageError for those that print something instead."""
    context = command().make_context("llmq-train", list(arguments))
    values = dict(context.params)
    if values.pop("print_config"):
        raise UsageError("--print-config is for llmq-train itself")
    config, more, less = (values.pop(name) for name in ("config", "more", "less"))
    return _options(context, config, more, less, values)


def _problems(arguments: Sequence[str]) -> list[str]:
    """Messages for arguments that no option took: unknown flags, and what belongs to no flag."""
    flags: dict[str, str | None] = {}  # and the value of each, if it may have one
    unexpected: list[str] = []
    takes_next = False  # an unknown flag may have its value in the next argument
    for text in arguments:
        if text.startswith("-") and text.strip("-"):
            name, equals, value = text.partition("=")
            flags[name] = value if equals else None
            takes_next = not equals
        elif takes_next:
            flags[name], takes_next = text, False
        else:
            unexpected.append(text)
    advice = STRAY if any(truth(text) is None for text in unexpected) else NO_VALUE
    problems = [f"unexpected {' '.join(unexpected)}: {advice}"] if unexpected else []
    asked = {name: value for name, value in flags.items() if not asks_nothing(name, value or "true")}
    return problems + [unknown_option(name, spellings(), value) for name, value in asked.items()]


def _off(key: str) -> str:
    """The name of what turns a switch off."""
    return f"no_{key}"


def click_option(d: Description, *aliases: str) -> click.Option:
    """An option by its own name and `aliases`. Values stay text: llmq.options.parse says what is wrong with them."""
    names = [flag(name) for name in (d.key, *aliases)]
    kinds: dict[str, dict[str, Any]] = {
        "flag": {"is_flag": True},
        "repeatable": {"multiple": True},
        "switch": {"is_flag": False, "flag_value": "true"},
        "optional_value": {"is_flag": False, "flag_value": "newest"},
        "value": {},
    }
    spelled = [f"{name}/--no-{name[2:]}" for name in names] if d.kind == "flag" else names
    return click.Option([*spelled, d.key], default=None, **kinds[d.kind])


def option_elsewhere(d: Description, *aliases: str, about: str = "") -> click.Option:
    """An option of another command, with the help `about`; empty: that of llmq-train."""
    option = click_option(d, *aliases)
    option.metavar, option.help = d.metavar, about or f"As in llmq-train: {d.help}"
    return option


def own_option(d: Description) -> click.Option:
    """An option that another command has for itself."""
    return option_elsewhere(d, about=d.help + (f" [default: {d.shown}]" if d.shown not in ("", "needed") else ""))


def _repeated(values: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """A notice for each option that is given more than once, of which the last one counts; `names` are in order."""
    counts = Counter(name for name in names if name in descriptions() and descriptions()[name].kind != "repeatable")
    return [
        f"{flag(key)} is given {count} times: the last one counts, {written(key, values[key])}"
        for key, count in counts.items()
        if count > 1
    ]


class TrainCommand(click.Command):
    """Flags that may be repeated, switches that can be turned off, and help by section."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Notes flags that are given more than once; makes `--no-packing` a value of `--packing`."""
        ctx.meta[ARGUMENTS] = tuple(args)
        _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        rest = super().parse_args(ctx, args)
        ctx.meta[REPEATED] = _repeated(ctx.params, [str(parameter.name) for parameter in order])
        for key in (d.key for d in descriptions().values() if d.kind == "switch"):
            if ctx.params.pop(_off(key)):
                if ctx.params[key] is not None:
                    raise click.UsageError(f"{flag(key)} and {flag(_off(key))} are both given: give one of them")
                ctx.params[key] = "false"
        return rest

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the options that most runs need, or after `--help-all` every one below the title of its section."""
        if context.meta.get(ALL):
            for section, section_class in SECTIONS.items():
                rows = [_help_row(d) for d in descriptions().values() if d.section == section]
                _write_rows(formatter, section_class.title, rows)
        else:
            _write_rows(
                formatter, "Most used options", [_help_row(descriptions()[key], aliases=False) for key in COMMON]
            )
        records = [p.get_help_record(context) for p in self.get_params(context) if p.name not in descriptions()]
        _write_rows(formatter, "Other", [record for record in records if record])


def _show_all(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    if value and not context.resilient_parsing:
        context.meta[ALL] = True
        click.echo(context.get_help())
        context.exit()


def _help_row(d: Description, *, aliases: bool = True) -> tuple[str, str]:
    own = flag(d.key)
    value = "" if d.kind == "flag" else f" {d.metavar}"
    left = f"{own}{value} / --no-{own[2:]}" if d.kind in ("flag", "switch") else own + value
    notes = [d.shown if not d.shown or d.shown.startswith("needed") else f"default: {d.shown}"]
    notes.append("also " + ", ".join(flag(alias) for alias in d.aliases) if d.aliases and aliases else "")
    notes = [note for note in notes if note]
    return left, d.help + (f" [{'; '.join(notes)}]" if notes else "")


def _write_rows(formatter: click.HelpFormatter, title: str, rows: Sequence[tuple[str, str]]) -> None:
    # click's own layout breaks lines inside flag names, where they cannot be searched for.
    formatter.write(f"\n{title}:\n")
    for left, right in rows:
        first = f"  {left}".ljust(COLUMN)
        lines = [] if len(first) == COLUMN and first.endswith("  ") else [first.rstrip()]
        indent = " " * COLUMN
        text = textwrap.fill(
            right,
            formatter.width,
            initial_indent=indent if lines else first,
            subsequent_indent=indent,
            break_on_hyphens=False,
            break_long_words=False,
        )
        formatter.write("\n".join([*lines, text]) + "\n")


def command() -> click.Command:
    """The click command, made from the description."""
    parameters: list[click.Parameter] = [click_option(d, *d.aliases) for d in descriptions().values()]
    parameters += [
        click.Option([flag(_off(d.key)), _off(d.key)], is_flag=True, hidden=True)
        for d in descriptions().values()
        if d.kind == "switch"
    ]
    parameters += [
        click.Option(
            ["--config"], metavar="FILE", type=shell.Home(), help="YAML file of options; the command line overrides it."
        ),
        click.Option(["-v", "more"], is_flag=True, help="Print more: --verbosity 1."),
        click.Option(["-q", "less"], count=True, help="Print less: --verbosity -1, or with -qq -2."),
        click.Option(
            ["--print-config"], is_flag=True, help="Print the effective options as a --config file, and exit."
        ),
        click.Option(
            ["--help-all"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_show_all,
            help=f"Show all {len(descriptions())} options, by subject, with defaults and aliases.",
        ),
    ]
    made = TrainCommand(
        "llmq-train",
        params=parameters,
        callback=click.pass_context(train),
        context_settings=UNKNOWN_ALLOWED,
        help="Trains a Llama or Qwen model on text, chats or token files, and saves it as a Hugging Face folder.",
        epilog="Example: llmq-train --model=Qwen/Qwen2.5-0.5B --data=chats.jsonl --epochs=3",
    )
    return shell.version_option(made)


if __name__ == "__main__":
    shell.main(command())
