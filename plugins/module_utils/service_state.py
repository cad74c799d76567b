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
    "ExecMainStartTimestampMonotonic",
    "UnitFileState",
)
COMMAND_TIMEOUT_S = 10
LOG_LINES = 3000
LOG_BYTES = 8 * 1024 * 1024
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_TITLED = ("VLLM::", "sglang::")
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


def log_entries(unit: str, cursor: str = "", lines: int = LOG_LINES) -> tuple[list[list[Any]], str]:
    """Return what a service logged in this boot behind ``cursor``, and the cursor to go on from.

    Each entry is [seconds since 1970, invocation id, line, whether systemd itself said it]. Without a cursor the last
    ``lines`` messages come.
    """
    command = ["journalctl", "--unit=" + unit, "--boot", "--output=json", "--quiet", "--no-pager"]
    command += ["--after-cursor=" + cursor] if cursor else ["--lines={0}".format(lines)]
    command += ["--output-fields=MESSAGE,_PID,_SYSTEMD_INVOCATION_ID,INVOCATION_ID"]
    seen = bounded.run(command, COMMAND_TIMEOUT_S, LOG_BYTES)
    entries, reached = parse_journal(seen["stdout"])
    return entries, reached or cursor


def parse_journal(text: str) -> tuple[list[list[Any]], str]:
    """Return the entries of journalctl's JSON lines and the last cursor ("" where there is none)."""
    entries: list[list[Any]] = []
    cursor = ""
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if not isinstance(entry, dict):
            continue
        cursor = str(entry.get("__CURSOR") or cursor)
        manager = entry.get("_PID") == "1"
        invocation = str(entry.get("INVOCATION_ID" if manager else "_SYSTEMD_INVOCATION_ID") or "")
        stamp = str(entry.get("__REALTIME_TIMESTAMP") or "0")
        at = int(stamp) / 1e6 if stamp.isdigit() else 0.0
        for part in _message(entry.get("MESSAGE")).split("\n"):
            entries.append([at, invocation, part, manager])
    return entries, cursor


def kernel_lines(since: float, lines: int = 300) -> list[str]:
    """Return what the kernel logged since this time (seconds since 1970), [] where it can't be read."""
    command = ["journalctl", "--dmesg", "--boot", "--quiet", "--no-pager", "--output=cat"]
    command += ["--since=@{0:.0f}".format(since), "--lines={0}".format(lines)]
    return str(bounded.run(command, COMMAND_TIMEOUT_S, LOG_BYTES)["stdout"]).splitlines()


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


def unit_processes(unit: str) -> list[dict[str, Any]]:
    """Return one row for each process of a unit: what it has spent and read, and its state.

    ``cpu_s`` counts its threads; ``read_bytes`` is what it got from storage, page-ins of mapped files included;
    ``char_bytes`` what it read by calls; ``mapped_bytes`` how much of files it has mapped in memory. The last three are
    None where they can't be read.
    """
    rows = []
    for pid in _process_ids():
        if unit_of_cgroup(bounded.value("/proc/{0}/cgroup".format(pid)) or "") == unit:
            row = process_row(pid)
            if row:
                rows.append(row)
    return rows


def process_row(pid: str) -> dict[str, Any]:
    """Return the row of one process, {} where it is gone."""
    stat = bounded.value("/proc/{0}/stat".format(pid)) or ""
    # The name stands in parentheses and can hold any character.
    name, _, rest = stat.partition("(")[2].rpartition(")")
    columns = rest.split()
    if len(columns) < 13:
        return {}
    title = (bounded.value("/proc/{0}/cmdline".format(pid)) or "").split(" ")[0]
    counted = parse_colons(bounded.value("/proc/{0}/io".format(pid)) or "")
    status = parse_colons(bounded.value("/proc/{0}/status".format(pid)) or "")
    mapped = status.get("RssFile")
    return {
        "pid": int(pid),
        # A command line can hold keys; a title that the engine gave itself holds none.
        "name": title[:64] if title.startswith(_TITLED) else name,
        "state": columns[0],
        "cpu_s": (int(columns[11]) + int(columns[12])) / _TICKS_PER_S,
        "read_bytes": counted.get("read_bytes"),
        "char_bytes": counted.get("rchar"),
        "mapped_bytes": None if mapped is None else mapped * 1024,
    }


def parse_colons(text: str) -> dict[str, int]:
    """Return the whole numbers of ``name: number`` lines, as /proc/PID/io and /proc/PID/status have them."""
    found = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isdigit():
            found[name] = int(words[0])
    return found


def _process_ids() -> Iterable[str]:
    return [name for name in os.listdir("/proc") if name.isdigit()]


def _holds_socket(pid: str, inodes: list[str]) -> bool:
    folder = "/proc/{0}/fd".format(pid)
    wanted = {"socket:[{0}]".format(inode) for inode in inodes}
    try:
        return any(os.readlink(os.path.join(folder, name)) in wanted for name in os.listdir(folder))
    except OSError:
        return False
