"""What rules compare with, each with its origin: ``thresholds.yml``, ``gpus.yml``, ``known_bad.yml``."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from ..core.gpu_generation import NEWER, Modules, generation

# libyaml's, where PyYAML was built with it: a fifth of an audit's start.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_HERE = Path(__file__).resolve().parent

OpenModules = Literal["required", "optional", "unsupported"]
_OPEN_MODULES: Mapping[Modules, OpenModules] = {
    "open": "required",
    "either": "optional",
    "proprietary": "unsupported",
    "none": "unsupported",
}


@functools.cache
def table(name: str) -> Mapping[str, Any]:
    """Return a data file of this folder."""
    data = yaml.load((_HERE / name).read_text(encoding="utf-8"), _LOADER)  # noqa: S506 - a safe one
    if not isinstance(data, dict):
        raise ValueError(f"{name} is no mapping")
    return data


@functools.cache
def number(name: str) -> int:
    """Return a threshold of ``thresholds.yml``; its unit stands beside it there."""
    return int(table("thresholds.yml")["numbers"][name]["value"])


@functools.cache
def version(name: str) -> tuple[int, ...]:
    """Return a version of ``thresholds.yml`` as numbers that compare."""
    return version_tuple(str(table("thresholds.yml")["versions"][name]["value"]))


@functools.cache
def version_text(name: str) -> str:
    """Return a version of ``thresholds.yml`` as it is written."""
    return str(table("thresholds.yml")["versions"][name]["value"])


@functools.cache
def names(name: str) -> frozenset[str]:
    """Return a list of ``thresholds.yml`` for membership tests."""
    return frozenset(str(one) for one in table("thresholds.yml")["lists"][name]["value"])


def origins() -> dict[str, str]:
    """Return where each threshold comes from, by its name."""
    sections = table("thresholds.yml")
    return {name: str(row["origin"]) for section in sections.values() for name, row in section.items()}


@functools.lru_cache(maxsize=4096)
def version_tuple(text: str) -> tuple[int, ...]:
    """Return the leading dotted numbers of a version: ``6.12.118+deb13-amd64`` is (6, 12, 118)."""
    found = re.match(r"\D*(\d+(?:\.\d+)*)", text)
    return tuple(int(part) for part in found.group(1).split(".")) if found else ()


@dataclass(frozen=True)
class GpuModel:
    """What is known of a GPU by its PCI device id. ``name`` is empty where only the family is known."""

    device: str
    name: str
    architecture: str
    open_modules: OpenModules
    p2p: str  # yes, no, unknown: peer access over PCIe with the stock driver on bare metal
    stop_start_risk: bool


@functools.lru_cache(maxsize=1024)
def gpu_model(device: str | None) -> GpuModel | None:
    """Return what is known of this PCI device id (four hex digits), or None."""
    if not device or not re.fullmatch(r"[0-9a-fA-F]{4}", device):
        return None
    row = table("gpus.yml")["models"].get(device.lower(), {})
    family = generation(int(device, 16))
    if family is NEWER:
        return None
    return GpuModel(
        device=device.lower(),
        name=str(row.get("name", "")),
        architecture=family.name.lower(),
        open_modules=_OPEN_MODULES[family.modules],
        p2p=str(row.get("p2p", "unknown")),
        stop_start_risk=bool(row.get("stop_start_risk", False)),
    )


@dataclass(frozen=True)
class BadKernel:
    """A report about a kernel: what was seen, what worked instead, and who says so."""

    id: str
    seen: str
    instead: str
    source: str
    date: str


@functools.lru_cache(maxsize=1024)
def known_bad_kernel(release: str) -> BadKernel | None:
    """Return the first report that this kernel release matches, or None."""
    for row in table("known_bad.yml")["kernels"]:
        if re.fullmatch(str(row["release"]), release):
            return BadKernel(**{name: str(row[name]) for name in ("id", "seen", "instead", "source", "date")})
    return None


@functools.lru_cache(maxsize=1024)
def gpu_model_by_name(name: str) -> GpuModel | None:
    """Return the listed model that ``nvidia-smi`` names like this, or None. Only whole names count."""
    plain = re.sub(r"^(NVIDIA|Tesla)\s+", "", name.strip(), flags=re.IGNORECASE).lower()
    for device, row in table("gpus.yml")["models"].items():
        if plain and str(row["name"]).lower() == plain:
            return gpu_model(device)
    return None
