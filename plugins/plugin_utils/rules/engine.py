"""Judge a fleet: every rule on every host, by role, with the cause before what it causes."""

from __future__ import annotations

import functools
import re
import traceback
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..core.finding import SEVERITIES, Finding, Severity
from ..core.snapshot import NOT_READ, Role, Snapshot
from ..core.values import changed

# Importing a family puts its rules on the list.
from . import (  # noqa: F401
    bare_metal,
    driver,
    fabric,
    gpu_health,
    gpu_state,
    guest_view,
    host_bars,
    host_errors,
    host_interrupts,
    host_links,
    host_pci,
    host_qemu,
    host_vfio,
    hygiene,
    hypervisor,
    identity,
    kernel_state,
    links,
    mmio,
    p2p,
    paths,
    runtime,
    services,
    vm_config,
    vm_resources,
    vm_settings,
    xid,
)
from .common import SECURITY_NOTES, listed
from .join import JoinedFleet, tie
from .registry import RULES, Fleet, Rule, Verdict, as_finding, verdict

_ROLE_WORDS = {"bare_metal": "bare metal", "hypervisor": "a hypervisor", "guest": "a guest"}
_MILD = {"unknown": 0, "info": 1, "pass": 2, "not_applicable": 3}


@functools.cache
def rule_order(rule_id: str) -> tuple[str, int]:
    """Return what sorts rule ids as people do: B2 before B11."""
    found = re.fullmatch(r"([A-Z]+)(\d+)", rule_id)
    return (found[1], int(found[2])) if found else (rule_id, 0)


for _id in sorted(RULES, key=rule_order):
    RULES[_id] = RULES.pop(_id)


def judge(fleet: Fleet) -> dict[str, tuple[Finding, ...]]:
    """Return the findings of each host: causes first, then by severity and rule.

    A guest's findings are tied to its hypervisor's where the fleet holds both (``join.home_of``). A rule that raises
    is a bug; it becomes an ``unknown`` of its own that names the bug, so that the other rules are still heard.
    """
    joined = JoinedFleet(fleet)
    found: dict[str, tuple[Finding, ...]] = {}
    for group in joined.groups():
        found |= judge_group(joined, group)
    return {host: found[host] for host in fleet}


def judge_group(fleet: JoinedFleet, group: Sequence[str]) -> dict[str, tuple[Finding, ...]]:
    """Return the findings of the hosts of one of the fleet's ``groups``. No other host's snapshot is looked at."""
    bad: dict[str, list[Finding]] = {}
    mild: dict[str, list[Finding]] = {}
    for host in group:
        bad[host], mild[host] = [], []
        for one in _findings(fleet[host], fleet):
            (bad if one.bad else mild)[host].append(one)
    tie(fleet, bad)
    names = {(host, one.rule) for host, findings in bad.items() for one in findings}
    return {
        host: (*_causes_first([_pruned(one, names) for one in bad[host]]), *_by_state(mild[host])) for host in group
    }


def _findings(snapshot: Snapshot, fleet: Fleet) -> list[Finding]:
    found: list[Finding] = []
    host, role = snapshot.host, snapshot.role
    for rule in RULES.values():
        if role.value is None and not rule.without_role:
            reason = f"role not known: {role.reason or 'systemd-detect-virt was not run'}"
            found.append(as_finding(rule, host, verdict("unknown", f"Not judged: {rule.title}", reason=reason)))
        elif role.value is not None and role.value not in rule.roles:
            found.append(changed(_not_for(rule.id, role.value), host=host))
        else:
            for one in _judged(rule, snapshot, fleet):
                if one.state == "unknown" and one.reason in ("", NOT_READ.reason):
                    one = changed(one, reason=f"not collected: {', '.join(rule.looks_at)}")
                found.append(as_finding(rule, host, one))
    return found


@functools.cache
def _not_for(rule_id: str, role: Role) -> Finding:
    """Return what a rule for other machines says; of every host the same."""
    rule = RULES[rule_id]
    reason = f"this is {_ROLE_WORDS[role]}; the rule is for {listed([_ROLE_WORDS[one] for one in rule.roles])}"
    given = verdict("not_applicable", f"Not for this machine: {rule.title}", reason=reason)
    return as_finding(rule, "", given)


def _judged(rule: Rule, snapshot: Snapshot, fleet: Fleet) -> list[Verdict]:
    try:
        return list(rule.judge(snapshot, fleet))
    except Exception as error:  # see judge(): the other rules are still heard
        place = traceback.extract_tb(error.__traceback__)[-1]
        bug = f"a bug in rule {rule.id}: {type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
        return [verdict("unknown", f"Not judged: {rule.title}", reason=bug)]


def _pruned(finding: Finding, bad: set[tuple[str, str]]) -> Finding:
    """Drop what a bad finding does not explain after all: what is not bad."""
    if not finding.explains:
        return finding
    kept = []
    for name in dict.fromkeys(finding.explains):
        host, _, rule = name.rpartition("/")
        if (host or finding.host, rule) in bad and (host or finding.host, rule) != (finding.host, finding.rule):
            kept.append(name)
    return changed(finding, explains=tuple(kept))


def order(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Order one host's findings: bad ones first, each cause before what it explains, then severity, then rule id.

    A mild cause of a severe finding takes the severe one's place. The others follow by state and rule id.
    """
    mild = [one for one in findings if not one.bad]
    return (*_causes_first([one for one in findings if one.bad]), *_by_state(mild))


def _by_state(mild: Sequence[Finding]) -> list[Finding]:
    # What is not bad explains nothing.
    told = [changed(one, explains=()) if one.explains else one for one in mild]
    return sorted(told, key=lambda one: (_MILD[one.state], rule_order(one.rule), one.subject))


def _causes_first(bad: Sequence[Finding]) -> list[Finding]:
    causes: dict[str, set[str]] = {}
    for one in bad:
        for name in one.explains:
            if "/" not in name:
                causes.setdefault(name, set()).add(one.rule)
    weight = _weights(bad)
    todo = sorted(
        bad, key=lambda one: (weight[one.rule], SEVERITIES.index(one.severity), rule_order(one.rule), one.subject)
    )
    ordered: list[Finding] = []
    waiting = Counter(one.rule for one in todo)
    while todo and causes:
        # A circle of explanations has no first: the worst one then leads.
        at = next((at for at, one in enumerate(todo) if not _waits(one.rule, causes, waiting)), 0)
        ready = todo.pop(at)
        waiting[ready.rule] -= 1
        ordered.append(ready)
    return ordered + todo


def _waits(rule: str, causes: Mapping[str, set[str]], waiting: Mapping[str, int]) -> bool:
    return any(waiting[cause] for cause in causes.get(rule, ()) if cause != rule)


def _weights(bad: Sequence[Finding]) -> dict[str, int]:
    """Return the severity that each rule's findings count with: their own, or that of the worst they explain."""
    weight: dict[str, int] = {}
    for one in bad:
        weight[one.rule] = min(weight.get(one.rule, len(SEVERITIES)), SEVERITIES.index(one.severity))
    for _ in range(len(weight)):
        for one in bad:
            for name in one.explains:
                weight[one.rule] = min(weight[one.rule], weight.get(name, len(SEVERITIES)))
    return weight


def blocking(findings: Iterable[Finding], fail_on: Severity = "high") -> list[str]:
    """Return the ids of the rules whose findings should stop a deployment, in the order of the findings.

    Failures of this severity or a worse one count; from ``medium`` down warnings count too.
    """
    worst = SEVERITIES[: SEVERITIES.index(fail_on) + 1]
    states = ("fail",) if fail_on in ("critical", "high") else ("fail", "warn")
    return list(dict.fromkeys(one.rule for one in findings if one.state in states and one.severity in worst))


def describe(rule_id: str) -> dict[str, Any] | None:
    """Return what a rule says about itself (its id or name, any case), as plain data, or None where there is none."""
    wanted = rule_id.strip().lower()
    rule = next((one for one in RULES.values() if wanted in (one.id.lower(), one.name)), None)
    if rule is None:
        return None
    shape = {name: getattr(rule, name) for name in Rule.__dataclass_fields__ if name not in ("judge", "gain")}
    shape = {name: list(value) if isinstance(value, tuple) else value for name, value in shape.items()}
    return {**shape, "gain": asdict(rule.gain) if rule.gain else None, "security_notes": list(SECURITY_NOTES.values())}
