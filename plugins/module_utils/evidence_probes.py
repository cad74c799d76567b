# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Sources that no single file or command holds, written as plain text that a person can read.

Each probe takes ``root`` (``/``, or a folder with a recorded tree) and returns text. The formats:

* ``first_cpu``: the first block of ``/proc/cpuinfo``, then ``processors<TAB>: N``.
* ``dmi``: ``product_name: X`` and so on, one a line; ``product_uuid`` only as root.
* ``pci``: a block ``[0000:01:00.0]`` per function, then ``key: value`` lines; ``driver`` is empty where none is bound;
  ``resource`` joins the file's lines with ``;``; ``config`` is hex without the zeros at its end, for NVIDIA functions,
  Mellanox cards and bridges alone, ``config_bytes`` how many bytes the kernel gave (64 without root); of the error
  counters ``aer_dev_*`` the ones that are not zero and the sum, or ``absent``.
* ``iommu``: ``unit dmar0`` lines, then ``group 14 type DMA-FQ devices 0000:01:00.0 0000:01:00.1`` lines.
* ``kernel_log``: ``dmesg``, or ``journalctl -k -b -o short-iso`` where dmesg is refused.
* ``boot``: ``efi: yes|no``, ``loader_info: TEXT``, ``secure_boot: 0|1``.
* ``kernels``: ``release R modules=yes headers=no image=yes running=yes`` lines.
* ``nvidia_libraries``, ``nvidia_devices``: one path a line.
* ``dpkg``: status, package and version, tab separated, for packages that matter to drivers, kernels and CUDA.
* ``services``: ``# ==> unit NAME <==`` and what systemd says of it; of the environment only ``NCCL_*``.
* ``qm_pending``: ``# ==> qm pending VMID <==`` and the output.
* ``qemu_processes``: ``# ==> vm VMID pid PID started SECONDS changed SECONDS cpus LIST <==`` and the arguments of the
  running QEMU, one a line. ``started`` is the process, ``changed`` its configuration file, both in seconds since 1970;
  what cannot be told is left out.
* ``libvirt_processes``: the same for libvirt, with the domain's name in place of the VMID.
* ``net_cards``: ``NAME MAC`` lines for network interfaces that are devices, real or emulated.
* ``cpu_time``: the lines ``cpu`` and ``btime`` of ``/proc/stat``.
* ``memory``: ``hugepages SIZE_KIB total=N free=N``, ``node N cpus=LIST mem_kib=N``, ``transparent_hugepage: TEXT``,
  ``ksm_run: N``, ``ksm_pages_sharing: N``, ``zfs_arc_max: BYTES`` lines.
* ``rom_files``: one name a line: the files of ``/usr/share/kvm`` that may be a device's ROM.
"""

from __future__ import annotations

import glob
import os
import re
from typing import Any

from ansible_collections.peerlane.gpu.plugins.module_utils import bounded

# Below the limit that each source has (evidence_sources.MAX_BYTES).
_LOG_BYTES = 2 * 1024 * 1024 - 1
# Bytes of a PCI Express configuration space.
_CONFIG_BYTES = 4096

_PCI_ATTRIBUTES = (
    "vendor",
    "device",
    "class",
    "revision",
    "numa_node",
    "current_link_speed",
    "current_link_width",
    "max_link_speed",
    "max_link_width",
    "reset_method",
    "power_state",
    "d3cold_allowed",
    "boot_vga",
)
# What is below or above a GPU, and what shares its switch: for these the configuration space and the errors count.
_TOLD_VENDORS = ("0x10de", "0x15b3")

_PACKAGES = re.compile(
    r"nvidia|cuda|nccl|dkms|linux-image|linux-headers|pve-kernel|pve-headers|proxmox-(kernel|headers)"
)

# EFI variables: 4 bytes of attributes, then the value. GUIDs of the UEFI specification and of systemd-boot.
_SECURE_BOOT = "SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
_LOADER_INFO = "LoaderInfo-4a67b082-0a4c-41cf-b6c7-440b29bb8c4f"


class NotHereError(Exception):
    """The machine has no such thing; the message says what is missing."""


def first_cpu(root: str) -> str:
    """Return the first processor of ``/proc/cpuinfo`` and how many there are."""
    text = _read(root, "proc/cpuinfo")
    blocks = [block for block in text.split("\n\n") if block.strip()]
    count = sum(1 for line in text.splitlines() if line.startswith("processor"))
    return "{0}\nprocessors\t: {1}\n".format(blocks[0].rstrip() if blocks else "", count)


def dmi(root: str) -> str:
    """Return what the firmware says the machine is."""
    folder = os.path.join(root, "sys/class/dmi/id")
    lines = []
    for name in ("product_name", "sys_vendor", "board_name", "bios_version", "product_uuid"):
        text = bounded.value(os.path.join(folder, name))
        if text is not None:
            lines.append("{0}: {1}\n".format(name, text))
    if not lines:
        raise NotHereError("{0} is not there".format(folder))
    uuid = os.path.join(folder, "product_uuid")
    hidden = os.path.exists(uuid) and not os.access(uuid, os.R_OK)
    return bounded.text("".join(lines), notes="{0} needs root".format(uuid) if hidden else "")


def pci(root: str) -> str:
    """Return every PCI function that sysfs knows."""
    folder = os.path.join(root, "sys/bus/pci/devices")
    if not os.path.isdir(folder):
        raise NotHereError("{0} is not there".format(folder))
    blocks = []
    for bdf in sorted(os.listdir(folder)):
        blocks.append(_function(os.path.join(folder, bdf), bdf))
    return "\n".join(blocks)


def _function(place: str, bdf: str) -> str:
    lines = ["[{0}]".format(bdf)]
    found = {}
    for name in _PCI_ATTRIBUTES:
        text = bounded.value(os.path.join(place, name))
        if text is not None:
            found[name] = text
            lines.append("{0}: {1}".format(name, text))
    lines.append("driver: {0}".format(_link_name(place, "driver") or ""))
    for name in ("iommu_group", "physfn"):
        target = _link_name(place, name)
        if target:
            lines.append("{0}: {1}".format(name, target))
    above = os.path.basename(os.path.dirname(os.path.realpath(place)))
    if re.match(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$", above):
        lines.append("parent: {0}".format(above))
    resource = bounded.value(os.path.join(place, "resource"))
    if resource:
        lines.append("resource: {0}".format(";".join(resource.splitlines())))
    if found.get("vendor") in _TOLD_VENDORS or found.get("class", "").startswith("0x0604"):
        config = _config(os.path.join(place, "config"))
        if config:
            lines.append("config_bytes: {0}".format(len(config)))
            lines.append("config: {0}".format((config.rstrip(b"\0") or config[:1]).hex()))
        for severity in ("correctable", "nonfatal", "fatal"):
            name = "aer_dev_{0}".format(severity)
            lines.append("{0}: {1}".format(name, _counters(os.path.join(place, name))))
    return "\n".join(lines) + "\n"


def _config(path: str) -> bytes:
    try:
        with open(path, "rb") as stream:
            return stream.read(_CONFIG_BYTES)
    except OSError:
        return b""


def _counters(path: str) -> str:
    """Return the counters that are not zero, and the sum, on one line."""
    words = (bounded.value(path) or "").split()
    told = [
        "{0} {1}".format(name, count)
        for name, count in zip(words[::2], words[1::2])
        if count != "0" or name.startswith("TOTAL")
    ]
    return " ".join(told) or "absent"


def iommu(root: str) -> str:
    """Return the IOMMU units and groups. No line at all means: read, and there is none."""
    lines = []
    units = os.path.join(root, "sys/class/iommu")
    groups = os.path.join(root, "sys/kernel/iommu_groups")
    if not os.path.isdir(units) and not os.path.isdir(groups):
        raise NotHereError("neither {0} nor {1} is there".format(units, groups))
    for name in sorted(os.listdir(units)) if os.path.isdir(units) else []:
        lines.append("unit {0}\n".format(name))
    numbers = [name for name in os.listdir(groups) if name.isdigit()] if os.path.isdir(groups) else []
    for number in sorted(numbers, key=int):
        kind = bounded.value(os.path.join(groups, number, "type")) or "unknown"
        devices = sorted(os.listdir(os.path.join(groups, number, "devices")))
        lines.append("group {0} type {1} devices {2}\n".format(number, kind, " ".join(devices)))
    lines.append("groups {0}\n".format(len(numbers)))
    return "".join(lines)


def kernel_log(root: str) -> str:
    """Return the kernel's messages of this boot."""
    first = bounded.run(["dmesg"], 20, _LOG_BYTES, ends=True)
    if first["rc"] == 0 and first["stdout"].strip():
        return bounded.text(first["stdout"], first["truncated"])
    second = bounded.run(["journalctl", "-k", "-b", "-o", "short-iso", "--no-pager"], 20, _LOG_BYTES, ends=True)
    if second["rc"] == 0 and second["stdout"].strip():
        return bounded.text(second["stdout"], second["truncated"], "from journalctl; {0}".format(_why(first)))
    raise NotHereError(_why(first))


def boot(root: str) -> str:
    """Return how the machine was booted."""
    efi = os.path.isdir(os.path.join(root, "sys/firmware/efi"))
    lines = ["efi: {0}\n".format("yes" if efi else "no")]
    variables = os.path.join(root, "sys/firmware/efi/efivars")
    loader = _efi_variable(os.path.join(variables, _LOADER_INFO))
    if loader:
        lines.append("loader_info: {0}\n".format(loader.decode("utf-16-le", "replace").strip("\0")))
    secure = _efi_variable(os.path.join(variables, _SECURE_BOOT))
    if secure:
        lines.append("secure_boot: {0}\n".format(secure[0]))
    return "".join(lines)


def _efi_variable(path: str) -> bytes:
    try:
        with open(path, "rb") as stream:
            return stream.read(4096)[4:]
    except OSError:
        return b""


def kernels(root: str) -> str:
    """Return every installed kernel, and whether its modules, headers and image are there."""
    running = os.uname().release
    modules = os.path.join(root, "lib/modules")
    releases = set(os.listdir(modules)) if os.path.isdir(modules) else set()
    images = {os.path.basename(path)[len("vmlinuz-") :] for path in glob.glob(os.path.join(root, "boot/vmlinuz-*"))}
    lines = []
    for release in sorted(releases | images | {running}):
        place = os.path.join(modules, release)
        lines.append(
            "release {0} modules={1} headers={2} image={3} running={4}\n".format(
                release,
                _yes(
                    os.path.exists(os.path.join(place, "modules.dep")) or os.path.isdir(os.path.join(place, "kernel"))
                ),
                _yes(os.path.exists(os.path.join(place, "build", "Makefile"))),
                _yes(release in images),
                _yes(release == running),
            )
        )
    return "".join(lines)


def nvidia_libraries(root: str) -> str:
    """Return the paths of the driver's user-space libraries."""
    found = set()
    for folder in ("usr/lib/*-linux-gnu", "usr/lib/*-linux-gnu/nvidia/*", "usr/lib64", "usr/lib", "lib/*-linux-gnu"):
        for name in ("libnvidia-ml.so.*", "libcuda.so.*"):
            found.update(glob.glob(os.path.join(root, folder, name)))
    return "".join(path + "\n" for path in sorted(found))


def nvidia_devices(root: str) -> str:
    """Return the NVIDIA device nodes, one path a line. No line at all means: read, and there is none."""
    folder = os.path.join(root, "dev")
    if not os.path.isdir(folder):
        raise NotHereError("{0} is not there".format(folder))
    names = [name for name in os.listdir(folder) if name.startswith("nvidia") and name != "nvidia-caps"]
    return "".join("/dev/{0}\n".format(name) for name in sorted(names))


def dpkg(root: str) -> str:
    """Return the packages that matter to drivers, kernels and CUDA."""
    answer = bounded.run(["dpkg-query", "-W", "-f=${db:Status-Abbrev}\t${Package}\t${Version}\n"], 20, 4 * 1024 * 1024)
    if answer["rc"] != 0:
        raise NotHereError(_why(answer))
    return "".join(line + "\n" for line in answer["stdout"].splitlines() if _PACKAGES.search(line))


def services(root: str) -> str:
    """Return the state of the model services, and their NCCL variables alone."""
    listed = bounded.run(
        ["systemctl", "list-units", "--all", "--plain", "--no-legend", "--no-pager", "peerlane-model@*"], 20, 65536
    )
    if listed["rc"] != 0:
        raise NotHereError(_why(listed))
    lines = []
    for row in listed["stdout"].splitlines():
        unit = row.split()[0] if row.split() else ""
        if not unit:
            continue
        lines.append("# ==> unit {0} <==\n".format(unit))
        shown = bounded.run(
            ["systemctl", "show", unit, "-p", "ActiveState,SubState,NRestarts,ExecMainStartTimestamp,MainPID"],
            20,
            65536,
        )
        lines.append(shown["stdout"])
        pid = dict(line.partition("=")[::2] for line in shown["stdout"].splitlines()).get("MainPID", "0")
        lines.extend(_nccl_environment(os.path.join(root, "proc", pid, "environ")) if pid != "0" else [])
    return "".join(lines)


def _nccl_environment(path: str) -> list[str]:
    try:
        with open(path, "rb") as stream:
            pairs = stream.read(1024 * 1024).split(b"\0")
    except OSError:
        return []
    wanted = sorted(pair.decode("utf-8", "replace") for pair in pairs if pair.startswith(b"NCCL_"))
    return ["Environment {0}\n".format(pair) for pair in wanted]


def qm_pending(root: str) -> str:
    """Return what ``qm pending`` says of each VM that has a file here."""
    lines = []
    for path in sorted(glob.glob(os.path.join(root, "etc/pve/qemu-server/*.conf"))):
        vmid = os.path.basename(path)[: -len(".conf")]
        answer = bounded.run(["qm", "pending", vmid], 20, 65536)
        if answer["rc"] is None:
            raise NotHereError(answer["reason"])
        lines.append("# ==> qm pending {0} <==\n{1}".format(vmid, answer["stdout"]))
    return "".join(lines)


def qemu_processes(root: str) -> str:
    """Return the arguments of each running QEMU process that Proxmox started."""
    return _processes(root, "run/qemu-server/*.pid", "etc/pve/qemu-server/{0}.conf")


def libvirt_processes(root: str) -> str:
    """Return the arguments of each running QEMU process that libvirt started."""
    return _processes(root, "run/libvirt/qemu/*.pid", "etc/libvirt/qemu/{0}.xml")


def _processes(root: str, pids: str, config: str) -> str:
    lines = []
    for path in sorted(glob.glob(os.path.join(root, pids))):
        pid = bounded.value(path) or ""
        process = os.path.join(root, "proc", pid)
        try:
            with open(os.path.join(process, "cmdline"), "rb") as stream:
                arguments = stream.read(1024 * 1024).decode("utf-8", "replace").split("\0")
        except OSError:
            continue
        if not pid.isdigit() or not any(arguments):
            continue
        name = os.path.basename(path)[: -len(".pid")]
        told: list[tuple[str, Any]] = [("started", _started(root, process))]
        told.append(("changed", _changed(os.path.join(root, config.format(name)))))
        told.append(("cpus", _status(process).get("Cpus_allowed_list")))
        words = "".join(" {0} {1}".format(key, value) for key, value in told if value)
        lines.append("# ==> vm {0} pid {1}{2} <==\n".format(name, pid, words))
        lines.extend(argument + "\n" for argument in arguments if argument)
    return "".join(lines)


def _started(root: str, process: str) -> int | None:
    """Return when a process started, in seconds since 1970: its ticks since boot, behind the command in brackets."""
    ticks = (bounded.value(os.path.join(process, "stat")) or "").rpartition(")")[2].split()
    booted = re.search(r"^btime (\d+)$", bounded.read(os.path.join(root, "proc/stat"), 4 * 1024 * 1024)["stdout"], re.M)
    if len(ticks) < 20 or not ticks[19].isdigit() or not booted:
        return None
    return int(booted.group(1)) + int(ticks[19]) // os.sysconf("SC_CLK_TCK")


def _changed(path: str) -> int | None:
    try:
        return int(os.stat(path).st_mtime)
    except OSError:
        return None


def _status(process: str) -> dict[str, str]:
    rows = (bounded.value(os.path.join(process, "status")) or "").splitlines()
    return {key: value.strip() for key, _, value in (row.partition(":") for row in rows)}


def net_cards(root: str) -> str:
    """Return the hardware addresses of interfaces that have a device behind them: no bridges, taps or loopback."""
    folder = os.path.join(root, "sys/class/net")
    if not os.path.isdir(folder):
        raise NotHereError("{0} is not there".format(folder))
    lines = []
    for name in sorted(os.listdir(folder)):
        address = bounded.value(os.path.join(folder, name, "address"))
        if address and os.path.exists(os.path.join(folder, name, "device")):
            lines.append("{0} {1}\n".format(name, address))
    return "".join(lines)


def cpu_time(root: str) -> str:
    """Return how CPU time was spent since boot, and when that was. The other lines of the file can be very long."""
    wanted = [line for line in _read(root, "proc/stat").splitlines() if line.startswith(("cpu ", "btime "))]
    return "".join(line + "\n" for line in wanted)


def memory(root: str) -> str:
    """Return the pools of huge pages, the NUMA nodes, and what shares or claims memory."""
    lines = []
    for path in sorted(glob.glob(os.path.join(root, "sys/kernel/mm/hugepages/hugepages-*kB"))):
        counts = [bounded.value(os.path.join(path, name)) for name in ("nr_hugepages", "free_hugepages")]
        size = os.path.basename(path)[len("hugepages-") : -len("kB")]
        lines.append("hugepages {0} total={1} free={2}\n".format(size, *counts))
    for path in sorted(glob.glob(os.path.join(root, "sys/devices/system/node/node[0-9]*"))):
        total = re.search(r"MemTotal:\s+(\d+)", bounded.value(os.path.join(path, "meminfo")) or "")
        cpus = bounded.value(os.path.join(path, "cpulist"))
        number = os.path.basename(path)[len("node") :]
        size = total.group(1) if total else ""
        lines.append("node {0} cpus={1} mem_kib={2}\n".format(number, cpus or "", size))
    for name, path in (
        ("transparent_hugepage", "sys/kernel/mm/transparent_hugepage/enabled"),
        ("ksm_run", "sys/kernel/mm/ksm/run"),
        ("ksm_pages_sharing", "sys/kernel/mm/ksm/pages_sharing"),
        ("zfs_arc_max", "sys/module/zfs/parameters/zfs_arc_max"),
    ):
        text = bounded.value(os.path.join(root, path))
        if text is not None:
            lines.append("{0}: {1}\n".format(name, text))
    if not lines:
        raise NotHereError("{0} is not there".format(os.path.join(root, "sys/kernel/mm")))
    return "".join(lines)


def rom_files(root: str) -> str:
    """Return the names of the files that a ``romfile=`` may mean. No line at all means: read, and there is none."""
    folder = os.path.join(root, "usr/share/kvm")
    if not os.path.isdir(folder):
        raise NotHereError("{0} is not there".format(folder))
    names = sorted(name for name in os.listdir(folder) if os.path.isfile(os.path.join(folder, name)))
    return "".join(name + "\n" for name in names)


PROBES = {
    probe.__name__: probe
    for probe in (
        first_cpu,
        dmi,
        pci,
        iommu,
        kernel_log,
        boot,
        kernels,
        nvidia_libraries,
        nvidia_devices,
        dpkg,
        services,
        qm_pending,
        qemu_processes,
        libvirt_processes,
        net_cards,
        cpu_time,
        memory,
        rom_files,
    )
}


def _read(root: str, path: str) -> str:
    place = os.path.join(root, path)
    answer = bounded.read(place, 4 * 1024 * 1024)
    if answer["reason"]:
        raise NotHereError(answer["reason"])
    return str(answer["stdout"])


def _why(answer: dict[str, Any]) -> str:
    """Say why a command gave nothing: its reason, its last complaint, or its status."""
    complaint = answer["stderr"].strip().splitlines()[-1:] or [""]
    return answer["reason"] or complaint[0] or "{0} ended with {1}".format(answer["command"], answer["rc"])


def _link_name(place: str, name: str) -> str | None:
    try:
        return os.path.basename(os.readlink(os.path.join(place, name)))
    except OSError:
        return None


def _yes(value: bool) -> str:
    return "yes" if value else "no"
