# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Read all sources of evidence of this machine, side by side, each with its own limits."""

from __future__ import annotations

import glob
import os
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ansible_collections.peerlane.gpu.plugins.module_utils import (
    bounded,
    engine_probes,
    evidence_probes,
    platform_probes,
)
from ansible_collections.peerlane.gpu.plugins.module_utils.evidence_sources import MAX_BYTES, SOURCES

# The sources wait for the kernel and for the driver, not for a processor.
WORKERS = 16

_PROBES = {**evidence_probes.PROBES, **platform_probes.PROBES, **engine_probes.PROBES}


def collect(timeout_s: int, root: str = "/", sources: Sequence[dict[str, Any]] = SOURCES) -> list[dict[str, Any]]:
    """Return one dict per source, in the order of ``sources``; see ``bounded.run`` for the keys.

    A source that this machine cannot have (``where``) is listed with the reason, never left out.
    """
    places = {
        "proxmox": os.path.isdir(os.path.join(root, "etc/pve")),
        "libvirt": os.path.isdir(os.path.join(root, "etc/libvirt/qemu")),
        "gpu": _has_nvidia(root),
    }
    places["hypervisor"] = places["proxmox"] or places["libvirt"]
    with ThreadPoolExecutor(max_workers=WORKERS) as pool:
        jobs = [pool.submit(_masked, source, timeout_s, root, places) for source in sources]
        return [entry for job in jobs for entry in job.result()]


_NOT_HERE = {
    "proxmox": "/etc/pve is not there",
    "libvirt": "/etc/libvirt/qemu is not there",
    "hypervisor": "neither /etc/pve nor /etc/libvirt/qemu is there",
    "gpu": "no NVIDIA function on the PCI bus",
}


def _masked(source: dict[str, Any], timeout_s: int, root: str, places: dict[str, bool]) -> list[dict[str, Any]]:
    entries = _one(source, timeout_s, root, places)
    if "mask" in source:
        for entry in entries:
            entry["stdout"] = re.sub(source["mask"], _mask, entry["stdout"])
    return entries


def _mask(found: re.Match[str]) -> str:
    return (next(group for group in found.groups() if group is not None)) + "[masked]"


def _one(source: dict[str, Any], timeout_s: int, root: str, places: dict[str, bool]) -> list[dict[str, Any]]:
    name = source["source"]
    where = source.get("where", "any")
    if not places.get(where, True):
        return [_entry(name, reason=_NOT_HERE[where])]
    kind = source["kind"]
    if kind == "command":
        return [dict(bounded.run(source["argv"], timeout_s, MAX_BYTES), source=name)]
    if kind == "probe":
        return [_probe(name, source["probe"], root)]
    path = os.path.join(root, source["path"].lstrip("/"))
    if kind == "file":
        return [dict(bounded.read(path, MAX_BYTES), source=name)]
    paths = sorted(glob.glob(path))
    if not paths:
        return [_entry(name, reason="no file matches {0}".format(path), path=path)]
    if kind == "each":
        stems = [os.path.splitext(os.path.basename(one))[0] for one in paths]
        return [
            dict(bounded.read(one, MAX_BYTES), source="{0}.{1}".format(name, stem)) for one, stem in zip(paths, stems)
        ]
    return [_joined(name, path, paths)]


def _probe(name: str, probe: str, root: str) -> dict[str, Any]:
    started = time.monotonic()
    entry = _entry(name)
    try:
        entry["stdout"] = _PROBES[probe](root)[:MAX_BYTES]
    except evidence_probes.NotHereError as error:
        entry["reason"] = str(error)
    except OSError as error:
        entry["reason"] = "{0}: {1}".format(error.filename or probe, error.strerror)
    entry["elapsed_ms"] = int((time.monotonic() - started) * 1000)
    return entry


def _joined(name: str, pattern: str, paths: list[str]) -> dict[str, Any]:
    entry = _entry(name, path=pattern)
    for path in paths:
        part = bounded.read(path, MAX_BYTES)
        if part["reason"]:
            entry["stderr"] += part["reason"] + "\n"
            continue
        text = part["stdout"]
        entry["stdout"] += "# ==> {0} <==\n{1}{2}".format(path, text, "" if text.endswith("\n") else "\n")
        entry["truncated"] = entry["truncated"] or part["truncated"]
    if not entry["stdout"]:
        entry["reason"] = entry["stderr"].strip().splitlines()[0]
    return entry


def _has_nvidia(root: str) -> bool:
    vendors = glob.glob(os.path.join(root, "sys/bus/pci/devices/*/vendor"))
    on_the_bus = any(bounded.value(path) == "0x10de" for path in vendors)
    # In a container the bus may be hidden while the driver of the host below is there.
    return on_the_bus or os.path.isdir(os.path.join(root, "proc/driver/nvidia"))


def _entry(name: str, reason: str = "", path: str = "") -> dict[str, Any]:
    return {
        "source": name,
        "command": "",
        "path": path,
        "rc": None,
        "stdout": "",
        "stderr": "",
        "elapsed_ms": 0,
        "truncated": False,
        "reason": reason,
    }
