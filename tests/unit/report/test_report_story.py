"""What every format shares: each bad finding is told once, causes first, and words are safe to show."""

from __future__ import annotations

import pytest
import rule_builders as b

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.finding import Finding
from ansible_collections.peerlane.gpu.plugins.plugin_utils.report import story


def bad(host: str, rule: str, *explains: str, severity: str = "high") -> Finding:
    return Finding(rule, host, "fail", f"{rule} is wrong", severity=severity, explains=explains)


def tell(*findings: Finding) -> story.Story:
    hosts = dict.fromkeys(one.host for one in findings)
    fleet = {host: b.snapshot("bare_metal", host) for host in hosts}
    return story.tell(fleet, {host: [one for one in findings if one.host == host] for host in hosts})


def shape(told: story.Story) -> list[tuple[str, list[tuple[int, str]]]]:
    return [
        (
            f"{host.host}/{cause.finding.rule}",
            [(one.depth, f"{one.finding.host}/{one.finding.rule}") for one in cause.effects],
        )
        for host in told.hosts
        for cause in host.causes
    ]


@pytest.mark.parametrize(
    ("findings", "expected"),
    [
        ([bad("a", "A1"), bad("a", "B1")], [("a/A1", []), ("a/B1", [])]),
        ([bad("a", "A1", "B1"), bad("a", "B1")], [("a/A1", [(1, "a/B1")])]),
        ([bad("a", "A1", "B1"), bad("a", "B1", "C1"), bad("a", "C1")], [("a/A1", [(1, "a/B1"), (2, "a/C1")])]),
        # The host with the cause comes first, and an effect's own effects on its host stand below it.
        (
            [bad("g", "D1", "D5"), bad("g", "D5"), bad("n", "B1", "g/D1")],
            [("n/B1", [(1, "g/D1"), (2, "g/D5")])],
        ),
        # Circles: the first one leads, nothing is lost.
        ([bad("a", "A1", "B1"), bad("a", "B1", "A1")], [("a/A1", [(1, "a/B1")])]),
        (
            [bad("a", "A1", "B1"), bad("a", "B1", "C1"), bad("a", "C1", "A1"), bad("a", "D1")],
            [("a/A1", [(1, "a/B1"), (2, "a/C1")]), ("a/D1", [])],
        ),
        # What is only said to be explained, by something that is not bad, is a cause itself.
        ([bad("a", "A1", "Z9")], [("a/A1", [])]),
    ],
)
def test_each_bad_finding_is_told_once_as_a_cause_or_below_one(findings, expected) -> None:
    told = tell(*findings)

    assert shape(told) == expected
    shown = [one for _, effects in shape(told) for _, one in effects] + [name for name, _ in shape(told)]
    assert sorted(shown) == sorted(f"{one.host}/{one.rule}" for one in findings)


def test_a_chain_longer_than_can_be_indented_is_told_all_the_same() -> None:
    chain = [bad("a", f"A{at}", f"A{at + 1}") for at in range(1, 9)]
    told = tell(*chain)

    shown = [one for _, effects in shape(told) for _, one in effects] + [name for name, _ in shape(told)]
    assert sorted(shown) == sorted(f"a/{one.rule}" for one in chain)


def test_a_host_names_the_cause_on_another_host_with_all_that_it_causes_here() -> None:
    told = tell(bad("g", "D1"), bad("g", "D5"), bad("n", "B1", "g/D1", "g/D5"))
    guest = told.hosts[1]

    assert [(one.rule, rules) for one, rules in guest.elsewhere] == [("B1", ("D1", "D5"))]
    assert not guest.causes
    assert [one.rule for one in guest.below] == ["D1", "D5"]


def test_equal_causes_of_many_hosts_stand_together_the_worst_first() -> None:
    told = tell(bad("a", "F4", severity="low"), bad("b", "D1"), bad("c", "F4", severity="low"), bad("d", "D1"))

    titles = [[cause.finding.host for cause in group] for group in told.alike]
    assert len(titles) == 2
    assert titles[0] == ["b", "d"]


@pytest.mark.parametrize(
    ("told", "pci_id", "name"),
    [
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", None, "RTX PRO 6000 Blackwell Server Edition"),
        (
            "NVIDIA Corporation GB202GL [RTX PRO 6000 Blackwell Server Edition]",
            "10de:2bb5",
            "RTX PRO 6000 Blackwell Server Edition",
        ),
        ("NVIDIA Corporation Device 2bb5", "10de:2bb5", "RTX PRO 6000 Blackwell Server"),
        ("NVIDIA Corporation Device [10de:2bb5]", "10de:2bb5", "RTX PRO 6000 Blackwell Server"),
        ("NVIDIA Corporation Device fff0", "10de:fff0", "10de:fff0"),
        ("", "10de:2bb5", "RTX PRO 6000 Blackwell Server"),
        ("", None, "GPU of unknown model"),
    ],
)
def test_gpus_have_short_names(told: str, pci_id: str | None, name: str) -> None:
    assert story.gpu_name(told, pci_id) == name


@pytest.mark.parametrize("character", ["\x00", "\x1b", "\x07", "\x7f", "\x9b", "\u202e", "\u2066", "\u200f", "\ufeff"])
def test_nothing_that_drives_a_terminal_or_turns_text_stays(character: str) -> None:
    assert story.clean(f"a{character}b") == "a?b"


def test_sources_that_are_missing_are_named_once_the_most_wanted_first() -> None:
    def unknown(rule: str, reason: str) -> Finding:
        return Finding(rule, "a", "unknown", "?", reason=reason)

    missing, others = story.missing_sources(
        [
            unknown("A1", "not collected: pve.conf"),
            unknown("A2", "not collected: kernel_log, pve.conf"),
            unknown("A3", "kernel_log was not collected"),
            unknown("A4", "pve.conf was not collected"),
            unknown("A5", "the text is cut"),
        ]
    )
    assert missing == [("pve.conf", "A1"), ("kernel_log", "A2")]
    assert [one.rule for one in others] == ["A5"]
