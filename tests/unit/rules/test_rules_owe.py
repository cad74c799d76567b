"""What each finding owes its reader: evidence, why, a fix with steps to copy, its risk, and how to verify it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import rule_builders as b
import test_rules_apt
import test_rules_driver
import test_rules_fabric
import test_rules_gpu
import test_rules_hygiene
import test_rules_hypervisor
import test_rules_identity
import test_rules_links
import test_rules_p2p
import test_rules_paths
import test_rules_platform
import test_rules_runtime
import test_rules_services
import test_rules_vm_config
import test_rules_vm_resources
import test_rules_vm_settings
import test_rules_xid

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.finding import Finding
from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.snapshot import Snapshot
from ansible_collections.peerlane.gpu.plugins.plugin_utils.rules import engine
from ansible_collections.peerlane.gpu.plugins.plugin_utils.rules.registry import RULES

TABLES = {
    "A": test_rules_identity.test_identity,
    "B": test_rules_vm_config.test_vm_config,
    "C": test_rules_hypervisor.test_hypervisor,
    "D": test_rules_p2p.test_p2p,
    "D paths": test_rules_paths.test_paths,
    "D fabric": test_rules_fabric.test_fabric,
    "G": test_rules_runtime.test_runtime,
    "S": test_rules_services.test_services,
    "platform": test_rules_platform.test_platform,
    "F": test_rules_driver.test_driver,
    "F gpu": test_rules_gpu.test_gpus,
    "F links": test_rules_links.test_links,
    "F15": test_rules_xid.test_xid,
    "apt": test_rules_apt.test_apt,
    "H": test_rules_hygiene.test_cmdline_hygiene,
    "H4": test_rules_hygiene.test_dkms,
    "B settings": test_rules_vm_settings.test_vm_settings,
    "B resources": test_rules_vm_resources.test_vm_resources,
    "B11": test_rules_vm_config.test_an_unknown_window_is_neither_wide_nor_narrow,
}


def judged(table: object) -> Iterator[Finding]:
    for mark in table.pytestmark:
        for row in mark.args[1]:
            for snapshot in row:
                if isinstance(snapshot, Snapshot):
                    yield from engine.judge({snapshot.host: snapshot})[snapshot.host]


EVERY = {name: tuple(judged(table)) for name, table in TABLES.items()}
# B11 has its own table of measured windows.
WINDOW = b.hypervisor(b.vm_config(*b.TWO, cpu="EPYC"))
# A1 and A3 only tell what the machine is, B23 what NCCL makes of it; the others tell what a person should know.
INFO_ONLY = ("A1", "A3", "B23", "C2", "D17", "F20", "F22", "F25", "E4", "H3", "H7")
EVERY["window"] = tuple(one for one in engine.judge({"node": WINDOW})["node"] if one.rule == "B11")


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_has_a_case_for_each_of_its_outcomes(rule: str) -> None:
    states = {one.state for ones in EVERY.values() for one in ones if one.rule == rule}
    assert "unknown" in states
    assert states & {"pass", "not_applicable"}
    assert states & ({"info"} if rule in INFO_ONLY else {"fail", "warn"})


@pytest.mark.parametrize("table", EVERY)
def test_each_bad_finding_is_complete(table: str) -> None:
    for one in EVERY[table]:
        if not one.bad:
            continue
        assert any(piece.source and piece.excerpt for piece in one.evidence), one.title
        assert one.why, one.title
        assert one.fix is not None, one.title
        assert one.fix.summary, one.title
        assert one.fix.steps, one.title
        assert one.verify, one.title
        assert one.sources, one.title


@pytest.mark.parametrize("table", EVERY)
def test_no_fix_does_what_must_never_be_done(table: str) -> None:
    for one in EVERY[table]:
        for step in one.fix.steps if one.fix else ():
            command = step.partition("   #")[0]
            if command.startswith("#"):
                continue
            assert "hidden=1" not in command
            assert "disable_acs" not in command
            assert "allow_unsafe_interrupts" not in command
            assert "\n" not in command
        commands = [step for step in one.fix.steps if step.startswith("qm set ")] if one.fix else []
        if commands:
            assert any(step.startswith("cp -a /etc/pve/qemu-server/") for step in one.fix.steps), one.title
            assert one.fix.restart == "vm_stop_start"


@pytest.mark.parametrize("table", EVERY)
def test_a_title_is_one_line_of_plain_words(table: str) -> None:
    for one in EVERY[table]:
        assert one.title == one.title.strip()
        assert "\n" not in one.title
        assert not one.title.endswith(".")
