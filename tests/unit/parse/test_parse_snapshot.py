"""From evidence to one snapshot: facts with source and line, unknown with reason, the role, and no traceback ever."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.errors import InputError
from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.evidence import Evidence
from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse import intake, snapshot

FIXTURES = Path(__file__).parents[2] / "fixtures" / "parse"

CONFIG = "de10b52b0600100000" + "00" * 2 + "03" + "00" * 40 + "c8" + "00" * 147 + "0900085032502800" + "00" * 48
GUEST_PCI = f"""[0000:00:00.0]
vendor: 0x8086
device: 0x29c0
class: 0x060000
driver:

[0000:01:00.0]
vendor: 0x10de
device: 0x2bb5
class: 0x030200
driver: nvidia
parent: 0000:00:1c.0
config: {CONFIG}
"""


def test_each_fact_has_its_source_and_its_line(built):
    made = built(
        {"dmi": "product_name: Standard PC (Q35 + ICH9, 2009)\nproduct_uuid: AB-CD\n", "uname": "Linux n 6.8.0-1 x\n"}
    )

    assert (made.machine.product_name.source, made.machine.product_name.excerpt) == (
        "dmi",
        "product_name: Standard PC (Q35 + ICH9, 2009)",
    )
    assert (made.machine.smbios_uuid.value, made.kernel.release.value) == ("ab-cd", "6.8.0-1")


def test_what_is_missing_says_why(built):
    made = built(
        {
            "nvidia_smi.topo_m": Evidence("nvidia_smi.topo_m", rc=9, stderr="no driver\n"),
            "kernel_log": Evidence(
                "kernel_log", rc=1, stderr="dmesg: read kernel buffer failed: Operation not permitted"
            ),
            "nvidia_smi.topo_p2p_r": " GPU0 GPU1\n GPU0 X PHB\n GPU1 PHB X\n",
        }
    )

    assert made.cpu.vendor.reason == "proc.cpuinfo was not collected"
    assert made.topology.reason == "nvidia_smi.topo_m ended with 9: no driver"
    assert "not permitted" in made.kernel.log.reason
    assert "'PHB', which is no known code" in made.p2p["r"].reason
    assert made.evidence_index == {
        "nvidia_smi.topo_m": "nvidia_smi.topo_m ended with 9: no driver",
        "kernel_log": "kernel_log ended with 1: dmesg: read kernel buffer failed: Operation not permitted",
        "nvidia_smi.topo_p2p_r": "",
    }


def test_the_collectors_word_for_absence_is_a_reading(built):
    absent = {
        name: Evidence(name, reason=reason)
        for name, reason in {
            "etc.nccl.conf": "/etc/nccl.conf: No such file or directory",
            "modprobe.d": "no file matches /etc/modprobe.d/*.conf",
            "pve.version": "/etc/pve is not there",
            "pve.conf": "/etc/pve is not there",
        }.items()
    }

    made = built(absent)

    assert (made.nccl.settings.value, made.kernel.modprobe.value, made.machine.is_proxmox.value) == ((), (), False)
    assert (made.vm.configs.known, made.vm.configs.reason) == (False, "/etc/pve is not there")
    assert (
        built({"pve.conf": Evidence("pve.conf", reason="no file matches /etc/pve/qemu-server/*.conf")}).vm.configs.value
        == {}
    )


def test_a_guests_approval_and_complete_bus(built):
    made = built({"sysfs.pci": GUEST_PCI})
    approvals = made.pci.approvals.value

    assert made.pci.complete
    assert approvals is not None
    assert (approvals["0000:01:00.0"].state, approvals["0000:01:00.0"].clique) == ("present", 5)
    assert [gpu.bdf for gpu in made.pci.gpus()] == ["0000:01:00.0"]


@pytest.mark.parametrize(
    ("texts", "role", "source"),
    [
        ({}, None, "detect_virt.vm"),
        ({"detect_virt.vm": "kvm\n"}, "guest", "detect_virt.vm"),
        ({"detect_virt.vm": "none\n"}, "bare_metal", "detect_virt.vm"),
        ({"dmi": "sys_vendor: QEMU\n"}, "guest", "dmi"),
        ({"proc.cpuinfo": "flags\t: fpu hypervisor\n"}, "guest", "proc.cpuinfo"),
        ({"proc.cpuinfo": "flags\t: fpu\n"}, "bare_metal", "proc.cpuinfo"),
        ({"sysfs.pci": GUEST_PCI}, "guest", "sysfs.pci"),
        ({"lspci.vvv": "00:02.0 VGA compatible controller: Device 1234:1111\n"}, "guest", "lspci.vvv"),
        ({"lspci.vvv": "00:10.0 3D controller: NVIDIA Corporation Device 2bb5\n"}, "guest", "lspci.vvv"),
        ({"lspci.vvv": "41:00.0 3D controller: NVIDIA Corporation Device 2bb5\n"}, None, "detect_virt.vm"),
        (
            {"lspci.vvv": "41:00.0 3D controller: NVIDIA Corporation Device 2bb5\n\tKernel driver in use: vfio-pci\n"},
            "hypervisor",
            "lspci.vvv",
        ),
        ({"modprobe.d": "options vfio-pci ids=10de:2bb5\n"}, "hypervisor", "modprobe.d"),
        ({"kernel_log": "[    1.0] vfio-pci 0000:41:00.0: reset done\n"}, "hypervisor", "kernel_log"),
        ({"kernel_log": "[    0.0] Hypervisor detected: KVM\n"}, "guest", "kernel_log"),
        ({"qemu.log": "kvm: vfio 0000:01:00.0: group 1 is not viable\n"}, "hypervisor", "qemu.log"),
        ({"pve.conf.101": "machine: q35\n", "detect_virt.vm": "kvm\n"}, "hypervisor", "pve.conf.101"),
        (
            {"proc.cmdline": "root=ZFS=rpool/ROOT/pve-1 boot=zfs\n", "detect_virt.vm": "none\n"},
            "hypervisor",
            "proc.cmdline",
        ),
        ({"uname": "Linux pve1 6.8.12-1-pve #1 x\n", "detect_virt.container": "lxc\n"}, "hypervisor", "uname"),
        ({"uname": "Linux pve1 6.8.12-1-pve #1 x\n", "detect_virt.vm": "kvm\n"}, "guest", "detect_virt.vm"),
        ({"modprobe.d": "options vfio-pci ids=10de:2bb5\n", "detect_virt.vm": "kvm\n"}, "guest", "detect_virt.vm"),
        ({"nvidia_smi.topo_m": "\tGPU0\tGPU1\nGPU0\t X \tPHB\nGPU1\tPHB\t X \n"}, None, "detect_virt.vm"),
    ],
)
def test_the_role_is_told_or_unknown_and_never_assumed(built, texts, role, source):
    fact = built(texts).role

    assert (fact.value, fact.source) == (role, source)
    assert bool(fact.excerpt) is (role is not None)
    assert bool(fact.reason) is (role is None)


def test_pass_through_in_nvidia_smi_tells_a_guest(built, recorded):
    assert built({"nvidia_smi.q": recorded("nvidia_smi.q.two_gpus.txt")}).role.value == "guest"


def test_gpus_of_several_listings_are_one_list(built, recorded):
    made = built(
        {"nvidia_smi.q": recorded("nvidia_smi.q.two_gpus.txt"), "nvidia_smi": recorded("nvidia_smi.table.txt")}
    )
    gpus = made.gpus.value

    assert gpus is not None
    assert [gpu.sources for gpu in gpus] == [("nvidia_smi.q", "nvidia_smi")] * 2
    assert (made.driver.smi.value.state, made.driver.smi.value.cuda_version) == ("ok", "13.1")


def test_no_devices_is_an_empty_list_and_no_driver_is_no_list(built):
    none = built({"nvidia_smi": Evidence("nvidia_smi", stdout="No devices were found\n", rc=6)})
    dead = built(
        {
            "nvidia_smi": Evidence(
                "nvidia_smi",
                rc=9,
                stderr="NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
            )
        }
    )
    gone = built({"nvidia_smi": Evidence("nvidia_smi", reason="nvidia-smi: command not found")})

    assert (none.gpus.value, none.driver.smi.value.state) == ((), "no_devices")
    assert (dead.gpus.known, dead.driver.smi.value.state) == (False, "no_driver")
    assert (gone.gpus.known, gone.driver.smi.value.state) == (False, "not_found")


def test_a_failure_of_any_call_counts(built):
    made = built(
        {
            "nvidia_smi": "| NVIDIA-SMI 580.1.2   Driver Version: 580.1.2   CUDA Version: 13.0 |\n",
            "nvidia_smi.L": "Failed to initialize NVML: Unknown Error\n",
        }
    )

    assert (made.driver.smi.value.state, made.driver.smi.source, made.driver.smi.value.driver_version) == (
        "unknown_error",
        "nvidia_smi.L",
        "580.1.2",
    )


def test_a_vm_knows_what_is_pending_and_running(built, recorded):
    conf = Evidence("pve.conf.101", stdout=recorded("pve.101.conf"), path="/etc/pve/qemu-server/101.conf")
    stopped = Evidence("pve.conf.102", stdout="machine: q35\n", path="/etc/pve/qemu-server/102.conf")
    made = built(
        {
            "pve.conf.101": conf,
            "pve.conf.102": stopped,
            "pve.qm_pending": "# ==> qm pending 101 <==\nnew machine: q35\ndel args: x\n",
            "pve.running": "# ==> vm 101 pid 7 <==\n/usr/bin/kvm\n-id\n101\n-cpu\nhost,kvm=off\n",
        }
    )
    configs = made.vm.configs.value

    assert configs is not None
    assert (configs["101"].pending, configs["101"].pending_deletes) == (
        {"cpu": "host", "machine": "q35"},
        ("balloon", "numa0", "args"),
    )
    assert (configs["101"].running.value, "host,kvm=off" in configs["101"].running_arguments.value) == (True, True)
    assert (configs["102"].running.value, configs["102"].pending, configs["102"].running_arguments.known) == (
        False,
        {},
        False,
    )


def test_without_a_process_list_running_is_unknown(built):
    configs = built({"pve.conf.7": "machine: q35\n"}).vm.configs.value

    assert configs is not None
    assert (configs["7"].running.known, configs["7"].running.reason) == (False, "pve.running was not collected")


def test_logs_of_several_files_are_joined(built):
    made = built(
        {
            "kernel_log": "[1.0] NVRM: Xid (PCI:0000:01:00): 79, x\n",
            "kernel_log@guest": "[2.0] NVRM: Xid (PCI:0000:02:00): 31, x\n",
            "qemu.log": "vfio error: 0000:01:00.0: group 1 is not viable\n",
        }
    )
    log = made.kernel.log.value

    assert log is not None
    assert ([xid.code for xid in log.xids], len(log.matching("not viable"))) == ([79, 31], 1)
    assert made.kernel.log.excerpt == "NVRM: Xid (PCI:0000:01:00): 79, x\nNVRM: Xid (PCI:0000:02:00): 31, x"


def test_the_command_line_of_the_log_serves_where_no_file_does(built):
    made = built({"kernel_log": "[    0.000000] Command line: BOOT_IMAGE=/boot/vmlinuz-6.1.0-1-amd64 ro iommu=pt\n"})

    assert (made.kernel.command_line.value.last("iommu"), made.kernel.boot_loader.value) == ("pt", "grub")
    assert made.kernel.release.value == "6.1.0-1-amd64"


def test_iommu_off_is_a_reading_and_no_collection_is_none(built):
    off, unread = built({"sysfs.iommu": "groups 0\n"}), built({})

    assert (off.iommu.units.value, off.iommu.groups.value) == ((), {})
    assert (unread.iommu.units.known, unread.iommu.groups.known) == (False, False)


def test_secure_boot_falls_back_to_the_firmware(built):
    made = built(
        {
            "mokutil.sb_state": Evidence("mokutil.sb_state", reason="mokutil: command not found"),
            "boot": "efi: yes\nsecure_boot: 1\n",
        }
    )

    assert (made.driver.secure_boot.value, made.driver.secure_boot.source) == ("enabled", "boot")


def mutations(text):
    rows = text.split("\n")
    chance = random.Random(7)
    yield text.replace("\n", "\r\n")
    yield f"root@host:~# nvidia-smi\n{text}"
    yield "\n".join(f"    {row}" for row in rows)
    yield "\n".join(row[at : at + 80] for row in rows for at in range(0, max(len(row), 1), 80))
    yield text.upper()
    yield text[::-1]
    for count in range(0, len(rows), 3):
        yield "\n".join(rows[:count])
    for _ in range(25):
        yield text[: chance.randrange(len(text))]
        yield text[chance.randrange(len(text)) :]


@pytest.mark.parametrize("path", sorted(FIXTURES.iterdir()), ids=lambda path: path.name)
def test_no_mutation_of_a_text_gives_a_traceback(path, tmp_path):
    pasted = tmp_path / path.name
    for text in mutations(path.read_text(encoding="utf-8")):
        pasted.write_text(text, encoding="utf-8", newline="")
        try:
            (host,) = intake.read([pasted])
        except InputError as error:
            assert "holds nothing that Peerlane knows" in error.line()
            continue
        json.dumps(snapshot.build(host).as_dict())
