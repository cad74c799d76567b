"""Rules C: IOMMU, binding, boot parameters and ACS of a hypervisor."""

from __future__ import annotations

import pytest
import rule_builders as b
from rule_builders import TWO

ON = {"ReqRedir": True, "CmpltRedir": True, "UpstreamFwd": True, "SrcValid": True}
OFF = dict.fromkeys(ON, False)
INTEL = {"vendor": b.fact("GenuineIntel"), "physical_bits": b.fact(46)}


def kernel(command_line: str = "quiet", release: str = "6.14.8-2-pve", **more: object) -> b.Kernel:
    return b.Kernel(
        command_line=b.fact(b.line(command_line), command_line, "proc.cmdline"), release=b.fact(release), **more
    )


def node(*configs: object, **parts: object) -> object:
    return b.hypervisor(*(configs or (b.vm_config(*TWO),)), **parts)


def iommu(units: tuple[str, ...] | None = ("ivhd0",), **groups: tuple[str, ...]) -> b.Iommu:
    return b.Iommu(
        units=b.fact(units, "units", "sysfs.iommu") if units is not None else b.unknown("/sys was not read"),
        groups=b.fact({name[1:]: members for name, members in groups.items()}, "groups", "sysfs.iommu")
        if groups
        else b.unknown("/sys was not read"),
    )


def chain(acs: dict[str, bool] | None, **more: object) -> list[object]:
    return [
        b.gpu_function(driver="vfio-pci", parent="0000:00:01.0"),
        b.port("0000:00:01.0", acs_ctl=acs, **more),
    ]


ONE = b.vm_config("0000:01:00.0,pcie=1")
GRUB = "BOOT_IMAGE=/boot/vmlinuz root=/dev/x ro quiet"
ZFS = "initrd=\\EFI root=ZFS=rpool/ROOT/pve-1 boot=zfs"


def boots(running: str, grub: str | None = None, systemd: str | None = None) -> b.Kernel:
    return kernel(
        running,
        grub_default=b.fact(b.line(grub), grub, "etc.default.grub") if grub is not None else b.unknown("not read"),
        etc_kernel_cmdline=b.fact(b.line(systemd), systemd) if systemd is not None else b.unknown("not read"),
    )


@pytest.mark.parametrize(
    ("rule", "judged", "state", "words"),
    [
        ("C1", node(iommu=iommu(("ivhd0",), g1=("0000:01:00.0",))), "pass", "1 group"),
        ("C1", node(iommu=iommu(()), kernel=kernel()), "fail", "off"),
        ("C1", node(iommu=iommu(()), kernel=kernel("amd_iommu=off")), "fail", "amd_iommu=off"),
        ("C1", node(kernel=kernel("intel_iommu=on intel_iommu=off")), "fail", "intel_iommu=off"),
        # Neither a kernel message nor a missing amd_iommu=on proves anything.
        ("C1", node(kernel=kernel("quiet", log=b.log("DMAR: IOMMU enabled"))), "unknown", "do not prove"),
        ("C1", node(iommu=iommu(("dmar0",), g1=("0000:01:00.0",)), kernel=kernel("quiet")), "pass", "on"),
        ("C2", node(kernel=kernel("iommu=pt")), "pass", "pt"),
        (
            "C2",
            node(iommu=b.Iommu(units=b.fact(("ivhd0",)), default_domain=b.fact("Translated"))),
            "info",
            "Translated",
        ),
        # The kernel prints Translated also with the IOMMU off.
        ("C2", node(iommu=b.Iommu(units=b.fact(()), default_domain=b.fact("Translated"))), "not_applicable", "C1"),
        ("C2", node(), "unknown", "not collected"),
        (
            "C5",
            node(ONE, iommu=iommu(g1=("0000:01:00.0", "0000:00:01.0", "0000:01:00.1")), functions=chain(ON)),
            "pass",
            "",
        ),
        (
            "C5",
            node(
                ONE,
                iommu=iommu(g1=("0000:01:00.0", "0000:03:00.0")),
                functions=[*chain(ON), b.port("0000:03:00.0", class_code="0200", driver="igb")],
            ),
            "fail",
            "igb",
        ),
        (
            "C5",
            node(
                ONE,
                iommu=iommu(g1=("0000:01:00.0", "0000:03:00.0")),
                functions=[*chain(ON), b.port("0000:03:00.0", class_code="0200", driver="")],
            ),
            "warn",
            "same VM",
        ),
        ("C5", node(ONE, iommu=iommu(g1=("0000:01:00.0", "0000:03:00.0")), functions=chain(ON)), "unknown", "driver"),
        ("C5", node(ONE), "unknown", "group"),
        ("C5", node(b.vm_config()), "not_applicable", "hostpci"),
        ("C7", node(ONE), "pass", "vfio-pci"),
        ("C7", node(ONE, functions=[b.gpu_function(driver="nouveau")]), "fail", "nouveau"),
        ("C7", node(ONE, functions=[b.gpu_function(driver="nvidia")]), "fail", "nvidia"),
        (
            "C7",
            node(b.vm_config("0000:01:00.0,pcie=1", running=b.fact(True)), functions=[b.gpu_function(driver="")]),
            "fail",
            "no driver",
        ),
        (
            "C7",
            node(b.vm_config("0000:01:00.0,pcie=1", running=b.fact(False)), functions=[b.gpu_function(driver="")]),
            "pass",
            "Proxmox binds it",
        ),
        ("C7", node(ONE, functions=[b.gpu_function(driver="")]), "unknown", "running"),
        ("C7", node(ONE, functions=[b.gpu_function()]), "unknown", "not read"),
        ("C7", node(b.vm_config("0000:01:00.0,driver=keep")), "not_applicable", "driver=keep"),
        ("C10", node(kernel=boots(ZFS, grub="quiet amd_iommu=on iommu=pt", systemd=ZFS)), "fail", "systemd-boot"),
        ("C10", node(kernel=boots(ZFS, systemd=f"{ZFS} iommu=pt")), "fail", "/etc/kernel/cmdline"),
        ("C10", node(kernel=boots(GRUB, grub="quiet iommu=pt")), "fail", "/etc/default/grub"),
        ("C10", node(kernel=boots(GRUB, grub="quiet nomodeset")), "warn", "nomodeset"),
        (
            "C10",
            node(kernel=boots(f"{ZFS} iommu=pt x=1", grub="quiet", systemd=f"{ZFS} iommu=pt")),
            "pass",
            "parameters",
        ),
        ("C10", node(kernel=boots(f"{GRUB} pci=a,noaer", grub="quiet pci=noaer pci=a")), "pass", "parameters"),
        ("C10", node(kernel=boots(GRUB)), "unknown", "not read"),
        ("C10", node(kernel=boots("quiet", grub="iommu=pt", systemd="iommu=pt")), "unknown", "boot"),
        ("C10", node(), "unknown", "not collected"),
        ("C12", node(kernel=kernel("pcie_acs_override=downstream,multifunction")), "fail", "claim"),
        (
            "C12",
            node(kernel=kernel("pcie_acs_override=downstream", release="6.13.9-200.fc41.x86_64")),
            "warn",
            "mainline",
        ),
        ("C12", node(kernel=kernel()), "pass", "No ACS override"),
        ("C12", node(), "unknown", "not collected"),
        ("C13", node(ONE, functions=chain(ON)), "pass", "on above"),
        ("C13", node(ONE, functions=chain(OFF)), "fail", "off on 0000:00:01.0"),
        ("C13", node(ONE, functions=chain({**ON, "UpstreamFwd": False})), "warn", "0000:00:01.0"),
        ("C13", node(ONE, functions=chain(ON), kernel=kernel("pci=disable_acs_redir=0000:00:01.0")), "fail", "told"),
        ("C13", node(ONE, functions=chain(None, access_denied=True)), "unknown", "as root"),
        ("C13", node(ONE), "unknown", "not read"),
        ("C13", node(ONE, functions=chain(OFF), iommu=iommu(())), "not_applicable", "C1"),
    ],
)
def test_hypervisor(rule: str, judged: object, state: str, words: str) -> None:
    found = b.findings(rule, judged)
    assert [one.state for one in found] == [state]
    assert words in f"{found[0].title} {found[0].reason}"


def test_amd_is_sent_to_the_firmware_and_old_intel_kernels_to_the_option() -> None:
    amd = b.findings("C1", node(iommu=iommu(()), kernel=kernel(release="6.5.1-1-pve")))[0].fix
    assert "firmware" in amd.summary
    assert not any("amd_iommu=on" in step for step in amd.steps)
    old = node(iommu=iommu(()), kernel=kernel(release="6.5.11-8-pve"), cpu=b.Cpu(**INTEL))
    assert "intel_iommu=on" in b.findings("C1", old)[0].fix.summary
    new = node(iommu=iommu(()), kernel=kernel(release="6.8.12-4-pve"), cpu=b.Cpu(**INTEL))
    assert "VT-d" in b.findings("C1", new)[0].fix.summary


def test_the_boot_loader_decides_which_file_a_fix_names() -> None:
    grub = b.findings("C12", node(kernel=kernel(f"{GRUB} pcie_acs_override=downstream")))[0].fix.steps
    assert "update-grub" in grub
    assert not any("proxmox-boot-tool" in step for step in grub)
    systemd = b.findings("C12", node(kernel=kernel(f"{ZFS} pcie_acs_override=downstream")))[0].fix.steps
    assert "proxmox-boot-tool refresh" in systemd
    assert "update-grub" not in systemd


def test_ids_for_vfio_that_bound_nothing_are_named_without_any_vm_file() -> None:
    kernel_ = b.Kernel(modprobe=b.fact(("options vfio-pci ids=10de:2204,10de:1aef",)))
    unbound = b.snapshot(None, kernel=kernel_, pci=b.pci(b.gpu_function(device=b.RTX_3090, driver="")))
    found = b.findings("C7", unbound)
    assert [one.state for one in found] == ["fail"]
    assert "update-initramfs -u -k all" in found[0].fix.steps
    cut = b.snapshot(None, kernel=kernel_, pci=b.pci(b.gpu_function(device=b.RTX_3090), complete=False))
    found = b.findings("C7", cut)
    assert [one.state for one in found] == ["unknown"]
    assert "initramfs" in found[0].reason


def test_a_group_that_qemu_called_not_viable_names_its_endpoints_but_not_the_bridge() -> None:
    judged = b.snapshot(
        None,
        kernel=b.Kernel(log=b.log("vfio error: 0000:01:00.0: group 1 is not viable")),
        iommu=iommu(None, g1=("0000:00:01.0", "0000:01:00.0", "0000:01:00.1")),
        pci=b.pci(b.port("0000:00:01.0"), b.gpu_function(), b.audio(), complete=False),
    )
    found = b.findings("C5", judged)
    assert [one.state for one in found] == ["fail"]
    assert "0000:01:00.1" in found[0].title
    assert "0000:00:01.0" not in found[0].title
    assert "0000:00:01.0 is a bridge" in found[0].why


def test_acs_is_never_judged_on_bare_metal_nor_without_a_role() -> None:
    parts = {"pci": b.pci(*chain(OFF)), "iommu": iommu(("dmar0",), g1=("0000:01:00.0",))}
    assert b.verdicts("C13", b.snapshot("bare_metal", **parts)) == ["not_applicable"]
    found = b.findings("C13", b.snapshot(None, **parts))
    assert [one.state for one in found] == ["unknown"]
    assert "role not known" in found[0].reason
