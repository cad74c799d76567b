"""The engine: roles, causes first, the join of guest and hypervisor, and what every rule owes its reader."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace

import pytest
import rule_builders as b

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.finding import SEVERITIES, Finding
from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.snapshot import Fact, Snapshot
from ansible_collections.peerlane.gpu.plugins.plugin_utils.rules import engine, knowledge
from ansible_collections.peerlane.gpu.plugins.plugin_utils.rules.registry import RULES

# The catalogue: 120 rules; S judges the services on top of it.
FAMILIES = {"A": 6, "B": 23, "C": 25, "D": 18, "E": 4, "F": 26, "G": 11, "H": 7, "S": 7}
CATALOGUE = [f"{family}{one}" for family, count in FAMILIES.items() for one in range(1, count + 1)]
SLOTS = ("0000:01:00,pcie=1", "0000:02:00,pcie=1")


def sick_guest(**parts: object) -> Snapshot:
    return b.guest(**{"p2p": b.granted(2, "NS"), "gpus": b.smi_gpus(2, virtualization_mode="None"), **parts})


def hiding_node(uuid: str | None = None, **parts: object) -> Snapshot:
    more = {"smbios1": f"uuid={uuid}"} if uuid else {}
    return b.hypervisor(b.vm_config(*b.TWO, cpu="host,hidden=1", **more), **parts)


def test_the_rules_of_the_catalogue_are_there_in_order() -> None:
    assert list(RULES) == CATALOGUE


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
def test_each_rule_says_what_it_looks_at_why_and_from_where(rule: object) -> None:
    assert rule.why.endswith(".")
    assert rule.looks_at
    assert rule.sources
    assert rule.severity in SEVERITIES
    assert rule.title[0].isupper()
    if rule.restart != "none" and rule.severity != "info":
        assert rule.risk
        assert rule.verify


def test_every_threshold_has_an_origin() -> None:
    origins = knowledge.origins()
    assert len(origins) > 15
    assert all(len(origin) > 20 for origin in origins.values())


@pytest.mark.parametrize(
    ("device", "architecture", "modules"),
    [
        ("2bb5", "blackwell", "required"),
        ("2C05", "blackwell", "required"),
        ("3182", "blackwell ultra", "required"),
        ("2204", "ampere", "optional"),
        ("1db6", "volta", "unsupported"),
        ("1d01", "pascal", "unsupported"),
        ("2330", "hopper", "optional"),
    ],
)
def test_a_device_id_tells_the_family(device: str, architecture: str, modules: str) -> None:
    model = knowledge.gpu_model(device)
    assert (model.architecture, model.open_modules) == (architecture, modules)


def test_an_unknown_device_id_tells_nothing() -> None:
    assert knowledge.gpu_model("ffff") is None
    assert knowledge.gpu_model(None) is None
    assert knowledge.gpu_model_by_name("Some GeForce") is None
    assert knowledge.gpu_model_by_name("NVIDIA GeForce RTX 3090").device == "2204"


@pytest.mark.parametrize(
    ("text", "version"),
    [("575.51.02", (575, 51, 2)), ("6.12.118+deb13-amd64", (6, 12, 118)), ("", ()), ("6.8.0-111-generic", (6, 8, 0))],
)
def test_versions_compare_as_numbers(text: str, version: tuple[int, ...]) -> None:
    assert knowledge.version_tuple(text) == version


def test_a_rule_for_another_role_is_not_applicable_with_the_reason() -> None:
    found = b.findings("C1", b.guest())[0]
    assert found.state == "not_applicable"
    assert "a guest" in found.reason


def test_without_a_role_nothing_is_judged_that_needs_one() -> None:
    found = engine.judge({"x": b.snapshot(None, "x")})["x"]
    assert {one.rule for one in found} == set(RULES)
    assert {one.state for one in found} == {"unknown"}
    needing = {one.rule for one in found if "nothing tells the role" in one.reason}
    assert {"A2", "C1", "C12", "C13", "D1", "D11"} <= needing


def test_each_unknown_and_each_not_applicable_says_why() -> None:
    for role in ("bare_metal", "hypervisor", "guest", None):
        for found in engine.judge({"x": b.snapshot(role, "x")})["x"]:
            assert found.state in ("pass", "unknown", "not_applicable"), found
            assert found.state == "pass" or len(found.reason) > 5, found


def test_the_hypervisors_setting_is_the_cause_in_the_guest() -> None:
    result = engine.judge({"guest": sick_guest(), "node": hiding_node()})
    hidden = next(one for one in result["node"] if one.rule == "B1")
    assert hidden.explains == ("guest/A2", "guest/D1", "guest/D4", "guest/D5")


def test_the_uuid_decides_which_vm_a_guest_is() -> None:
    uuid = "bbbbbbbb-0000-0000-0000-000000000002"
    machine = replace(b.guest().machine, smbios_uuid=b.fact(uuid))
    own = b.vm_config(*b.TWO, vmid="102", cpu="host,hidden=1", smbios1=f"uuid={uuid.upper()}")
    other = b.vm_config(*b.TWO, vmid="103")
    result = engine.judge({"guest": sick_guest(machine=machine), "node": b.hypervisor(own, other)})
    assert next(one for one in result["node"] if one.rule == "B1" and one.bad).explains
    strange = engine.judge({"guest": sick_guest(machine=machine), "node": hiding_node()})
    assert not next(one for one in strange["node"] if one.rule == "B1").explains


def test_a_guest_whose_home_is_not_known_says_so() -> None:
    alone = next(one for one in engine.judge({"guest": sick_guest()})["guest"] if one.rule == "D1")
    assert "its hypervisor is not among the audited hosts" in alone.why
    two = b.hypervisor(b.vm_config(*b.TWO, vmid="102"), b.vm_config(*b.TWO, vmid="103"))
    several = next(one for one in engine.judge({"guest": sick_guest(), "node": two})["guest"] if one.rule == "D1")
    assert "2 VMs with GPUs are left and nothing tells which belong together" in several.why


def test_causes_precede_what_they_explain() -> None:
    found = [one for one in engine.judge({"guest": sick_guest()})["guest"] if one.bad]
    order = [one.rule for one in found]
    assert order.index("A2") < order.index("D1") < order.index("D5")


def made(rule: str, severity: str = "high", state: str = "fail", explains: tuple[str, ...] = ()) -> Finding:
    return Finding(rule, "x", state, rule, severity=severity, explains=explains)


def test_a_mild_cause_takes_the_place_of_the_worst_that_it_explains() -> None:
    found = engine.order(
        [made("A1", "high"), made("B1", "critical"), made("Z1", "low", "warn", ("B1",)), made("C1", state="pass")]
    )
    assert [one.rule for one in found] == ["Z1", "B1", "A1", "C1"]


def test_rule_ids_sort_as_people_read_them() -> None:
    found = engine.order([made("B11"), made("B2"), made("A6")])
    assert [one.rule for one in found] == ["A6", "B2", "B11"]


def test_a_circle_of_explanations_loses_no_finding() -> None:
    found = engine.order([made("A1", explains=("B1",)), made("B1", explains=("A1",))])
    assert sorted(one.rule for one in found) == ["A1", "B1"]


def test_explanations_name_only_findings_that_are_there() -> None:
    healthy = engine.judge({"x": b.guest(gpus=b.smi_gpus(2, virtualization_mode="None"))})["x"]
    bad = {one.rule for one in healthy if one.bad}
    for one in healthy:
        assert set(one.explains) <= bad


@pytest.mark.parametrize(
    ("fail_on", "expected"),
    [
        ("critical", ["A5"]),
        ("high", ["A5", "B1"]),
        ("medium", ["A5", "B1", "D2"]),
        ("low", ["A5", "B1", "D2", "H1"]),
    ],
)
def test_what_blocks_a_deployment(fail_on: str, expected: list[str]) -> None:
    findings = [
        made("A5", "critical"),
        made("B1"),
        made("B1"),
        made("D2", "medium", "warn"),
        made("H1", "low", "warn"),
        made("C1", "critical", "unknown"),
        made("C2", "high", "pass"),
    ]
    assert engine.blocking(findings, fail_on) == expected


def test_a_rule_describes_itself_by_id_or_name() -> None:
    by_id, by_name = engine.describe("b1"), engine.describe("pve-cpu-hidden")
    assert by_id == by_name
    assert by_id["gain"]["value"] == "14 -> 0.45"
    assert any("clique" in note for note in by_id["security_notes"])
    assert engine.describe("B99") is None


def rich() -> list[Snapshot]:
    """Hosts in which much is known and much is wrong."""
    log = b.log(
        "NVRM: None of the NVIDIA devices were initialized",
        "vfio error: 0000:01:00.0: group 1 is not viable",
        "Key was rejected by service",
    )
    kernel = b.Kernel(
        release=b.fact("6.2.16-3-pve"),
        command_line=b.fact(b.line("iommu=off pcie_acs_override=downstream mitigations=off video=efifb:off")),
        grub_default=b.fact(b.line("iommu=pt")),
        log=log,
        modules=b.fact({"nouveau": 1}),
        installed=b.fact(("6.2.16-3-pve", "6.2.16-19-pve")),
    )
    driver = b.Driver(
        smi=b.smi("lost_gpu", lost=("0000:01:00.0",)),
        loaded_version=b.fact("550.1"),
        library_version=b.fact("560.2"),
        loaded_flavour=b.fact("proprietary"),
        dkms=b.fact((b.DkmsState("nvidia", "550.1", "6.2.16-3-pve", "failed"),)),
        secure_boot=b.fact("enabled"),
    )
    parts = {"kernel": kernel, "driver": driver, "topology": b.topology(2, "SYS"), "p2p": b.granted(2, "CNS")}
    configs = [
        b.vm_config(*SLOTS, cpu="custom-x,hidden=1", machine="pc", args="-set device.hostpci9.a='", vmid="100"),
        b.vm_config(f"{b.TWO[0]},x-vga=1", "mapping=none", "", vmid="101", cpu="", args="-set"),
        b.vm_config(vmid="odd;id", excerpt=True),
    ]
    return [
        b.guest(**parts),
        b.hypervisor(*configs, kernel=kernel, driver=driver),
        b.snapshot(None, "nobody", **parts),
        b.snapshot(
            "bare_metal", "metal", pci=b.pci(b.gpu_function(off_bus=True, regions=b.bars(b.GIB, at=None))), **parts
        ),
    ]


def blanks(snapshot: Snapshot) -> list[Snapshot]:
    """The same host with one part after the other not read."""
    found = []
    for part in fields(snapshot):
        value = getattr(snapshot, part.name)
        if isinstance(value, Fact):
            found.append(replace(snapshot, **{part.name: b.unknown("blanked")}))
        elif hasattr(value, "__dataclass_fields__"):
            for inner in fields(value):
                if isinstance(getattr(value, inner.name), Fact):
                    blank = replace(value, **{inner.name: b.unknown("blanked")})
                    found.append(replace(snapshot, **{part.name: blank}))
    return found


def test_no_rule_raises_whatever_is_missing() -> None:
    hosts = rich()
    for index, host in enumerate(hosts):
        others = {one.host: one for one in hosts[:index] + hosts[index + 1 :]}
        for variant in [host, *blanks(host)]:
            result = engine.judge({variant.host: variant, **others})
            assert {one.rule for one in result[variant.host]} == set(RULES)
            for one in itertools.chain.from_iterable(result.values()):
                assert one.title
                assert one.state not in ("unknown", "not_applicable") or one.reason


def test_what_was_blanked_never_turns_into_a_new_failure_of_the_same_rule() -> None:
    healthy = b.guest(p2p=b.granted(2), nccl=b.settings(), topology=b.topology(2))
    before = {one.rule for one in engine.judge({"guest": healthy})["guest"] if one.state == "fail"}
    for variant in blanks(healthy):
        after = {one.rule for one in engine.judge({"guest": variant})["guest"] if one.state == "fail"}
        assert after <= before
