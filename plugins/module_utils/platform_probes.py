# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Probes of the platform: interrupts, module parameters, the initial RAM disk, logs of VM starts.

Like ``evidence_probes``: each takes ``root`` and returns plain text. The formats:

* ``interrupts``: ``IR-PCI-MSI 24`` lines: the interrupt chips of ``/proc/interrupts`` with the number of their lines.
* ``module_parameters``: ``vfio_pci.disable_idle_d3 N`` lines, for loaded modules that matter to passthrough.
* ``initramfs``: ``image PATH modified SECONDS``, ``config PATH modified SECONDS`` (the configuration file that changed
  last), ``listed yes`` and ``module NAME`` lines (vfio, GPU and sound modules in it). It is listed only where the
  configuration names vfio, because unpacking takes a second or more. Times are seconds since 1970.
* ``start_logs``: ``# ==> vm VMID task SECONDS <==`` (when) and the log of the newest start of each VM on Proxmox.
* ``qemu_binaries``: ``vm VMID pid PID replaced=yes|no``: whether the program file was replaced since the start.
"""

from __future__ import annotations

import glob
import os
import re

from ansible_collections.peerlane.gpu.plugins.module_utils import bounded
from ansible_collections.peerlane.gpu.plugins.module_utils.evidence_probes import NotHereError

# Unpacking an initial RAM disk of 100 MB takes one to two seconds.
_LISTING_TIMEOUT_S = 15
_LISTING_BYTES = 4 * 1024 * 1024
_LOG_BYTES = 64 * 1024

_PARAMETER_MODULES = ("vfio*", "iommufd", "pcie_aspm")
_EARLY_MODULE = re.compile(r"/((?:vfio|nouveau|nvidia|nova|snd[-_]hda|i2c[-_]nvidia|ucsi)[\w-]*)\.ko")
_CHIP = re.compile(r"\s*\d+:[\s\d]*?\s([A-Za-z][\w-]*)")
_START_TASK = re.compile(r"UPID:[^:]*:[0-9A-Fa-f]+:[0-9A-Fa-f]+:([0-9A-Fa-f]+):qmstart:(\d+):")


def interrupts(root: str) -> str:
    """Return how many interrupt lines each interrupt chip serves."""
    counts: dict[str, int] = {}
    answer = bounded.read(os.path.join(root, "proc/interrupts"), 32 * 1024 * 1024)
    if answer["reason"]:
        raise NotHereError(answer["reason"])
    for row in answer["stdout"].splitlines():
        found = _CHIP.match(row)
        if found:
            # Newer kernels put the device behind the chip: IR-PCI-MSIX-0000:01:00.0.
            chip = re.sub(r"-[0-9a-f]{4}$", "", found.group(1))
            counts[chip] = counts.get(chip, 0) + 1
    return "".join("{0} {1}\n".format(chip, counts[chip]) for chip in sorted(counts))


def module_parameters(root: str) -> str:
    """Return the parameters of the loaded modules that matter to passthrough."""
    lines = []
    for pattern in _PARAMETER_MODULES:
        for path in sorted(glob.glob(os.path.join(root, "sys/module", pattern, "parameters/*"))):
            value = bounded.value(path)
            if value:
                module = os.path.basename(os.path.dirname(os.path.dirname(path)))
                lines.append("{0}.{1} {2}\n".format(module, os.path.basename(path), value))
    if not lines and not os.path.isdir(os.path.join(root, "sys/module")):
        raise NotHereError("{0} is not there".format(os.path.join(root, "sys/module")))
    return "".join(lines)


def initramfs(root: str) -> str:
    """Return the age of the running kernel's initial RAM disk, and which early modules it holds."""
    release = os.uname().release
    names = ("initrd.img-{0}", "initramfs-{0}.img", "initrd-{0}")
    paths = [os.path.join(root, "boot", name.format(release)) for name in names]
    image = next((path for path in paths if os.path.exists(path)), "")
    if not image:
        raise NotHereError("{0} is not there".format(paths[0]))
    lines = ["image {0} modified {1}\n".format(image, int(os.stat(image).st_mtime))]
    configs = glob.glob(os.path.join(root, "etc/modprobe.d/*.conf")) + glob.glob(
        os.path.join(root, "etc/modules-load.d/*.conf")
    )
    configs += [path for path in (os.path.join(root, "etc/initramfs-tools/modules"),) if os.path.exists(path)]
    wanted = [path for path in configs if "vfio" in (bounded.value(path) or "")]
    if wanted:
        newest = max(wanted, key=lambda path: os.stat(path).st_mtime)
        lines.append("config {0} modified {1}\n".format(newest, int(os.stat(newest).st_mtime)))
        answer = bounded.run(["lsinitramfs", image], _LISTING_TIMEOUT_S, _LISTING_BYTES)
        if answer["rc"] == 0 and not answer["truncated"]:
            found = sorted({hit.group(1) for hit in _EARLY_MODULE.finditer(answer["stdout"])})
            lines.append("listed yes\n")
            lines.extend("module {0}\n".format(name) for name in found)
    return "".join(lines)


def start_logs(root: str) -> str:
    """Return the log of the newest start of each VM."""
    newest: dict[str, tuple[int, str]] = {}
    for path in glob.glob(os.path.join(root, "var/log/pve/tasks/*/UPID:*:qmstart:*")):
        found = _START_TASK.match(os.path.basename(path))
        if found:
            started, vmid = int(found.group(1), 16), found.group(2)
            if started > newest.get(vmid, (-1, ""))[0]:
                newest[vmid] = (started, path)
    if not newest:
        raise NotHereError("no file matches {0}".format(os.path.join(root, "var/log/pve/tasks/*/UPID:*:qmstart:*")))
    lines = []
    for vmid in sorted(newest, key=int):
        path = newest[vmid][1]
        answer = bounded.read(path, _LOG_BYTES)
        if not answer["reason"]:
            lines.append(
                "# ==> vm {0} task {1} <==\n{2}\n".format(vmid, newest[vmid][0], answer["stdout"].rstrip("\n"))
            )
    return "".join(lines)


def qemu_binaries(root: str) -> str:
    """Return for each VM of Proxmox that runs whether QEMU's program file was replaced since its start."""
    lines = []
    for path in sorted(glob.glob(os.path.join(root, "run/qemu-server/*.pid"))):
        pid = bounded.value(path) or "0"
        try:
            target = os.readlink(os.path.join(root, "proc", pid, "exe"))
        except OSError:
            continue
        vmid = os.path.basename(path)[: -len(".pid")]
        replaced = "yes" if target.endswith(" (deleted)") else "no"
        lines.append("vm {0} pid {1} replaced={2}\n".format(vmid, pid, replaced))
    return "".join(lines)


PROBES = {probe.__name__: probe for probe in (interrupts, module_parameters, initramfs, start_logs, qemu_binaries)}
