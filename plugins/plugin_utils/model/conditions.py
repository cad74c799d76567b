"""When a row of data holds: versions of an engine (PEP 440) and GPU architectures."""

from __future__ import annotations

import re
from dataclasses import dataclass

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from ..core.errors import InputError

_RANGE = re.compile(r"(\d{1,3})(?:-(\d{1,3})|(\+))?")
_HIGHEST_SM = 999


@dataclass(frozen=True)
class SmRange:
    """GPU architectures, such as ``75-88, 120+``: compute capability without its dot. No bounds: all of them."""

    bounds: tuple[tuple[int, int], ...] = ()

    def __contains__(self, sm: int) -> bool:
        return not self.bounds or any(low <= sm <= high for low, high in self.bounds)

    def __str__(self) -> str:
        words = []
        for low, high in self.bounds:
            words.append(str(low) if low == high else f"{low}+" if high == _HIGHEST_SM else f"{low}-{high}")
        return ", ".join(words)


def sm_range(text: str, where: str = "") -> SmRange:
    """Read ``120``, ``120-129``, ``90+`` or several of them with commas between. Raises InputError."""
    bounds = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if not match:
            raise InputError(f"{text!r} is no range of GPU architectures", where, 'write "120", "75-88" or "90+"')
        low = int(match[1])
        high = int(match[2]) if match[2] else _HIGHEST_SM if match[3] else low
        if high < low:
            raise InputError(f"{part.strip()} ends before it begins", where, "write the lower architecture first")
        bounds.append((low, high))
    return SmRange(tuple(bounds))


def sm_of(text: str, where: str = "--sm") -> int:
    """Read one GPU architecture: ``120``, ``12.0``, ``sm_120`` or ``sm120``. Raises InputError."""
    match = re.fullmatch(r"(?:sm_?)?(\d{1,2})\.(\d)[a-z]?|(?:sm_?)?(\d{2,3})[a-z]?", text.strip().lower())
    if not match:
        raise InputError(f"{text!r} is no GPU architecture", where, "give the compute capability: 12.0 or 120")
    return int(match[3]) if match[3] else int(match[1]) * 10 + int(match[2])


def versions(text: str, where: str = "") -> SpecifierSet:
    """Read a range of versions (PEP 440): ``>=0.5.13,<0.5.20``. Raises InputError."""
    try:
        return SpecifierSet(text, prereleases=True)
    except InvalidSpecifier:
        raise InputError(f"{text!r} is no range of versions", where, 'write ">=0.5.13,<0.5.20"') from None


def version(text: str, where: str = "") -> Version:
    """Read one version (PEP 440). Raises InputError."""
    try:
        return Version(text)
    except InvalidVersion:
        raise InputError(f"{text!r} is no version", where, "write one such as 0.5.23") from None
