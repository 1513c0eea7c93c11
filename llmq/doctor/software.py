"""The Python packages of llmq and of its extras, the driver, and NVIDIA's libraries: found against needed."""

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, metadata, requires

from packaging.requirements import Requirement

import llmq
from llmq.doctor.finding import FAULT, WARNING, Finding
from llmq.hardware import cuda_driver
from llmq.hardware.cuda_driver import Driver, Problem

DISTRIBUTION = "llmq-train"
DEVELOPING = {"dev", "docs", "test"}  # extras that no run needs
CUPY_OF = {f"cuda{major}": package for major, package in cuda_driver.CUPY.items()}
Installed = Callable[[str], str | None]


def python() -> Iterator[Finding]:
    """llmq and the interpreter."""
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    yield Finding("python", f"llmq {llmq.__version__}, Python {platform.python_version()}, {system}")


def packages() -> Iterator[Finding]:
    """Those that llmq's own metadata names."""
    try:
        about = metadata(DISTRIBUTION)
    except PackageNotFoundError:
        fix = "pip install -e . in the checkout"
        yield Finding("packages", f"{DISTRIBUTION} is not installed", WARNING, "what it needs is not known", fix)
        return
    extras = [one for one in about.get_all("Provides-Extra") or [] if one not in DEVELOPING]
    yield from required(requires(DISTRIBUTION) or [], extras, cuda_driver.installed)


def required(requirements: Sequence[str], extras: Sequence[str], installed: Installed) -> Iterator[Finding]:
    """A finding for the packages of every run, and one for each extra."""
    for extra in ("", *extras):
        name, wanted = f"extra.{extra}" if extra else "packages", _of_extra(requirements, extra)
        there = {one.name: version for one in wanted if (version := installed(one.name))}
        bad = [one for one in wanted if not _fits(one, there.get(one.name))]
        fix = f"pip install '{DISTRIBUTION}[{extra}]'"
        if extra and (not there or _is_other_cuda(extra, there)):
            yield Finding(name, f"not installed ({fix} adds it)")
        elif bad:
            alone = "pip install " + " ".join(f"'{one}'" for one in map(_bare, bad))
            shows = "what uses it fails" if extra else "commands end while they import it"
            yield Finding(
                name,
                ", ".join(_wrong(one, there.get(one.name)) for one in bad),
                WARNING if extra else FAULT,
                shows,
                alone,
            )
        else:
            yield Finding(name, ", ".join(f"{one} {version}" for one, version in there.items()))


def _of_extra(requirements: Sequence[str], extra: str) -> list[Requirement]:
    """What an extra adds, or with "" what there is without one."""
    found = []
    for one in map(Requirement, requirements):
        without = one.marker is None or one.marker.evaluate({"extra": ""})
        if without != bool(extra) and (without or (one.marker and one.marker.evaluate({"extra": extra}))):
            found.append(one)
    return found


def _bare(requirement: Requirement) -> str:
    return f"{requirement.name}{requirement.specifier}"


def _is_other_cuda(extra: str, there: Mapping[str, str]) -> bool:
    """Whether this is an extra without its CuPy: some of its packages belong to the other CUDA version too."""
    return extra in CUPY_OF and CUPY_OF[extra] not in there


def _wrong(wanted: Requirement, version: str | None) -> str:
    return f"{wanted.name} {version} is not {wanted.specifier}" if version else f"{wanted.name} is missing"


def _fits(needed: Requirement, version: str | None) -> bool:
    return version is not None and needed.specifier.contains(version, prereleases=True)


def driver(found: Driver | None, problem: Problem | None) -> Iterator[Finding]:
    """The NVIDIA driver. A machine without one trains on the CPU."""
    if found is None:
        assert problem is not None
        yield Finding("driver", problem.what, WARNING, "runs train on the CPU", problem.fix)
    elif problem is not None:
        yield Finding("driver", problem.what, FAULT, "runs train on the CPU", problem.fix)
    else:
        yield Finding("driver", str(found))


def libraries(driver_cuda: tuple[int, int]) -> Iterator[Finding]:
    """NVIDIA's libraries for this driver, each with the version that it says it has."""
    if problem := cuda_driver.library_problem(driver_cuda):
        yield Finding("libraries", problem.what, FAULT, "runs train on the CPU", problem.fix)
        return
    major = next(major for major, name in cuda_driver.CUPY.items() if cuda_driver.installed(name))
    by_title = {library.title: library.packages[major] for library in cuda_driver.LIBRARIES}
    needed = {one.name: one for one in _needed(f"cuda{major}")}
    for title, version in cuda_driver.versions().items():
        wanted = needed.get(by_title.get(title, title))
        value = f"{version} ({wanted.specifier} is needed)" if wanted else version
        if wanted is None or _fits(wanted, version):
            yield Finding(f"library.{title}", value)
        else:
            fix = f"pip install '{DISTRIBUTION}[cuda{major}]' in a new environment"
            yield Finding(f"library.{title}", value, FAULT, "calls that it lacks fail", fix)


def _needed(extra: str) -> list[Requirement]:
    try:
        return _of_extra(requires(DISTRIBUTION) or [], extra)
    except PackageNotFoundError:
        return []
