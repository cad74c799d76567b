"""Snapshots and findings straight to JSON text: what ``json.dumps`` makes of their plain shapes, without those shapes.

Hosts of one fleet share most of their facts, as objects (``parse.facts``): the text of such a fact is made once.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from ..core.finding import Finding
from ..core.plain import plain
from ..core.snapshot import SNAPSHOT_SCHEMA, Fact, PciFunction, Snapshot
from ..core.values import by_identity

# Raw config space and every field of nvidia-smi -q are evidence, not facts: they stay in the snapshot folder.
BULKY = frozenset(("config_hex", "raw"))

dumps = json.JSONEncoder(sort_keys=True, allow_nan=False, separators=(",", ":")).encode


def snapshot_text(snapshot: Snapshot) -> str:
    """Return the JSON of a snapshot's facts."""
    parts = {name: _part(getattr(snapshot, name)) for name in _names(Snapshot)}
    parts["schema"] = quoted(SNAPSHOT_SCHEMA)
    return _object(parts)


def _part(value: Any) -> str:
    if type(value) is Fact:
        return _fact(value)
    if is_dataclass(value) and not isinstance(value, type):
        return _object({name: _part(getattr(value, name)) for name in _names(type(value))})
    if isinstance(value, Mapping) and value and all(type(one) is Fact for one in value.values()):
        return _object({key: _fact(one) for key, one in value.items()})
    return dumps(plain(value, BULKY))


@functools.cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(one.name for one in fields(kind))


def _object(parts: Mapping[str, str]) -> str:
    return "{" + ",".join([f"{quoted(name)}:{parts[name]}" for name in sorted(parts)]) + "}"


@by_identity(4096)
def _fact(fact: Fact[Any]) -> str:
    value = fact.value
    if type(value) is dict and any(type(one) is PciFunction for one in value.values()):
        told = _object({str(name): _function(one) for name, one in value.items()})
    else:
        told = dumps(plain(value, BULKY))
    return (
        f'{{"excerpt":{quoted(fact.excerpt)},"reason":{quoted(fact.reason)},"source":{quoted(fact.source)},'
        f'"value":{told}}}'
    )


@by_identity(4096)
def _function(function: PciFunction) -> str:
    return dumps(plain(function, BULKY))


_constant = functools.lru_cache(maxsize=4096)(quoted)


def finding_text(one: Finding) -> str:
    """Return the JSON of a finding."""
    evidence = ",".join(
        [f'{{"excerpt":{quoted(shown.excerpt)},"source":{_constant(shown.source)}}}' for shown in one.evidence]
    )
    gain = "null" if one.expected_gain is None else dumps(plain(one.expected_gain))
    explains = dumps(list(one.explains)) if one.explains else "[]"
    fix = "null" if one.fix is None else dumps(plain(one.fix))
    rest = _rest(one.rule, one.rung, one.severity, one.sources, one.state, one.subject, one.title, one.verify, one.why)
    return (
        f'{{"evidence":[{evidence}],"expected_gain":{gain},"explains":{explains},"fix":{fix},'
        f'"host":{_constant(one.host)},"reason":{_constant(one.reason)},{rest}'
    )


@functools.lru_cache(maxsize=4096)
def _rest(
    rule: str,
    rung: int | None,
    severity: str,
    sources: tuple[str, ...],
    state: str,
    subject: str,
    title: str,
    verify: str,
    why: str,
) -> str:
    """Return the end of a finding, from its rule on: most hosts get the same."""
    return (
        f'"rule":{quoted(rule)},"rung":{"null" if rung is None else rung},"severity":{quoted(severity)},'
        f'"sources":{dumps(list(sources))},"state":{quoted(state)},"subject":{quoted(subject)},'
        f'"title":{quoted(title)},"verify":{quoted(verify)},"why":{quoted(why)}}}'
    )
