"""Turn what Ansible says of a failed host into one line: what happened, and what to do."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ansible_collections.peerlane.gpu.plugins.plugin_utils.model import preflight

# A line on a terminal, not a page. The log has the rest.
_LONGEST = 400

_NEWER_PYTHON = "set ansible_python_interpreter to a Python 3.9 or newer; `peerlane doctor` lists what is there"

# In the order of what says more: ssh prints several of these for one failed login.
_SSH_TROUBLES: tuple[tuple[str, str, str], ...] = (
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED|host key for .* has changed",
        "its SSH host key has changed",
        "if the host was installed anew: ssh-keygen -R {name}{known_hosts}; if not, find out why before you connect",
    ),
    (
        r"Host key verification failed",
        "its SSH host key is not known here",
        "log in once by hand (ssh {address}) and compare the fingerprint",
    ),
    (r"Connection refused", "it refuses connections to the SSH port", "start sshd there, or correct ansible_port"),
    (
        r"Could not resolve hostname|Name or service not known",
        "its name cannot be resolved",
        "correct ansible_host in the inventory",
    ),
    (
        r"No route to host|Network is unreachable",
        "there is no route to it",
        "is it up, and is ansible_host right? Try: ssh {address}",
    ),
    (
        r"timed out|Timeout|timeout",
        "it did not answer in time",
        "is it up, and does a firewall drop the SSH port? Try: ssh {address}",
    ),
    (
        r"UNPROTECTED PRIVATE KEY FILE|bad permissions",
        "the private key file may be read by others",
        "chmod 600 the key file",
    ),
    (
        r"no such identity|Identity file .* not accessible",
        "the private key file is missing",
        "correct ansible_ssh_private_key_file",
    ),
    (
        r"Permission denied|Too many authentication failures|Authentication failed|Invalid/incorrect password",
        "it refused the login{tried}",
        "check ansible_user and its key. Try: ssh {address}",
    ),
    (
        r"no matching (host key|key exchange|cipher)",
        "it and this machine share no SSH algorithm",
        "update its sshd",
    ),
    (
        r"Data could not be sent|Connection (closed|reset)|Broken pipe|lost connection|closed by remote|Shared conn",
        "the connection was cut",
        "is it rebooting? Run again when it is back; finished steps are not repeated",
    ),
    (
        r"Failed to create temporary directory|No space left on device",
        "it has no writable folder for Ansible's files",
        "free some space: df -h / /tmp",
    ),
)


def unreachable_line(message: str, address: str) -> str:
    """Return what and what to do for a host that could not be reached. ``address``: the words to give to ssh."""
    for pattern, what, todo in _SSH_TROUBLES:
        if re.search(pattern, message):
            name = address.split()[-1].rpartition("@")[2]
            places = {
                "address": address,
                "name": name if " -p " not in f" {address}" else f"'[{name}]:{address.split()[1]}'",
                "known_hosts": _known_hosts(message),
                "tried": _tried(message),
            }
            return f"{what.format(**places)}; {todo.format(**places)}"
    return f"it cannot be reached: {one_line(message)}; try: ssh {address}"


def _known_hosts(message: str) -> str:
    place = re.search(r"Offending \S+ key in (\S+?):\d+", message)
    return f" -f {place.group(1)}" if place else ""


def _tried(message: str) -> str:
    methods = re.search(r"Permission denied \(([^)]+)\)", message)
    return f" ({methods.group(1)})" if methods else ""


def failure_lines(result: Mapping[str, Any], login: str = "") -> list[str]:
    """Return the lines that a failed task says: those of its ``msg``, each with what to do where the task knows."""
    failed = _failed_item(result)
    message = str(failed.get("msg") or "").strip()
    sudo = preflight.become_problem(f"{message}\n{failed.get('module_stderr') or ''}", login)
    if sudo is not None:
        return [sudo.line()]
    if "Ansible requires" in message and "Python" in message:
        return [f"its Python is too old ({one_line(message)}); {_NEWER_PYTHON}"]
    if "deserialization failed" in message:
        # The module ended before it could answer. Ansible's own start code needs a newer Python than 3.6.
        told = str(failed.get("module_stderr") or failed.get("module_stdout") or "").strip().splitlines() or [message]
        old = "SyntaxError: future feature annotations" in told[-1]
        return [f"its Python is too old; {_NEWER_PYTHON}" if old else f"its Python ran no module: {one_line(told[-1])}"]
    if "interpreter" in message and "not found" in message:
        return [f"{one_line(message)}; set ansible_python_interpreter, or as root: apt install python3"]
    problems = failed.get("problems")
    if isinstance(problems, list) and problems:
        return [one_line(str(one)) for one in problems]
    said = message or str(failed.get("censored") or "")
    if not said or said == "non-zero return code":
        tail = str(failed.get("stderr") or failed.get("stdout") or "").strip().splitlines()
        said = f"ended with {failed.get('rc')}: {tail[-1] if tail else 'it said nothing'}"
    item = failed.get("item")
    about = f" (item {item})" if isinstance(item, str) and item and item not in said else ""
    return [one_line(said) + about]


def _failed_item(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the first failed item of a loop, or the result itself."""
    for one in result.get("results") or []:
        if isinstance(one, Mapping) and (one.get("failed") or one.get("unreachable")):
            return one
    return result


def one_line(text: str) -> str:
    """Fold a text into one line that a terminal can show."""
    folded = re.sub(r"\s+", " ", text).strip()
    for noise in ("Task failed: ", "Action failed: ", "Module failed: "):
        folded = folded.removeprefix(noise)
    return folded if len(folded) <= _LONGEST else folded[: _LONGEST - 1].rstrip() + "…"


def plain(line: str) -> str:
    """Return a line without terminal colours."""
    return re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", line)
