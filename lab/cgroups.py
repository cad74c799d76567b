"""The control groups of lab hosts: every process of a host is in the host's own group, so it can be found and ended."""

from __future__ import annotations

import os
import signal
import time
from datetime import UTC, datetime
from pathlib import Path

from .system import LabError

TOP = "peerlane-lab"


def roots(mounts: str) -> list[Path]:
    """Return the hierarchies that systemd uses, from a /proc/mounts text: cgroup v2, and v1's `name=systemd`."""
    found = []
    for line in mounts.splitlines():
        _, where, kind, options = line.split()[:4]
        if kind == "cgroup2" or (kind == "cgroup" and "name=systemd" in options.split(",")):
            found.append(Path(where))
    return found


def directories(lab_id: str, name: str) -> list[Path]:
    """Return the host's directory in each hierarchy (they need not exist)."""
    return [root / TOP / lab_id / name for root in roots(Path("/proc/mounts").read_text())]


def make(lab_id: str, name: str) -> list[Path]:
    """Make the host's directories and return them."""
    found = directories(lab_id, name)
    if not found:
        raise LabError("no cgroup v2 or systemd hierarchy is mounted on this machine, so no lab host can start")
    for directory in found:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LabError(f"{directory}: {error.strerror}; a lab host needs a writable cgroup hierarchy") from error
    return found


def processes(lab_id: str, name: str) -> list[int]:
    """Return the process ids (as this machine numbers them) of a host, its supervisor included."""
    found: set[int] = set()
    for directory in directories(lab_id, name):
        for group, _, _ in os.walk(directory):  # leaves out what vanishes while it walks
            try:
                found.update(int(word) for word in Path(group, "cgroup.procs").read_text().split())
            except OSError:
                continue  # the group vanished while it was read
    return sorted(found - {0})


def leader(lab_id: str, name: str) -> int | None:
    """Return the process id of the host's init, or None where it does not run."""
    for pid in processes(lab_id, name):
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        ids = next((line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:")), [])
        if len(ids) == 2 and ids[1] == "1":
            return pid
    return None


def started_at(pid: int) -> str:
    """Return when a process started, ISO 8601 in UTC, to the second."""
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])  # field 22 of proc(5)
    boot = next(line.split()[1] for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
    moment = datetime.fromtimestamp(int(boot) + ticks / os.sysconf("SC_CLK_TCK"), UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def kill(lab_id: str, name: str, timeout_s: float = 15) -> None:
    """End all processes of a host at once, as a power cut does, and wait until they are gone."""
    give_up = time.monotonic() + timeout_s
    while pids := processes(lab_id, name):
        for directory in directories(lab_id, name):
            switch = directory / "cgroup.kill"
            if switch.exists():
                switch.write_text("1")
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > give_up:
            raise LabError(f"{name}: processes {pids} did not end within {timeout_s:g} s of SIGKILL")
        time.sleep(0.05)


def remove(lab_id: str, name: str) -> None:
    """Remove a host's directories, and the lab's when the last host has gone."""
    for directory in directories(lab_id, name):
        for group, _, _ in os.walk(directory, topdown=False):
            _rmdir(Path(group))
        _rmdir(directory.parent)
        _rmdir(directory.parent.parent)


def names(lab_id: str) -> set[str]:
    """Return the hosts of a lab that have directories."""
    return {path.name for parent in {d.parent for d in directories(lab_id, "x")} for path in parent.glob("*/")}


def _rmdir(directory: Path) -> None:
    """Remove a group if it is empty; a group that just lost its last process may be busy for a moment."""
    for _ in range(20):
        try:
            directory.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            if any(groups for _, groups, _ in os.walk(directory)):
                return
            time.sleep(0.05)
        else:
            return
