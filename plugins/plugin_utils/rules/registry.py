"""The list of rules, and what each one says about itself.

A rule is a function ``(snapshot, fleet) -> iterable of Verdict``, put on the list by ``@rule``. It yields one verdict
for each subject that it judged, ``pass`` included, or a single ``unknown`` or ``not_applicable`` with its reason. It
never raises on odd input and never reads anything but its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..core.finding import Automation, Excerpt, Finding, Fix, Gain, Restart, Severity, State
from ..core.snapshot import Fact, Role, Snapshot
from ..core.values import changed, fast_init

Fleet = Mapping[str, Snapshot]


@fast_init
@dataclass(frozen=True)
class Verdict:
    """What a judge says of one subject. The rest of a finding comes from the rule (``as_finding``).

    ``severity`` None: the rule's own where the state is ``fail``, ``low`` for ``warn``.
    ``explains`` holds rule ids (``D5``) of this host, or ``HOST/D5`` of another, that this verdict is the cause of.
    """

    state: State
    title: str
    evidence: tuple[Excerpt, ...] = ()
    subject: str = ""
    severity: Severity | None = None
    why: str = ""
    reason: str = ""
    fix: Fix | None = None
    explains: tuple[str, ...] = ()
    rung: int | None = None


Judge = Callable[[Snapshot, Fleet], Iterable[Verdict]]

ROLES: tuple[Role, ...] = ("bare_metal", "hypervisor", "guest")


@dataclass(frozen=True)
class Rule:
    """One rule of the catalogue.

    ``looks_at``: evidence sources. ``why``: the mechanism, in a sentence or two. ``severity``: when it fails, unless
    the verdict says otherwise. ``sources``: where the knowledge comes from.
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
    without_role: bool = False


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
    without_role: bool = False,
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
            without_role=without_role,
        )
        return judge

    return register


def verdict(
    state: State,
    title: str,
    *evidence: Fact[Any] | Excerpt,
    subject: str = "",
    severity: Severity | None = None,
    why: str = "",
    reason: str = "",
    fix: Fix | None = None,
    explains: tuple[str, ...] = (),
    rung: int | None = None,
) -> Verdict:
    """Make a verdict; a fact given as evidence brings its source and its line."""
    excerpts = [
        one if isinstance(one, Excerpt) else Excerpt(one.source, one.excerpt)
        for one in evidence
        if isinstance(one, Excerpt) or one.source
    ]
    return Verdict(state, title, tuple(excerpts), subject, severity, why, reason, fix, explains, rung)


def _of_subject(command: str, subject: str) -> str:
    """Put the id of the judged VM into a command that names it VMID."""
    kind, _, number = subject.partition(" ")
    return command.replace("VMID", number) if kind == "vm" and number.isdigit() else command


def as_finding(rule_: Rule, host: str, given: Verdict) -> Finding:
    """Join a verdict with what its rule says about itself."""
    bad = given.state in ("fail", "warn")
    severity = given.severity or (rule_.severity if given.state == "fail" else "low" if bad else "info")
    fix = given.fix
    if fix is not None:
        fix = changed(
            fix,
            restart=fix.restart if fix.restart != "none" else rule_.restart,
            automation=fix.automation if fix.automation != "never" else rule_.automation,
            risk=fix.risk or rule_.risk,
        )
    return Finding(
        rule=rule_.id,
        host=host,
        state=given.state,
        title=given.title,
        severity=severity,
        subject=given.subject,
        rung=given.rung if given.rung is not None else rule_.rung,
        evidence=given.evidence,
        why=given.why or (rule_.why if bad else ""),
        reason=given.reason,
        expected_gain=rule_.gain if bad else None,
        fix=fix,
        verify=_of_subject(rule_.verify, given.subject) if bad else "",
        sources=rule_.sources,
        explains=given.explains,
    )
