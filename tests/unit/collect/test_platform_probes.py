"""Probes of the platform, over small trees: what they write, and what they say where there is nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ansible_collections.peerlane.gpu.plugins.module_utils import bounded, platform_probes
from ansible_collections.peerlane.gpu.plugins.module_utils.evidence_probes import NotHereError
from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse import platform

INTERRUPTS = """           CPU0       CPU1
  9:          0          4  IR-IO-APIC    9-fasteoi   acpi
 24:          0          0  IR-PCI-MSIX-0000:01:00.0    0-edge      nvidia
 25:         17          0  IR-PCI-MSIX-0000:01:00.0    1-edge      nvidia
 26:          1          2  PCI-MSI 524288-edge      AMD-Vi
NMI:          0          0   Non-maskable interrupts
ERR:          0
"""


def write(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return str(root)


def test_interrupt_lines_are_counted_by_chip_without_their_device(tmp_path):
    text = platform_probes.interrupts(write(tmp_path, {"proc/interrupts": INTERRUPTS}))

    assert text == "IR-IO-APIC 1\nIR-PCI-MSIX 2\nPCI-MSI 1\n"
    assert platform.interrupt_chips(text) == {"IR-IO-APIC": 1, "IR-PCI-MSIX": 2, "PCI-MSI": 1}


def test_parameters_of_modules_that_matter_are_told_and_others_not(tmp_path):
    root = write(
        tmp_path,
        {
            "sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts": "N\n",
            "sys/module/pcie_aspm/parameters/policy": "[default] performance\n",
            "sys/module/secret/parameters/key": "x\n",
        },
    )

    assert platform_probes.module_parameters(root) == (
        "vfio_iommu_type1.allow_unsafe_interrupts N\npcie_aspm.policy [default] performance\n"
    )


def test_the_initial_ram_disk_is_listed_only_where_vfio_is_configured(tmp_path, monkeypatch):
    asked = []

    def run(argv, timeout_s, max_bytes):
        asked.append(argv)
        listing = "usr/lib/modules/6/kernel/drivers/vfio/pci/vfio-pci.ko.zst\nusr/lib/modules/6/kernel/x/ext4.ko\n"
        return {"rc": 0, "stdout": listing, "stderr": "", "reason": "", "truncated": False}

    monkeypatch.setattr(bounded, "run", run)
    image = f"boot/initrd.img-{os.uname().release}"
    root = write(tmp_path, {image: "x", "etc/modprobe.d/blacklist.conf": "blacklist floppy\n"})
    os.utime(tmp_path / image, (100, 100))

    assert platform_probes.initramfs(root) == f"image {tmp_path}/{image} modified 100\n"
    assert asked == []

    write(tmp_path, {"etc/modprobe.d/vfio.conf": "options vfio-pci ids=10de:2bb5\n"})
    os.utime(tmp_path / "etc/modprobe.d/vfio.conf", (200, 200))
    told = platform.initramfs(platform_probes.initramfs(root))

    assert (told.modified_at, told.config_modified_at, told.modules) == (100, 200, ("vfio_pci",))


def test_only_the_newest_start_of_each_vm_is_read(tmp_path):
    tasks = "var/log/pve/tasks/A/UPID:node1:0000ABCD:00000001"
    root = write(
        tmp_path,
        {
            f"{tasks}:65A00000:qmstart:101:root@pam:": "old\n",
            f"{tasks}:65B00000:qmstart:101:root@pam:": "swtpm: ok\nTASK OK\n",
            f"{tasks}:65C00000:qmstop:101:root@pam:": "stop\n",
            f"{tasks}:65B00000:qmstart:7:root@pam:": "TASK ERROR: start failed\n",
        },
    )

    text = platform_probes.start_logs(root)

    assert platform.start_logs(text) == {"7": ("TASK ERROR: start failed",), "101": ("swtpm: ok", "TASK OK")}
    assert "root@pam" not in text


def test_a_replaced_program_is_told(tmp_path):
    root = write(tmp_path, {"run/qemu-server/101.pid": "11\n", "run/qemu-server/7.pid": "12\n", "proc/11/x": ""})
    (tmp_path / "proc/12").mkdir(parents=True)
    (tmp_path / "proc/11/exe").symlink_to("/usr/bin/qemu-system-x86_64 (deleted)")
    (tmp_path / "proc/12/exe").symlink_to("/usr/bin/qemu-system-x86_64")

    assert platform.replaced_binaries(platform_probes.qemu_binaries(root)) == {"101": True, "7": False}


@pytest.mark.parametrize("probe", ["interrupts", "module_parameters", "initramfs", "start_logs"])
def test_what_is_not_there_is_said(probe, tmp_path):
    with pytest.raises(NotHereError):
        platform_probes.PROBES[probe](str(tmp_path))
