"""Rules B: the configuration of Proxmox VMs with GPUs."""

from __future__ import annotations

import pytest
import rule_builders as b
from rule_builders import GIB, MIB, TWO

CLIQUE = "x-nv-gpudirect-clique"
SETS = f"-set device.hostpci0.{CLIQUE}=0 -set device.hostpci1.{CLIQUE}=0"
SLOTS = ("0000:01:00,pcie=1", "0000:02:00,pcie=1")
UNREAD = b.snapshot("hypervisor")
NO_PCI = b.Vm(mappings=b.fact({}), cpu_models=b.fact({}))


def vms(*configs: object, **more: object) -> object:
    """A hypervisor of which only the VM files are known, as from a paste."""
    made = b.Vm(configs=b.fact({one.vmid: one for one in configs}), mappings=b.fact({}), **more)
    return b.snapshot("hypervisor", "node", vm=made)


def with_models(config: object, **models: object) -> object:
    return vms(config, cpu_models=b.fact(models))


def running(*arguments: str) -> dict[str, object]:
    return {"running": b.fact(True), "running_arguments": b.fact(arguments, " ".join(arguments), "pve.running")}


RUNS = ("-cpu", "host,+kvm_pv_eoi", "-device", "vfio-pci,host=0000:01:00.0,id=hostpci0", "-device", "x,id=hostpci1")


@pytest.mark.parametrize(
    ("rule", "judged", "state", "words"),
    [
        # B1
        ("B1", b.hypervisor(b.vm_config(*TWO, cpu="host,hidden=1,flags=+pcid")), "fail", "hidden=1"),
        ("B1", b.hypervisor(b.vm_config(*TWO, args="-cpu host,kvm=off")), "fail", "its args"),
        (
            "B1",
            with_models(b.vm_config(*TWO, cpu="custom-lab"), **{"custom-lab": {"hidden": "1"}}),
            "fail",
            "CPU model",
        ),
        ("B1", b.hypervisor(b.vm_config(*TWO, **running("-cpu", "host,kvm=off"))), "fail", "still runs with kvm=off"),
        ("B1", b.hypervisor(b.vm_config(*TWO)), "pass", "does not hide"),
        ("B1", b.hypervisor(b.vm_config(*TWO, cpu="host,hidden=0")), "pass", "does not hide"),
        # kvm=off that x-vga brings is B2's.
        (
            "B1",
            b.hypervisor(b.vm_config(f"{TWO[0]},x-vga=1", TWO[1], **running("-cpu", "host,kvm=off"))),
            "pass",
            "does not hide",
        ),
        ("B1", vms(b.vm_config(*TWO, cpu="custom-lab")), "unknown", "cpu-models.conf, which was not read"),
        ("B1", b.hypervisor(b.vm_config(*TWO, excerpt=True)), "unknown", "excerpt"),
        ("B1", UNREAD, "unknown", "not collected"),
        # B2
        ("B2", b.hypervisor(b.vm_config(f"{TWO[0]},x-vga=1", TWO[1])), "fail", "hides KVM"),
        ("B2", b.hypervisor(b.vm_config(f"{TWO[0]},x-vga=1")), "info", "two GPUs"),
        ("B2", vms(b.vm_config("0000:43:00,pcie=1,x-vga=1", "0000:08:00.0,pcie=1")), "warn", "two GPUs"),
        ("B2", b.hypervisor(b.vm_config(f"{TWO[0]},x-vga=1", TWO[1], cpu="host,hidden=0")), "warn", "pointless"),
        ("B2", b.hypervisor(b.vm_config(f"{TWO[0]},x-vga=1", TWO[1], cpu="host,hidden=1")), "info", "rule B1"),
        ("B2", b.hypervisor(b.vm_config(*TWO)), "pass", "No GPU"),
        ("B2", b.hypervisor(b.vm_config(f"{TWO[0]},x-vga=0", TWO[1])), "pass", "No GPU"),
        ("B2", UNREAD, "unknown", "not collected"),
        # B3
        ("B3", b.hypervisor(b.vm_config(*TWO, cpu="host,hv-vendor-id=abc")), "info", "harmless"),
        ("B3", b.hypervisor(b.vm_config(*TWO, cpu="host,hidden=1,hv-vendor-id=abc")), "warn", "hidden KVM"),
        ("B3", b.hypervisor(b.vm_config(*TWO)), "pass", "no Hyper-V"),
        ("B3", b.hypervisor(b.vm_config(*TWO, ostype="win11")), "unknown", "not among the audited hosts"),
        # B4
        ("B4", b.hypervisor(b.vm_config(*TWO, cpu="EPYC-Milan")), "fail", "EPYC-Milan"),
        ("B4", b.hypervisor(b.vm_config(*TWO, cpu="x86-64-v2-AES")), "fail", "lacks AVX2"),
        ("B4", b.hypervisor(b.vm_config(*TWO, drop=["cpu"])), "fail", "kvm64"),
        ("B4", b.hypervisor(b.vm_config(TWO[0], cpu="EPYC")), "warn", "EPYC"),
        ("B4", b.hypervisor(b.vm_config(*TWO)), "pass", "host's CPU"),
        (
            "B4",
            with_models(b.vm_config(*TWO, cpu="custom-a"), **{"custom-a": {"reported-model": "host"}}),
            "pass",
            "host",
        ),
        ("B4", vms(b.vm_config(*TWO, cpu="custom-a")), "unknown", "was not read"),
        ("B4", b.hypervisor(b.vm_config(*TWO, excerpt=True)), "unknown", "excerpt"),
        # B5
        ("B5", b.hypervisor(b.vm_config(*TWO, cpu="EPYC")), "fail", "too few"),
        (
            "B5",
            b.hypervisor(b.vm_config(TWO[0], cpu="EPYC"), functions=b.gpus_on_bus(1, regions=b.bars(32 * GIB))),
            "info",
            "40",
        ),
        ("B5", b.hypervisor(b.vm_config(*TWO, cpu="EPYC,phys-bits=46")), "warn", "pdpe1gb"),
        ("B5", b.hypervisor(b.vm_config(*TWO, cpu="EPYC,phys-bits=46,flags=+pdpe1gb")), "pass", "46"),
        (
            "B5",
            b.hypervisor(b.vm_config(*TWO, cpu="EPYC"), cpu=b.Cpu(physical_bits=b.fact(39))),
            "warn",
            "host with 39",
        ),
        ("B5", b.hypervisor(b.vm_config(*TWO)), "pass", "46 address bits"),
        ("B5", b.hypervisor(b.vm_config(*TWO), cpu=b.Cpu()), "unknown", "host's address bits"),
        # B6
        ("B6", b.hypervisor(b.vm_config(*TWO, machine="pc")), "fail", "does not start"),
        ("B6", b.hypervisor(b.vm_config("0000:01:00.0", drop=["machine"])), "fail", "no PCIe"),
        ("B6", b.hypervisor(b.vm_config(*TWO, machine="pc-q35-9.2+pve1")), "pass", "q35"),
        ("B6", b.hypervisor(b.vm_config(*TWO, excerpt=True)), "unknown", "excerpt"),
        # B7
        ("B7", b.hypervisor(b.vm_config("0000:01:00.0", TWO[1])), "fail", "hostpci0"),
        ("B7", b.hypervisor(b.vm_config(*TWO)), "pass", "pcie=1"),
        ("B7", b.hypervisor(b.vm_config("0000:01:00.0,pcie=on")), "pass", "pcie=1"),
        ("B7", b.hypervisor(b.vm_config("0000:01:00.0", machine="pc")), "not_applicable", "B6"),
        ("B7", b.hypervisor(b.vm_config("0000:01:00.0", excerpt=True)), "unknown", "excerpt"),
        ("B7", b.hypervisor(b.vm_config(*TWO, excerpt=True)), "unknown", "there may be others"),
        # B8: the slot 01:00 has two functions here
        (
            "B8",
            b.hypervisor(b.vm_config(*SLOTS, args=SETS), functions=[b.gpu_function(), b.audio()]),
            "fail",
            "hostpci0",
        ),
        ("B8", vms(b.vm_config(*SLOTS, args=SETS)), "fail", "single function"),
        ("B8", b.hypervisor(b.vm_config(*SLOTS, args=SETS)), "pass", "undotted"),
        ("B8", b.hypervisor(b.vm_config(*TWO, args=SETS)), "pass", "undotted"),
        ("B8", vms(b.vm_config(*SLOTS)), "info", "all functions"),
        ("B8", vms(b.vm_config(*SLOTS, args=SETS, **running(*SETS.split()))), "pass", "runs with"),
        ("B8", vms(b.vm_config("mapping=gpu0,pcie=1")), "unknown", "mapping"),
        # B13
        ("B13", b.hypervisor(b.vm_config(*TWO, args="-device 'x")), "fail", "not closed"),
        ("B13", b.hypervisor(b.vm_config(*TWO, args="-device \u201cx\u201d")), "fail", "typographic"),
        ("B13", b.hypervisor(b.vm_config(*TWO, args="\u2013set device.hostpci0.a=1")), "fail", "typographic"),
        ("B13", b.hypervisor(b.vm_config(*TWO, args="-a b", duplicates=("args",))), "fail", "two args lines"),
        ("B13", b.hypervisor(b.vm_config(*TWO, args=f"-set device.hostpci7.{CLIQUE}=0")), "fail", "hostpci7"),
        ("B13", b.hypervisor(b.vm_config(*TWO, args=f"-set device.hostpci0.0.{CLIQUE}=0")), "fail", "dotted"),
        ("B13", b.hypervisor(b.vm_config(*TWO, args="-set device.hostpci0")), "fail", "group.id.property"),
        (
            "B13",
            b.hypervisor(b.vm_config(*TWO, args="""-device '{"driver":"x","id":"nic9"}' -set device.nic9.a=1""")),
            "fail",
            "JSON",
        ),
        ("B13", b.hypervisor(b.vm_config(*TWO, args=SETS)), "pass", "well formed"),
        ("B13", b.hypervisor(b.vm_config(*TWO, args="-device ivshmem-plain,memdev=a")), "info", "keep them"),
        ("B13", b.hypervisor(b.vm_config(*TWO)), "not_applicable", "no line args"),
        ("B13", UNREAD, "unknown", "not collected"),
        # B12
        ("B12", b.hypervisor(b.vm_config(*TWO, pending={"args": SETS})), "warn", "args"),
        ("B12", b.hypervisor(b.vm_config(*TWO, pending={}, pending_deletes=("hostpci0",))), "warn", "removed"),
        ("B12", b.hypervisor(b.vm_config(*TWO, args=SETS, **running(*RUNS))), "warn", "args"),
        ("B12", b.hypervisor(b.vm_config(*TWO, cpu="EPYC", **running(*RUNS))), "warn", "cpu host, not EPYC"),
        ("B12", b.hypervisor(b.vm_config(*TWO, **running("-cpu", "host"))), "warn", "hostpci0 and hostpci1"),
        ("B12", b.hypervisor(b.vm_config(*TWO, args=SETS, **running(*RUNS, *SETS.split()))), "pass", "runs as"),
        (
            "B12",
            b.hypervisor(b.vm_config(*TWO, pending={"description": "x"}, running=b.fact(False))),
            "pass",
            "stopped",
        ),
        ("B12", b.hypervisor(b.vm_config(*TWO, pending={})), "pass", "no pending"),
        ("B12", b.hypervisor(b.vm_config(*TWO)), "unknown", "neither qm pending nor"),
    ],
)
def test_vm_config(rule: str, judged: object, state: str, words: str) -> None:
    found = b.findings(rule, judged)
    assert [one.state for one in found] == [state]
    assert words in f"{found[0].title} {found[0].reason}"
    if state in ("fail", "warn") and found[0].fix:
        assert found[0].subject == "vm 101"
        assert found[0].fix.restart == "vm_stop_start"


def need(count: int, size: int) -> list[object]:
    return b.gpus_on_bus(count, driver="vfio-pci", regions=b.bars(size))


def lines(count: int) -> list[str]:
    return [f"0000:{index + 1:02x}:00.0,pcie=1" for index in range(count)]


KNOB = "-fw_cfg name=opt/ovmf/X-PciMmio64Mb,string={}"


@pytest.mark.parametrize(
    ("bits", "knob", "count", "size", "state"),
    [
        # Measured on QEMU 7.2 with OVMF 2022.11, one BAR a device.
        (39, None, 1, 32 * GIB, "pass"),
        (39, None, 2, 32 * GIB, "fail"),
        (40, None, 4, 32 * GIB, "pass"),
        (40, None, 4, 32 * GIB + 32 * MIB, "fail"),
        (40, None, 5, 32 * GIB, "fail"),
        (40, None, 1, 128 * GIB, "pass"),
        (40, None, 2, 128 * GIB, "fail"),
        (40, 262144, 1, 128 * GIB, "pass"),
        (40, 524288, 4, 128 * GIB, "pass"),
        (40, 1048576, 4, 128 * GIB, "fail"),
        (40, 65536, 4, 32 * GIB, "pass"),
        (40, 393216, 2, 128 * GIB, "pass"),
        (42, None, 8, 128 * GIB, "fail"),
        (42, 1048576, 8, 128 * GIB, "pass"),
        (46, None, 8, 128 * GIB + 96 * MIB, "pass"),
    ],
)
def test_ovmf_window_as_measured(bits: int, knob: int | None, count: int, size: int, state: str) -> None:
    more = {"args": KNOB.format(knob)} if knob else {}
    config = b.vm_config(*lines(count), cpu=f"EPYC,phys-bits={bits}", **more)
    found = b.findings("B11", b.hypervisor(config, functions=need(count, size)))
    assert [one.state for one in found] == [state]
    assert ("hangs" in found[0].title) == (knob == 1048576 and bits == 40)


def test_the_window_fix_takes_the_hosts_cpu_first_and_a_knob_only_where_that_is_short() -> None:
    eight = b.hypervisor(b.vm_config(*lines(8), cpu="EPYC"), functions=need(8, 128 * GIB))
    steps = b.findings("B11", eight)[0].fix.steps
    assert "qm set 101 --cpu host" in steps
    assert not any("X-PciMmio64Mb" in step for step in steps)
    narrow = b.hypervisor(
        b.vm_config(*lines(8), args="-device a,id=b"), functions=need(8, 128 * GIB), cpu=b.Cpu(physical_bits=b.fact(42))
    )
    steps = b.findings("B11", narrow)[0].fix.steps
    assert "qm set 101 --args '-device a,id=b -fw_cfg name=opt/ovmf/X-PciMmio64Mb,string=1048576'" in steps


@pytest.mark.parametrize(
    ("judged", "words"),
    [
        (b.hypervisor(b.vm_config(*TWO, drop=["bios"])), "SeaBIOS"),
        (b.hypervisor(b.vm_config(*TWO, excerpt=True)), "excerpt"),
        (b.hypervisor(b.vm_config(*TWO), functions=need(2, 128 * GIB)[:1]), "BAR sizes"),
        (UNREAD, "not collected"),
        (b.guest(pci=b.pci(b.gpu_function())), "BARs of the GPUs were not read"),
        (b.guest(pci=b.pci(b.gpu_function(regions=b.bars(64 * MIB)), complete=False)), "only a part"),
    ],
)
def test_an_unknown_window_is_neither_wide_nor_narrow(judged: object, words: str) -> None:
    found = b.findings("B11", judged)
    assert [one.state for one in found] == ["unknown"]
    assert words in found[0].reason


@pytest.mark.parametrize(
    ("function", "lines_", "state"),
    [
        (b.gpu_function(regions=b.bars(128 * GIB, at=None)), (), "fail"),
        (b.gpu_function(regions=b.bars(128 * GIB)), (), "pass"),
        (b.gpu_function(regions=b.bars(64 * MIB, 32 * MIB)), (), "fail"),
        (
            b.gpu_function(regions=b.bars(128 * GIB)),
            ("pci 0000:01:00.0: BAR 2 [mem size 0x2000000000 64bit pref]: can't assign; no space",),
            "fail",
        ),
        # Another device's missing window is not a GPU's.
        (
            b.gpu_function(regions=b.bars(128 * GIB)),
            ("pci 0000:00:1d.4: BAR 15 [mem size 0xc00000000 64bit pref]: failed to assign",),
            "pass",
        ),
    ],
)
def test_bars_inside_a_guest(function: object, lines_: tuple[str, ...], state: str) -> None:
    assert b.verdicts("B11", b.guest(pci=b.pci(function), kernel=b.Kernel(log=b.log(*lines_)))) == [state]


def test_fixes_keep_the_other_options_and_back_up_first() -> None:
    judged = b.hypervisor(b.vm_config(f"{TWO[0]},x-vga=1", TWO[1], cpu="host,hidden=1,flags=+pcid", vga="none"))
    first = b.findings("B1", judged)[0].fix.steps
    assert first[0] == "cp -a /etc/pve/qemu-server/101.conf /root/101.conf.before-B1"
    assert first[1] == "qm set 101 --cpu 'host,flags=+pcid'"
    assert first[-1].startswith("# way back: cp /root/101.conf.before-B1 ")
    second = b.hypervisor(b.vm_config(f"{TWO[0]},x-vga=1", TWO[1], vga="none"))
    steps = b.findings("B2", second)[0].fix.steps
    assert "qm set 101 --hostpci0 '0000:01:00.0,pcie=1'" in steps
    assert "qm set 101 --vga std" in steps


def test_a_card_that_may_not_come_back_is_named_in_the_risk() -> None:
    config = b.vm_config(*TWO, cpu="host,hidden=1")
    risky = b.findings("B1", b.hypervisor(config))[0].fix.risk
    safe = b.findings("B1", b.hypervisor(config, functions=b.gpus_on_bus(2, b.RTX_6000_ADA)))[0].fix.risk
    assert "power-cycled" in risky
    assert "power-cycled" not in safe


def test_snapshots_sections_and_vms_without_gpus_are_not_judged() -> None:
    judged = b.hypervisor(b.vm_config("0000:0e:10.4,pcie=1", cpu="EPYC"))
    assert b.verdicts("B4", judged) == ["not_applicable"]
    assert b.verdicts("B4", b.hypervisor(b.vm_config(cpu="EPYC"))) == ["not_applicable"]


def test_a_mapping_is_resolved_to_its_function() -> None:
    made = b.Vm(
        configs=b.fact({"101": b.vm_config("mapping=gpu0,pcie=1", args=f"-set device.hostpci0.{CLIQUE}=0")}),
        mappings=b.fact({"gpu0": ("0000:01:00",)}),
        cpu_models=b.fact({}),
    )
    both = b.hypervisor(functions=[b.gpu_function(), b.audio()], vm=made)
    assert b.verdicts("B8", both) == ["fail"]
    assert b.verdicts("B8", b.hypervisor(functions=[b.gpu_function()], vm=made)) == ["pass"]


def test_a_windows_ostype_under_linux_is_found_where_the_guest_is_audited() -> None:
    node = b.hypervisor(b.vm_config(*TWO, ostype="win11"))
    assert b.verdicts("B3", node, b.guest()) == ["warn"]
