"""The list of rules, and what each one says about itself.

A rule is a function ``(snapshot, fleet) -> iterable of Finding``, put on the list by ``@rule``. It yields one finding
for each subject that it judged, ``pass`` included, or a single ``unknown`` or ``not_applicable``. It never raises on
odd input and never reads anything but its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from ..core.finding import Automation, Excerpt, Finding, Fix, Gain, Restart, Severity, State
from ..core.snapshot import Fact, Role, Snapshot

Fleet = Mapping[str, Snapshot]
Judge = Callable[[Snapshot, Fleet], Iterable[Finding]]

ROLES: tuple[Role, ...] = ("bare_metal", "hypervisor", "guest")


@dataclass(frozen=True)
class Rule:
    """One rule of the catalogue.

    ``looks_at``: evidence sources. ``why``: the mechanism, in a sentence or two. ``severity``: when it fails, unless the
    finding says otherwise. ``sources``: where the knowledge comes from.
    """

    id: str
    name: str
    title: str
    roles: tuple[Role, ...]
    severity: Severity
    looks_at: tuple[str, ...]
    why: str
    judge: Judge
    restart: Restart = "none"
    automation: Automation = "never"
    risk: str = ""
    verify: str = ""
    sources: tuple[str, ...] = ()
    rung: int | None = None
    gain: Gain | None = None


RULES: dict[str, Rule] = {}


def rule(
    id: str,
    name: str,
    *,
    title: str,
    roles: tuple[Role, ...] = ROLES,
    severity: Severity,
    looks_at: tuple[str, ...],
    why: str,
    restart: Restart = "none",
    automation: Automation = "never",
    risk: str = "",
    verify: str = "",
    sources: tuple[str, ...] = (),
    rung: int | None = None,
    gain: Gain | None = None,
) -> Callable[[Judge], Judge]:
    """Put a judge on the list under its catalogue id."""

    def register(judge: Judge) -> Judge:
        if id in RULES:
            raise ValueError(f"rule {id} is registered twice")
        RULES[id] = Rule(
            id=id,
            name=name,
            title=title,
            roles=roles,
            severity=severity,
            looks_at=looks_at,
            why=why,
            judge=judge,
            restart=restart,
            automation=automation,
            risk=risk,
            verify=verify,
            sources=sources,
            rung=rung,
            gain=gain,
        )
        return judge

    return register


def found(
    snapshot: Snapshot,
    state: State,
    title: str,
    *evidence: Fact[object] | Excerpt,
    subject: str = "",
    severity: Severity | None = None,
    why: str = "",
    reason: str = "",
    fix: Fix | None = None,
    explains: tuple[str, ...] = (),
) -> Finding:
    """Make a finding of this host; the engine fills in what the rule says about itself."""
    excerpts = tuple(
        one if isinstance(one, Excerpt) else Excerpt(one.source, one.excerpt)
        for one in evidence
        if isinstance(one, Excerpt) or one.source
    )
    return Finding(
        rule="",
        host=snapshot.host,
        state=state,
        title=title,
        severity=severity or "info",
        subject=subject,
        evidence=excerpts,
        why=why,
        reason=reason,
        fix=fix,
        explains=explains,
    )


def complete(rule_: Rule, finding: Finding, severity_given: bool) -> Finding:
    """Give a finding its rule's id, severity, rung, sources, gain and verify text."""
    bad = finding.bad
    fix = finding.fix
    if fix is not None:
        fix = replace(
            fix,
            restart=fix.restart if fix.restart != "none" else rule_.restart,
            automation=fix.automation if fix.automation != "never" else rule_.automation,
            risk=fix.risk or rule_.risk,
        )
    severity = finding.severity if severity_given else (rule_.severity if finding.state == "fail" else "info")
    return replace(
        finding,
        rule=rule_.id,
        severity=severity if bad or finding.state == "info" else "info",
        rung=rule_.rung,
        why=finding.why or (rule_.why if bad else ""),
        fix=fix if bad or finding.state == "info" else None,
        expected_gain=rule_.gain if bad else None,
        verify=rule_.verify if bad else "",
        sources=rule_.sources,
    )
