"""Rules H: kernel parameters and DKMS."""

from __future__ import annotations

import pytest
import rule_builders as b

GRUB = "BOOT_IMAGE=/boot/vmlinuz-6.12.1-amd64 root=/dev/x ro"


def booted(text: str, role: str | None = "bare_metal", release: str = "6.12.1-amd64", **more: object) -> object:
    kernel = b.Kernel(command_line=b.fact(b.line(text), text, "proc.cmdline"), release=b.fact(release), **more)
    return b.snapshot(role, kernel=kernel)


@pytest.mark.parametrize(
    ("judged", "expected"),
    [
        (booted("quiet"), {("pass", "")}),
        (booted("mitigations=off"), {("warn", "mitigations=off")}),
        (booted("pci=noaer,noats"), {("fail", "pci=noaer"), ("fail", "pci=noats")}),
        (booted("pci=nomsi pci=realloc"), {("fail", "pci=nomsi"), ("info", "pci=realloc")}),
        (booted("nopat"), {("fail", "nopat")}),
        (booted("iommu=off"), {("info", "iommu=off")}),
        # On a hypervisor that is rule C1's.
        (booted("iommu=off", "hypervisor"), {("pass", "")}),
        (booted("amd_iommu=off iommu=pt"), {("info", "amd_iommu=off"), ("info", "iommu=pt")}),
        (booted("amd_iommu=on iommu=pt"), {("info", "amd_iommu=on")}),
        (booted("iommu=off pcie_acs_override=downstream"), {("info", "iommu=off"), ("info", "pcie_acs_override")}),
        (booted("iommu=pt iommu=off"), {("info", "iommu=off"), ("info", "iommu")}),
        (booted("console=tty0 console=ttyS0"), {("pass", "")}),
        (booted("video=efifb:off", release="5.15.64-1-pve"), {("warn", "video")}),
        (booted("video=efifb:off", release="5.10.0-13-amd64"), {("pass", "")}),
        (booted("nomodeset video=vesafb:off,x"), {("warn", "video")}),
        (
            booted("quiet", grub_settings=b.fact({"GRUB_DEFAULT": "saved", "GRUB_SAVEDEFAULT": "true"})),
            {("warn", "GRUB_DEFAULT")},
        ),
        (
            booted("quiet", grub_settings=b.fact({"GRUB_DEFAULT": '"gnulinux>x"', "GRUB_SAVEDEFAULT": "false"})),
            {("pass", "")},
        ),
        (b.snapshot(None), {("unknown", "")}),
        (
            b.snapshot(None, kernel=b.Kernel(grub_default=b.fact(b.line("mitigations=off")))),
            {("warn", "mitigations=off")},
        ),
    ],
)
def test_cmdline_hygiene(judged: object, expected: set[tuple[str, str]]) -> None:
    assert {(one.state, one.subject) for one in b.findings("H1", judged)} == expected


def test_an_override_without_iommu_says_what_makes_it_idle() -> None:
    judged = booted("iommu=off pcie_acs_override=downstream", None, "6.13.9-200.fc41.x86_64")
    title = next(one.title for one in b.findings("H1", judged) if one.subject == "pcie_acs_override")
    assert "iommu=off" in title
    assert "6.13.9-200.fc41.x86_64" in title


def test_a_file_is_not_taken_for_the_running_kernel() -> None:
    judged = b.snapshot(None, kernel=b.Kernel(grub_default=b.fact(b.line("nopat"))))
    assert "whether it runs so was not read" in b.findings("H1", judged)[0].title


def dkms(
    *states: b.DkmsState, running: str | None = "6.12.1-amd64", installed: tuple[str, ...] | None = None
) -> object:
    kernel = b.Kernel(
        release=b.fact(running) if running else b.unknown("uname was not run"),
        installed=b.fact(installed) if installed else b.unknown("/lib/modules was not read"),
    )
    return b.snapshot(kernel=kernel, driver=b.Driver(dkms=b.fact(states, "dkms", "dkms.status")))


def state(kernel: str, what: str = "installed", module: str = "nvidia", note: str = "") -> b.DkmsState:
    return b.DkmsState(module, "580.95.05", kernel, what, note)


OLD, NEW = "6.12.1-amd64", "6.12.10-amd64"


@pytest.mark.parametrize(
    ("judged", "expected", "severity"),
    [
        (dkms(state(OLD), state(NEW), installed=(OLD, NEW)), "pass", "info"),
        (dkms(state(OLD)), "pass", "info"),
        (dkms(state(NEW), installed=(OLD, NEW)), "fail", "high"),
        (dkms(state("", "added")), "fail", "high"),
        (dkms(state(OLD), installed=(OLD, NEW)), "warn", "medium"),
        (dkms(state(OLD, "failed", note="error: implicit declaration")), "fail", "high"),
        (dkms(state(OLD, "headers_missing")), "fail", "high"),
        (dkms(state(OLD, note="Diff between built and installed module!")), "warn", "low"),
        (dkms(state(OLD), running=None), "unknown", "info"),
        (dkms(), "not_applicable", "info"),
        (b.snapshot(), "unknown", "info"),
    ],
)
def test_dkms(judged: object, expected: str, severity: str) -> None:
    assert [(one.state, one.severity) for one in b.findings("H4", judged)] == [(expected, severity)]


def test_the_newest_kernel_without_a_module_is_said_to_start_next() -> None:
    newest = b.findings("H4", dkms(state(OLD), installed=(OLD, NEW)))[0]
    assert "next boot" in newest.title
    older = b.findings("H4", dkms(state(NEW), running=NEW, installed=(OLD, NEW)))[0]
    assert "next boot" not in older.title


@pytest.mark.parametrize(
    ("running", "package", "meta"),
    [
        ("6.2.16-3-pve", "pve-headers-6.2.16-3-pve", "proxmox-default-headers"),
        ("6.14.8-2-pve", "proxmox-headers-6.14.8-2-pve", "proxmox-default-headers"),
        ("6.12.1-amd64", "linux-headers-6.12.1-amd64", "linux-headers-amd64"),
    ],
)
def test_headers_are_named_as_the_distribution_names_them(running: str, package: str, meta: str) -> None:
    found = b.findings("H4", dkms(state(running, "headers_missing"), running=running))[0]
    steps = "\n".join(found.fix.steps)
    assert package in steps
    assert meta in steps
    if running.endswith("-pve"):
        assert f"not linux-headers-{running}" in found.why
        assert "linux-headers" not in steps


def test_an_older_running_kernel_is_left_before_anything_is_installed() -> None:
    judged = dkms(
        state("6.2.16-3-pve", "headers_missing"), running="6.2.16-3-pve", installed=("6.2.16-3-pve", "6.2.16-19-pve")
    )
    found = b.findings("H4", judged)[0]
    assert found.fix.steps[0].startswith("reboot")
    assert "6.2.16-19-pve" in found.why


def test_another_module_than_nvidias_is_not_as_severe() -> None:
    assert b.findings("H4", dkms(state(NEW, module="zfs"), installed=(OLD, NEW)))[0].severity == "medium"


def test_in_a_container_the_running_kernel_is_not_this_machines() -> None:
    from dataclasses import replace

    inside = b.Machine(container=b.fact("systemd-nspawn"))
    built = replace(dkms(state(NEW), running="6.1.0-host", installed=(NEW,)), machine=inside)
    assert b.verdicts("H4", built) == ["pass"]
    nothing = replace(dkms(state(NEW), running="6.1.0-host"), machine=inside)
    assert "container" in b.findings("H4", nothing)[0].reason
