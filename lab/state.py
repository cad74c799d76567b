"""What the lab remembers: its folders, its hosts, and the locks that keep concurrent calls apart."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from .system import LabError

SCHEMA = "peerlane.lab/1"
KINDS = ("container", "proxmox", "vm")
USERS = ("root", "admin")
LOCK_WAIT_S = 900  # an image takes 1-3 minutes to build
RESERVED_NAMES = frozenset({"all", "ungrouped", "lab", "localhost", "trixie", "bookworm", "proxmox", "vm"})


@dataclass(frozen=True)
class Paths:
    """The folders of one lab. `root` is this lab's own; `images` may be shared by several labs."""

    root: Path
    images: Path

    @classmethod
    def from_environment(cls) -> Paths:
        """Read PEERLANE_LAB_DIR and PEERLANE_LAB_IMAGES (default: `images` inside the lab's folder)."""
        root = Path(os.environ.get("PEERLANE_LAB_DIR") or "~/.cache/peerlane/lab").expanduser().resolve()
        images = os.environ.get("PEERLANE_LAB_IMAGES")
        return cls(root, Path(images).expanduser().resolve() if images else root / "images")

    @property
    def lab_id(self) -> str:
        """Eight hex digits that tell this lab from others on the machine."""
        return hashlib.sha256(str(self.root).encode()).hexdigest()[:8]

    @property
    def key(self) -> Path:
        """Private SSH key of this lab."""
        return self.root / "key"

    @property
    def known_hosts(self) -> Path:
        """Host keys of the hosts of this lab."""
        return self.root / "known_hosts"

    @property
    def inventory(self) -> Path:
        """Generated Ansible inventory."""
        return self.root / "inventory" / "hosts.yml"

    def host(self, name: str) -> Path:
        """Folder of one host."""
        return self.root / "hosts" / name


@dataclass(frozen=True)
class Host:
    """One lab host. `octet` is the last part of its address; `scenario` is what a host of kind `vm` is made of."""

    name: str
    distro: str
    kind: str
    user: str
    octet: int
    scenario: str = ""


@dataclass(frozen=True)
class State:
    """All that is kept between calls. `network` N stands for bridge `planeN` and 10.77.N.0/24."""

    network: int | None = None
    last_octet: int = 0
    hosts: dict[str, Host] = field(default_factory=dict)

    def with_host(self, host: Host) -> State:
        """Return this state with `host` added or replaced."""
        last = self.last_octet if host.name in self.hosts else host.octet
        return replace(self, hosts={**self.hosts, host.name: host}, last_octet=last)

    def without_host(self, name: str) -> State:
        """Return this state without the host of that name."""
        return replace(self, hosts={key: host for key, host in self.hosts.items() if key != name})


def check_name(name: str) -> None:
    """Refuse a host name that is no host name or that an inventory group already has."""
    if not re.fullmatch(r"[a-z][a-z0-9-]{0,29}[a-z0-9]|[a-z]", name):
        raise LabError(f"{name!r} is no lab host name; use up to 31 of a-z, 0-9 and -, beginning with a letter")
    if name in RESERVED_NAMES:
        raise LabError(f"{name!r} is the name of an inventory group; choose another host name")


def load(paths: Paths) -> State:
    """Read the state; a lab that was never up has an empty one."""
    file = paths.root / "state.json"
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return State()
    try:
        document = json.loads(text)
        if document["schema"] != SCHEMA:
            raise LabError(f"{file}: schema {document['schema']!r}, this version reads {SCHEMA}; remove {paths.root}")
        hosts = {name: Host(**entry) for name, entry in document["hosts"].items()}
        return State(document["network"], document["last_octet"], hosts)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LabError(f"{file}: not a lab state ({error}); `peerlane lab down --all` makes a new one") from error


def save(paths: Paths, state: State) -> None:
    """Write the state in one step, so that a reader never sees half of it. Call with the lab lock held."""
    document = {
        "schema": SCHEMA,
        "network": state.network,
        "last_octet": state.last_octet,
        "hosts": {name: asdict(host) for name, host in sorted(state.hosts.items())},
    }
    write_atomically(paths.root / "state.json", json.dumps(document, indent=2) + "\n")


def write_atomically(file: Path, text: str, mode: int = 0o644) -> None:
    """Write a file beside its place and rename it there."""
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    aside.write_text(text, encoding="utf-8")
    aside.chmod(mode)
    aside.replace(file)


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold an exclusive lock on `file` (made if needed; it stays, so that two callers always meet on one inode)."""
    file.parent.mkdir(parents=True, exist_ok=True)
    give_up = time.monotonic() + LOCK_WAIT_S
    with file.open("a", encoding="utf-8") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up:
                    raise LabError(f"{file}: another lab command held this for {LOCK_WAIT_S} s") from None
                time.sleep(0.1)
        yield


@contextmanager
def lab_lock(paths: Paths) -> Iterator[None]:
    """Guard the state, the network and the inventory of one lab. Held briefly."""
    with locked(paths.root / "locks" / "lab"):
        yield


@contextmanager
def host_lock(paths: Paths, name: str) -> Iterator[None]:
    """Guard one host while it is made, started, stopped or given a fault. Take it before the lab lock."""
    with locked(paths.root / "locks" / f"host-{name}"):
        yield
