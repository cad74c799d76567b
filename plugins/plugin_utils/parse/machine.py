"""What a machine says it is: virtualisation, DMI, operating system, processor."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from .text import lines, whole_number

# systemd-detect-virt's words.
CONTAINERS = frozenset(
    {
        "docker",
        "podman",
        "lxc",
        "lxc-libvirt",
        "systemd-nspawn",
        "openvz",
        "rkt",
        "wsl",
        "proot",
        "pouch",
        "container-other",
    }
)
VIRTUAL_MACHINES = frozenset(
    {
        "kvm",
        "qemu",
        "amazon",
        "bochs",
        "xen",
        "uml",
        "vmware",
        "oracle",
        "microsoft",
        "zvm",
        "parallels",
        "bhyve",
        "qnx",
        "acrn",
        "powervm",
        "apple",
        "sre",
        "google",
        "vm-other",
    }
)
_SIZES = re.compile(r"(\d{1,3}) bits physical, (\d{1,3}) bits virtual")
_OS_KEY = re.compile(r"([A-Z_]+)=(.*)")


def virtualisation(text: str, words: frozenset[str]) -> str | None:
    """Return the word of ``systemd-detect-virt`` if it is ``none`` or one of these, or None."""
    word = text.strip().lower()
    return word if word == "none" or word in words else None


@lru_cache(maxsize=64)
def keys(text: str) -> Mapping[str, str]:
    """Read ``key: value`` lines (the source ``dmi``, ``lscpu``, ``hostnamectl``); the first of a key stands."""
    found: dict[str, str] = {}
    for row in lines(text):
        key, colon, given = row.partition(":")
        if colon:
            found.setdefault(key.strip(), given.strip())
    return found


def os_release(text: str) -> dict[str, str]:
    """Read ``/etc/os-release``; values without their quotes."""
    found = (_OS_KEY.fullmatch(row.strip()) for row in lines(text))
    return {hit[1]: hit[2].strip().strip("\"'") for hit in found if hit}


@dataclass(frozen=True)
class Processor:
    """One processor. What the text does not tell is None."""

    vendor: str | None = None
    model_name: str | None = None
    flags: frozenset[str] | None = None
    physical_bits: int | None = None
    virtual_bits: int | None = None
    threads: int | None = None


@lru_cache(maxsize=8)
def processor(text: str) -> Processor:
    """Read ``/proc/cpuinfo`` or ``lscpu``. ``threads``: the collector's count, or that of several blocks."""
    rows = lines(text)
    first: dict[str, str] = {}
    blocks = 0
    for row in rows:
        key, colon, given = row.partition(":")
        if colon:
            blocks += key.strip() == "processor"
            first.setdefault(key.strip(), given.strip())
    sizes = _SIZES.search(first.get("address sizes", first.get("Address sizes", "")))
    flags = first.get("flags", first.get("Flags"))
    counted = whole_number(first.get("processors", first.get("CPU(s)")))
    return Processor(
        vendor=_text(first, "vendor_id", "Vendor ID"),
        model_name=_text(first, "model name", "Model name"),
        flags=frozenset(flags.split()) if flags else None,
        physical_bits=int(sizes[1]) if sizes else None,
        virtual_bits=int(sizes[2]) if sizes else None,
        threads=counted if counted is not None else blocks if blocks > 1 else None,
    )


def _text(found: Mapping[str, str], *names: str) -> str | None:
    return next((found[name] for name in names if found.get(name)), None)
