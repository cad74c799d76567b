"""From evidence to facts: the value, the source it came from, the line that says it, or why there is none."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, TypeVar

from ..core.evidence import Evidence, EvidenceSet
from ..core.snapshot import Fact, unknown
from .text import RefusedError, first_line

T = TypeVar("T")

# The collector's words (module_utils) for a file, a folder or a set of files that this machine does not have.
_NOT_THERE = re.compile(r"No such file or directory|is not there|no file matches")

# What a parser gives to a fact: the value, and the verbatim lines that it stands on. None: the text says nothing of it.
Reading = tuple[T, str] | None


# Facts by reader, source and text, for all hosts: machines of one fleet answer much the same. What is longer than
# this is hardly the same on two machines.
_LONGEST_REMEMBERED = 32 * 1024
_MOST_REMEMBERED = 8192
_remembered: dict[Hashable, Fact[Any]] = {}


def _identity(read: Callable[[str], Any]) -> Hashable:
    """Return what names a reader that is made anew for each host, or None where it may know more than the text."""
    if isinstance(read, partial):
        return (read.func, read.args)
    return None if getattr(read, "__closure__", None) else getattr(read, "__code__", None)


@functools.lru_cache(maxsize=1024)
def _not_collected(source: str) -> Fact[Any]:
    return unknown(f"{source} was not collected", source)


class Sources:
    """The evidence of one host, asked by source. Several files of one source are ``source`` and ``source@file``."""

    def __init__(self, evidence: EvidenceSet) -> None:
        self.evidence = evidence
        self._by_source: dict[str, list[Evidence]] = {}
        for entry in evidence:
            self._by_source.setdefault(entry.source.partition("@")[0], []).append(entry)

    def entries(self, *sources: str) -> list[Evidence]:
        """Return the usable entries of these sources, in this order."""
        return [entry for entry in self.asked(*sources) if entry.usable]

    def asked(self, *sources: str) -> list[Evidence]:
        """Return the entries of these sources, with those that failed."""
        return [entry for source in sources for entry in self._by_source.get(source, ())]

    def fact(self, read: Callable[[str], Reading[T]], *sources: str) -> Fact[T]:
        """Return the first reading that these sources give, or why none does.

        ``read`` depends on nothing but the text, and on the words that it was made with.
        """
        if self._by_source.keys().isdisjoint(sources):
            return self.missing(*sources)
        refusal = ""
        for entry in self.entries(*sources):
            text = entry.text
            named = _identity(read)
            key = (named, entry.source, text) if named and len(text) < _LONGEST_REMEMBERED else None
            if key in _remembered:
                return _remembered[key]
            try:
                reading = read(text)
            except RefusedError as error:
                refusal = refusal or f"{entry.source}: {error}"
                continue
            if reading is not None:
                fact = Fact(reading[0], entry.source, reading[1])
                if key is not None:
                    if len(_remembered) >= _MOST_REMEMBERED:
                        _remembered.clear()
                    _remembered[key] = fact
                return fact
            refusal = refusal or f"{entry.source} does not tell"
        return self.missing(*sources, refusal=refusal)

    def absent(self, source: str) -> str:
        """Return the collector's words that what this source reads does not exist: then its emptiness is a reading."""
        reasons = (entry.reason for entry in self.asked(source))
        return next((reason for reason in reasons if _NOT_THERE.search(reason)), "")

    def missing(self, *sources: str, refusal: str = "") -> Fact[Any]:
        """Return the fact that says why none of these sources has a value."""
        if not refusal and self._by_source.keys().isdisjoint(sources):
            return _not_collected(sources[0])
        failed = next((entry.source for entry in self.asked(*sources)), sources[0])
        return unknown(refusal or self.evidence.why_missing(failed), sources[0])


def said(value: T | None, text: str, pattern: str) -> Reading[T]:
    """Make a reading of a value and the first line that the pattern finds; None where there is no value."""
    return None if value is None else (value, first_line(text, pattern))
