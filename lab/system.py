"""Programs of this machine: run them bounded in time, and say in one line what went wrong."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

# program -> Debian/Ubuntu package that carries it
PROGRAMS: Mapping[str, str] = {
    "systemd-nspawn": "systemd-container",
    "mmdebstrap": "mmdebstrap",
    "iptables": "iptables",
    "ip": "iproute2",
    "tc": "iproute2",
    "ss": "iproute2",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "nsenter": "util-linux",
    "mount": "mount",
    "tar": "tar",
    "unshare": "util-linux",
    "mkfs.ext4": "e2fsprogs",
}
DEBIAN_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
DEBIAN_KEYRING_PACKAGE = "debian-archive-keyring"


class LabError(Exception):
    """One line for the user: what is wrong, and what to do."""


class Progress:
    """Lines with the elapsed time on stderr, safe to use from several threads."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._lock = threading.Lock()

    def __call__(self, line: str) -> None:
        """Print one line."""
        with self._lock:
            print(f"[{time.monotonic() - self._started:6.1f}s] {line}", file=sys.stderr, flush=True)


def command(
    argv: Sequence[str | Path],
    *,
    timeout_s: float = 30,
    check: bool = True,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program without a shell; with `check`, a failure or a timeout is a LabError with its last line."""
    words = [str(word) for word in argv]
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env=None if env is None else {**os.environ, **env},
            check=False,
        )
    except FileNotFoundError as error:
        raise LabError(f"{words[0]} is not installed; run: {install_line([words[0]])}") from error
    except subprocess.TimeoutExpired as error:
        raise LabError(f"`{' '.join(words)}` gave no answer within {timeout_s:g} s") from error
    if check and done.returncode != 0:
        lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        raise LabError(f"`{' '.join(words)}` failed ({done.returncode}): {lines[-1] if lines else 'no output'}")
    return done


def install_line(programs: Sequence[str]) -> str:
    """Return the one apt-get line that brings these programs."""
    packages = sorted({PROGRAMS.get(program, program) for program in programs})
    return f"apt-get install -y --no-install-recommends {' '.join(packages)}"


def missing_programs() -> list[str]:
    """Return what the lab needs and this machine lacks (programs, and the Debian keyring's package)."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if not DEBIAN_KEYRING.exists():
        missing.append(DEBIAN_KEYRING_PACKAGE)
    return missing


def install_requirements(progress: Progress) -> None:
    """Install what the lab needs from the machine's own package sources; does nothing where all is there."""
    require_root()
    missing = missing_programs()
    if not missing:
        return
    if shutil.which("apt-get") is None:
        raise LabError(f"the lab needs {', '.join(missing)}, and this machine has no apt-get to install them with")
    progress(f"installing {', '.join(sorted({PROGRAMS.get(name, name) for name in missing}))}")
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    command(["apt-get", "update"], timeout_s=300, env=quiet)
    command(install_line(missing).split(), timeout_s=900, env=quiet)


def require_root() -> None:
    """Stop, with the way out, where the lab is not run as root."""
    if os.geteuid() != 0:
        raise LabError("the lab makes network interfaces and mounts, so it needs root; run it with sudo")


def require_machine() -> None:
    """Check all that a lab host needs of this machine before anything is changed."""
    require_root()
    missing = missing_programs()
    if missing:
        raise LabError(f"the lab needs {', '.join(missing)}; run: {install_line(missing)}")
    probe = command(
        ["unshare", "--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "true"], check=False, timeout_s=10
    )
    if probe.returncode != 0:
        reason = probe.stderr.strip().splitlines()
        raise LabError(f"this machine does not allow namespaces, so no lab host can start ({' '.join(reason[-1:])})")


def require_space(path: Path, needed_mib: int, purpose: str) -> None:
    """Stop where the file system of `path` has less than `needed_mib` MiB free."""
    free_mib = shutil.disk_usage(path).free // 2**20
    if free_mib < needed_mib:
        raise LabError(
            f"{path} has {free_mib} MiB free, {purpose} needs {needed_mib} MiB; free some, or set PEERLANE_LAB_DIR"
        )
