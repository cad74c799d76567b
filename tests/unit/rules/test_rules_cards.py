"""A fleet can be joined and judged by its cards: one group of hosts after the other, no other snapshot at hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import rule_builders as b

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.snapshot import Snapshot
from ansible_collections.peerlane.gpu.plugins.plugin_utils.rules import engine
from ansible_collections.peerlane.gpu.plugins.plugin_utils.rules.cards import card
from ansible_collections.peerlane.gpu.plugins.plugin_utils.rules.join import JoinedFleet, Place

UUID = "bbbbbbbb-0000-0000-0000-00000000010{}"


def guest(number: int, host: str = "", driver: str = "580.95.05") -> Snapshot:
    made = b.guest(2, host or f"g{number}", p2p=b.granted(2, "NS"))
    machine = replace(made.machine, smbios_uuid=b.fact(UUID.format(number)))
    return replace(made, machine=machine, driver=replace(made.driver, loaded_version=b.fact(driver)))


def node(host: str, *numbers: int) -> Snapshot:
    vms = (
        b.vm_config(*b.TWO, vmid=f"10{one}", cpu="host,hidden=1", smbios1=f"uuid={UUID.format(one)}") for one in numbers
    )
    return b.hypervisor(*vms, host=host)


HOSTS = (guest(1), guest(2), node("pve1", 1, 3), guest(3, driver="570.1"), node("pve2", 2), guest(9))
FLEET = {one.host: one for one in HOSTS}


class Lent(Mapping[str, Snapshot]):
    """A fleet that hands out only the snapshots that it was told to."""

    def __init__(self) -> None:
        self.lent: tuple[str, ...] = ()

    def __getitem__(self, host: str) -> Snapshot:
        assert host in self.lent, f"{host} is not at hand"
        return FLEET[host]

    def __iter__(self) -> Iterator[str]:
        return iter(FLEET)

    def __len__(self) -> int:
        return len(FLEET)


def test_a_group_is_a_hypervisor_with_its_guests() -> None:
    groups = JoinedFleet(FLEET).groups()
    assert groups == [("g1", "pve1", "g3"), ("g2", "pve2"), ("g9",)]


def test_a_group_needs_no_other_snapshot_and_gets_the_findings_of_the_whole_fleet() -> None:
    lent = Lent()
    fleet = JoinedFleet(lent, map(card, HOSTS))
    found = {}
    for group in fleet.groups():
        lent.lent = group
        found |= engine.judge_group(fleet, group)
    assert found == engine.judge(FLEET)
    told = next(one for one in found["g3"] if one.rule == "F4" and one.state == "warn")
    assert told.title == "This host has driver 570.1, while g1, g2 and g9 has 580.95.05"
    assert any("hidden=1" in one.excerpt for finding in found["g1"] for one in finding.evidence if finding.rule == "D5")


def test_guests_in_a_circle_are_one_group(monkeypatch) -> None:
    fleet = JoinedFleet(dict.fromkeys(("z", "a", "b"), FLEET["g9"]), ())
    circle = {"a": Place("b", "1"), "b": Place("a", "1"), "z": Place("a", "1")}
    monkeypatch.setattr(JoinedFleet, "homes", circle)
    assert fleet.groups() == [("z", "a", "b")]
