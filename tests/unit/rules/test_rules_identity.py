"""Rules A: what fires, what must not, and what stays unknown, with the evidence that is missing."""

from __future__ import annotations

import pytest
import rule_builders as b

EPYC = b.fact("AMD EPYC 9575F 64-Core Processor")


def virt(text: str | None, **more: object) -> b.Machine:
    return b.Machine(virt=b.fact(text) if text else b.unknown("systemd-detect-virt was not run"), **more)


QEMU_DMI = {"sys_vendor": b.fact("QEMU"), "product_name": b.fact("Standard PC (Q35 + ICH9, 2009)")}


@pytest.mark.parametrize(
    ("rule", "judged", "state", "words"),
    [
        ("A1", b.guest(), "pass", "virtual machine"),
        ("A1", b.snapshot("bare_metal", machine=virt("none")), "pass", "bare metal"),
        ("A1", b.guest(machine=virt("qemu", **QEMU_DMI)), "info", "not kvm"),
        ("A1", b.snapshot("guest", machine=virt("vmware")), "info", "vmware"),
        ("A1", b.snapshot(None), "unknown", "nothing tells the role"),
        ("A2", b.guest(gpus=b.smi_gpus(2, virtualization_mode="None")), "fail", "hidden"),
        ("A2", b.guest(machine=virt("qemu", **QEMU_DMI), gpus=b.unknown("no driver")), "fail", "says qemu"),
        ("A2", b.guest(machine=virt("microsoft", **QEMU_DMI), gpus=b.unknown("no driver")), "fail", "microsoft"),
        ("A2", b.guest(), "pass", "passed through"),
        ("A2", b.guest(gpus=b.unknown("no driver")), "pass", "KVM is visible"),
        # kvm proves something only where DMI says QEMU: elsewhere the DMI product alone may be "KVM".
        ("A2", b.guest(machine=virt("kvm", product_name=b.fact("KVM")), gpus=b.unknown("no driver")), "unknown", "DMI"),
        # A hidden KVM with a generic CPU type cannot be told from emulation.
        (
            "A2",
            b.guest(
                machine=virt("qemu", **QEMU_DMI),
                gpus=b.unknown("no driver"),
                cpu=b.Cpu(model_name=b.fact("QEMU Virtual CPU version 2.5+")),
            ),
            "unknown",
            "emulation",
        ),
        ("A2", b.guest(machine=virt(None), gpus=b.unknown("no driver")), "unknown", "systemd-detect-virt"),
        ("A2", b.guest(gpus=b.smi_gpus(2, virtualization_mode="VGPU")), "not_applicable", "A4"),
        ("A3", b.snapshot(machine=b.Machine(container=b.fact("lxc"))), "info", "lxc container"),
        ("A3", b.snapshot(machine=b.Machine(container=b.fact("none"))), "pass", "no container"),
        ("A3", b.snapshot(), "unknown", "not collected"),
        ("A4", b.guest(gpus=b.smi_gpus(2, virtualization_mode="VGPU")), "fail", "virtual GPUs"),
        ("A4", b.guest(1, gpus=b.smi_gpus(1, virtualization_mode="VGPU")), "info", "virtual GPU"),
        ("A4", b.guest(), "pass", "vGPU"),
        ("A4", b.guest(gpus=b.unknown("nvidia-smi -q was not run")), "unknown", "nvidia-smi -q was not run"),
        ("A5", b.guest(3, gpus=b.smi_gpus(2)), "fail", "2 of the 3"),
        ("A5", b.guest(gpus=b.unknown("none"), driver=b.Driver(smi=b.smi("no_devices"))), "fail", "0 of the 2"),
        ("A5", b.guest(), "pass", "all of the 2 GPUs"),
        ("A5", b.guest(0), "not_applicable", "no NVIDIA GPU"),
        ("A5", b.guest(pci=b.pci(*b.gpus_on_bus(3), complete=False)), "unknown", "only a part"),
        # A cut nvidia-smi table proves no count where another output shows more.
        ("A5", b.guest(2, gpus=b.smi_gpus(1), topology=b.topology(2)), "pass", "all of the 2 GPUs"),
        ("A6", b.guest(), "pass", "q35"),
        (
            "A6",
            b.guest(machine=virt("kvm", product_name=b.fact("Standard PC (i440FX + PIIX, 1996)"))),
            "warn",
            "i440FX",
        ),
        ("A6", b.guest(pci=b.pci(b.gpu_function("0000:00:0a.0"))), "warn", "without a PCIe root port"),
        (
            "A6",
            b.guest(
                pci=b.pci(
                    b.gpu_function("0000:02:01.0", parent="0000:01:00.0"),
                    b.port("0000:01:00.0", vendor="1b36", device="000e"),
                )
            ),
            "warn",
            "0000:02:01.0",
        ),
        ("A6", b.guest(machine=virt("kvm")), "unknown", "dmi"),
    ],
)
def test_identity(rule: str, judged: object, state: str, words: str) -> None:
    found = b.findings(rule, judged)
    assert [one.state for one in found] == [state]
    assert words in f"{found[0].title} {found[0].reason}"
    assert state not in ("fail", "warn") or found[0].fix is not None


def test_a_hidden_kvm_is_critical_where_a_clique_is_configured() -> None:
    judged = b.guest(
        gpus=b.smi_gpus(2, virtualization_mode="None"), pci=b.pci(*b.gpus_on_bus(2), approvals=b.cliques(0, 0))
    )
    assert b.findings("A2", judged)[0].severity == "critical"
    assert b.findings("A2", b.guest(gpus=b.smi_gpus(2, virtualization_mode="None")))[0].severity == "high"


def test_a_refused_gpu_shows_in_the_kernel_log_even_without_a_role() -> None:
    judged = b.snapshot(None, kernel=b.Kernel(log=b.log("nvidia: probe of 0000:01:00.0 failed with error -1")))
    found = b.findings("A5", judged)
    assert found[0].state == "fail"
    assert "probe of 0000:01:00.0" in found[0].evidence[0].excerpt


def test_gpus_that_the_hypervisor_passes_and_the_guest_lacks_are_counted() -> None:
    node = b.hypervisor(b.vm_config(*b.TWO))
    assert b.verdicts("A5", b.guest(1), node) == ["fail"]
    assert b.verdicts("A5", b.guest(2), node) == ["pass"]


def test_no_fix_ever_hides_kvm() -> None:
    for found in b.findings("A2", b.guest(gpus=b.smi_gpus(2, virtualization_mode="None"))):
        assert found.fix is not None
        assert not any("qm set" in step and "hidden=1" in step for step in found.fix.steps)
