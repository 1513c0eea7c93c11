"""What has a name: tables with llmq's own, to which plug-ins add. An installed one is an entry point of the group
`llmq.plugins`, such as `optimizer.lion`; entry points are read only where a name is not known without them.

An option names a plug-in with options of its own after a colon: `lion:beta_1=0.95,beta_2=0.98`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FrameType, FunctionType
from typing import TYPE_CHECKING, Any, TypeVar

from llmq.errors import LlmqError, PluginError, UsageError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "llmq.plugins"
Item = TypeVar("Item")
_TABLES: dict[str, Table[Any]] = {}


class Table(dict[str, Item]):
    """All of one kind by name: `ours`, and the plug-ins that this process has registered (`local`) or found installed.

    A name that is not there is looked for among entry points; KeyError if it is not there either. A plug-in has the
    attributes that it `needs`, and what is made by calling it those that it `gives`.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.ours, self.local = kind, dict[str, Item](), set[str]()
        self.needs: tuple[str, ...] = ()
        self.gives: tuple[str, ...] = ()

    def __missing__(self, name: str) -> Item:
        """Imports an installed plug-in. PluginError if that fails."""
        found = _installed()[f"{self.kind}.{name}"]
        if len({one.value for one in found}) > 1:
            raise PluginError(f"{self.kind} {name} is a plug-in of {' and '.join(map(_origin, found))}: uninstall one")
        try:
            item: Item = found[0].load()
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise PluginError(
                f"the plug-in {self.kind} {name} of {_origin(found[0])} is not imported: {why}"
            ) from error
        self[name] = _checked(f"{self.kind} {name} is", item, self.needs)
        return item

    def has(self, name: str) -> bool:
        """Whether there is a plug-in of this name, installed ones included."""
        return name not in self.ours and (name in self or f"{self.kind}.{name}" in _installed())

    def names(self) -> list[str]:
        """All names, installed ones included."""
        start = f"{self.kind}."
        there = [name.removeprefix(start) for name in _installed() if name.startswith(start)]
        return list(dict.fromkeys((*self, *there)))

    def whole(self) -> Table[Item]:
        """Itself, with all that is installed imported. PluginError."""
        for name in self.names():
            self[name]
        return self

    def register(self, name: str, item: Item) -> None:
        """Adds a plug-in of this process, or replaces one. UsageError for a name of ours."""
        if name in self.ours:
            raise UsageError(f"{self.kind} {name} is llmq's own: register yours under another name")
        self[name] = _checked(f"{self.kind} {name} is", item, self.needs)
        self.local.add(name)

    def call(self, text: str, *about: Any, by: Callable[[Any], Any] = lambda item: item) -> Any:
        """What the item that an option names returns, or a part `by` of it, with the options in the text as keywords.
        PluginError for what it raises."""
        name, own = split(text)
        item = by(self[name])
        if name in self.ours and not own:
            return item(*about)
        return _checked(f"{self.kind} {text} gives", called(f"{self.kind} {text}", item, *about, **own), self.gives)


def _checked(what: str, found: Any, attributes: tuple[str, ...]) -> Any:
    """What was found. PluginError where it lacks an attribute."""
    if absent := [name for name in attributes if not hasattr(found, name)]:
        raise PluginError(f"the plug-in {what} {found!r}, which has no {', '.join(absent)}")
    return found


def called(what: str, item: Callable[..., Any], *about: Any, **own: Any) -> Any:
    """What a plug-in returns. PluginError for what it raises, and for options that it does not take."""
    try:
        return item(*about, **own)
    except LlmqError:
        raise
    except Exception as error:
        places = [(one.f_code.co_filename, line) for one, line in _frames(error)][1:]
        lines = [line for file, line in places if file == places[0][0]]  # the last: what it called may be NumPy's
        place = f" in {places[0][0]}, line {lines[-1]}" if lines else ""
        raise PluginError(f"the plug-in {what} failed{place}: {type(error).__name__}: {error}") from error


def table(
    kind: str, ours: Mapping[str, Any] | None = None, *, needs: tuple[str, ...] = (), gives: tuple[str, ...] = ()
) -> Table[Any]:
    """The table of a kind, with these of llmq's own, and what its plug-ins need and give."""
    found = _TABLES.setdefault(kind, Table(kind))
    found.update(ours or {})
    found.ours.update(ours or {})
    found.needs, found.gives = needs or found.needs, gives or found.gives
    return found


def split(text: str) -> tuple[str, dict[str, Any]]:
    """A name, and the options after its colon: JSON's numbers and words, else texts. UsageError."""
    name, _, rest = text.partition(":")
    pairs = [part.partition("=") for part in rest.split(",")] if rest else []
    if any(not (key.strip().isidentifier() and equals) for key, equals, _ in pairs):
        raise UsageError(f"{text}: a plug-in and its options are NAME:key=value,key=value")
    return name, {key.strip(): _value(value) for key, _, value in pairs}


def _value(text: str) -> Any:
    import json

    try:
        return json.loads(text)
    except ValueError:
        return text


def _installed() -> dict[str, list[EntryPoint]]:
    """Entry points by name, such as optimizer.lion."""
    from importlib.metadata import entry_points

    found: dict[str, list[EntryPoint]] = {}
    for one in entry_points(group=GROUP):
        found.setdefault(one.name, []).append(one)
    return found


def _origin(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value


@contextmanager
def naming_plugins() -> Iterator[None]:
    """Within, an error that comes out of a plug-in becomes a PluginError that names it, and the line."""
    try:
        yield
    except Exception as error:
        found = None if isinstance(error, LlmqError) else _blamed(error)
        if found is None:
            raise
        raise PluginError(f"{found}: {type(error).__name__}: {error}") from error


def _blamed(error: Exception) -> str | None:
    """The plug-in whose code an error came through, and the last line of it; None if none had a part in it."""
    frames = [(one.f_code, one.f_globals.get("__name__", ""), line) for one, line in _frames(error)]
    plugins = [(one, name, one[name]) for one in _TABLES.values() for name in one if name not in one.ours]
    codes = {(one.kind, name): _codes(item) for one, name, item in plugins}
    packages = {(one.kind, name): _package(item) for one, name, item in plugins if name not in one.local}
    for code, module, line in reversed(frames):
        own = [key for key, held in codes.items() if code in held]
        own += [key for key, package in packages.items() if package == module.partition(".")[0] != "llmq"]
        if own:
            kind, name = own[0]
            return f"the plug-in {kind} {name} failed in {code.co_filename}, line {line}"
    return None


def _frames(error: Exception) -> list[tuple[FrameType, int]]:
    """Where an error came through, with the lines."""
    from traceback import walk_tb

    return list(walk_tb(error.__traceback__))


def _codes(item: Any) -> set[CodeType]:
    """The code of a function, or of the methods of a class, of an instance's or of a class method's."""
    owner = getattr(item, "__self__", item)
    if isinstance(owner, FunctionType):
        return {owner.__code__}
    owner = owner if isinstance(owner, type) else type(owner)
    if owner.__module__.startswith("llmq."):
        return set()
    found = (getattr(one, "__func__", None) or getattr(one, "fget", one) for one in vars(owner).values())
    return {one.__code__ for one in found if isinstance(one, FunctionType)}


def _package(item: Any) -> str:
    module: str = getattr(item, "__module__", None) or type(item).__module__
    return module.partition(".")[0]
