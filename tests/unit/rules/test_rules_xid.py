"""Rule F15: Xid events, by what they mean."""

from __future__ import annotations

from typing import Any

import pytest
import rule_builders as b

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.snapshot import KernelLog, LogLine, Xid
from ansible_collections.peerlane.gpu.plugins.plugin_utils.rules import xid

ONE, TWO = "0000:41:00", "0000:c1:00"
REBOOT = "GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"


def event(code: int, pci: str = ONE, detail: str = "words", stamp: str = "", **more: Any) -> Xid:
    return Xid(pci, code, detail, stamp, **more)


def host(*xids: Xid, role: str | None = "bare_metal", **parts: Any) -> object:
    log = KernelLog((LogLine("", "line"),), xids, **parts.pop("log", {}))
    return b.snapshot(role, kernel=b.Kernel(log=b.fact(log, "log", "kernel_log")), **parts)


LIVE = {"collected_at": "2031-01-01T00:00:00Z", "log": {"from_boot": True}}
ROWS = [
    ("F15", host(**LIVE), "pass", "since the boot"),
    ("F15", host(), "info", "No Xid in 1 line"),
    ("F15", host(role="hypervisor"), "not_applicable", "guests"),
    ("F15", host(event(79)), "fail", "Xid 79 (the GPU fell off the bus) on 0000:41:00: 1 event"),
    ("F15", host(event(119), event(119), event(119)), "fail", "3 events"),
    ("F15", host(event(109, stamp="7.1"), event(13)), "fail", "at 7.1, with Xid 13 beside it"),
    ("F15", host(event(13, process="python3")), "warn", "exception in the compute engine"),
    ("F15", host(event(31), event(45)), "warn", "Xid 31"),
    ("F15", host(event(63)), "info", "remapped"),
    ("F15", host(event(999)), "warn", "no entry"),
    ("F15", host(event(154, detail=REBOOT)), "fail", "asks for a recovery of 0000:41:00 (Node Reboot Required)"),
    ("F15", host(event(79), role="hypervisor"), "fail", "Xid 79"),
    ("F15", b.snapshot("bare_metal", pci=b.pci()), "not_applicable", "no NVIDIA GPU"),
    ("F15", b.snapshot("bare_metal"), "unknown", "kernel_log"),
]


@pytest.mark.parametrize(("rule", "judged", "state", "words"), ROWS)
def test_xid(rule: str, judged: object, state: str, words: str) -> None:
    found = b.findings(rule, judged)
    assert [one.state for one in found] == [state]
    assert words in f"{found[0].title} {found[0].reason}"


def test_only_the_gpu_that_failed_is_called_dead() -> None:
    judged = host(event(79, TWO), event(154, ONE, REBOOT), event(154, TWO, REBOOT), event(45, ONE))
    found = {one.subject: one for one in b.findings("F15", judged)}
    assert (found[TWO].state, found[TWO].severity) == ("fail", "critical")
    assert "Node Reboot Required" in found[TWO].why
    assert found[ONE].state == "warn"
    assert "because of Xid 79 on 0000:c1:00" in found[ONE].title


def test_a_follower_on_another_gpu_is_no_finding() -> None:
    found = {one.subject: one.state for one in b.findings("F15", host(event(48, TWO), event(45, ONE)))}
    assert found == {TWO: "fail", ONE: "info"}


def test_the_span_of_time_and_rate_limits_are_told() -> None:
    events = (event(119, stamp="[x]", time="2031-02-03T04:05:06"), event(119, time="2031-02-03T05:05:06"))
    title = b.findings("F15", host(*events, log={"suppressed": 4}))[0].title
    assert title.endswith("at least 2 events, first 2031-02-03T04:05:06, last 2031-02-03T05:05:06")


def test_an_xid_explains_what_other_rules_see_of_it() -> None:
    found = b.findings("F15", host(event(119), gpus=b.unknown("no")))[0]
    assert found.explains == ("F7",)


def test_the_table_is_whole() -> None:
    kinds = {"critical", "application", "notice", "info", "follow"}
    for code, known in xid.meanings().items():
        assert known.kind in kinds, code
        assert known.action in {*xid._STEPS, "follow"}, code
        assert known.words.strip(" .") == known.words, code
    named = (48, 62, 64, 74, 79, 92, 94, 95, 109, 119, 120, 136, 137, 140, 143, *range(144, 151))
    assert all(xid.meaning(code).kind == "critical" for code in named)
