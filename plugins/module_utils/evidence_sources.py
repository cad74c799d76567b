# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is read on a target, as data: every source of evidence with its command, file or sysfs tree.

Nothing here judges. ``kind``:

* ``command``: ``argv`` is run with ``LC_ALL=C``; the first element is looked up on PATH.
* ``file``: ``path`` is read.
* ``files``: every file that matches the glob ``path``; each starts with a line ``# ==> PATH <==``.
* ``each``: like ``files``, but one source per file, named ``<source>.<stem of the file>``.
* ``probe``: a function of ``evidence_probes`` of this name, for what no single file holds.

``where`` limits a source to machines that can have it: ``any``, ``gpu`` (an NVIDIA function on the bus), ``proxmox``,
``libvirt``, ``hypervisor`` (either of both).
``mask`` hides what must not leave the machine: what a pattern finds becomes its first group and ``[masked]``.
``mask_serials`` does the same, unless serial numbers are asked for.
Whole environments, keys and tokens are never read.
"""

from __future__ import annotations

from typing import Any

# nvidia-smi waits for a GPU that fell off the bus; 20 s is the limit that the passthrough catalogue (section 2) gives.
TIMEOUT_S = 20

# Per source. A kernel log that repeats one line for days must not fill the controller's memory.
MAX_BYTES = 2 * 1024 * 1024

# Passwords and serial numbers of a VM's configuration. What a password stands in stays well-formed.
_HIDE_IN_SETTINGS = r"(?m)^((?:(?:cur|new|del) )?(?:cipassword|sshkeys): *)\S.*$|(\bserial=)[^,\s]+"
_HIDE_IN_ELEMENTS = (
    r"(\bpasswd=['\"])[^'\"]*|(<qemu:env\b[^>]{0,200}?\bvalue=['\"])[^'\"]*|(<entry name=['\"]serial['\"]>)[^<]*"
    r"|(<serial>)[^<]*"
)

# The arguments behind a program's name, which may hold tokens, and the serial numbers of GPUs, chassis and PCI devices.
_HIDE_IN_GPUS = r"(?m)^([ \t]+Name[ \t]+: \S+ )\S.*$"
_SERIALS_OF_GPUS = r"(?m)^([ \t]*(?:Chassis )?Serial Number[ \t]+: )(?!N/A|GPU requires)\S.*$"
_SERIALS_OF_PCI = r"(Device Serial Number )[0-9a-fA-F-]+"
_HIDE_IN_LOG = r"(NVRM: .{0,40}[Ss]erial [Nn]umber(?:: | is ))\d+"

SOURCES: tuple[dict[str, Any], ...] = (
    # --- identity
    {"source": "detect_virt.vm", "kind": "command", "argv": ["systemd-detect-virt", "--vm"]},
    {"source": "detect_virt.container", "kind": "command", "argv": ["systemd-detect-virt", "--container"]},
    {"source": "proc.cmdline", "kind": "file", "path": "/proc/cmdline"},
    {"source": "proc.version", "kind": "file", "path": "/proc/version"},
    {"source": "proc.cpuinfo", "kind": "probe", "probe": "first_cpu"},
    {"source": "proc.meminfo", "kind": "file", "path": "/proc/meminfo"},
    {"source": "proc.modules", "kind": "file", "path": "/proc/modules"},
    {"source": "os_release", "kind": "file", "path": "/etc/os-release"},
    {"source": "uname", "kind": "command", "argv": ["uname", "-a"]},
    {"source": "dmi", "kind": "probe", "probe": "dmi"},
    {"source": "systemctl.version", "kind": "command", "argv": ["systemctl", "--version"]},
    {
        "source": "clocksource",
        "kind": "files",
        "path": "/sys/devices/system/clocksource/clocksource0/[ac]*_clocksource",
    },
    {"source": "net.cards", "kind": "probe", "probe": "net_cards"},
    {"source": "proc.stat", "kind": "probe", "probe": "cpu_time"},
    {"source": "memory", "kind": "probe", "probe": "memory"},
    # --- PCI and IOMMU
    {"source": "sysfs.pci", "kind": "probe", "probe": "pci"},
    {"source": "sysfs.iommu", "kind": "probe", "probe": "iommu"},
    {"source": "proc.iomem", "kind": "file", "path": "/proc/iomem"},
    {"source": "proc.interrupts", "kind": "probe", "probe": "interrupts"},
    {
        "source": "lspci.vvv",
        "kind": "command",
        "argv": ["lspci", "-Dvvvnn"],
        "mask_serials": _SERIALS_OF_PCI,
    },
    # --- kernel and boot
    {"source": "kernel_log", "kind": "probe", "probe": "kernel_log", "mask_serials": _HIDE_IN_LOG},
    {"source": "etc.default.grub", "kind": "files", "path": "/etc/default/grub*"},
    {"source": "etc.kernel.cmdline", "kind": "file", "path": "/etc/kernel/cmdline"},
    {"source": "boot", "kind": "probe", "probe": "boot"},
    {
        "source": "proxmox_boot_tool.status",
        "kind": "command",
        "argv": ["proxmox-boot-tool", "status"],
        "where": "proxmox",
    },
    {"source": "modprobe.d", "kind": "files", "path": "/etc/modprobe.d/*.conf"},
    {"source": "modprobe.d@lib", "kind": "files", "path": "/usr/lib/modprobe.d/*.conf"},
    {"source": "modules_load.d", "kind": "files", "path": "/etc/modules-load.d/*.conf"},
    {"source": "module_parameters", "kind": "probe", "probe": "module_parameters"},
    {"source": "initramfs", "kind": "probe", "probe": "initramfs"},
    {"source": "lockdown", "kind": "file", "path": "/sys/kernel/security/lockdown"},
    {"source": "kernels", "kind": "probe", "probe": "kernels"},
    # --- NVIDIA driver
    {"source": "nvidia_smi", "kind": "command", "argv": ["nvidia-smi"], "where": "gpu"},
    {"source": "nvidia_smi.L", "kind": "command", "argv": ["nvidia-smi", "-L"], "where": "gpu"},
    {
        "source": "nvidia_smi.q",
        "kind": "command",
        "argv": ["nvidia-smi", "-q"],
        "where": "gpu",
        "mask": _HIDE_IN_GPUS,
        "mask_serials": _SERIALS_OF_GPUS,
    },
    {"source": "nvidia_smi.topo_m", "kind": "command", "argv": ["nvidia-smi", "topo", "-m"], "where": "gpu"},
    {"source": "nvidia_smi.topo_p2p_r", "kind": "command", "argv": ["nvidia-smi", "topo", "-p2p", "r"], "where": "gpu"},
    {"source": "nvidia_smi.topo_p2p_w", "kind": "command", "argv": ["nvidia-smi", "topo", "-p2p", "w"], "where": "gpu"},
    {"source": "nvidia_smi.topo_p2p_n", "kind": "command", "argv": ["nvidia-smi", "topo", "-p2p", "n"], "where": "gpu"},
    {"source": "nvidia_smi.nvlink_s", "kind": "command", "argv": ["nvidia-smi", "nvlink", "-s"], "where": "gpu"},
    {"source": "proc.driver.nvidia.version", "kind": "file", "path": "/proc/driver/nvidia/version", "where": "gpu"},
    {"source": "proc.driver.nvidia.params", "kind": "file", "path": "/proc/driver/nvidia/params", "where": "gpu"},
    {
        "source": "proc.driver.nvidia.gpus",
        "kind": "files",
        "path": "/proc/driver/nvidia/gpus/*/information",
        "where": "gpu",
    },
    {
        "source": "proc.driver.nvidia.power",
        "kind": "files",
        "path": "/proc/driver/nvidia/gpus/*/power",
        "where": "gpu",
    },
    {
        "source": "nvidia_uvm.parameters",
        "kind": "files",
        "path": "/sys/module/nvidia_uvm/parameters/uvm_disable_hmm",
        "where": "gpu",
    },
    {"source": "nvidia_devices", "kind": "probe", "probe": "nvidia_devices", "where": "gpu"},
    {"source": "modinfo.nvidia", "kind": "command", "argv": ["modinfo", "nvidia"], "where": "gpu"},
    {"source": "nvidia_libraries", "kind": "probe", "probe": "nvidia_libraries"},
    {"source": "dkms.status", "kind": "command", "argv": ["dkms", "status"]},
    {"source": "dpkg", "kind": "probe", "probe": "dpkg"},
    {"source": "apt.history", "kind": "file", "path": "/var/log/apt/history.log"},
    {"source": "mokutil.sb_state", "kind": "command", "argv": ["mokutil", "--sb-state"]},
    {
        "source": "systemctl.fabricmanager",
        "kind": "command",
        "argv": ["systemctl", "status", "--no-pager", "--lines=20", "nvidia-fabricmanager"],
        "where": "gpu",
    },
    {
        "source": "systemctl.nvidia_units",
        "kind": "command",
        "argv": [
            "systemctl",
            "show",
            "--property=Id,LoadState,ActiveState,UnitFileState",
            "nvidia-persistenced.service",
            "nvidia-fabricmanager.service",
        ],
        "where": "gpu",
    },
    # --- NCCL and services
    {"source": "etc.nccl.conf", "kind": "file", "path": "/etc/nccl.conf"},
    {"source": "home.nccl.conf", "kind": "probe", "probe": "nccl_files"},
    {"source": "nccl.topology", "kind": "probe", "probe": "nccl_topology"},
    {"source": "nccl.topology_file", "kind": "probe", "probe": "nccl_topology_file"},
    {"source": "peerlane.services", "kind": "probe", "probe": "services"},
    {"source": "engines", "kind": "probe", "probe": "engines"},
    {"source": "engine.log", "kind": "probe", "probe": "engine_logs"},
    {"source": "p2p_caches", "kind": "probe", "probe": "p2p_caches"},
    {"source": "df.shm", "kind": "command", "argv": ["df", "-k", "/dev/shm"]},  # noqa: S108
    {"source": "cgroup.devices", "kind": "file", "path": "/sys/fs/cgroup/devices/devices.list"},
    # --- Proxmox
    {
        "source": "pve.conf",
        "kind": "each",
        "path": "/etc/pve/qemu-server/*.conf",
        "where": "proxmox",
        "mask": _HIDE_IN_SETTINGS,
    },
    {"source": "pve.mapping.pci", "kind": "file", "path": "/etc/pve/mapping/pci.cfg", "where": "proxmox"},
    {"source": "pve.cpu_models", "kind": "file", "path": "/etc/pve/virtual-guest/cpu-models.conf", "where": "proxmox"},
    {"source": "pve.version", "kind": "command", "argv": ["pveversion", "-v"], "where": "proxmox"},
    {"source": "kvm.version", "kind": "command", "argv": ["kvm", "--version"], "where": "proxmox"},
    {
        "source": "pve.qm_pending",
        "kind": "probe",
        "probe": "qm_pending",
        "where": "proxmox",
        "mask": _HIDE_IN_SETTINGS,
    },
    {
        "source": "pve.running",
        "kind": "probe",
        "probe": "qemu_processes",
        "where": "proxmox",
        "mask": _HIDE_IN_SETTINGS,
    },
    {
        "source": "pve.reservations",
        "kind": "file",
        "path": "/run/qemu-server/pci-id-reservations",
        "where": "proxmox",
    },
    {"source": "pve.start_log", "kind": "probe", "probe": "start_logs", "where": "proxmox"},
    {"source": "pve.qemu_binaries", "kind": "probe", "probe": "qemu_binaries", "where": "proxmox"},
    {"source": "pve.rom_files", "kind": "probe", "probe": "rom_files", "where": "proxmox"},
    # --- libvirt
    {
        "source": "libvirt.domains",
        "kind": "files",
        "path": "/etc/libvirt/qemu/*.xml",
        "where": "libvirt",
        "mask": _HIDE_IN_ELEMENTS,
    },
    {"source": "libvirt.running", "kind": "probe", "probe": "libvirt_processes", "where": "libvirt"},
    # --- any hypervisor
    {
        "source": "vhost.max_mem_regions",
        "kind": "file",
        "path": "/sys/module/vhost/parameters/max_mem_regions",
        "where": "hypervisor",
    },
)
