"""Typed shapes to the plain types that JSON knows. Whole fleets pass here, so each type is looked at once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

_ATOMS = frozenset((str, int, bool, type(None)))
_FIELDS: dict[type, tuple[str, ...]] = {}


def plain(value: Any, skip: frozenset[str] = frozenset()) -> Any:
    """Return dicts, lists, texts, numbers, booleans and None.

    Dataclasses become dicts of their fields, without those that ``skip`` names; one with a method ``plain_shape`` says
    itself what it becomes. A key that is a pair is joined with ``-``. Sets are sorted. A number that is none is None.
    """
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is float:
        # JSON has no word for what some tools print: nan, inf.
        return value if math.isfinite(value) else None
    if kind is tuple or kind is list:
        return [one if type(one) in _ATOMS else plain(one, skip) for one in value]
    names = _FIELDS.get(kind)
    if names is None:
        is_shape = dataclasses.is_dataclass(kind) and not hasattr(kind, "plain_shape")
        names = _FIELDS[kind] = tuple(one.name for one in dataclasses.fields(kind)) if is_shape else ()
    if names:
        shape = {}
        for name in names:
            if name not in skip:
                one = getattr(value, name)
                shape[name] = one if type(one) in _ATOMS else plain(one, skip)
        return shape
    if hasattr(kind, "plain_shape"):
        return plain(value.plain_shape(), skip)
    if isinstance(value, Mapping):
        return {
            "-".join(key) if isinstance(key, tuple) else str(key): one if type(one) in _ATOMS else plain(one, skip)
            for key, one in value.items()
        }
    if isinstance(value, frozenset | set):
        return sorted(plain(one, skip) for one in value)
    return value
