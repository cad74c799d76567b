"""Extra variables from ``-e``: typed, so that ``false`` is false and a version stays the text that it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.errors import InputError

_TEXT_TYPES = ("str", "path")


class _Loader(yaml.SafeLoader):
    """YAML without dates: JSON has none, and nobody means one here."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rows if tag != "tag:yaml.org,2002:timestamp"]
    for first, rows in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def parse(words: Sequence[str], types: Mapping[str, str]) -> dict[str, Any]:
    """Return the variables of all ``-e`` words; a later one wins.

    ``types`` maps a role's option to its type: an option that is text keeps its text, so 0.10 stays 0.10.
    """
    found: dict[str, Any] = {}
    for word in words:
        found.update(_one(word.strip(), types))
    return found


def _one(word: str, types: Mapping[str, str]) -> dict[str, Any]:
    if word.startswith("@"):
        return _file(Path(word[1:]).expanduser())
    if word.startswith("{"):
        return _mapping(word, f"-e {word}")
    name, equals, text = word.partition("=")
    name = name.strip()
    if not equals or not name.isidentifier():
        raise InputError("is no NAME=VALUE", f"-e {word}", "write -e model_service_port=8000, or -e @FILE")
    if types.get(name) in _TEXT_TYPES:
        return {name: text}
    return {name: _load(text, f"-e {word}")}


def _file(place: Path) -> dict[str, Any]:
    try:
        text = place.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise InputError(f"cannot be read: {reason}", f"-e @{place}", "check the path") from None
    return _mapping(text, f"-e @{place}")


def _mapping(text: str, where: str) -> dict[str, Any]:
    value = _load(text, where)
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise InputError("is no mapping of names to values", where, "write NAME: VALUE lines")
    return value


def _load(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506  a SafeLoader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 1}" if mark else ""
        raise InputError(
            f"is no YAML{line}: {getattr(error, 'problem', None) or error}", where, "quote the value"
        ) from None
