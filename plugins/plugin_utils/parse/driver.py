"""NVIDIA's kernel module and libraries: what is loaded, with which settings, and what lies on disk."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .text import RefusedError, address, files, lines

_LOADED = re.compile(
    r"NVRM version:\s+NVIDIA UNIX (Open Kernel Module for )?(?:x86_64|aarch64)(?: Kernel Module)?\s+(\d+\.\d[\d.]*)"
)
_PARAMETER = re.compile(r"([A-Za-z]\w*):\s*(.*)")
_GPU_PATH = re.compile(r"/proc/driver/nvidia/gpus/([0-9a-fA-F:.]+)/")
_LOCATION = re.compile(r"Bus Location:\s*(\S+)")
_NO_MODULE = re.compile(r"modinfo: ERROR: .*")
_LIBRARY = re.compile(r"lib(nvidia-ml|cuda)\.so\.(\d+\.\d[\d.]*)")


@dataclass(frozen=True)
class LoadedDriver:
    """``/proc/driver/nvidia/version``. A patched build says the same as the original."""

    version: str
    flavour: str  # open, proprietary
    line: str


def loaded(text: str) -> LoadedDriver:
    """Read which module is loaded."""
    for row in lines(text):
        found = _LOADED.search(row)
        if found:
            return LoadedDriver(found[2], "open" if found[1] else "proprietary", row.strip())
    raise RefusedError("has no line `NVRM version: NVIDIA UNIX ...`")


def params(text: str) -> dict[str, str]:
    """Read ``/proc/driver/nvidia/params``; values without their quotes."""
    found = (_PARAMETER.fullmatch(row.strip()) for row in lines(text))
    return {hit[1]: hit[2].strip().strip('"') for hit in found if hit}


def proc_gpus(text: str) -> tuple[str, ...]:
    """Return the addresses that the driver has a folder for (``/proc/driver/nvidia/gpus``)."""
    found = []
    for path, part in files(text):
        named = _GPU_PATH.search(path) or _LOCATION.search(part)
        bdf = address(named[1]) if named else None
        if bdf:
            found.append(bdf)
    return tuple(found)


_POWER_PATH = re.compile(r"/proc/driver/nvidia/gpus/([0-9a-fA-F:.]+)/power")


def runtime_d3(text: str) -> dict[str, str]:
    """Read ``/proc/driver/nvidia/gpus/*/power``: address -> runtime D3 status, in the driver's words."""
    found = {}
    for path, part in files(text):
        named = _POWER_PATH.search(path)
        status = re.search(r"Runtime D3 status:\s*(\S.*)", part)
        bdf = address(named[1]) if named else None
        if bdf and status:
            found[bdf] = status[1].strip()
    return found


@dataclass(frozen=True)
class ModuleInfo:
    """What ``modinfo nvidia`` says of the module file of the running kernel."""

    version: str | None
    license: str | None


def modinfo(text: str) -> ModuleInfo:
    """Read ``modinfo nvidia``. Raises RefusedError with modinfo's own words where there is no such module."""
    missing = _NO_MODULE.search(text)
    if missing:
        raise RefusedError(missing[0].strip())
    keys: dict[str, str] = {}
    for row in lines(text):
        key, colon, given = row.partition(":")
        if colon:
            keys.setdefault(key.strip(), given.strip())
    if not keys.get("version") and not keys.get("license"):
        raise RefusedError("names neither a version nor a license")
    return ModuleInfo(keys.get("version") or None, keys.get("license") or None)


def library_version(text: str) -> tuple[str, str] | None:
    """Return (version, the line) of ``libnvidia-ml.so``, or of ``libcuda.so`` where that is all there is."""
    hits = [(found[1], found[2], row.strip()) for row in lines(text) if (found := _LIBRARY.search(row))]
    hits.sort(key=lambda hit: hit[0] != "nvidia-ml")
    return (hits[0][1], hits[0][2]) if hits else None
