"""The lab's network: one bridge and one /24 per lab, reached from outside by masquerading."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from .state import Paths, State, locked
from .system import LabError, command

FIRST_OCTET, LAST_OCTET = 10, 250
NETWORKS = range(256)
RUN = Path("/run/peerlane-lab")
MACHINE_LOCK = Path("/run/lock/peerlane-lab.lock")
FORWARD_SWITCH = Path("/proc/sys/net/ipv4/ip_forward")
ALIAS = "peerlane-lab "


def bridge(network: int) -> str:
    """Return the bridge's name."""
    return f"plane{network}"


def subnet(network: int) -> ipaddress.IPv4Network:
    """Return the network of a lab."""
    return ipaddress.IPv4Network(f"10.77.{network}.0/24")


def gateway(network: int) -> str:
    """Return the machine's own address on the bridge."""
    return f"10.77.{network}.1"


def address(network: int, octet: int) -> str:
    """Return a host's address."""
    return f"10.77.{network}.{octet}"


def machine(network: int, octet: int) -> str:
    """Return the name that systemd-nspawn gets: unique on the machine, and short enough for an interface name."""
    return f"{bridge(network)}-{octet}"


def veth(network: int, octet: int) -> str:
    """Return the machine's end of a host's cable, as systemd-nspawn names it for a bridged machine."""
    return f"vb-{machine(network, octet)}"


def free_octet(state: State) -> int:
    """Return an unused last part of an address, going round: a just freed address is the last to be given again."""
    used = {host.octet for host in state.hosts.values()}
    span = LAST_OCTET - FIRST_OCTET + 1
    start = max(state.last_octet + 1, FIRST_OCTET) - FIRST_OCTET
    for step in range(span):
        octet = FIRST_OCTET + (start + step) % span
        if octet not in used:
            return octet
    raise LabError(f"this lab has {span} hosts, all of its addresses; take some down first")


def free_networks(taken: Iterable[ipaddress.IPv4Network], bridges: Iterable[str]) -> list[int]:
    """Return the lab networks that overlap with no route of this machine and whose bridge does not exist."""
    names, routes = set(bridges), list(taken)
    return [
        number
        for number in NETWORKS
        if bridge(number) not in names and not any(subnet(number).overlaps(route) for route in routes)
    ]


def rules(network: int) -> list[list[str]]:
    """Return the lab's firewall rules as iptables words after -A/-C/-D: way out, and way back for answers."""
    name = bridge(network)
    return [
        ["nat", "POSTROUTING", "-s", str(subnet(network)), "!", "-o", name, "-j", "MASQUERADE"],
        ["filter", "FORWARD", "-i", name, "-j", "ACCEPT"],
        ["filter", "FORWARD", "-o", name, "-m", "conntrack", "--ctstate", "RELATED,ESTABLISHED", "-j", "ACCEPT"],
    ]


def ensure(paths: Paths, state: State) -> int:
    """Make the bridge, the forwarding and the rules where they are missing; return the lab's network number.

    Call with the lab lock held.
    """
    with locked(MACHINE_LOCK):
        network = _own_bridge(paths)
        if network is None:
            network = _make_bridge(paths, preferred=state.network)
        if FORWARD_SWITCH.read_text().strip() == "0":
            RUN.mkdir(parents=True, exist_ok=True)
            (RUN / "ip_forward_was_0").touch()
            FORWARD_SWITCH.write_text("1\n")
    for rule in rules(network):
        add_rule(rule)
    return network


def remove(paths: Paths) -> None:
    """Take away all of this lab's bridges with their rules, and forwarding if the lab turned it on and is the last.

    Call with the lab lock held.
    """
    with locked(MACHINE_LOCK):
        links = _bridges()
        for name, alias in links.items():
            if alias == _alias(paths):
                for rule in rules(int(name.removeprefix("plane"))):
                    delete_rule(rule)
                command(["ip", "link", "delete", name])
        others = [name for name, alias in links.items() if alias.startswith(ALIAS) and alias != _alias(paths)]
        if not others and RUN.is_dir():
            if (RUN / "ip_forward_was_0").exists():
                FORWARD_SWITCH.write_text("0\n")
                (RUN / "ip_forward_was_0").unlink()
            RUN.rmdir()


def cut_rules(host_address: str) -> list[list[str]]:
    """Return the rules that drop SSH between this machine and a host, both ways (words as in `rules`)."""
    return [
        ["filter", "OUTPUT", "-d", host_address, "-p", "tcp", "--dport", "22", "-j", "DROP"],
        ["filter", "INPUT", "-s", host_address, "-p", "tcp", "--sport", "22", "-j", "DROP"],
    ]


def break_connections(host_address: str) -> None:
    """End this machine's open connections to a host; where the kernel cannot, they stall until their own timeouts."""
    command(["ss", "-K", "dst", host_address], check=False, timeout_s=10)


def add_rule(rule: Sequence[str]) -> None:
    """Put an iptables rule (table, chain, words...) first in its chain, once."""
    if not has_rule(rule):
        table, chain, *words = rule
        command(["iptables", "-w", "10", "-t", table, "-I", chain, *words])


def delete_rule(rule: Sequence[str]) -> None:
    """Delete an iptables rule, as often as it is there."""
    table, chain, *words = rule
    while has_rule(rule):
        command(["iptables", "-w", "10", "-t", table, "-D", chain, *words])


def has_rule(rule: Sequence[str]) -> bool:
    """Tell whether an iptables rule is in place."""
    table, chain, *words = rule
    return command(["iptables", "-w", "10", "-t", table, "-C", chain, *words], check=False).returncode == 0


def uplink_mtu() -> int:
    """Return the MTU in bytes of the interface with the default route, 1500 where there is none."""
    routes = json.loads(command(["ip", "-j", "-4", "route", "show", "default"]).stdout or "[]")
    if not routes:
        return 1500
    return int(Path(f"/sys/class/net/{routes[0]['dev']}/mtu").read_text())


def _alias(paths: Paths) -> str:
    """Return the label by which a lab knows its bridge (the kernel keeps up to 255 bytes)."""
    return ALIAS + paths.lab_id


def _bridges() -> dict[str, str]:
    """Return the lab bridges of this machine, of all labs, with their labels."""
    links = json.loads(command(["ip", "-j", "-d", "link", "show", "type", "bridge"]).stdout or "[]")
    return {
        link["ifname"]: link.get("ifalias", "")
        for link in links
        if link.get("ifname", "").startswith("plane") and link["ifname"].removeprefix("plane").isdigit()
    }


def _own_bridge(paths: Paths) -> int | None:
    for name, alias in _bridges().items():
        if alias == _alias(paths):
            return int(name.removeprefix("plane"))
    return None


def _make_bridge(paths: Paths, preferred: int | None) -> int:
    routes = json.loads(command(["ip", "-j", "-4", "route", "show", "table", "all"]).stdout or "[]")
    taken = [
        ipaddress.IPv4Network(route["dst"], strict=False)
        for route in routes
        if route.get("dst", "default")[0].isdigit() and not route["dst"].startswith("0.")
    ]
    free = free_networks(taken, (path.name for path in Path("/sys/class/net").iterdir()))
    if preferred in free:
        free.insert(0, preferred)
    if not free:
        raise LabError("every network of 10.77.0.0/16 is in use on this machine, so the lab has no address range left")
    number = free[0]
    name = bridge(number)
    command(["ip", "link", "add", name, "mtu", str(uplink_mtu()), "type", "bridge"])
    command(["ip", "link", "set", name, "alias", _alias(paths)])
    command(["ip", "address", "add", f"{gateway(number)}/24", "dev", name])
    command(["ip", "link", "set", name, "up"])
    return number
