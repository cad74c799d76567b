"""Read a YAML file that people write against a schema: each slip in one line, with its place and what was meant."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Union

import yaml

from ..core.errors import InputError

# A person's file of settings; anything larger was named by mistake.
_MAX_BYTES = 1024 * 1024

# No count in a model's shape is anywhere near it.
MOST = 10**9

# libyaml's parser where PyYAML was built with it: ten times as fast, the same language.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Path_ = tuple[str, ...]
Check = Callable[[Any, str], None]
Spec = Union[Check, "Table", "Named"]


@dataclass(frozen=True)
class Table:
    """A mapping with known keys. ``needed`` ones must be there."""

    keys: Mapping[str, Spec]
    needed: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Named:
    """A mapping from names that the writer chooses to rows of one kind. A row that is null takes one away."""

    row: Spec


@dataclass(frozen=True)
class Document:
    """What a file says, and the line of each key."""

    name: str
    data: dict[str, Any]
    lines: Mapping[Path_, int] = field(default_factory=dict)

    def where(self, path: Path_) -> str:
        """Return the place of a key as a message names it: file, line and dotted path."""
        line = next((self.lines[path[:end]] for end in range(len(path), 0, -1) if path[:end] in self.lines), 0)
        place = f"{self.name}:{line}" if line else self.name
        return f"{place}: {'.'.join(path)}" if path else place


def read(place: Path, name: str = "") -> Document:
    """Read a file. Raises InputError where it cannot be read, is no YAML, or is no mapping."""
    shown = name or str(place)
    try:
        if place.is_file() and place.stat().st_size > _MAX_BYTES:
            raise InputError("is larger than 1 MiB", shown, "name a file of settings")
        text = place.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", shown, "correct the path") from None
    except UnicodeDecodeError:
        raise InputError("is no text (UTF-8)", shown, "name a YAML file") from None
    return parse(text, shown)


def parse(text: str, name: str) -> Document:
    """Read YAML text. Raises InputError where it is none, has a key twice, or is no mapping."""
    try:
        node = yaml.compose(text, Loader=_LOADER)
    except RecursionError:
        raise InputError("is nested too deeply", name, "correct it") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{name}:{mark.line + 1}" if mark else name
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise InputError(f"is no YAML: {problem}", place, "correct it") from None
    if not isinstance(node, yaml.MappingNode):
        raise InputError("is no mapping of keys to values", name, "see docs/models.md for an example")
    reader = _Reader(name)
    return Document(name, reader.value(node, ()), reader.lines)


class _Reader:
    """Turns nodes into values and keeps the lines of keys."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines: dict[Path_, int] = {}
        self._seen: set[int] = set()
        self._constructor = yaml.constructor.SafeConstructor()

    def value(self, node: yaml.Node, path: Path_) -> Any:
        line = node.start_mark.line + 1
        if id(node) in self._seen:
            raise InputError("anchors and aliases are not read here", f"{self.name}:{line}", "write the value out")
        self._seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(one, path) for one in node.value]
        try:
            return self._constructor.construct_object(node)
        except (yaml.YAMLError, ValueError):
            raise InputError("is a value that is not read here", f"{self.name}:{line}", "write plain text") from None

    def _mapping(self, node: yaml.MappingNode, path: Path_) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise InputError("a key is no plain text", f"{self.name}:{line}", "write name: value")
            key = str(key_node.value)
            if key in found:
                raise InputError(f"the key {key} stands there twice", f"{self.name}:{line}", "keep one of them")
            self.lines[(*path, key)] = line
            found[key] = self.value(value_node, (*path, key))
        return found


def check(document: Document, spec: Table, complete: bool = True) -> None:
    """Hold a document against a schema. Raises InputError at the first slip.

    ``complete`` False: needed keys may be missing, because the file is merged over another one.
    """
    _check(document, document.data, spec, (), complete)


def _check(document: Document, value: Any, spec: Spec, path: Path_, complete: bool) -> None:
    if isinstance(spec, Table):
        _mapping(document, value, path)
        for key in value:
            if key not in spec.keys:
                near = difflib.get_close_matches(key, list(spec.keys), n=1, cutoff=0.5)
                todo = f"did you mean {near[0]}?" if near else f"known: {', '.join(spec.keys)}"
                raise InputError(f"there is no key {key!r}", document.where((*path, key)), todo)
        missing = [key for key in spec.keys if key in spec.needed and value.get(key) is None]
        if complete and missing:
            raise InputError(f"{missing[0]} is missing", document.where(path), "add it")
        for key, one in value.items():
            if one is not None:
                _check(document, one, spec.keys[key], (*path, key), complete)
    elif isinstance(spec, Named):
        _mapping(document, value, path)
        for key, one in value.items():
            if one is not None:
                _check(document, one, spec.row, (*path, key), complete)
    else:
        spec(value, document.where(path))


def _mapping(document: Document, value: Any, path: Path_) -> None:
    if not isinstance(value, dict):
        raise InputError(f"{value!r} is no mapping", document.where(path), "write keys and values below it")


def merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Lay one document over another: mappings key by key, all else replaced, null takes away."""
    made = dict(under)
    for key, value in over.items():
        below = made.get(key)
        if value is None:
            made.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(below, Mapping):
            made[key] = merge(below, value)
        else:
            made[key] = merge({}, value) if isinstance(value, Mapping) else value
    return made


# --- values ---------------------------------------------------------------------------------------------------------


def whole(value: Any, where: str) -> None:
    """Check a whole number from 0 to a thousand million."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST:
        raise InputError(f"{value!r} is no whole number", where, "write digits")


def number(value: Any, where: str) -> None:
    """Check a number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise InputError(f"{value!r} is no number above 0", where, "write one such as 595")


def text(value: Any, where: str) -> None:
    """Check text that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{value!r} is no text", where, "put it into quotes")


def yes_no(value: Any, where: str) -> None:
    """Check true or false."""
    if not isinstance(value, bool):
        raise InputError(f"{value!r} is neither true nor false", where)


def texts(value: Any, where: str) -> None:
    """Check a list of text."""
    if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
        raise InputError(f"{value!r} is no list of text", where, "write [one, two]")


def scalar(value: Any, where: str) -> None:
    """Check a single value: text, a number, true or false."""
    if isinstance(value, list | dict):
        raise InputError("is no single value", where, "write text, a number, true or false")


def choice(*allowed: str) -> Check:
    """Return a check for one of these words."""

    def check_choice(value: Any, where: str) -> None:
        if value not in allowed:
            near = difflib.get_close_matches(str(value), allowed, n=1)
            todo = f"did you mean {near[0]}?" if near else f"use {', '.join(allowed)}"
            raise InputError(f"{value!r} is not known here", where, todo)

    return check_choice
