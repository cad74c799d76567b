"""The Ansible inventory and the known-hosts file of a lab, as texts."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

import yaml

from . import network
from .state import Host, Paths, State, write_atomically

HEADER = "# Written by `peerlane lab`; changed with every up and down.\n"


def ssh_options(paths: Paths) -> list[str]:
    """Return the ssh options by which only this lab's key and host keys count."""
    return [
        "-o",
        f"UserKnownHostsFile={paths.known_hosts}",
        "-o",
        "GlobalKnownHostsFile=/dev/null",
        "-o",
        "StrictHostKeyChecking=yes",
        "-o",
        "IdentitiesOnly=yes",
    ]


def inventory_text(paths: Paths, state: State) -> str:
    """Return the inventory: group `lab` with all hosts, and a group for each release and kind in use."""
    groups: dict[str, Any] = {}
    variables: dict[str, Any] = {}
    for name, host in sorted(state.hosts.items()):
        entry: dict[str, Any] = {"ansible_host": _address(state, host), "ansible_user": host.user}
        if host.user != "root":
            entry["ansible_become"] = True
        variables[name] = entry
        for group in (host.distro, *(() if host.kind == "container" else (host.kind,))):
            groups.setdefault(group, {"hosts": {}})["hosts"][name] = {}
    lab: dict[str, Any] = {
        "hosts": variables,
        "vars": {
            "ansible_ssh_private_key_file": str(paths.key),
            "ansible_ssh_common_args": shlex.join(ssh_options(paths)),
            "ansible_python_interpreter": "/usr/bin/python3",
        },
    }
    return HEADER + yaml.safe_dump({"lab": lab, **groups}, sort_keys=False)


def known_hosts_text(state: State, keys: Mapping[str, str]) -> str:
    """Return a known-hosts file; `keys` are the hosts' public keys (`ssh-ed25519 AAAA... comment`) by host name."""
    lines = []
    for name, host in sorted(state.hosts.items()):
        if name in keys:
            kind, key = keys[name].split()[:2]
            lines.append(f"{_address(state, host)} {kind} {key}\n")
    return "".join(lines)


def write(paths: Paths, state: State) -> None:
    """Write inventory and known hosts for the present state. Call with the lab lock held."""
    keys = {}
    for name in state.hosts:
        file = paths.host(name) / "host_key.pub"
        if file.exists():
            keys[name] = file.read_text(encoding="utf-8")
    write_atomically(paths.known_hosts, known_hosts_text(state, keys))
    write_atomically(paths.inventory, inventory_text(paths, state))


def _address(state: State, host: Host) -> str:
    assert state.network is not None  # a state with hosts has a network
    return network.address(state.network, host.octet)
