"""The audit as JSON, for other programs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.finding import SEVERITIES, Finding
from ..core.snapshot import Snapshot
from ..rules.drift import Drift, compare
from ..rules.engine import blocking
from ..rules.registry import Fleet
from .json_text import BULKY, dumps, finding_text, snapshot_text

AUDIT_SCHEMA = "peerlane.audit/1"
_SCHEMA = Path(__file__).resolve().parent / "audit.schema.json"

_STATES = ("fail", "warn", "unknown", "info", "pass", "not_applicable")
# A larger fleet is written without white space: the encoder of Python that indents is much slower.
INDENTED_HOSTS = 50


def document(fleet: Fleet, findings: Mapping[str, Sequence[Finding]], generated_at: str) -> dict[str, Any]:
    """Return the audit of a fleet (schema ``peerlane.audit/1``). The same input gives the same document.

    ``generated_at``: ISO 8601 in UTC, given by the caller. ``summary.blocking`` holds ``HOST/RULE``.
    """
    summary = Summary()
    hosts = {}
    for host in sorted(fleet):
        hosts[host] = _host(fleet[host], findings.get(host, ()))
        summary.add(host, findings.get(host, ()))
    return {
        "schema": AUDIT_SCHEMA,
        "generated_at": generated_at,
        "hosts": hosts,
        "summary": summary.as_dict(),
        "drift": compare(fleet).as_dict(),
    }


def text(document_: Mapping[str, Any]) -> str:
    """Return a document as JSON with sorted keys: indented, or without white space for a large fleet."""
    if len(document_["hosts"]) > INDENTED_HOSTS:
        return f"{dumps(document_)}\n"
    return json.dumps(document_, sort_keys=True, allow_nan=False, indent=1) + "\n"


def pieces(hosts: Iterable[tuple[str, str]], summary: Summary, drift: Drift, generated_at: str) -> Iterator[str]:
    """Yield the text of the document of a large fleet in pieces, so that it need not be in memory as a whole.

    ``hosts`` gives name and ``host_text`` of each host in the order of the names; ``summary`` is complete when it ends.
    """
    yield f'{{"drift":{dumps(drift.as_dict())},"generated_at":{dumps(generated_at)},"hosts":{{'
    separator = ""
    for host, told in hosts:
        yield f"{separator}{dumps(host)}:{told}"
        separator = ","
    yield f'}},"schema":{dumps(AUDIT_SCHEMA)},"summary":{dumps(summary.as_dict())}}}\n'


def host_text(snapshot: Snapshot, findings: Sequence[Finding]) -> str:
    """Return the text of one host in the document of a large fleet."""
    told = ",".join([finding_text(one) for one in findings])
    return (
        f'{{"facts":{snapshot_text(snapshot)},"findings":[{told}],"role":{dumps(snapshot.role.value)},'
        f'"unrecognised":{dumps(list(snapshot.unrecognised))}}}'
    )


class Summary:
    """What the document says of all findings together. The order in which hosts are added does not matter."""

    def __init__(self) -> None:
        self._blocking: dict[str, list[str]] = {}
        self._severities: Counter[str] = Counter()
        self._states: Counter[str] = Counter()
        self._hosts = 0

    def add(self, host: str, findings: Sequence[Finding]) -> None:
        """Count the findings of one host."""
        self._hosts += 1
        if rules := blocking(findings):
            self._blocking[host] = rules
        self._severities.update([one.severity for one in findings if one.bad])
        self._states.update([one.state for one in findings])

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {
            "blocking": [f"{host}/{rule}" for host in sorted(self._blocking) for rule in self._blocking[host]],
            "by_severity": {severity: self._severities[severity] for severity in SEVERITIES},
            "by_state": {state: self._states[state] for state in _STATES},
            "hosts": self._hosts,
        }


def schema() -> dict[str, Any]:
    """Return the JSON Schema of ``document``."""
    shape: dict[str, Any] = json.loads(_SCHEMA.read_text(encoding="utf-8"))
    return shape


def _host(snapshot: Snapshot, findings: Sequence[Finding]) -> dict[str, Any]:
    return {
        "facts": snapshot.as_dict(skip=BULKY),
        "findings": [one.as_dict() for one in findings],
        "role": snapshot.role.value,
        "unrecognised": list(snapshot.unrecognised),
    }
