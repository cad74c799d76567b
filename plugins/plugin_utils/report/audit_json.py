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
_INDENTED_HOSTS = 50
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
    return {
        "schema": AUDIT_SCHEMA,
        "generated_at": generated_at,
        "hosts": hosts,
        "summary": summary,
        "drift": compare(fleet).as_dict(),
    }


def text(document_: Mapping[str, Any]) -> str:
    """Return a document as JSON with sorted keys: indented, or without white space for a large fleet."""
    small = len(document_["hosts"]) <= _INDENTED_HOSTS
    # Python's own encoder, which is much slower, is the one that indents.
    how: dict[str, Any] = {"indent": 1} if small else {"separators": (",", ":")}
    return json.dumps(document_, sort_keys=True, allow_nan=False, **how) + "\n"


def schema() -> dict[str, Any]:
    """Return the JSON Schema of ``document``."""
    shape: dict[str, Any] = json.loads(_SCHEMA.read_text(encoding="utf-8"))
    return shape


def _host(snapshot: Snapshot, findings: Sequence[Finding]) -> dict[str, Any]:
    return {
        "facts": snapshot.as_dict(skip=_BULKY),
        "findings": [one.as_dict() for one in findings],
        "role": snapshot.role.value,
        "unrecognised": list(snapshot.unrecognised),
    }
