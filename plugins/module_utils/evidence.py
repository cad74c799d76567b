# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Read all sources of evidence of this machine, side by side, each with its own limits."""

from __future__ import annotations

import functools
import glob
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ansible_collections.peerlane.gpu.plugins.module_utils import (
    bounded,
    engine_probes,
    evidence_probes,
    platform_probes,
)
from ansible_collections.peerlane.gpu.plugins.module_utils.evidence_sources import MAX_BYTES, SOURCES
from ansible_collections.peerlane.gpu.plugins.module_utils.pci_serial import without_serial_numbers

# The sources wait for the kernel and for the driver, not for a processor.
WORKERS = 16
# A probe may run several commands, each with its own limit.
_PROBE_SHARE = 3
_SPARE_S = 5
# A node with more virtual machines than that has its first ones read.
_MOST_FILES = 1000

_PROBES = {**evidence_probes.PROBES, **platform_probes.PROBES, **engine_probes.PROBES}


def collect(
    timeout_s: int, root: str = "/", sources: Sequence[dict[str, Any]] = SOURCES, serials: bool = False
) -> list[dict[str, Any]]:
    """Return one dict per source, in the order of ``sources``; see ``bounded.run`` for the keys.

    ``serials``: whether serial numbers are wanted; else they are masked. A source that this machine cannot have
    (``where``) is listed with the reason, never left out.
    """
    places = {
        "proxmox": os.path.isdir(os.path.join(root, "etc/pve")),
        "libvirt": os.path.isdir(os.path.join(root, "etc/libvirt/qemu")),
        "gpu": _has_nvidia(root),
    }
    places["hypervisor"] = places["proxmox"] or places["libvirt"]
    work: queue.SimpleQueue[_Job] = queue.SimpleQueue()
    jobs = [_Job(source, functools.partial(_masked, source, timeout_s, root, places, serials)) for source in sources]
    for job in jobs:
        work.put(job)
    for _ in range(min(WORKERS, len(jobs))):
        # Daemons: one that waits in the kernel for a lost device must not keep the module from its end.
        threading.Thread(target=_work, args=(work,), daemon=True).start()
    return [entry for job in jobs for entry in job.result(timeout_s)]


class _Job:
    """One source that a worker reads."""

    def __init__(self, source: dict[str, Any], read: Callable[[], list[dict[str, Any]]]) -> None:
        self.source, self.read = source, read
        self.started, self.done = threading.Event(), threading.Event()
        self.entries: list[dict[str, Any]] = []
        self.error: BaseException | None = None

    def result(self, timeout_s: int) -> list[dict[str, Any]]:
        """Return the entries, or say that none came within the limit; a probe may run several commands."""
        limit_s = timeout_s * (_PROBE_SHARE if self.source["kind"] == "probe" else 1) + _SPARE_S
        if not self.started.wait(limit_s):
            return [_entry(self.source["source"], reason="not read: the sources before it gave no answer")]
        if not self.done.wait(limit_s):
            return [_entry(self.source["source"], reason="no answer within {0} s".format(limit_s))]
        if self.error is not None:
            raise self.error
        return self.entries


def _work(jobs: queue.SimpleQueue[_Job]) -> None:
    while True:
        try:
            job = jobs.get_nowait()
        except queue.Empty:
            return
        job.started.set()
        try:
            job.entries = job.read()
        except BaseException as error:
            job.error = error
        job.done.set()


_NOT_HERE = {
    "proxmox": "/etc/pve is not there",
    "libvirt": "/etc/libvirt/qemu is not there",
    "hypervisor": "neither /etc/pve nor /etc/libvirt/qemu is there",
    "gpu": "no NVIDIA function on the PCI bus",
}


def _masked(
    source: dict[str, Any], timeout_s: int, root: str, places: dict[str, bool], serials: bool
) -> list[dict[str, Any]]:
    entries = _one(source, timeout_s, root, places)
    for key in ("mask",) if serials else ("mask", "mask_serials"):
        for entry in entries if key in source else []:
            entry["stdout"] = re.sub(source[key], _mask, entry["stdout"])
    if source["source"] == "sysfs.pci" and not serials:
        for entry in entries:
            entry["stdout"] = without_serial_numbers(entry["stdout"])
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
    paths = sorted(glob.glob(path))[:_MOST_FILES]
    if not paths:
        closed = _closed_folder(path)
        why = "{0}: Permission denied, needs root".format(closed) if closed else "no file matches {0}".format(path)
        return [_entry(name, reason=why, path=path)]
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
        text = _PROBES[probe](root)
        entry["stdout"] = text[:MAX_BYTES]
        entry["truncated"] = len(text) > MAX_BYTES or getattr(text, "truncated", False)
        entry["stderr"] = getattr(text, "notes", "")
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
        if len(entry["stdout"]) + len(text) > MAX_BYTES:
            entry["truncated"] = True
            break
        entry["stdout"] += "# ==> {0} <==\n{1}{2}".format(path, text, "" if text.endswith("\n") else "\n")
        entry["truncated"] = entry["truncated"] or part["truncated"]
    if not entry["stdout"]:
        entry["reason"] = entry["stderr"].strip().splitlines()[0]
    return entry


def _closed_folder(pattern: str) -> str:
    """Return the folder above a pattern that this user may not list, or "": then no match means that there is none."""
    folder = os.path.dirname(pattern)
    while folder and not os.path.isdir(folder) and folder != os.path.dirname(folder):
        folder = os.path.dirname(folder)
    return "" if glob.has_magic(folder) or os.access(folder, os.R_OK | os.X_OK) else folder


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
