"""The terminal report: cause first, narrow enough, and safe to print."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import rule_builders as b

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.finding import Excerpt, Finding, Fix
from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.snapshot import Gpu, Snapshot
from ansible_collections.peerlane.gpu.plugins.plugin_utils.report import terminal
from ansible_collections.peerlane.gpu.plugins.plugin_utils.rules import engine

ANSI = re.compile(r"\x1b\[[0-9;]*m")


def fleet() -> dict[str, Snapshot]:
    guest = b.guest(8, "llm1", p2p=b.granted(8, "NS"), unrecognised=("notes.txt: no output that Peerlane knows",))
    lines = [f"0000:{one + 1:02x}:00.0,pcie=1" for one in range(8)]
    functions = b.gpus_on_bus(8, driver="vfio-pci", regions=b.bars(128 * b.GIB))
    node = b.hypervisor(b.vm_config(*lines, cpu="host,hidden=1"), host="pve1", functions=functions)
    return {"llm1": guest, "pve1": node}


def text(hosts: Mapping[str, Snapshot], **how: object) -> str:
    findings: Mapping[str, Sequence[Finding]] = engine.judge(hosts)
    return terminal.render(hosts, findings, **how)


def test_the_host_that_causes_comes_first_with_its_effects_below_the_cause() -> None:
    shown = text(fleet())
    assert shown.index("pve1  hypervisor") < shown.index("llm1  guest")
    cause = shown.index("FAIL high B1")
    effect = shown.index("-> FAIL high D1  llm1: ")
    assert cause < effect < shown.index("llm1  guest")
    assert "of this host: the cause is on pve1: B1 " in shown


def test_a_head_says_role_gpus_driver_and_the_rung_by_name() -> None:
    shown = text(fleet())
    assert "llm1  guest (detect_virt.vm: guest)" in shown
    assert "refused [rung 0: claimed]" in shown
    assert "580.95.05" in shown
    assert "notes.txt" in shown


def test_an_effect_on_the_same_host_is_one_line_below_its_cause() -> None:
    alone = {"llm1": fleet()["llm1"]}
    shown = text(alone)
    assert shown.count("D5  ") == 1
    assert "-> FAIL high D5" in shown


def test_the_short_report_fits_a_screen() -> None:
    assert len(text(fleet()).splitlines()) <= 45


@pytest.mark.parametrize("width", [60, 80, 100])
@pytest.mark.parametrize("verbose", [False, True])
def test_nothing_but_a_command_is_wider_than_the_page(width: int, verbose: bool) -> None:
    hosts = fleet()
    findings = engine.judge(hosts)
    commands = {step for ones in findings.values() for one in ones if one.fix for step in one.fix.steps}
    commands |= {one.verify for ones in findings.values() for one in ones if one.verify}
    for row in terminal.render(hosts, findings, verbose=verbose, width=width).splitlines():
        assert len(row) <= width or row.strip() in commands


def test_commands_are_whole_lines_to_copy() -> None:
    hosts = fleet()
    rows = [row.strip() for row in text(hosts, verbose=True, width=60).splitlines()]
    fix = next(one for one in engine.judge(hosts)["llm1"] if one.rule == "D1").fix
    for step in fix.steps:
        assert step in rows or step.startswith("# ")


def test_verbose_gives_evidence_reason_fix_risk_and_verification() -> None:
    shown = text(fleet(), verbose=True)
    for label in ("evidence:", "why:", "fix:", "risk:", "verify:", "seen:", "cause:"):
        assert label in shown
    assert "hidden=1" in shown
    assert "not collected" in shown  # the reasons of what is unknown


def test_colour_changes_nothing_but_colour() -> None:
    plain, painted = text(fleet()), text(fleet(), color=True)
    assert "\x1b" not in plain
    assert "\x1b[31m" in painted
    assert ANSI.sub("", painted) == plain


def test_evidence_cannot_drive_the_terminal() -> None:
    evil = "NVIDIA \x1b[2J\x07 RTX"
    guest = replace(fleet()["llm1"], gpus=b.fact((Gpu(index=0, bus_id="0000:01:00.0", name=evil),)), host="a\x1b[1mb")
    shown = text({"a\x1b[1mb": guest}, verbose=True)
    assert "\x1b" not in shown
    assert "\x07" not in shown


def test_a_host_of_which_nothing_is_known_is_not_said_to_be_fine() -> None:
    shown = text({"x": b.snapshot(None, "x")})
    assert "nothing could be judged" in shown
    assert "nothing wrong" not in shown
    assert "nothing tells the role" in shown
    assert re.search(r"\d+ unknown: \d+ rules lack .*nvidia_smi", shown)


def test_a_host_without_trouble_is_said_to_be_so_only_for_what_was_read() -> None:
    shown = text({"x": b.snapshot("bare_metal", "x", pci=b.pci())})
    assert "nothing wrong in what could be read" in shown


def test_no_gpus_and_no_driver_are_words_not_zeros() -> None:
    shown = text({"x": b.snapshot("bare_metal", "x", pci=b.pci())})
    assert "GPUs    none" in shown
    assert "GPUs    not known" in text({"x": b.snapshot("bare_metal", "x")})


def test_the_first_screen_has_the_evidence_line_and_the_exact_change() -> None:
    shown = text({"pve1": fleet()["pve1"]})
    rows = [row.strip() for row in shown.splitlines()]
    assert "pve.conf.101: cpu: host,hidden=1" in rows
    assert any(row.startswith("qm set 101 --cpu") for row in rows)


def wrong(count: int) -> tuple[dict[str, Snapshot], dict[str, list[Finding]]]:
    fix = Fix("Change it", ("do this", "do that"), "reboot")
    ones = [
        Finding(f"F{at}", "x", "fail", f"Number {at} is wrong", "high", evidence=(Excerpt("log", "line"),), fix=fix)
        for at in range(1, count + 1)
    ]
    return {"x": b.snapshot("bare_metal", "x")}, {"x": ones}


@pytest.mark.parametrize("count", [1, 5, 9, 30, 200])
def test_one_host_fits_a_screen_whatever_is_wrong_with_it(count: int) -> None:
    shown = terminal.render(*wrong(count))
    assert len(shown.splitlines()) <= 40
    assert shown.index("Number 1 ") > 0
    hidden = count - len(re.findall(r"Number \d+ is", shown))
    assert (f"and {hidden} more findings: -v shows them" in shown) is bool(hidden)
    assert len(re.findall(r"Number \d+ is", terminal.render(*wrong(count), verbose=True))) == count


def test_a_cause_of_very_many_counts_what_does_not_fit() -> None:
    ones = [Finding(f"F{at}", "x", "fail", "wrong", "high") for at in range(2, 30)]
    cause = Finding("F1", "x", "fail", "cause", "high", explains=tuple(one.rule for one in ones))
    shown = terminal.render({"x": b.snapshot("bare_metal", "x")}, {"x": [cause, *ones]})
    assert len(shown.splitlines()) <= 40
    assert "-> and 22 more" in shown


def twelve() -> dict[str, Snapshot]:
    hosts = {}
    for at in range(12):
        release = b.Kernel(release=b.fact("6.8.0-1" if at else "6.5.0-9"))
        hosts[f"llm{at:02}"] = b.guest(8, f"llm{at:02}", p2p=b.granted(8, "OK" if at < 9 else "NS"), kernel=release)
    return hosts


def test_many_hosts_get_a_line_each_and_equal_causes_stand_together() -> None:
    shown = text(twelve())
    rows = shown.splitlines()
    assert rows[0].startswith("FAIL high D1  llm09: ")
    assert rows[1] == "    and on llm10, llm11"
    for name in twelve():
        assert sum(row.startswith(f"{name}  guest") for row in rows) == 1
    assert next(row for row in rows if row.startswith("llm")).startswith("llm09")
    assert all(len(row) <= 100 for row in rows)


def test_drift_is_short_without_v_and_whole_with_it() -> None:
    short, whole = text(twelve()), text(twelve(), verbose=True)
    assert "drift  12 hosts of one kind (guest, RTX PRO 6000 Blackwell Server)" in short
    assert "  kernel: 6.8.0-1 on 11 hosts; 6.5.0-9 on llm00" in short
    assert "unknown on some hosts: " in short
    assert "unknown: VBIOS on llm00, " in whole


def test_one_host_has_no_drift() -> None:
    assert "drift" not in text({"llm1": fleet()["llm1"]})
