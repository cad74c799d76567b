"""Faults that a lab host really suffers, each with a way back. `down` ends them all, a power cut all but `power`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from . import container, network, operations, vm
from .state import Host, Paths, State, host_lock, load
from .system import LabError, Progress, command

INSIDE = Path(__file__).with_name("inside")
APT_LOCK_UNIT = "peerlane-lab-apt-lock"
APT_LOCK_MAX_S = 3600
KINDS: Mapping[str, str] = {
    "ssh": "cut port 22 between this machine and the host; open connections break, new ones get no answer",
    "power": "`off` ends all processes of the host at once, as pulling the plug does; `on` starts it again",
    "disk": "leave only --free-mib of room under --path; a write beyond it gets ENOSPC from the kernel",
    "slow": "delay by --delay-ms and limit to --rate-kbit, in both directions",
    "apt-lock": "hold the lock of apt and dpkg in a process of the host",
}


@dataclass(frozen=True)
class Options:
    """How hard a fault is. `path` is a directory in the host; `rate_kbit` is kilobit per second each way."""

    path: str = "/opt"
    free_mib: int = 8
    delay_ms: int = 200
    rate_kbit: int = 1000

    def check(self) -> None:
        """Refuse values that would not give the fault."""
        if not PurePosixPath(self.path).is_absolute() or self.path in ("/", "/proc", "/sys", "/dev", "/run"):
            raise LabError(f"--path {self.path}: not a directory that can be filled; name one like /opt or /var/lib")
        for name, value in (("free-mib", self.free_mib), ("delay-ms", self.delay_ms), ("rate-kbit", self.rate_kbit)):
            if value < 1:
                raise LabError(f"--{name} {value}: must be at least 1")


@dataclass(frozen=True)
class Target:
    """A host with what its faults need to know."""

    paths: Paths
    host: Host
    network: int

    @property
    def address(self) -> str:
        """The host's address."""
        return network.address(self.network, self.host.octet)

    @property
    def veth(self) -> str:
        """This machine's end of the host's cable."""
        return network.veth(self.network, self.host.octet)

    @property
    def interface(self) -> str:
        """The host's own end of it."""
        return vm.INTERFACE if self.host.kind == "vm" else "host0"

    def inside(self, *argv: str, check: bool = True) -> str:
        """Run a program in the host without SSH."""
        if self.host.kind == "vm":
            return vm.inside(self.paths, self.host.name, list(argv), check=check)
        return container.inside(self.paths, self.host.name, list(argv), check=check)


def switch(paths: Paths, name: str, kind: str, on: bool, options: Options, progress: Progress) -> None:
    """Put a fault on or take it off. Putting on what is on, or taking off what is off, changes nothing."""
    options.check()
    with host_lock(paths, name):
        state = load(paths)
        target = _target(paths, state, name)
        running = operations.is_running(paths, target.host)
        if kind == "power":
            if running and not on:
                operations.power_off(paths, name)
            elif not running and on:
                operations.power_on(paths, name, progress)
            progress(f"{name}: power is {'on' if on else 'off'}")
            return
        if not running:
            raise LabError(f"{name} is off, so it cannot have the fault {kind}; `peerlane lab fault {name} power on`")
        if on != _IS_ON[kind](target):
            (_put_on if on else _take_off)(target, kind, options, progress)
        progress(f"{name}: fault {kind} is {'on' if on else 'off'}")


def active(paths: Paths, state: State, name: str) -> tuple[str, ...]:
    """Return the faults that a running host has, as they can be seen from outside; `power` shows as its state."""
    target = _target(paths, state, name)
    return tuple(kind for kind in KINDS if kind != "power" and _IS_ON[kind](target))


def _target(paths: Paths, state: State, name: str) -> Target:
    host = operations.get_host(state, name)
    if state.network is None:
        raise LabError(f"{name}: the lab has no network; `peerlane lab up {name}`")
    return Target(paths, host, state.network)


def _put_on(target: Target, kind: str, options: Options, progress: Progress) -> None:
    if kind == "ssh":
        for rule in network.cut_rules(target.address):
            network.add_rule(rule)
        network.break_connections(target.address)
    elif kind == "disk":
        _run_script(target, "disk_full.py", "on", options.path, str(options.free_mib))
    elif kind == "slow":
        _slow_down(target, options, progress)
    elif kind == "apt-lock":
        _hold_apt_lock(target)


def _take_off(target: Target, kind: str, options: Options, progress: Progress) -> None:
    if kind == "ssh":
        for rule in network.cut_rules(target.address):
            network.delete_rule(rule)
    elif kind == "disk":
        _run_script(target, "disk_full.py", "off")
    elif kind == "slow":
        command(["tc", "qdisc", "delete", "dev", target.veth, "root"])
        target.inside("tc", "qdisc", "delete", "dev", target.interface, "root")
    elif kind == "apt-lock":
        target.inside("systemctl", "stop", APT_LOCK_UNIT)


def _is_slow(target: Target) -> bool:
    shown = json.loads(command(["tc", "-j", "qdisc", "show", "dev", target.veth], check=False).stdout or "[]")
    return any(entry.get("kind") in ("netem", "tbf") for entry in shown)


def _holds_apt_lock(target: Target) -> bool:
    unit = f"{APT_LOCK_UNIT}.service"
    return (
        operations.is_running(target.paths, target.host)
        and target.inside("systemctl", "is-active", unit, check=False).strip() == "active"
    )


_IS_ON: Mapping[str, Callable[[Target], bool]] = {
    "ssh": lambda target: all(network.has_rule(rule) for rule in network.cut_rules(target.address)),
    "disk": lambda target: target.inside("sh", "-c", "test -e /run/peerlane-lab/disk && echo on", check=False) != "",
    "slow": _is_slow,
    "apt-lock": _holds_apt_lock,
}


def _run_script(target: Target, script: str, *arguments: str) -> None:
    target.inside("python3", "-c", (INSIDE / script).read_text(encoding="utf-8"), *arguments)


def _slow_down(target: Target, options: Options, progress: Progress) -> None:
    rate = ["rate", f"{options.rate_kbit}kbit"]
    netem = ["netem", "delay", f"{options.delay_ms}ms", *rate]
    device = ["tc", "qdisc", "replace", "dev"]
    if command([*device, target.veth, "root", *netem], check=False).returncode != 0:
        progress(f"{target.host.name}: this kernel has no netem, so the rate is limited but nothing is delayed")
        netem = ["tbf", *rate, "burst", "16kb", "latency", "400ms"]
        command([*device, target.veth, "root", *netem])
    target.inside(*device, target.interface, "root", *netem)


def _hold_apt_lock(target: Target) -> None:
    """Start the holder as a unit of the host, and wait until the lock is really held."""
    script = (INSIDE / "hold_apt_lock.py").read_text(encoding="utf-8")
    target.inside(
        "systemd-run",
        "--quiet",
        "--collect",
        f"--unit={APT_LOCK_UNIT}",
        f"--property=RuntimeMaxSec={APT_LOCK_MAX_S}",
        "python3",
        "-c",
        script,
        str(APT_LOCK_MAX_S),
    )
    probe = (
        "import fcntl\n"
        "try: fcntl.lockf(open('/var/lib/dpkg/lock-frontend', 'r+b'), fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "except OSError: print('held')\n"
    )
    give_up = time.monotonic() + 10
    while target.inside("python3", "-c", probe) != "held\n":
        if time.monotonic() > give_up:
            raise LabError(f"{target.host.name}: the apt lock was not taken within 10 s")
        time.sleep(0.1)
