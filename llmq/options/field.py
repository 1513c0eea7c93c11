"""What an option is: a pydantic field that carries its own help, limits and aliases, in a frozen section.

Everything a shell, a file or a reader of the log needs is read off the fields: flags and help (`describe`), messages
for bad values (`build`). Which options there are is the business of `llmq.options.parse`.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from llmq.disk import size_bytes
from llmq.errors import UsageError, nearest
from llmq.plugins import split, table

LARGEST_STEP = 2**31 - 1  # the step number is an int32 on the device
# Names of options that other trainers have. Those that take the same values are other names of ours, and stand there;
# these have others in their place, unless they are set to what asks for nothing: false, or what is the default here.
DEFAULT_HERE = {"bf16": True}
_NO_LISA = "LISA is no longer there: use --lora-rank 16, or --train-only 'layers.2[0-3],norm' for some of the layers"
_NO_PROMPT_INIT = "prompts begin as drawn; continue one that PEFT made, such as of a text, with --adapter"
_SHARED = "use --zero-level 3, which shares out weights, gradients and states, or 2, which keeps weights whole"
INSTEAD = {
    "bf16": "use --model-dtype fp32; bf16 is the default",
    "assistant_only_loss": "use --train-on assistant or all",
    "fp16": "use --model-dtype bf16, the default: fp16 needs its loss scaled, which llmq does not do yet",
    **dict.fromkeys(("use_lora", "use_peft"), "use --lora-rank 16"),
    **dict.fromkeys(("qlora", "load_in_4bit"), "use --lora-rank 16 --base-dtype nf4"),
    "load_in_8bit": "use --lora-rank 16 --base-dtype int8",
    "fsdp": _SHARED,
    **dict.fromkeys(("deepspeed", "deepspeed_config"), f"{_SHARED}; --offload-optimizer keeps states in host memory"),
    **dict.fromkeys(("nodes", "nnodes"), "start llmq-launch --nnodes {value} on each machine"),
    **dict.fromkeys(("lisa", "lisa_activated_layers", "lisa_interval", "lisa_interval_steps"), _NO_LISA),
    **dict.fromkeys(("prompt_init", "prompt_init_text", "prompt_tuning_init"), _NO_PROMPT_INIT),
    "optim": "use --optimizer adamw or sgd; --opt-m-dtype int8 --opt-v-dtype int8 keeps AdamW's states in 8 bits",
}


def option(
    default: Any, description: str, *aliases: str, shown: str = "", metavar: str = "", kind: str = "", **limits: Any
) -> Any:
    """A field of a section. `default` may be a function of the fields before it; `shown` then says what it gives."""
    extra: dict[str, Any] = {"aliases": list(aliases), "shown": shown, "metavar": metavar, "kind": kind}
    source = {"default_factory": default} if callable(default) else {"default": default}
    return Field(description=description, json_schema_extra={k: v for k, v in extra.items() if v}, **source, **limits)


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a number is needed, not true or false")
    return value


def _text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _home(value: str) -> str:
    if not is_file_name(value):
        raise ValueError("it has a character that no path has")
    return os.path.expanduser(value) if value.startswith("~") else value


def is_file_name(text: str) -> bool:
    """Whether file systems take a text: no NUL, and no half of a character."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def one_or_more(*kinds: type) -> BeforeValidator:
    """One value of these types is a list of it."""
    return BeforeValidator(lambda value: (value,) if isinstance(value, kinds) else value)


def truth(value: Any) -> bool | None:
    """Whether a value, or a word for it, is true or false; None of any other."""
    words = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    return value if isinstance(value, bool) else words.get(str(value).lower())


def with_commas(value: Any) -> Any:
    """The different names of a list that is written with commas, or of several such lists."""
    given = [value] if isinstance(value, str) else value
    if isinstance(given, (list, tuple)) and all(isinstance(item, str) for item in given):
        return tuple(dict.fromkeys(part.strip() for item in given for part in item.split(",") if part.strip()))
    return value


def dtype_name(value: Any) -> Any:
    """Our name of a dtype: `bf16` for PyTorch's `bfloat16`."""
    names = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    return names.get(value, value) if isinstance(value, str) else value


def _computed(value: Any) -> Any:
    if (name := dtype_name(value)) == "fp16":
        raise ValueError("fp16 needs its loss scaled, which llmq does not do yet: use bf16 or fp32")
    return name


def _size(value: str) -> str:
    if size_bytes(value) is None:
        raise ValueError("give a size above 0 with its unit, such as 16GiB or 800MiB")
    return value


Int = Annotated[int, BeforeValidator(_number)]
Float = Annotated[float, BeforeValidator(_number)]
Count = Annotated[int, Field(ge=0, le=LARGEST_STEP), BeforeValidator(_number)]
Positive = Annotated[int, Field(ge=1, le=LARGEST_STEP), BeforeValidator(_number)]
NonNegative = Annotated[float, Field(ge=0), BeforeValidator(_number)]
Share = Annotated[float, Field(ge=0, lt=1), BeforeValidator(_number)]
Text = Annotated[str, BeforeValidator(_text)]
Size = Annotated[Text, AfterValidator(_size)]  # of memory: 16GiB
Computed = BeforeValidator(_computed)  # a dtype to compute in
Path = Annotated[Text, Field(min_length=1), AfterValidator(_home)]
Floats = Annotated[tuple[Float, ...], one_or_more(str, int, float), Field(min_length=1)]
Texts = Annotated[tuple[Text, ...], one_or_more(str, os.PathLike), Field(min_length=1)]
Paths = Annotated[tuple[Path, ...], one_or_more(str, os.PathLike), Field(min_length=1)]


@dataclass(frozen=True)
class Named:
    """Checks the name of one of `ours` of a kind, or of a plug-in, with its own options."""

    kind: str
    ours: tuple[str, ...] = ()

    def __call__(self, value: Any) -> Any:
        """The value: one text, or several."""
        for text in (value,) if isinstance(value, str) else value or ():
            name, own = split(text)
            plugins = table(self.kind)
            if name not in self.ours and not plugins.has(name):
                known = (*self.ours, *(one for one in plugins.names() if one not in plugins.ours))
                raise PydanticCustomError("literal_error", "unknown", {"value": name, "known": known})
            if name in self.ours and own and self.kind != "callback":
                raise UsageError(f"the options of {name} are flags of their own: give no others with the name")
        return value


DeviceName = Annotated[Text, AfterValidator(Named("backend", ("auto", "cuda", "cpu")))]


class Section(BaseModel):
    """Options that one module reads. Unknown keys are errors; validators are built at the first use, not at import."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        defer_build=True,
        protected_namespaces=(),
        coerce_numbers_to_str=True,
        allow_inf_nan=False,
    )
    title: ClassVar[str]

    def contradictions(self) -> Iterator[str]:
        """One message for each set of values in this section that cannot go together."""
        return iter(())

    def given(self, keys: Iterable[str]) -> list[str]:
        """Those of some options that ask for something: neither absent nor off."""
        return [key for key in keys if getattr(self, key) not in (None, False)]

    def written(self, key: str) -> str:
        """An option with its value as a user types it."""
        return written(key, getattr(self, key))


S = TypeVar("S", bound=Section)


@dataclass(frozen=True)
class Description:
    """One option as a shell needs it.

    `kind` is flag (true or false), switch (a flag that takes other values, too), repeatable, optional_value or value.
    """

    key: str  # learning_rate; the field's name, but `continue` for `continue_`
    field: str
    section: str
    help: str
    aliases: tuple[str, ...]
    kind: str
    metavar: str
    choices: tuple[str, ...]
    default: Any  # None if it depends on other options, or there is none
    shown: str  # the default in words; empty if there is nothing to say
    plugin: Named | None = None  # what it names, if that may be a plug-in


def flag(name: str) -> str:
    """`--learning-rate` for `learning_rate`, in any spelling."""
    return "--" + name.strip("-_").replace("_", "-")


def written(name: str, value: Any, between: str = " ") -> str:
    """An option as a user types it: `--dora`, `--no-packing`, `--lora-alpha 16`."""
    if isinstance(value, bool):
        return flag(name if value else f"no_{name}")
    short = f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else value
    return f"{flag(name)}{between}{short}"


def describe(section: str, cls: type[Section]) -> Iterator[Description]:
    """The options of a section, in order."""
    for field, info in cls.model_fields.items():
        extra: dict[str, Any] = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
        annotation: Any = info.annotation
        while get_origin(annotation) not in (None, Literal, tuple):  # X of `X | None` and of Annotated[X, ...]
            annotation = get_args(annotation)[0]
        typed = cls.__annotations__[field]  # X, or X | None, which has X among its arguments
        checks = [one for kind in (typed, *get_args(typed)) for one in getattr(kind, "__metadata__", ())]
        plugin = next((found for one in checks if isinstance(found := getattr(one, "func", None), Named)), None)
        choices = plugin.ours if plugin else get_args(annotation) if get_origin(annotation) is Literal else ()
        default = None if info.is_required() or info.default_factory else info.default
        shown = default if default is not None else ""
        if isinstance(shown, bool):
            shown = "on" if shown else ""
        elif isinstance(shown, float):
            shown = f"{shown:g}"
        kinds = {bool: "flag", tuple: "repeatable"}
        is_path = any(kind in (Path, Paths) for kind in (typed, *get_args(typed)))
        word = "PATH" if is_path else {int: "INT", float: "FLOAT"}.get(annotation, "TEXT")
        yield Description(
            key=field.rstrip("_"),
            field=field,
            section=section,
            help=info.description or "",
            aliases=tuple(extra.get("aliases", ())),
            kind=extra.get("kind") or kinds.get(get_origin(annotation) or annotation, "value"),
            metavar=extra.get("metavar") or "|".join(choices) or word,
            choices=choices,
            default=default,
            shown="needed" if info.is_required() else extra.get("shown", str(shown)),
            plugin=plugin,
        )


def plain(name: object) -> str:
    """`learning_rate` for any spelling of it."""
    return flag(str(name))[2:].replace("-", "_")


def named(
    given: Mapping[str, Any], spellings: Mapping[str, Description], errors: list[str], places: Mapping[str, str]
) -> dict[str, Any]:
    """Values by key; unknown names, and two names of one option, are added to `errors`.

    `spellings` has every option by every name, `places` where a name was given (`run.yaml:3: `), where that is known.
    None is the same as not given, where the default is None.
    """
    found: dict[str, Any] = {}
    names: dict[str, str] = {}  # by key, as given
    for name, value in given.items():
        option, place, spelled = spellings.get(plain(name)), places.get(name, ""), flag(str(name))
        if plain(name) == "config":
            errors.append(f"{place}config is for the command line: a file cannot name another one")
        elif option is None and asks_nothing(name, value):
            continue
        elif option is None:
            errors.append(place + unknown_option(spelled, spellings, value))
        elif option.key in names:
            errors.append(f"{place}{names[option.key]} and {spelled} are the same option: give one of them")
        else:
            names[option.key] = spelled
            if value is not None or option.default is not None:
                found[option.key] = value
    return found


def asks_nothing(name: object, value: Any) -> bool:
    """Whether another trainer's option has a value that changes nothing here, as in `fp16: false` and `bf16: true`."""
    known = plain(name)
    return known in INSTEAD and (value in (None, "", "none") or truth(value) is DEFAULT_HERE.get(known, False))


def unknown_option(name: str, spellings: Mapping[str, Description], value: Any = None) -> str:
    """The message for a name that is none, with what another trainer's is here, else the options that begin with it,
    else those that look like it."""
    if (instead := INSTEAD.get(plain(name))) is not None:
        return f"unknown option {name}: {instead.format(value='N' if value is None else value)}"
    wanted, keys = plain(name), {**{name: d.key for name, d in spellings.items()}, "config": "config"}
    near = [known for known in keys if len(wanted) > 2 and known.startswith(wanted)]
    near = near or get_close_matches(wanted, keys, n=2, cutoff=ALIKE)
    meant = " or ".join(dict.fromkeys(flag(keys[known]) for known in near))
    return f"unknown option {name}: " + (
        f"did you mean {meant}?" if meant else "llmq-train --help-all lists all options"
    )


def build(
    cls: type[Section],
    fields: Mapping[str, Any],
    options: Mapping[str, Description],
    errors: list[str],
    places: Mapping[str, str],
) -> Section | None:
    """The section made of the given fields; None, with `errors` extended, if a value is bad.

    Contradictions between good values are added to `errors` too. `options` are the descriptions by field, `places` as
    above, by key.
    """
    try:
        section = cls(**fields)
    except ValidationError as found:
        wrong = {
            str(error["loc"][0]): error
            for error in found.errors(include_url=False)
            if error["type"] != "default_factory_not_called"  # follows from another error
        }
        errors.extend(
            places.get(options[field].key, "") + _message(options[field], error) for field, error in wrong.items()
        )
        return None
    errors.extend(section.contradictions())
    return section


def section_of(cls: type[S], given: Mapping[str, Any]) -> S:
    """The section made of the given fields alone. UsageError with all that is wrong."""
    problems = list[str]()
    found = build(cls, given, {d.field: d for d in describe("", cls)}, problems, {})
    refuse(problems)
    assert isinstance(found, cls)
    return found


def refuse(problems: Sequence[str]) -> None:
    """UsageError with all problems at once; nothing where there are none."""
    if problems:
        raise UsageError("\n  ".join(["options that need a change:", *problems]) if problems[1:] else problems[0])


ALIKE = 0.75  # of two names, as difflib counts: --bacth-size is 0.9 of --batch-size
LIMITS = {
    "greater_than_equal": "is below the least value: use {ge} or more",
    "greater_than": "is too small: use more than {gt}",
    "less_than_equal": "is above the largest value: use {le} or less",
    "less_than": "is too large: use less than {lt}",
    "string_too_short": "is empty: give a path",
    "too_short": "is empty: give {what}",
    "finite_number": "is not a finite number",
}
WORDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "string": "text", "tuple": "a list"}


def _message(d: Description, error: Any) -> str:
    """What is wrong with the value of one option, its limit, and the fix."""
    kind, context, value = error["type"], error.get("ctx", {}), error["input"]
    if kind == "missing":
        return f"{flag(d.key)} is needed: {d.help}"
    is_plain = isinstance(value, (str, int, float)) and value != "" and str(value).isprintable()
    start = f"{flag(d.key)} {value if is_plain else repr(value)}"
    if kind in LIMITS:
        exact = {k: int(v) if isinstance(v, float) and v.is_integer() else v for k, v in context.items()}
        exact["what"] = "a path" if value == "" else "one value or more"
        or_not = ", or leave the option out" if kind.endswith("too_short") and d.shown != "needed" else ""
        return f"{start} {LIMITS[kind].format(**exact)}{or_not}"
    if kind == "literal_error":
        known = context.get("known") or d.choices
        if d.plugin and not known:
            return f"{start}: no plug-in is installed or registered that could have this name"
        choices = ", ".join(known) or str(context["expected"]).replace("'", "")  # of a list those of its items
        said = ", and no plug-in has this name" if d.plugin else ""
        return f"{start} is not one of {choices}{said}{nearest(str(context.get('value', value)).lower(), known)}"
    word = next((word for prefix, word in WORDS.items() if kind.startswith(prefix)), "")
    return f"{start} is not {word}: {d.help}" if word else f"{start}: {context.get('error') or error['msg']}"


def read_flat_yaml(path: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Options as written in a YAML file of flat keys, and the place of each key (`run.yaml:3: `).

    UsageError if it is absent or not such a file. Scalars stay text, as on the command line, so that both are read by
    the same rules (YAML alone would take 1e-5 for text and 0123 for 83).
    """
    import yaml

    try:
        with open(path, encoding="utf-8-sig") as file:
            root = yaml.compose(file, Loader=yaml.SafeLoader)
    except OSError as error:
        raise UsageError(f"--config {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"--config {path} is not YAML: {' '.join(str(error).split())}") from error
    if root is not None and not isinstance(root, yaml.MappingNode):
        raise UsageError(f"--config {path} must hold lines of the form `learning_rate: 1e-5`")

    def place(node: yaml.Node) -> str:
        return f"{path}:{node.start_mark.line + 1}: "

    def scalar(node: yaml.Node) -> Any:
        if not isinstance(node, yaml.ScalarNode):
            raise UsageError(f"{place(node)}keys are flat: a key has one value, or a list of single values")
        return None if node.tag == "tag:yaml.org,2002:null" else node.value

    found: dict[str, Any] = {}
    places: dict[str, str] = {}
    for key, node in root.value if root else ():
        name = str(scalar(key))
        if name in found:
            raise UsageError(f"{place(key)}{name} is given a second time")
        places[name] = place(key)
        found[name] = [scalar(item) for item in node.value] if isinstance(node, yaml.SequenceNode) else scalar(node)
    return found, places
