"""Which release of an engine a host can run: the version matrix (``engine_versions.yml``) against what the audit found.

A figure that the audit did not bring is named as unknown, and is neither a pass nor an obstacle.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ..core.errors import InputError
from ..core.gpu_generation import compute_capability
from .conditions import SmRange, sm_range, versions

_FILE = Path(__file__).resolve().parent / "engine_versions.yml"

# Releases of Python that a range is counted out in.
_PYTHONS = tuple(f"3.{minor}" for minor in range(9, 20))


@dataclass(frozen=True)
class Build:
    """One release of an engine. ``cuda`` is empty for one that runs on the CPU."""

    engine: str
    version: str
    package: str
    python: SpecifierSet
    wheel_python: tuple[str, ...] = ()
    torch: str = ""
    cuda: str = ""
    driver_branch: int | None = None
    nccl: str = ""
    flashinfer: str = ""
    sm: tuple[int, ...] = ()
    ptx: tuple[int, ...] = ()
    glibc: str = ""
    cpu_flags: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Return how a message calls it."""
        return f"{self.engine} {self.version}"

    def pythons(self) -> tuple[str, ...]:
        """Return the releases of Python that it runs on, oldest first."""
        return tuple(
            one for one in _PYTHONS if one in self.python and (not self.wheel_python or one in self.wheel_python)
        )

    def serves(self, sm: int) -> bool | None:
        """Tell whether its machine code runs on an architecture; None where only PTX of some kernels could.

        Machine code for X.y runs on every X.z with z >= y (CUDA programming guide, binary compatibility).
        """
        if any(one // 10 == sm // 10 and one <= sm for one in self.sm):
            return True
        return None if any(one <= sm for one in self.ptx) and sm > max(self.sm) else False


@dataclass(frozen=True)
class Host:
    """What is known of a host. None and empty mean: not known; ``sms`` has None for a GPU of unknown architecture.

    ``driver_branch`` 0 means that no driver runs.
    """

    driver_branch: int | None = None
    sms: tuple[int | None, ...] = ()
    gpu_names: tuple[str, ...] = ()
    glibc: str = ""
    pythons: tuple[str, ...] = ()
    cpu_flags: frozenset[str] | None = None
    distribution: str = ""


@dataclass(frozen=True)
class Choice:
    """The release to install, and the Python for it; or, in one line each, what must change first."""

    build: Build | None
    python: str = ""
    obstacles: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class BadBuild:
    """A combination that does not compile, or whose result does not run."""

    id: str
    why: str
    todo: str
    source: str

    def line(self) -> str:
        """Return the one line that a user reads."""
        return f"{self.why}; {self.todo} [{self.source}]"


@functools.cache
def _data() -> Mapping[str, Any]:
    return dict(yaml.safe_load(_FILE.read_text(encoding="utf-8")))


@functools.cache
def builds(engine: str) -> tuple[Build, ...]:
    """Return the known releases of an engine, newest first; none for an engine that is not in the matrix."""
    rows = _data()["engines"].get(engine, {})
    found = [
        Build(
            engine=engine,
            version=name,
            package=row["package"],
            python=versions(row["python"]),
            wheel_python=tuple(row.get("wheel_python", ())),
            torch=row.get("torch", ""),
            cuda=row.get("cuda", ""),
            driver_branch=row.get("driver_branch"),
            nccl=row.get("nccl", ""),
            flashinfer=row.get("flashinfer", ""),
            sm=tuple(row.get("sm", ())),
            ptx=tuple(row.get("ptx", ())),
            glibc=row.get("glibc", ""),
            cpu_flags=tuple(row.get("cpu_flags", ())),
            sources=row["sources"],
            notes=tuple(row.get("notes", ())),
        )
        for name, row in rows.items()
    ]
    return tuple(sorted(found, key=lambda one: Version(one.version), reverse=True))


def engines() -> tuple[str, ...]:
    """Return the engines of the matrix."""
    return tuple(_data()["engines"])


def build(engine: str, version: str = "", where: str = "inference_engine_version") -> Build:
    """Return one release, the newest for "". Raises InputError for one that is not in the matrix."""
    known = builds(engine)
    if not known:
        raise InputError(f"{engine!r} is not in the version matrix", where, f"it has {', '.join(engines())}")
    if version in ("", "newest"):
        return known[0]
    for one in known:
        if one.version == version:
            return one
    have = ", ".join(one.version for one in known)
    raise InputError(f"{engine} {version} is not in the version matrix", where, f"it has {have}")


def oldest_python(engine: str) -> tuple[int, int]:
    """Return the oldest Python that the newest release of an engine runs on."""
    major, _, minor = build(engine).pythons()[0].partition(".")
    return int(major), int(minor)


def host(facts: Mapping[str, Any], os_id: str = "", os_version: str = "", pythons: Sequence[str] = ()) -> Host:
    """Return what the audit's facts (design section 5) say about a host.

    ``pythons``: releases (3.12) known to be there; where none is given, the distribution's own.
    """
    gpus = list(facts.get("gpus") or ())
    sms = tuple(_sm(str(one.get("pci_id") or "")) for one in gpus)
    names = tuple(str(one.get("name") or one.get("bdf") or "a GPU") for one in gpus)
    driver = facts.get("driver") or {}
    text = str(driver.get("version") or "")
    branch = int(text.partition(".")[0]) if text.partition(".")[0].isdigit() else None
    if branch is None and driver.get("state") == "no_driver":
        branch = 0
    row = _data()["distributions"].get(f"{os_id} {os_version}", {})
    return Host(
        driver_branch=branch,
        sms=sms,
        gpu_names=names,
        glibc=row.get("glibc", ""),
        pythons=tuple(pythons) or ((row["python"],) if row else ()),
        distribution=f"{os_id} {os_version}".strip(),
    )


def _sm(pci_id: str) -> int | None:
    device = pci_id.rpartition(":")[2]
    try:
        return compute_capability(int(device, 16))
    except ValueError:
        return None


def choose(engine: str, here: Host, version: str = "") -> Choice:
    """Return the newest release that this host can run (or the wanted one), or what must change for it.

    Raises InputError for an engine or version that is not in the matrix.
    """
    wanted = (build(engine, version),) if version not in ("", "newest") else builds(engine) or (build(engine),)
    tried = [_judge(one, here) for one in wanted]
    return next((one for one in tried if not one.obstacles), tried[0])


def _judge(one: Build, here: Host) -> Choice:
    obstacles: list[str] = []
    unknown: list[str] = []
    if one.cuda:
        _driver(one, here, obstacles, unknown)
        _gpus(one, here, obstacles, unknown)
    _glibc(one, here, obstacles, unknown)
    python = _python(one, here, obstacles, unknown)
    if one.cpu_flags:
        if here.cpu_flags is None:
            unknown.append(f"the CPU's flags are not known; {one.name} needs {', '.join(one.cpu_flags)}")
        elif lacks := [flag for flag in one.cpu_flags if flag not in here.cpu_flags]:
            obstacles.append(f"the CPU lacks {', '.join(lacks)}: {one.name} ends with an illegal instruction there")
    chosen = None if obstacles else one
    return Choice(chosen, "" if obstacles else python, tuple(obstacles), tuple(unknown), one.notes)


def _driver(one: Build, here: Host, obstacles: list[str], unknown: list[str]) -> None:
    needs = f"{one.name} has CUDA {one.cuda} wheels, which need driver branch {one.driver_branch} or later"
    if here.driver_branch is None:
        unknown.append(f"the driver's version is not known; {needs}")
    elif here.driver_branch == 0:
        obstacles.append(f"no NVIDIA driver runs: {needs}; run the role nvidia_driver first")
    elif one.driver_branch is not None and here.driver_branch < one.driver_branch:
        obstacles.append(
            f"driver branch {here.driver_branch} is too old: {needs}; set nvidia_driver_branch to {one.driver_branch}"
        )


def _gpus(one: Build, here: Host, obstacles: list[str], unknown: list[str]) -> None:
    code = f"{one.name} has code for SM {', '.join(map(str, one.sm))}"
    if not here.sms:
        unknown.append(f"no GPU is known; {code}")
    seen: dict[str, None] = {}
    for position, sm in enumerate(here.sms):
        name = here.gpu_names[position] if position < len(here.gpu_names) else "a GPU"
        served = one.serves(sm) if sm is not None else None
        if served is True or name in seen:
            continue
        seen[name] = None
        if sm is None:
            unknown.append(f"the architecture of {name} is not known; {code}")
        elif served is None:
            unknown.append(f"{name} is SM {sm}, newer than {one.name}, and only some kernels could be translated")
        elif sm < min(one.sm):
            obstacles.append(f"{name} is SM {sm}, too old: {code}; use another GPU, or llama.cpp on the CPU")
        else:
            obstacles.append(f"{name} is SM {sm}, which {one.name} was not built for: {code}; build it from source")


def _glibc(one: Build, here: Host, obstacles: list[str], unknown: list[str]) -> None:
    if not one.glibc:
        return
    if not here.glibc:
        unknown.append(f"the C library's version is not known; {one.name} needs glibc {one.glibc}")
    elif Version(here.glibc) < Version(one.glibc):
        obstacles.append(
            f"glibc {here.glibc} is too old: {one.name} needs {one.glibc}; use Ubuntu 22.04, Debian 12 or later"
        )


def _python(one: Build, here: Host, obstacles: list[str], unknown: list[str]) -> str:
    fit = one.pythons()
    span = f"{fit[0]} to {fit[-1]}"
    if not here.pythons:
        unknown.append(f"the host's Python is not known; {one.name} needs {span}")
        return ""
    good = [name for name in here.pythons if name in fit]
    if good:
        return max(good, key=Version)
    have = ", ".join(sorted(here.pythons, key=Version))
    age = "too old" if all(Version(name) < Version(fit[0]) for name in here.pythons) else "none that it has wheels for"
    obstacles.append(
        f"Python {have} is {age}: {one.name} needs {span}; install one and set inference_engine_python to it"
    )
    return ""


# --- builds on the host ---------------------------------------------------------------------------------------------


@functools.cache
def _bad_rows() -> tuple[tuple[BadBuild, frozenset[str], SpecifierSet | None, SmRange, bool], ...]:
    return tuple(
        (
            BadBuild(name, row["why"], row["todo"], row["source"]),
            frozenset(row["what"]),
            versions(row["toolkit"]) if "toolkit" in row else None,
            sm_range(row["sm"]) if "sm" in row else SmRange(),
            row.get("torch_cuda") == "other_major",
        )
        for name, row in _data()["known_bad_builds"].items()
    )


def buildable() -> tuple[str, ...]:
    """Return what ``bad_builds`` knows about."""
    return tuple(sorted({name for _, what, *_ in _bad_rows() for name in what}))


def bad_builds(what: str, toolkit: str, sms: Sequence[int], torch_cuda: str) -> tuple[BadBuild, ...]:
    """Return the known-bad combinations that a build would be, before it is started.

    ``what``: one of ``buildable()``. ``toolkit`` and ``torch_cuda``: CUDA releases (13.0). ``sms``: architectures of
    the host's GPUs. Raises InputError for something unknown.
    """
    if what not in buildable():
        raise InputError(f"nothing is known about building {what!r}", "", f"known: {', '.join(buildable())}")
    found = []
    for bad, names, toolkits, architectures, other_major in _bad_rows():
        if what not in names or (toolkits is not None and toolkit not in toolkits):
            continue
        if other_major and toolkit.partition(".")[0] == torch_cuda.partition(".")[0]:
            continue
        if architectures.bounds and not any(sm in architectures for sm in sms):
            continue
        found.append(bad)
    return tuple(found)


def build_environment(what: str, sms: Sequence[int], memory_gib: float, cores: int) -> dict[str, str]:
    """Return ``TORCH_CUDA_ARCH_LIST`` and ``MAX_JOBS`` for a build on a host with this much free memory."""
    row = _data()["job_memory_gib"]
    per_job = float(row.get(what, row["other"])["value"])
    names = [f"{sm // 10}.{sm % 10}{'a' if sm >= 90 else ''}" for sm in sorted(set(sms))]
    jobs = max(1, min(cores, int(memory_gib // per_job)))
    return {"TORCH_CUDA_ARCH_LIST": ";".join(names), "MAX_JOBS": str(jobs)}
