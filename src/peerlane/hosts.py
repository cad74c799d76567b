"""The arguments that every verb with hosts shares, and what is checked before Ansible starts."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

import ansible_collections.peerlane.gpu.plugins.plugin_utils as rooms
from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.errors import InputError
from ansible_collections.peerlane.gpu.plugins.plugin_utils.model import variables
from peerlane import extravars

# Never provisioned: only read, to judge their guests.
HYPERVISORS = "hypervisors"

INVENTORY_TIMEOUT_S = 120

_SUFFIXES = (".yml", ".yaml", ".json")


@dataclass(frozen=True)
class Target:
    """Which hosts, with which variables.

    ``hosts`` are those that the limit leaves, ``hypervisors`` a part of them. ``addresses``: the words that reach each
    host with ssh (``-p 2222 admin@192.0.2.20``).
    """

    inventory: tuple[str, ...]
    limit: str = ""
    hosts: tuple[str, ...] = ()
    hypervisors: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    addresses: Mapping[str, str] = field(default_factory=dict)


def add_arguments(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Add the inventory, the limit, the extra variables and the sudo password."""
    parser.add_argument(
        "-i",
        "--inventory",
        action="append",
        required=required,
        metavar="INVENTORY",
        help="inventory file or folder, or a list of hosts with a comma; `peerlane init` writes one",
    )
    parser.add_argument("-l", "--limit", default="", metavar="PATTERN", help="only these hosts of the inventory")
    parser.add_argument(
        "-e",
        "--extra-vars",
        action="append",
        default=[],
        metavar="K=V",
        help="set a variable (K=V as in YAML, a YAML mapping, or @FILE); wins over the inventory",
    )
    parser.add_argument("-K", "--ask-become-pass", action="store_true", help="ask for the sudo password")
    parser.add_argument("-v", "--verbose", action="store_true", help="show each task, and the ansible-playbook line")


def roles_folder() -> Path:
    """Return the folder with the roles of the collection in use."""
    return Path(rooms.__path__[0]).parents[1] / "roles"


def target(arguments: argparse.Namespace, read_only: bool = False) -> Target:
    """Check inventory, limit and variables, so that nothing is started on bad input.

    ``read_only``: nothing is to be provisioned, so an option that only that would need may be missing.
    """
    roles = roles_folder()
    options = variables.role_options(roles)
    extra = extravars.parse(arguments.extra_vars, {name: one.type for name, one in options.items()})
    sources = tuple(_source(text) for text in arguments.inventory)
    listing = _listing(sources, arguments.limit)
    complaints = _unknown(listing, extra, sources, options, variables.role_names(roles))
    if not read_only:
        complaints += _incomplete(listing, extra, sources, options)
    if complaints:
        raise InputError("\n".join(complaints))
    hypervisors = tuple(sorted(set(_members(listing, HYPERVISORS)) & set(_hosts(listing))))
    addresses = {name: _address(name, listing, extra) for name in _hosts(listing)}
    return Target(sources, arguments.limit, _hosts(listing), hypervisors, extra, addresses)


def _address(name: str, listing: Mapping[str, Any], extra: Mapping[str, Any]) -> str:
    given = {**(((listing.get("_meta") or {}).get("hostvars") or {}).get(name) or {}), **extra}
    user, port = given.get("ansible_user"), given.get("ansible_port")
    place = f"{user}@" if isinstance(user, str) else ""
    return f"{f'-p {port} ' if port else ''}{place}{given.get('ansible_host') or name}"


def environment() -> dict[str, str]:
    """Return the variables that this Python's own Ansible is found by, and the settings that Peerlane is tested with.

    What the user has set in the environment wins.
    """
    scripts = sysconfig.get_path("scripts")
    settings = {
        "ANSIBLE_INJECT_FACT_VARS": "false",
        "ANSIBLE_PIPELINING": "true",
        "ANSIBLE_FORKS": "20",
        "ANSIBLE_SSH_ARGS": "-o ControlMaster=auto -o ControlPersist=300s "
        "-o ServerAliveInterval=15 -o ServerAliveCountMax=4",
    }
    chosen = {name: os.environ.get(name, value) for name, value in settings.items()}
    return {**chosen, "PATH": os.pathsep.join([scripts, os.environ.get("PATH", os.defpath)])}


def _source(text: str) -> str:
    """Return an inventory as Ansible takes it, after a look at what Ansible only warns of."""
    if "," in text and not Path(text).exists():
        return text
    place = Path(text).expanduser()
    todo = "write one with: peerlane init"
    if not place.exists():
        raise InputError("there is no such inventory", text, todo)
    if not os.access(place, os.R_OK | (os.X_OK if place.is_dir() else 0)):
        raise InputError("cannot be read: permission denied", text, "check its owner and mode")
    if place.is_file():
        _check_text(place, text)
    return str(place.resolve())


def _check_text(place: Path, shown: str) -> None:
    try:
        content = place.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", shown, "check its owner and mode") from None
    except UnicodeDecodeError:
        raise InputError("is no text (not UTF-8)", shown, "give an inventory file or folder") from None
    if not content.strip():
        raise InputError("is empty", shown, "write one with: peerlane init")
    if place.suffix not in _SUFFIXES:
        return
    try:
        node = yaml.compose(content, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f"{shown}:{mark.line + 1}" if mark else shown
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise InputError(f"is no YAML: {problem}", at, "correct that line") from None
    if not isinstance(node, yaml.MappingNode):
        raise InputError("is no inventory: its top is no mapping of groups", shown, "compare it with: peerlane init")


def _listing(sources: Sequence[str], limit: str) -> dict[str, Any]:
    command = ["ansible-inventory", "--list"]
    for source in sources:
        command += ["-i", source]
    if limit:
        command += ["--limit", limit]
    env = {**os.environ, **environment(), "ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED": "true", "ANSIBLE_NOCOLOR": "1"}
    env.pop("ANSIBLE_FORCE_COLOR", None)
    shown = ", ".join(sources)
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, errors="replace", timeout=INVENTORY_TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        raise InputError("ansible-inventory is not installed beside peerlane", "", "pip install ansible-core") from None
    except subprocess.TimeoutExpired:
        raise InputError(f"gave no answer in {INVENTORY_TIMEOUT_S} s", shown, "run ansible-inventory on it") from None
    if limit and _no_match(done.stderr):
        raise InputError(
            f"no host matches {limit!r}", "-l", "list the hosts with: ansible-inventory --graph -i INVENTORY"
        )
    if done.returncode != 0:
        raise InputError(_reason(done.stderr), shown, "run ansible-inventory --list on it for the whole story")
    try:
        listing = json.loads(done.stdout)
    except ValueError:
        raise InputError("ansible-inventory printed no JSON", shown, "run ansible-inventory --list on it") from None
    if not _hosts(listing):
        raise InputError("has no hosts", shown, "add one below `hosts:`; `peerlane init` shows how")
    return dict(listing)


def _no_match(stderr: str) -> bool:
    return "Could not match supplied host pattern" in stderr or "leaves us with no hosts" in stderr


def _reason(stderr: str) -> str:
    """Return the one line of Ansible's complaint that says most: the last one that names an error."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith(("[ERROR]", "ERROR!"))] or lines[-1:] or ["is no inventory"]
    return told[0].removeprefix("[ERROR]:").removeprefix("ERROR!").strip()


def _hosts(listing: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(sorted(_members(listing, "all")))


def _members(listing: Mapping[str, Any], group: str) -> set[str]:
    entry = listing.get(group) or {}
    found = set(entry.get("hosts") or [])
    for child in entry.get("children") or []:
        found |= _members(listing, child)
    return found


def _unknown(
    listing: Mapping[str, Any],
    extra: Mapping[str, Any],
    sources: Sequence[str],
    options: Mapping[str, variables.Option],
    roles: Sequence[str],
) -> list[str]:
    lines = [one.line("-e") for one in variables.unknown_variables(extra, options, roles)]
    per_host = (listing.get("_meta") or {}).get("hostvars") or {}
    names = {name for host in per_host.values() for name in host}
    for one in variables.unknown_variables(names, options, roles):
        hosts = sorted(host for host, given in per_host.items() if one.name in given)
        place = variables.where_set(one.name, [Path(source) for source in sources])
        lines.append(one.line(place or f"variable of {', '.join(hosts)}"))
    return lines


def _incomplete(
    listing: Mapping[str, Any],
    extra: Mapping[str, Any],
    sources: Sequence[str],
    options: Mapping[str, variables.Option],
) -> list[str]:
    lines = []
    for name in sorted(set(_hosts(listing)) - _members(listing, HYPERVISORS)):
        given = {**(((listing.get("_meta") or {}).get("hostvars") or {}).get(name) or {}), **extra}
        for one in variables.missing(given, options):
            place = "-e" if one.because in extra else variables.where_set(one.because, [Path(text) for text in sources])
            lines.append(one.line(place or f"variable of {name}"))
    return list(dict.fromkeys(lines))
