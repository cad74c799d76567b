"""Which variables exist, and what a misspelt one was meant to be.

Ansible ignores a variable that nobody reads, so a misspelt option would be dropped without a word. Every option of
every role is in its ``meta/argument_specs.yml``; a name that looks like one and is none of them is refused.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ..core.errors import InputError

# Variables of the playbooks, not of a role.
PLAYBOOK_VARIABLES: Mapping[str, str] = {
    "peerlane_accept_findings": "ids of findings (a list, or one string with commas) that must not stop a deployment",
    "peerlane_hypervisor": "inventory name of the hypervisor that this guest runs on, where the audit cannot find it",
    "peerlane_vmid": "id (Proxmox) or name (libvirt) of this guest's VM on its hypervisor",
    "peerlane_hosts": "host pattern of the playbook; only as an extra variable",
    "peerlane_save_to": "folder on the controller that gets the snapshot of each host",
}

# Roles that make sense only together: a model is fetched to be served.
_TOGETHER: Mapping[str, str] = {"model_weights": "model", "model_service": "model"}

_PREFIX = "peerlane_"

# A name of another prefix this near to an option is a slip of the keyboard: one or two letters of twenty.
_NEAR = 0.92

# An inventory is read to say where a name is set: not a whole disk.
_MAX_FILES = 2000
_MAX_FILE_BYTES = 1024 * 1024


@dataclass(frozen=True)
class Option:
    """One option of one role, as its argument_specs say it."""

    name: str
    role: str
    type: str = "str"
    required: bool = False
    default: Any = None
    description: str = ""


@dataclass(frozen=True)
class Unknown:
    """A variable that looks like an option and is none. ``suggestions``: the nearest names, best first."""

    name: str
    suggestions: tuple[str, ...] = ()

    def line(self, where: str = "") -> str:
        """Return the one line that a user reads."""
        place = f"{where}: " if where else ""
        if self.suggestions:
            return f"{place}there is no variable {self.name}; did you mean {' or '.join(self.suggestions)}?"
        return f"{place}there is no variable {self.name}; see: ansible-doc -t role -l peerlane.gpu"


@dataclass(frozen=True)
class Missing:
    """A required option that is not set, and the one whose setting shows that its role is wanted."""

    name: str
    because: str
    description: str = ""

    def line(self, where: str = "") -> str:
        """Return the one line that a user reads. ``where``: the place that sets ``because``."""
        place = f"{where}: " if where else ""
        return f"{place}{self.because} is set and {self.name} is not; set it: {self.description}"


def role_options(roles: Path) -> dict[str, Option]:
    """Read the options of all roles below a folder, by name."""
    options: dict[str, Option] = {}
    for place in sorted(roles.glob("*/meta/argument_specs.yml")):
        role = place.parent.parent.name
        for name, spec in argument_spec(place).items():
            described = spec.get("description") or ""
            options[name] = Option(
                name=name,
                role=role,
                type=str(spec.get("type") or "str"),
                required=bool(spec.get("required")),
                default=spec.get("default"),
                description=" ".join(described) if isinstance(described, list) else str(described),
            )
    return options


def argument_spec(place: Path) -> dict[str, dict[str, Any]]:
    """Read the options of every entry point of one ``argument_specs.yml``."""
    try:
        content = yaml.safe_load(place.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise InputError(f"cannot be read: {error}", str(place), "install Peerlane again") from None
    merged: dict[str, dict[str, Any]] = {}
    for entry in ((content or {}).get("argument_specs") or {}).values():
        for name, spec in ((entry or {}).get("options") or {}).items():
            merged[name] = spec or {}
    return merged


def role_names(roles: Path) -> tuple[str, ...]:
    """Return the names of the roles below a folder."""
    return tuple(sorted(place.parent.name for place in roles.glob("*/meta")))


def unknown_variables(names: Iterable[str], options: Iterable[str], roles: Iterable[str]) -> list[Unknown]:
    """Return the names that look like options and are none.

    A name looks like an option where it starts with a role's name or with ``peerlane_``, or where it is within a
    letter or two of an option.
    """
    known = set(options) | set(PLAYBOOK_VARIABLES)
    prefixes = (*(f"{role}_" for role in roles), _PREFIX)
    found = []
    for name in sorted(set(names)):
        if name in known or name.startswith("__"):
            continue
        near = difflib.get_close_matches(name, sorted(known), n=2, cutoff=0.75)
        slip = bool(near) and difflib.SequenceMatcher(None, name, near[0]).ratio() >= _NEAR
        if not slip and not name.startswith(prefixes):
            continue
        found.append(Unknown(name, tuple(near[:1] if slip else near)))
    return found


def missing(names: Iterable[str], options: Mapping[str, Option]) -> list[Missing]:
    """Return the required options that are not set, of each role of which the user has set another option."""

    def together(role: str) -> str:
        return _TOGETHER.get(role, role)

    wanted: dict[str, str] = {}
    for name in sorted(set(names)):
        if name in options:
            wanted.setdefault(together(options[name].role), name)
    given = set(names)
    return [
        Missing(one.name, wanted[together(one.role)], one.description)
        for one in options.values()
        if one.required and one.name not in given and together(one.role) in wanted
    ]


def where_set(name: str, sources: Sequence[Path]) -> str:
    """Return ``FILE:LINE`` of the first place in an inventory that sets a variable, or "" where none is found.

    ``sources`` are inventory files or folders; ``group_vars`` and ``host_vars`` beside them are read too.
    """
    setting = re.compile(rf"(?:^|[\s{{,\"'-]){re.escape(name)}[\"']?\s*[:=]")
    for place in _inventory_files(sources):
        try:
            if place.stat().st_size > _MAX_FILE_BYTES:
                continue
            lines = place.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        for number, line in enumerate(lines, 1):
            if setting.search(line.split(" #", 1)[0]) and not line.lstrip().startswith("#"):
                return f"{place}:{number}"
    return ""


def _inventory_files(sources: Sequence[Path]) -> list[Path]:
    files: list[Path] = []
    for source in sources:
        if source.is_file():
            files.append(source)
            folders = [source.parent / "group_vars", source.parent / "host_vars"]
        else:
            folders = [source]
        for folder in folders:
            if folder.is_dir():
                files.extend(sorted(one for one in folder.rglob("*") if one.is_file()))
    return list(dict.fromkeys(files))[:_MAX_FILES]
