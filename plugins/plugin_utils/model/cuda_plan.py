"""Plan CUDA toolkits side by side, without a driver coming along."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..core.errors import InputError
from . import driver_plan
from .apt_text import Versions

_VERSION = re.compile(r"\d+\.\d+")


@dataclass(frozen=True)
class Toolkits:
    """What the role does with one host."""

    wanted: tuple[str, ...] = ()
    default: str = ""
    stops: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    install: tuple[str, ...] = ()  # package names
    remove: tuple[str, ...] = ()  # installed packages of the versions to remove
    register: tuple[str, ...] = ()  # versions that the alternative does not know yet
    default_path: str = ""  # "" where the alternative is right already
    pattern: str = " ".join(driver_plan.DRIVER_PATTERNS)

    def as_dict(self) -> dict[str, Any]:
        """Return plain types for Ansible."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}


def alternatives(query: str) -> tuple[str, tuple[str, ...]]:
    """Parse ``update-alternatives --query cuda``: the path in use, and all paths known."""
    value = re.search(r"^Value: (\S+)$", query, re.M)
    return (value[1] if value else "", tuple(re.findall(r"^Alternative: (\S+)$", query, re.M)))


def plan(facts: Mapping[str, Any], options: Mapping[str, Any]) -> Toolkits:
    """Return the plan from the facts of ``driver_facts``. Raises InputError for a version that is none."""
    wanted = _versions(options.get("versions"), "cuda_toolkit_versions")
    absent = _versions(options.get("absent_versions"), "cuda_toolkit_absent_versions")
    both = [one for one in wanted if one in absent]
    if both:
        raise InputError(f"{', '.join(both)} is also in cuda_toolkit_versions", "cuda_toolkit_absent_versions")
    default = str(options.get("default_version") or "") or max(wanted, key=_key, default="")
    if default and wanted and default not in wanted:
        raise InputError(f"{default!r} is not one of {', '.join(wanted)}", "cuda_toolkit_default_version")
    if not wanted and not absent:
        return Toolkits()
    here = driver_plan.host(facts)
    stops = tuple(driver_plan.unsupported(here))
    packages = [f"cuda-toolkit-{one.replace('.', '-')}" for one in wanted]
    offered = {name: here.versions.get(name, Versions()).candidate for name in packages}
    has_nvidia = any(one.vendor == "nvidia" for one in here.repositories)
    notes: list[str] = []
    if has_nvidia:
        stops += tuple(
            f"{name} is not in NVIDIA's repository for this distribution; leave its version out of "
            "cuda_toolkit_versions, or set nvidia_driver_repository_url to a repository that has it"
            for name, version in offered.items()
            if not version and name in here.asked
        )
    elif wanted:
        notes.append("exact versions not known yet: apt has no package list of NVIDIA's repository")
    value, known = alternatives(str(facts.get("alternatives", "")))
    path = f"/usr/local/cuda-{default}" if default else ""
    tails = tuple(re.compile(rf"-{one.replace('.', '-')}(?:-|$)") for one in absent)
    return Toolkits(
        wanted=wanted,
        default=default,
        stops=stops,
        notes=tuple(notes),
        install=tuple(packages),
        remove=tuple(name for name in here.packages if any(tail.search(name) for tail in tails)),
        register=tuple(one for one in wanted if f"/usr/local/cuda-{one}" not in known),
        default_path="" if value == path else path,
    )


def _versions(given: Any, where: str) -> tuple[str, ...]:
    if not isinstance(given, list | tuple | None):
        raise InputError(f"{given!r} is no list", where, "give a list such as ['12.8', '13.0']")
    found = tuple(str(one) for one in given or ())
    for one in found:
        if not _VERSION.fullmatch(one):
            raise InputError(f"{one!r} is no CUDA version", where, "give major and minor in quotes, such as '12.8'")
    return found


def _key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
