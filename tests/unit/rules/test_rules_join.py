"""Which guest runs in which VM, and which line of the VM's configuration stands behind a guest's finding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import rule_builders as b
from rule_builders import TWO

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.finding import Finding
from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.snapshot import Snapshot, VmConfig
from ansible_collections.peerlane.gpu.plugins.plugin_utils.rules import engine, join

CLIQUE = "x-nv-gpudirect-clique"
ONE_CLIQUE = f"-set device.hostpci0.{CLIQUE}=0"
UUIDS = {"101": "bbbbbbbb-0000-0000-0000-000000000101", "102": "bbbbbbbb-0000-0000-0000-000000000102"}
MACS = {"101": "02:00:00:00:01:01", "102": "02:00:00:00:01:02"}
STARTED, LATER = 1_700_000_000, 1_700_100_000


def vm(vmid: str, *devices: str, uuid: bool = True, mac: bool = False, **more: object) -> VmConfig:
    """A VM with two GPUs; with or without an id line and a network card."""
    settings = {"smbios1": f"uuid={UUIDS[vmid].upper()}"} if uuid else {}
    settings |= {"net0": f"virtio={MACS[vmid].upper()},bridge=vmbr0,firewall=1"} if mac else {}
    return b.vm_config(*(devices or TWO), vmid=vmid, drop=() if uuid else ["smbios1"], **{**settings, **more})


def guest(host: str = "guest", uuid: str = "", mac: str = "", inventory: object = None, **parts: object) -> Snapshot:
    """A guest to which the driver grants nothing."""
    machine = parts.pop("machine", b.guest().machine)
    if uuid:
        machine = replace(machine, smbios_uuid=b.fact(UUIDS[uuid]))
    if mac:
        machine = replace(machine, macs=b.fact((MACS[mac],)))
    made = b.guest(host=host, machine=machine, **{"p2p": b.granted(2, "NS"), **parts})
    return replace(made, inventory=inventory or {})


def home(of: Snapshot, *others: Snapshot) -> tuple[str, str] | str:
    found = join.home_of(of, {one.host: one for one in (of, *others)})
    return found.key if isinstance(found, join.Home) else found


NODE = b.hypervisor(vm("101"), vm("102"))
NO_IDS = b.hypervisor(vm("101", uuid=False, mac=True), vm("102", uuid=False, mac=True))
NAMELESS = b.hypervisor(vm("101", uuid=False), vm("102", uuid=False))
SECOND = b.hypervisor(vm("101", uuid=False), host="other")
# VM 102 has two cards of another model.
MODELS = b.hypervisor(
    vm("101", uuid=False),
    vm("102", "0000:03:00.0,pcie=1", "0000:04:00.0,pcie=1", uuid=False),
    functions=[
        *b.gpus_on_bus(2),
        b.gpu_function("0000:03:00.0", b.RTX_3090),
        b.gpu_function("0000:04:00.0", b.RTX_3090),
    ],
)
OLD_CARDS = {"pci": b.pci(*b.gpus_on_bus(2, b.RTX_3090), approvals=b.cliques(None, None))}


@pytest.mark.parametrize(
    ("of", "others", "expected"),
    [
        # the inventory decides
        (guest(inventory={"hypervisor": "node", "vmid": "102"}), [NODE], ("node", "102")),
        (guest(uuid="101", inventory={"vmid": "102"}), [NODE], ("node", "102")),
        (
            guest(inventory={"vmid": "101"}),
            [NAMELESS, SECOND],
            "fits 2 VMs (VM 101 of node, VM 101 of other)",
        ),
        (guest(inventory={"hypervisor": "node.example", "vmid": "102"}), [NODE], ("node", "102")),
        (guest(inventory={"vmid": "900"}), [NODE], "the inventory says VM 900, which no audited host has"),
        (guest(inventory={"hypervisor": "gone"}), [NODE], "runs on gone, which is not among the audited hypervisors"),
        # then the UUID, whatever the case of its letters
        (guest(uuid="102"), [NODE], ("node", "102")),
        (guest(uuid="102", mac="101"), [NODE], ("node", "102")),
        # then a network card
        (guest(mac="102"), [NO_IDS], ("node", "102")),
        (guest(uuid="102", mac="101"), [NO_IDS], ("node", "101")),
        # then models and number of the GPUs
        (guest(), [MODELS], ("node", "101")),
        (guest(**OLD_CARDS), [MODELS], ("node", "102")),
        (guest(uuid="101", **OLD_CARDS), [MODELS], ("node", "102")),
        # last, the only VM for the only guest
        (guest(), [SECOND], ("other", "101")),
        (guest(), [NAMELESS], "2 VMs with GPUs are left and nothing tells which belong together"),
        (guest(), [SECOND, guest("another")], "VM 101 and 2 guests are left"),
        (guest(mac="102"), [b.hypervisor(vm("101", uuid=False, mac=True))], "no VM with GPUs"),
        (guest(uuid="102"), [b.hypervisor(vm("101"))], "no audited hypervisor has a VM with this guest's SMBIOS UUID"),
        (guest(), [b.hypervisor(b.vm_config())], "is left for it"),
        (guest(), [], "its hypervisor is not among the audited hosts"),
    ],
)
def test_where_a_guest_runs(of: Snapshot, others: list[Snapshot], expected: tuple[str, str] | str) -> None:
    found = home(of, *others)
    assert found == expected or (isinstance(found, str) and isinstance(expected, str) and expected in found), found


def test_a_uuid_that_two_copies_of_a_vm_share_means_the_one_that_runs() -> None:
    copy = b.hypervisor(vm("101", running=b.fact(False)), host="other")
    runs = b.hypervisor(vm("101", running=b.fact(True)))
    assert home(guest(uuid="101"), copy, runs) == ("node", "101")
    unsure = home(guest(uuid="101"), b.hypervisor(vm("101"), host="other"), b.hypervisor(vm("101")))
    assert "the SMBIOS UUID fits 2 VMs" in unsure


def test_a_uuid_without_meaning_joins_nothing() -> None:
    zero = "00000000-0000-0000-0000-000000000000"
    machine = replace(b.guest().machine, smbios_uuid=b.fact(zero))
    node = b.hypervisor(b.vm_config(*TWO, vmid="101", smbios1=f"uuid={zero}"), vm("102"))
    assert isinstance(home(guest(machine=machine), node), str)


def test_guests_of_equal_vms_stay_apart_from_each_other() -> None:
    pair = [guest("a", uuid="101"), guest("b", uuid="102")]
    fleet = join.JoinedFleet({one.host: one for one in (*pair, NODE)})
    assert {name: one.key for name, one in fleet.homes.items()} == {"a": ("node", "101"), "b": ("node", "102")}
    assert join.guest_of(NODE, NODE.vm.configs.value["102"], fleet).host == "b"


def test_a_stopped_vm_is_nobodys_home_by_its_devices() -> None:
    node = b.hypervisor(vm("101", uuid=False, running=b.fact(False)), vm("102", uuid=False))
    assert home(guest(), node) == ("node", "102")


# --- the line behind a guest's finding ------------------------------------------------------------------------------


def judged(of: Snapshot, config: VmConfig, **parts: object) -> dict[str, tuple[Finding, ...]]:
    return engine.judge({of.host: of, "node": b.hypervisor(config, **parts)})


HIDDEN = guest(uuid="101", gpus=b.smi_gpus(2, virtualization_mode="None"))
PARTIAL = {"pci": b.pci(*b.gpus_on_bus(2), approvals=b.cliques(0, None))}
RUNS = ("-cpu", "host", "-device", "vfio-pci,id=hostpci0", "-device", "vfio-pci,id=hostpci1")


@pytest.mark.parametrize(
    ("of", "config", "rule", "line"),
    [
        (HIDDEN, vm("101", cpu="host,hidden=1"), "D5", "cpu: host,hidden=1"),
        (HIDDEN, vm("101", f"{TWO[0]},x-vga=1", TWO[1]), "D5", "hostpci0: 0000:01:00.0,pcie=1,x-vga=1"),
        (guest(uuid="101"), vm("101", cpu="EPYC"), "D5", "cpu: EPYC"),
        (guest(uuid="101"), vm("101"), "D1", "(no line args:)"),
        (guest(uuid="101"), vm("101", args=ONE_CLIQUE), "D1", f"args: {ONE_CLIQUE}"),
        (guest(uuid="101", **PARTIAL), vm("101", args=ONE_CLIQUE), "D2", f"args: {ONE_CLIQUE}"),
        (
            guest(uuid="101"),
            vm("101", "0000:01:00,pcie=1", "0000:02:00,pcie=1", args=ONE_CLIQUE),
            "D1",
            "hostpci0: 0000:01:00,pcie=1",
        ),
        (guest(uuid="101"), vm("101", machine="pc-i440fx-9.2"), "D5", "machine: pc-i440fx-9.2"),
        (guest(uuid="101"), vm("101", pending={"args": ONE_CLIQUE}), "D1", f"new args: {ONE_CLIQUE}"),
        (
            guest(uuid="101", pci=b.pci(*b.gpus_on_bus(2, regions=b.bars(b.GIB, at=None)))),
            vm("101", cpu="EPYC"),
            "B11",
            "cpu: EPYC",
        ),
    ],
)
def test_a_guests_finding_names_the_line_behind_it(of: Snapshot, config: VmConfig, rule: str, line: str) -> None:
    functions = [
        *b.gpus_on_bus(2, regions=b.bars(128 * b.GIB), driver="vfio-pci"),
        b.audio("0000:01:00.1"),
        b.audio("0000:02:00.1"),
    ]
    result = judged(of, config, functions=functions)
    found = next(one for one in result["guest"] if one.rule == rule and one.bad)
    behind = [one.excerpt for one in found.evidence if one.source.startswith("node: ")]
    assert any(line in excerpt for excerpt in behind), behind
    assert "the SMBIOS UUID" in found.why


def test_the_cause_on_the_hypervisor_explains_only_what_is_there() -> None:
    result = judged(guest(uuid="101"), vm("101", cpu="host,hidden=1"))
    hidden = next(one for one in result["node"] if one.rule == "B1")
    bad = {f"guest/{one.rule}" for one in result["guest"] if one.bad}
    assert set(hidden.explains) <= bad
    assert "guest/D5" in hidden.explains


def test_a_healthy_guest_gets_no_line_of_its_vm() -> None:
    fine = guest(uuid="101", p2p=b.granted(2))
    for one in judged(fine, vm("101", cpu="host,hidden=1"))["guest"]:
        assert one.bad or not any(piece.source.startswith("node: ") for piece in one.evidence)


def test_a_finding_whose_vm_is_not_known_says_so() -> None:
    lost = guest(pci=b.Pci())
    found = next(one for one in engine.judge({"guest": lost})["guest"] if one.rule == "D5")
    assert "The VM settings behind it are not known: its hypervisor is not among the audited hosts" in found.why


def times(booted: int | None, started: int | None = STARTED) -> tuple[Snapshot, VmConfig]:
    machine = replace(b.guest().machine, booted_at=b.fact(booted)) if booted else b.guest().machine
    config = vm("101", args=ONE_CLIQUE, running=b.fact(True), changed_at=b.fact(STARTED + 5000))
    config = replace(config, running_arguments=b.fact(RUNS, "-cpu host", "pve.running"))
    return guest(uuid="101", machine=machine), replace(config, started_at=b.fact(started, "started", "pve.running"))


@pytest.mark.parametrize(
    ("booted", "inside"), [(LATER, True), (STARTED + 60, False), (None, False), (STARTED - 86400, False)]
)
def test_a_reboot_inside_the_guest_keeps_the_old_command_line(booted: int | None, inside: bool) -> None:
    of, config = times(booted)
    result = judged(of, config)
    found = next(one for one in result["node"] if one.rule == "B12")
    assert found.state == "warn"
    assert "its args are not on the command line" in found.title
    assert ("guest was only rebooted from inside" in found.title) is inside
    if inside:
        assert any("QEMU process started 2023-11-14T22:13+00:00" in one.excerpt for one in found.evidence)
        absent = next(one for one in result["guest"] if one.rule == "D1")
        assert "only rebooted from inside" in absent.why


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("-cpu", "host,kvm=off", *RUNS[2:]), "it runs with kvm=off"),
        ((*RUNS, "-machine", "type=pc-i440fx-9.2+pve1"), "it runs as machine type=pc-i440fx-9.2+pve1, not q35"),
        ((*RUNS, "-set", f"device.hostpci0.{CLIQUE}=0"), ""),
    ],
)
def test_what_runs_is_compared_with_what_is_configured(arguments: tuple[str, ...], words: str) -> None:
    config = replace(vm("101", args=ONE_CLIQUE if not words else ""), running=b.fact(True))
    config = replace(config, running_arguments=b.fact(arguments, " ".join(arguments), "pve.running"))
    (found,) = b.findings("B12", b.hypervisor(config))
    assert (found.state, words in found.title) == ("warn" if words else "pass", True), found.title


def test_steps_for_the_hypervisor_name_it_once_it_is_known() -> None:
    alone = next(one for one in engine.judge({"guest": HIDDEN})["guest"] if one.rule == "A2")
    joined = next(one for one in judged(HIDDEN, vm("101", cpu="host,hidden=1"))["guest"] if one.rule == "A2")
    assert alone.fix.steps[0] == join.UNKNOWN_HOME
    assert joined.fix.steps[:2] == ("# on node", "cp -a /etc/pve/qemu-server/101.conf /root/101.conf.before-A2")


def test_a_missing_clique_is_named_beside_what_hides_it() -> None:
    found = next(one for one in judged(HIDDEN, vm("101", cpu="host,hidden=1"))["guest"] if one.rule == "D1")
    assert "hides KVM" in found.why
    assert "VM 101 on node sets no P2P clique" in found.why
    assert [one.excerpt for one in found.evidence[-2:]] == ["cpu: host,hidden=1", "(no line args:)"]


def test_an_excerpt_says_nothing_of_the_args_that_it_lacks() -> None:
    config = b.vm_config(*TWO, vmid="101", excerpt=True, smbios1=f"uuid={UUIDS['101']}")
    cut = replace(config, settings={key: value for key, value in config.settings.items() if key != "smbios1"})
    found = next(one for one in judged(guest(), cut)["guest"] if one.rule == "D1")
    assert "sets no P2P clique" not in found.why


def test_the_command_that_verifies_names_the_vm() -> None:
    hidden = next(one for one in judged(HIDDEN, vm("101", cpu="host,hidden=1"))["node"] if one.rule == "B1")
    assert "/run/qemu-server/101.pid" in hidden.verify
