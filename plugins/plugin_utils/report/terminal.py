"""The audit as text for a terminal: the cause first, one screen, more with ``verbose``."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from ..core.finding import RUNGS, Finding
from ..core.snapshot import Snapshot
from ..rules.common import gpu_count
from ..rules.peers import path_state
from ..rules.registry import Fleet
from .facts import gpus

_COLORS = {"fail": "31", "warn": "33", "unknown": "36", "info": "34", "pass": "32", "not_applicable": "2", "head": "1"}
_ROLES = {"bare_metal": "bare metal", "hypervisor": "hypervisor", "guest": "guest"}
_STATE_WORDS = {"not_applicable": "n/a"}
_RESTARTS = {
    "none": "no restart",
    "service": "restart of the service",
    "vm_stop_start": "stop and start of the VM",
    "reboot": "reboot",
}
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_MIN_WIDTH = 40


class _Page:
    """Lines that are at most ``width`` wide, except commands, which stay whole so that they can be copied."""

    def __init__(self, width: int, color: bool) -> None:
        self.width = max(width, _MIN_WIDTH)
        self.color = color
        self.lines: list[str] = []

    def paint(self, text: str, kind: str) -> str:
        """Return text in the colour of a kind."""
        return f"\x1b[{_COLORS[kind]}m{text}\x1b[0m" if self.color else text

    def text(self, text: str, lead: str = "", hang: int | None = None, kind: str = "", first: str = "") -> None:
        """Add wrapped text. ``first`` is the part of the first line, at its start, that is painted."""
        indent = " " * (len(lead) if hang is None else hang)
        rows = textwrap.wrap(
            first + clean(text), self.width, initial_indent=lead, subsequent_indent=indent, break_on_hyphens=False
        )
        if kind and first and rows:
            rows[0] = rows[0].replace(first.rstrip(), self.paint(first.rstrip(), kind), 1)
        elif kind:
            rows = [self.paint(row, kind) for row in rows]
        self.lines += rows or [""]

    def cut(self, text: str, lead: str = "", kind: str = "", first: str = "") -> None:
        """Add one line, cut with ``...`` where it is too long."""
        row = lead + first + clean(text)
        row = row if len(row) <= self.width else row[: self.width - 3].rstrip() + "..."
        self.lines.append(row.replace(first.rstrip(), self.paint(first.rstrip(), kind), 1) if kind and first else row)

    def command(self, step: str, lead: str) -> None:
        """Add a command to copy: never broken. A remark is wrapped as text."""
        step = clean(step)
        if step.startswith("#") and not step.startswith("# way back:"):
            rows = textwrap.wrap(step[1:].strip(), self.width - len(lead) - 2, break_on_hyphens=False)
            self.lines += [f"{lead}# {row}" for row in rows]
        else:
            self.lines.append(lead + step)

    def gap(self) -> None:
        """Add one empty line, never two."""
        if self.lines and self.lines[-1]:
            self.lines.append("")


def clean(text: str) -> str:
    """Return text without control characters: evidence is input, and must not drive the terminal."""
    return _CONTROL.sub("?", text.replace("\t", " "))


def render(
    fleet: Fleet,
    findings: Mapping[str, Sequence[Finding]],
    verbose: bool = False,
    color: bool = False,
    width: int = 100,
) -> str:
    """Return the audit as text. ``width``: columns that no line exceeds, except a command to copy."""
    page = _Page(width, color)
    every = {host: tuple(findings.get(host, ())) for host in fleet}
    causes = _causes(every)
    for host in _hosts(every):
        page.gap()
        _head(page, fleet[host])
        _bad(page, host, every, causes, verbose)
        if verbose:
            _mild(page, every[host])
        _counts(page, every[host], verbose)
        for name in fleet[host].unrecognised:
            page.text(name, lead="  not recognised: ", hang=4)
    page.gap()
    _total(page, every)
    return "\n".join(page.lines) + "\n"


def _hosts(findings: Mapping[str, Sequence[Finding]]) -> list[str]:
    """Return the hosts: those that cause another's trouble first, then by name."""
    causing = {host for host, ones in findings.items() if any("/" in name for one in ones for name in one.explains)}
    return sorted(findings, key=lambda host: (host not in causing, host))


def _causes(findings: Mapping[str, Sequence[Finding]]) -> dict[tuple[str, str], list[Finding]]:
    """Return which findings explain a rule of a host, by (host, rule)."""
    found: dict[tuple[str, str], list[Finding]] = {}
    for host, ones in findings.items():
        for one in ones:
            for name in one.explains:
                other, _, rule = name.rpartition("/")
                found.setdefault((other or host, rule), []).append(one)
    return found


def _head(page: _Page, snapshot: Snapshot) -> None:
    role = snapshot.role
    said = role.excerpt.splitlines()[:1]
    how = f" ({': '.join([role.source, *(clean(row)[:60] for row in said)])})" if role.known and role.source else ""
    what = _ROLES.get(str(role.value), "role not known") + (how if role.known else f": {role.reason or 'not read'}")
    page.text(what, first=f"{clean(snapshot.host)}  ", kind="head", hang=2)
    rows = gpus(snapshot)
    names = [str(row["name"] or row["pci_id"] or "GPU of unknown model") for row in rows]
    counted = [f"{names.count(name)}x {name}" for name in dict.fromkeys(names)]
    count = gpu_count(snapshot)
    if counted:
        sure = "" if count.known else " (perhaps more: the list is a part)"
        page.text(", ".join(counted) + sure, lead="  GPUs    ")
    else:
        page.text(
            "none" if count.value == 0 else "not known" if not count.value else str(count.value), lead="  GPUs    "
        )
    driver = snapshot.driver
    if role.value != "hypervisor" or driver.loaded_version.known:
        page.text(_driver(snapshot), lead="  driver  ")
    state = path_state(snapshot, count.value)
    if role.value != "hypervisor" and state.state != "single":
        rung = f" [rung {state.rung}: {RUNGS[state.rung]}]" if state.rung is not None else ""
        page.text(f"{state.state}{rung}: {state.reason}", lead="  P2P     ")


def _driver(snapshot: Snapshot) -> str:
    driver = snapshot.driver
    smi = driver.smi.value
    version = driver.loaded_version.value or (smi.driver_version if smi else None)
    if version:
        flavour = f", {driver.loaded_flavour.value} modules" if driver.loaded_flavour.known else ""
        cuda = f", CUDA {smi.cuda_version}" if smi and smi.cuda_version else ""
        return f"{version}{flavour}{cuda}"
    if smi is not None:
        return f"not working ({smi.state.replace('_', ' ')})"
    return f"not known ({driver.smi.reason or 'nvidia-smi was not run'})"


def _bad(
    page: _Page,
    host: str,
    findings: Mapping[str, Sequence[Finding]],
    causes: Mapping[tuple[str, str], Sequence[Finding]],
    verbose: bool,
) -> None:
    bad = [one for one in findings[host] if one.bad]
    for one in bad:
        reasons = [cause for cause in causes.get((host, one.rule), ()) if cause.rule != one.rule or cause.host != host]
        if verbose:
            page.gap()
            _full(page, one, reasons)
            continue
        if reasons and not _in_circle(one, reasons):
            continue  # shown below its cause, here or on the host of the cause
        _short(page, one)
        _explained(page, one, findings, {one.key})
    if not verbose:
        _caused_elsewhere(page, host, bad, causes)


def _caused_elsewhere(
    page: _Page, host: str, bad: Sequence[Finding], causes: Mapping[tuple[str, str], Sequence[Finding]]
) -> None:
    """Add one line for each finding of another host that is the cause of findings here."""
    effects: dict[str, list[str]] = {}
    for one in bad:
        for cause in causes.get((host, one.rule), ()):
            if cause.host != host:
                name = f"{clean(cause.host)}: {cause.rule} {cause.title}"
                effects[name] = list(dict.fromkeys([*effects.get(name, []), one.rule]))
    for name, rules in effects.items():
        page.gap()
        page.text(f"{', '.join(rules)} of this host: the cause is on {name}", lead="  ", hang=6)


def _in_circle(one: Finding, reasons: Sequence[Finding]) -> bool:
    return any(cause.rule in one.explains for cause in reasons)


def _label(one: Finding) -> str:
    return f"{_STATE_WORDS.get(one.state, one.state).upper()} {one.severity} {one.rule}  "


def _rung(one: Finding) -> str:
    return f" [{RUNGS[one.rung]}]" if one.rung is not None and one.bad else ""


def _short(page: _Page, one: Finding) -> None:
    page.gap()
    page.text(one.title + _rung(one), lead="  ", hang=6, first=_label(one), kind=one.state)
    if one.fix is not None:
        restart = f" ({_RESTARTS[one.fix.restart]})" if one.fix.restart != "none" else ""
        page.text(one.fix.summary + restart, lead="      fix: ", hang=11)


def _explained(
    page: _Page, one: Finding, findings: Mapping[str, Sequence[Finding]], shown: set[str], depth: int = 1
) -> None:
    """Add a line for each finding that this one is the cause of, those that they cause in turn below them."""
    for name in one.explains:
        other, _, rule = name.rpartition("/")
        for effect in findings.get(other or one.host, ()):
            if effect.rule != rule or not effect.bad or effect.key in shown:
                continue
            shown.add(effect.key)
            where = f"{clean(effect.host)}: " if effect.host != one.host else ""
            page.cut(
                f"{where}{effect.title}", lead=" " * (4 + 2 * depth) + "-> ", first=_label(effect), kind=effect.state
            )
            if depth < 4 and effect.host == one.host:
                _explained(page, effect, findings, shown, depth + 1)


def _full(page: _Page, one: Finding, reasons: Sequence[Finding]) -> None:
    subject = f" [{one.subject}]" if one.subject else ""
    page.text(one.title + _rung(one) + subject, lead="  ", hang=6, first=_label(one), kind=one.state)
    for cause in reasons:
        page.text(f"{cause.rule} on {cause.host}: {cause.title}", lead="      cause:    ")
    if one.reason:
        page.text(one.reason, lead="      reason:   ")
    for piece in one.evidence:
        page.cut(piece.source, lead="      evidence: ")
        for row in piece.excerpt.splitlines()[:8]:
            page.cut(row, lead="        | ")
    if one.why:
        page.text(one.why, lead="      why:      ")
    if one.expected_gain is not None:
        gain = one.expected_gain
        page.text(f"{gain.value} {gain.unit} ({gain.source})", lead="      seen:     ")
    if one.fix is not None:
        page.text(f"{one.fix.summary} ({_RESTARTS[one.fix.restart]})", lead="      fix:      ")
        for step in one.fix.steps:
            page.command(step, "        ")
        if one.fix.risk:
            page.text(one.fix.risk, lead="      risk:     ")
    if one.verify:
        page.lines.append("      verify:")
        page.command(one.verify, "        ")


def _mild(page: _Page, findings: Sequence[Finding]) -> None:
    page.gap()
    elsewhere: dict[str, list[str]] = {}
    for one in findings:
        if one.bad:
            continue
        if one.state == "not_applicable":
            elsewhere.setdefault(one.reason, []).append(one.rule)
            continue
        label = f"{_STATE_WORDS.get(one.state, one.state)} {one.rule}  "
        why = f" ({one.reason})" if one.reason else ""
        page.text(f"{one.title}{why}", lead="  ", hang=6, first=label, kind=one.state)
    for reason, rules in elsewhere.items():
        word = _STATE_WORDS.get("not_applicable", "not_applicable")
        page.text(f"{reason}: {', '.join(dict.fromkeys(rules))}", lead="  ", hang=6, first=f"{word}  ")


def _counts(page: _Page, findings: Sequence[Finding], verbose: bool) -> None:
    counted = {
        state: sum(one.state == state for one in findings) for state in ("pass", "info", "unknown", "not_applicable")
    }
    words = [
        f"{number} {'not applicable' if state == 'not_applicable' else state}"
        for state, number in counted.items()
        if number
    ]
    if not words:
        return
    page.gap()
    lead = "  also: " if any(one.bad for one in findings) else "  "
    page.text(", ".join(words) + ("" if verbose else "; -v shows them"), lead=lead)


def _total(page: _Page, findings: Mapping[str, Sequence[Finding]]) -> None:
    every: Iterator[Finding] = (one for ones in findings.values() for one in ones)
    bad = [one for one in every if one.bad]
    hosts = f"{len(findings)} host{'' if len(findings) == 1 else 's'}"
    if not bad:
        page.text(f"{hosts}: nothing wrong in what could be read")
        return
    fails = sum(one.state == "fail" for one in bad)
    page.text(f"{hosts}: {fails} failed, {len(bad) - fails} warnings")
