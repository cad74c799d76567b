"""The audit as JSON, for other programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.finding import SEVERITIES, Finding
from ..core.snapshot import Snapshot
from ..rules.drift import compare
from ..rules.engine import blocking
from ..rules.registry import Fleet

AUDIT_SCHEMA = "peerlane.audit/1"
_SCHEMA = Path(__file__).resolve().parent / "audit.schema.json"

_STATES = ("fail", "warn", "unknown", "info", "pass", "not_applicable")
# Raw config space and every field of nvidia-smi -q are evidence, not facts: they stay in the snapshot folder.
_BULKY = frozenset(("config_hex", "raw"))


def document(fleet: Fleet, findings: Mapping[str, Sequence[Finding]], generated_at: str) -> dict[str, Any]:
    """Return the audit of a fleet (schema ``peerlane.audit/1``). The same input gives the same document.

    ``generated_at``: ISO 8601 in UTC, given by the caller. ``summary.blocking`` holds ``HOST/RULE``.
    """
    hosts = {host: _host(fleet[host], findings.get(host, ())) for host in sorted(fleet)}
    every = [one for host in sorted(fleet) for one in findings.get(host, ())]
    summary = {
        "blocking": [f"{host}/{rule}" for host in sorted(fleet) for rule in blocking(findings.get(host, ()))],
        "by_severity": {
            severity: sum(one.bad and one.severity == severity for one in every) for severity in SEVERITIES
        },
        "by_state": {state: sum(one.state == state for one in every) for state in _STATES},
        "hosts": len(hosts),
    }
    shape = {
        "schema": AUDIT_SCHEMA,
        "generated_at": generated_at,
        "hosts": hosts,
        "summary": summary,
        "drift": compare(fleet).as_dict(),
    }
    sorted_shape: dict[str, Any] = _sorted(shape)
    return sorted_shape


def schema() -> dict[str, Any]:
    """Return the JSON Schema of ``document``."""
    shape: dict[str, Any] = json.loads(_SCHEMA.read_text(encoding="utf-8"))
    return shape


def _host(snapshot: Snapshot, findings: Sequence[Finding]) -> dict[str, Any]:
    return {
        "facts": slim(snapshot.as_dict()),
        "findings": [one.as_dict() for one in findings],
        "role": snapshot.role.value,
        "unrecognised": list(snapshot.unrecognised),
    }


def slim(value: Any) -> Any:
    """Return a snapshot's shape without its bulky parts."""
    if isinstance(value, Mapping):
        return {key: slim(one) for key, one in value.items() if key not in _BULKY or isinstance(one, int)}
    if isinstance(value, list):
        return [slim(one) for one in value]
    return value


def _sorted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _sorted(value[key]) for key in sorted(value)}
    if isinstance(value, list | tuple):
        return [_sorted(one) for one in value]
    return value
