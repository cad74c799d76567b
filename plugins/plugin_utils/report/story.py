"""The order in which an audit is told, and the words for it: shared by every format.

Causes come first, each with what it causes below it; a finding that another one explains is told there and not again.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..core.finding import RUNGS, SEVERITIES, Finding
from ..core.snapshot import Snapshot
from ..rules.common import gpu_count
from ..rules.drift import Drift, compare
from ..rules.knowledge import gpu_model
from ..rules.peers import PathState, path_state
from ..rules.registry import Fleet
from .facts import gpus

ROLES: Mapping[str, str] = {"bare_metal": "bare metal", "hypervisor": "hypervisor", "guest": "guest"}
RESTARTS: Mapping[str, str] = {
    "none": "no restart",
    "service": "restart of the service",
    "vm_stop_start": "stop and start of the VM",
    "reboot": "reboot",
}
STATES = ("fail", "warn", "unknown", "info", "pass", "not_applicable")
STATE_WORDS: Mapping[str, str] = {"not_applicable": "n/a"}
RUNG_MEANINGS: Mapping[str, str] = {
    "claimed": "the driver or a configuration says so",
    "copied": "bytes were copied at a speed that was measured",
    "delivered": "the owner of the memory read the right bytes",
    "reduced": "a collective gave the right values",
    "served": "the engine answered with the right tokens",
}
_DEPTH = 4

# Control characters, and the ones that turn the direction of text: evidence is input, and must drive neither a
# terminal nor a reader's eyes.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]")

# As the engine and ``core.evidence`` word it.
_NOT_COLLECTED = re.compile(r"not collected: (.+)|(\S+) was not collected")
_PCI_ID = re.compile(r"[0-9a-f]{4}(:[0-9a-f]{4})?")


def clean(text: str) -> str:
    """Return text without control characters; a tab becomes a blank, lines stay."""
    return _CONTROL.sub("?", text.replace("\t", " ").replace("\r\n", "\n"))


@dataclass(frozen=True)
class Effect:
    """A finding below its cause. ``depth`` 1: a direct one."""

    depth: int
    finding: Finding


@dataclass(frozen=True)
class Cause:
    """A bad finding that nothing else explains, with all that it explains."""

    finding: Finding
    effects: tuple[Effect, ...]


@dataclass(frozen=True)
class HostStory:
    """One host: who it is, its causes, and the causes of its trouble that lie on other hosts."""

    snapshot: Snapshot
    findings: tuple[Finding, ...]
    causes: tuple[Cause, ...]
    elsewhere: tuple[tuple[Finding, tuple[str, ...]], ...]
    reasons: Mapping[str, tuple[Finding, ...]]  # rule of this host -> what explains it
    role: str
    role_source: str
    gpus: str
    driver: str
    paths: PathState | None  # None where paths between GPUs are no subject

    @property
    def host(self) -> str:
        """Return the host's name."""
        return self.snapshot.host

    @property
    def bad(self) -> tuple[Finding, ...]:
        """Return the findings that say that something is wrong."""
        return tuple(one for one in self.findings if one.bad)

    @property
    def below(self) -> tuple[Finding, ...]:
        """Return the bad findings that are told below a cause, here or on another host."""
        own = {id(cause.finding) for cause in self.causes}
        return tuple(one for one in self.bad if id(one) not in own)

    def of(self, state: str) -> tuple[Finding, ...]:
        """Return the findings of one state."""
        return tuple(one for one in self.findings if one.state == state)

    def counts(self) -> dict[str, int]:
        """Return how many findings each state has."""
        return {state: sum(one.state == state for one in self.findings) for state in STATES}

    @property
    def worst(self) -> tuple[int, int]:
        """Return what sorts hosts: the worst severity first, then the number of bad findings."""
        bad = self.bad
        return (min((SEVERITIES.index(one.severity) for one in bad), default=len(SEVERITIES)), -len(bad))


@dataclass(frozen=True)
class Story:
    """A whole audit."""

    hosts: tuple[HostStory, ...]
    drift: Drift

    @property
    def causes(self) -> tuple[Cause, ...]:
        """Return the causes of all hosts, the worst first; hosts keep their order."""
        every = [cause for host in self.hosts for cause in host.causes]
        return tuple(sorted(every, key=_weight))

    @property
    def alike(self) -> tuple[tuple[Cause, ...], ...]:
        """Return the causes with those of one rule, state, severity and fix together, the worst first."""
        groups: dict[tuple[str, str, str, str], list[Cause]] = {}
        for cause in self.causes:
            one = cause.finding
            fix = one.fix.summary if one.fix is not None else one.title
            groups.setdefault((one.rule, one.state, one.severity, fix), []).append(cause)
        return tuple(tuple(group) for group in groups.values())

    def counts(self) -> dict[str, int]:
        """Return how many findings of the fleet each state has."""
        per_host = [host.counts() for host in self.hosts]
        return {state: sum(one[state] for one in per_host) for state in STATES}


def _weight(cause: Cause) -> tuple[int, int]:
    ones = [cause.finding, *(effect.finding for effect in cause.effects)]
    return (
        min(SEVERITIES.index(one.severity) for one in ones),
        0 if any(one.state == "fail" for one in ones) else 1,
    )


def tell(fleet: Fleet, findings: Mapping[str, Sequence[Finding]]) -> Story:
    """Return the audit in the order in which it is told. Hosts that cause another's trouble come first."""
    every = {host: tuple(findings.get(host, ())) for host in fleet}
    bad: _Rules = {}
    reasons: _Rules = {}
    causing = set()
    for host, ones in every.items():
        for one in ones:
            if one.bad:
                bad.setdefault((host, one.rule), []).append(one)
            for name in one.explains:
                other, _, rule = name.rpartition("/")
                if (other or host, rule) != (host, one.rule):
                    reasons.setdefault((other or host, rule), []).append(one)
                if other and other != host:
                    causing.add(host)
    names = sorted(every, key=lambda host: (host not in causing, host))
    causes = _causes([one for host in names for one in every[host] if one.bad], bad, reasons)
    return Story(tuple(_host(fleet[host], every[host], causes[host], reasons) for host in names), compare(fleet))


_Rules = dict[tuple[str, str], list[Finding]]


def _causes(every: Sequence[Finding], bad: _Rules, reasons: _Rules) -> dict[str, list[Cause]]:
    """Return the causes of each host, so that every bad finding is told: as a cause, or below one."""
    found: dict[str, list[Cause]] = {one.host: [] for one in every}
    told: set[str] = set()

    def add(one: Finding) -> None:
        cause = Cause(one, tuple(_effects(one, bad, {one.key})))
        told.update((one.key, *(effect.finding.key for effect in cause.effects)))
        found[one.host].append(cause)

    for one in every:
        if not reasons.get((one.host, one.rule)):
            add(one)
    for one in every:
        # A circle of explanations has no first: the one that the engine ranks first leads.
        if one.key not in told:
            add(one)
    rank = {one.key: at for at, one in enumerate(every)}
    return defaultdict(
        list, {host: sorted(ones, key=lambda cause: rank[cause.finding.key]) for host, ones in found.items()}
    )


def _effects(one: Finding, bad: _Rules, shown: set[str], depth: int = 1) -> list[Effect]:
    found: list[Effect] = []
    for name in one.explains:
        other, _, rule = name.rpartition("/")
        for effect in bad.get((other or one.host, rule), ()):
            if effect.key in shown:
                continue
            shown.add(effect.key)
            found.append(Effect(depth, effect))
            if depth < _DEPTH:
                found += _effects(effect, bad, shown, depth + 1)
    return found


def _host(snapshot: Snapshot, findings: tuple[Finding, ...], causes: Sequence[Cause], reasons: _Rules) -> HostStory:
    host = snapshot.host
    own = {one.rule: tuple(reasons.get((host, one.rule), ())) for one in findings if one.bad}
    elsewhere: dict[str, tuple[Finding, list[str]]] = {}
    for rule, ones in own.items():
        for one in ones:
            if one.host != host and rule not in (rules := elsewhere.setdefault(one.key, (one, []))[1]):
                rules.append(rule)
    role, role_source = _role(snapshot)
    paths = path_state(snapshot, gpu_count(snapshot).value)
    told = snapshot.role.value != "hypervisor" and paths.state != "single"
    return HostStory(
        snapshot=snapshot,
        findings=findings,
        causes=tuple(causes),
        elsewhere=tuple((cause, tuple(rules)) for cause, rules in elsewhere.values()),
        reasons=own,
        role=role,
        role_source=role_source,
        gpus=_gpus(snapshot),
        driver=_driver(snapshot),
        paths=paths if told else None,
    )


def _role(snapshot: Snapshot) -> tuple[str, str]:
    role = snapshot.role
    if not role.known:
        return f"role not known: {role.reason or 'not read'}", ""
    said = [clean(row)[:60] for row in role.excerpt.splitlines()[:1]]
    return ROLES.get(str(role.value), str(role.value)), ": ".join([role.source, *said]) if role.source else ""


def _gpus(snapshot: Snapshot) -> str:
    names = [gpu_name(str(row["name"] or ""), row["pci_id"]) for row in gpus(snapshot)]
    count = gpu_count(snapshot)
    if names:
        sure = "" if count.known else " (perhaps more: the list is a part)"
        return ", ".join(f"{names.count(name)}x {name}" for name in dict.fromkeys(names)) + sure
    return "none" if count.value == 0 else "not known" if not count.value else str(count.value)


def gpu_name(told: str, pci_id: str | None = None) -> str:
    """Return the model without maker and chip: what lspci has in brackets, or nvidia-smi after ``NVIDIA``.

    A model that lspci does not know (``Device 2330``) is looked up by its id (``10de:2330``).
    """
    bracket = re.search(r"\[([^\]]{4,60})\]", told)
    name = bracket[1] if bracket and not _PCI_ID.fullmatch(bracket[1]) else told
    name = name.removeprefix("NVIDIA ").removeprefix("Corporation ").strip()
    if not name or name.startswith("Device "):
        model = gpu_model((pci_id or "").removeprefix("10de:"))
        name = model.name if model is not None and model.name else pci_id or name
    return name or "GPU of unknown model"


def _driver(snapshot: Snapshot) -> str:
    """Return what is known of the driver, or "" on a hypervisor that has none to speak of."""
    driver = snapshot.driver
    if snapshot.role.value == "hypervisor" and not driver.loaded_version.known:
        return ""
    smi = driver.smi.value
    version = driver.loaded_version.value or (smi.driver_version if smi else None)
    if version:
        flavour = f", {driver.loaded_flavour.value} modules" if driver.loaded_flavour.known else ""
        cuda = f", CUDA {smi.cuda_version}" if smi and smi.cuda_version else ""
        return f"{version}{flavour}{cuda}"
    if smi is not None and smi.state == "ok":
        return "works, its version is not told"
    if smi is not None:
        return f"not working ({smi.state.replace('_', ' ')})"
    return f"not known ({driver.smi.reason or 'nvidia-smi was not run'})"


def paths_text(paths: PathState) -> str:
    """Return the state of the paths between GPUs with its rung: ``granted [rung 0: claimed]: ...``."""
    rung = f" [rung {paths.rung}: {RUNGS[paths.rung]}]" if paths.rung is not None else ""
    return f"{paths.state}{rung}: {paths.reason}"


def label(one: Finding) -> str:
    """Return how a finding is headed: ``FAIL high B1``."""
    return f"{STATE_WORDS.get(one.state, one.state).upper()} {one.severity} {one.rule}"


def rung_text(one: Finding) -> str:
    """Return the rung of a bad finding about paths: `` [claimed]``, or nothing."""
    return f" [{RUNGS[one.rung]}]" if one.rung is not None and one.bad else ""


def quiet_text(counts: Mapping[str, int]) -> str:
    """Return what is to be said where nothing is bad: an unknown is no pass."""
    return "nothing wrong in what could be read" if counts["pass"] else "nothing could be judged"


def total_text(story: Story) -> str:
    """Return the last line of a report: ``2 hosts: 5 failed, 0 warnings``."""
    counts = story.counts()
    hosts = f"{len(story.hosts)} host{'' if len(story.hosts) == 1 else 's'}"
    if not counts["fail"] and not counts["warn"]:
        return f"{hosts}: {quiet_text(counts)}"
    return f"{hosts}: {counts['fail']} failed, {counts['warn']} warning{'' if counts['warn'] == 1 else 's'}"


def reasons_of(findings: Sequence[Finding]) -> list[tuple[str, tuple[str, ...]]]:
    """Return why findings are unknown or not applicable, each reason with its rules, the most frequent first."""
    found: dict[str, list[str]] = {}
    for one in findings:
        rules = found.setdefault(one.reason or "no reason was given", [])
        rules += [one.rule] if one.rule not in rules else []
    return sorted(((reason, tuple(rules)) for reason, rules in found.items()), key=lambda one: -len(one[1]))


def missing_sources(findings: Sequence[Finding]) -> tuple[list[tuple[str, str]], list[Finding]]:
    """Return the sources that unknowns lack, each with a rule, the most wanted first; and the other unknowns."""
    wanted: dict[str, list[str]] = {}
    others = []
    for one in findings:
        hit = _NOT_COLLECTED.fullmatch(one.reason)
        for source in (hit[1] or hit[2]).split(", ") if hit else ():
            wanted.setdefault(source, []).append(one.rule)
        others += [] if hit else [one]
    ranked = sorted(wanted.items(), key=lambda one: (-len(one[1]), one[0]))
    return [(source, rules[0]) for source, rules in ranked], others
