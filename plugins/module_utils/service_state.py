# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Read the state of a systemd service, its last log lines, and who listens on a port. Nothing here judges."""

from __future__ import annotations

import json
import os
import re
from typing import Any, Iterable

from ansible_collections.peerlane.gpu.plugins.module_utils import bounded

PROPERTIES = (
    "LoadState",
    "ActiveState",
    "SubState",
    "Result",
    "NRestarts",
    "ExecMainCode",
    "ExecMainStatus",
    "MainPID",
    "InvocationID",
    "UnitFileState",
)
COMMAND_TIMEOUT_S = 10
LOG_LINES = 300
_LISTEN = "0A"
_LISTEN_ANY = re.compile(r"^(0{8}|0{32})$")


def service_properties(unit: str) -> dict[str, str]:
    """Return ``systemctl show`` of a unit as a dict; {} where systemd does not answer."""
    seen = bounded.run(["systemctl", "show", "--property=" + ",".join(PROPERTIES), unit], COMMAND_TIMEOUT_S, 65536)
    if seen["rc"] != 0:
        return {}
    return parse_properties(seen["stdout"])


def parse_properties(text: str) -> dict[str, str]:
    """Return ``NAME=value`` lines as a dict."""
    pairs = [line.partition("=") for line in text.splitlines() if "=" in line]
    return {name: value for name, _, value in pairs}


def is_dead(service: dict[str, str], restarts_before: int) -> bool:
    """Whether a service ended since ``restarts_before`` restarts were counted, or is not running at all."""
    if service.get("ActiveState") in ("failed", "inactive"):
        return True
    if service.get("SubState", "").startswith("auto-restart"):
        return True
    count = service.get("NRestarts", "0")
    return count.isdigit() and int(count) > restarts_before


def log_runs(unit: str, after: str = "", lines: int = LOG_LINES) -> list[list[str]]:
    """Return what a service itself logged in this boot, a list of lines for each of its last starts, oldest first.

    ``after`` is the invocation id of a start that, with all before it, is of no interest.
    """
    command = ["journalctl", "--unit=" + unit, "--boot", "--lines={0}".format(lines), "--output=json", "--quiet"]
    seen = bounded.run(command + ["--no-pager"], COMMAND_TIMEOUT_S, 4 * 1024 * 1024)
    return parse_journal(seen["stdout"], after)


def parse_journal(text: str, after: str = "") -> list[list[str]]:
    """Return the messages of journalctl's JSON lines, grouped by invocation; systemd's own messages are left out.

    Invocations up to and including ``after`` are left out.
    """
    runs: dict[str, list[str]] = {}
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if not isinstance(entry, dict) or entry.get("_PID") == "1":
            continue
        invocation = str(entry.get("_SYSTEMD_INVOCATION_ID") or "")
        runs.setdefault(invocation, []).extend(_message(entry.get("MESSAGE")).split("\n"))
    order = list(runs)
    first = order.index(after) + 1 if after in runs else 0
    return [runs[invocation] for invocation in order[first:]]


def _message(value: Any) -> str:
    # journalctl gives a message that is not UTF-8 as a list of bytes, and one that is too long as null.
    if isinstance(value, list):
        return bytes(one for one in value if isinstance(one, int) and 0 <= one < 256).decode("utf-8", "replace")
    return str(value or "")


def listening_inodes(table: str, port: int, host: str) -> list[str]:
    """Return the socket inodes in a ``/proc/net/tcp`` text that would keep ``host`` from listening on ``port``."""
    wanted = _hex_address(host)
    found = []
    for row in table.splitlines()[1:]:
        columns = row.split()
        if len(columns) < 10 or columns[3] != _LISTEN:
            continue
        address, _, number = columns[1].rpartition(":")
        if int(number, 16) != port:
            continue
        if wanted is None or _LISTEN_ANY.match(address) or address == wanted:
            found.append(columns[9])
    return found


def _hex_address(host: str) -> str | None:
    """Return an IPv4 address as the kernel prints it, or None where any listener would be in the way."""
    parts = host.split(".")
    if len(parts) != 4 or not all(part.isdigit() for part in parts) or host == "0.0.0.0":  # noqa: S104  only compared
        return None
    return "".join("{0:02X}".format(int(part)) for part in reversed(parts))


def port_owner(port: int, host: str) -> dict[str, Any]:
    """Return {pid, command, unit} of who listens on this port, {} where nobody does.

    ``pid`` is None and ``command`` empty where the process can't be seen.
    """
    inodes: list[str] = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        inodes += listening_inodes(bounded.read(table, 8 * 1024 * 1024)["stdout"], port, host)
    if not inodes:
        return {}
    for pid in _process_ids():
        if _holds_socket(pid, inodes):
            command = (bounded.value("/proc/{0}/comm".format(pid)) or "").strip()
            cgroup = bounded.value("/proc/{0}/cgroup".format(pid)) or ""
            return {"pid": int(pid), "command": command, "unit": unit_of_cgroup(cgroup)}
    return {"pid": None, "command": "", "unit": ""}


def unit_of_cgroup(text: str) -> str:
    """Return the systemd service that a ``/proc/PID/cgroup`` text names, or ""."""
    units = re.findall(r"/([^/\n]+\.(?:service|scope|socket))", text)
    return str(units[-1]) if units else ""


def _process_ids() -> Iterable[str]:
    return [name for name in os.listdir("/proc") if name.isdigit()]


def _holds_socket(pid: str, inodes: list[str]) -> bool:
    folder = "/proc/{0}/fd".format(pid)
    wanted = {"socket:[{0}]".format(inode) for inode in inodes}
    try:
        return any(os.readlink(os.path.join(folder, name)) in wanted for name in os.listdir(folder))
    except OSError:
        return False
