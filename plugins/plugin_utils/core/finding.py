"""Findings: what Peerlane says about a host, with the evidence that it stands on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from .plain import plain
from .values import fast_init

State = Literal["pass", "fail", "warn", "info", "unknown", "not_applicable"]
Severity = Literal["critical", "high", "medium", "low", "info"]
Restart = Literal["none", "service", "vm_stop_start", "reboot"]
Automation = Literal["yes", "ask", "never"]

# From worst to mildest.
SEVERITIES: tuple[Severity, ...] = ("critical", "high", "medium", "low", "info")

# The evidence ladder: every statement about a path between GPUs carries the rung that was reached.
RUNG_CLAIMED, RUNG_COPIED, RUNG_DELIVERED, RUNG_REDUCED, RUNG_SERVED = range(5)
RUNGS = ("claimed", "copied", "delivered", "reduced", "served")


@fast_init
@dataclass(frozen=True)
class Excerpt:
    """The lines of one evidence source that a finding stands on."""

    source: str
    excerpt: str


@dataclass(frozen=True)
class Gain:
    """What a fix brought elsewhere: a value with its unit, and where it was seen. Never a promise."""

    value: str
    unit: str
    source: str


@fast_init
@dataclass(frozen=True)
class Fix:
    """What a person would do. ``steps`` are commands or edits to copy, in order."""

    summary: str
    steps: tuple[str, ...] = ()
    restart: Restart = "none"
    automation: Automation = "never"
    risk: str = ""


@fast_init
@dataclass(frozen=True)
class Finding:
    """One verdict of one rule about one subject of one host.

    ``subject`` names the thing judged: a PCI address, a VM (``vm 101``), a package, or "" for the host.
    ``rung`` is None where the finding is not about a path between GPUs.
    ``reason`` says why the state is ``unknown`` or ``not_applicable``.
    ``explains`` holds the rule ids (``HOST/ID`` for another host's) that this finding is the cause of.
    """

    rule: str
    host: str
    state: State
    title: str
    severity: Severity = "info"
    subject: str = ""
    rung: int | None = None
    evidence: tuple[Excerpt, ...] = ()
    why: str = ""
    reason: str = ""
    expected_gain: Gain | None = None
    fix: Fix | None = None
    verify: str = ""
    sources: tuple[str, ...] = ()
    explains: tuple[str, ...] = field(default_factory=tuple)

    @property
    def key(self) -> str:
        """Return what names this finding within a fleet."""
        return "/".join((self.host, self.rule, self.subject))

    @property
    def bad(self) -> bool:
        """Whether this says that something is wrong."""
        return self.state == "fail" or self.state == "warn"

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON shape of design section 3."""
        shape: dict[str, Any] = plain(self)
        return shape
