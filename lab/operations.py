"""What a user does with the lab: up, down, status, ssh."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from . import cgroups, container, image, inventory, network, scenarios, vm, vm_image
from .state import Host, Paths, State, check_name, host_lock, lab_lock, load, save
from .system import LabError, Progress, command, require_machine, require_root

DEFAULT_NAMES = ("lab1",)
AT_ONCE = 4


@dataclass(frozen=True)
class Row:
    """One line of `status`. `state`: running, no-ssh, off, incomplete. `since`: when it started, ISO 8601 in UTC."""

    name: str
    distro: str
    kind: str
    address: str
    state: str
    since: str = "-"
    faults: tuple[str, ...] = ()
    scenario: str = ""


@dataclass(frozen=True)
class Wish:
    """What `up` is asked for; None leaves it as it is, or takes the default for a new host."""

    distro: str | None = None
    kind: str | None = None
    user: str | None = None
    scenario: str | None = None


def up(paths: Paths, names: Sequence[str], wish: Wish, progress: Progress) -> list[str]:
    """Start hosts, making what is missing and healing what a crash left. Returns the errors, one line each."""
    for name in names:
        check_name(name)
    if wish.kind == "vm" and wish.distro not in (None, vm_image.DISTRO):
        raise LabError(f"hosts of kind vm are {image.DISTROS[vm_image.DISTRO]}; leave out --distro {wish.distro}")
    require_machine()
    paths.root.mkdir(parents=True, exist_ok=True)
    _make_key(paths)
    known = load(paths).hosts
    distro = wish.distro or image.DEFAULT_DISTRO
    for release in sorted({known[name].distro if name in known else distro for name in names}):
        image.ensure(paths, release, progress)
    return _for_each(names, lambda name: _up_one(paths, name, wish, progress))


def down(paths: Paths, names: Sequence[str], progress: Progress) -> list[str]:
    """Remove hosts with all they hold; the network goes with the last one. Returns the errors, one line each."""
    require_root()
    unknown = sorted(set(names) - existing_names(paths))
    errors = [f"{name}: there is no such lab host" for name in unknown]
    errors += _for_each([name for name in names if name not in unknown], lambda name: _down_one(paths, name, progress))
    with lab_lock(paths):
        if not _load_or_empty(paths).hosts:
            network.remove(paths)
    return errors


def purge(paths: Paths, progress: Progress) -> None:
    """Delete the lab's folder, base images included. Call after all hosts are down."""
    if paths.root.is_dir() and existing_names(paths):
        raise LabError(
            f"{paths.root}: hosts are left ({', '.join(sorted(existing_names(paths)))}), so nothing is purged"
        )
    images = str(paths.images)
    in_use = f"lowerdir={images}/" in Path("/proc/mounts").read_text() or vm.uses(paths.images)
    if paths.images.is_relative_to(paths.root) and in_use:
        raise LabError(f"{images}: hosts of another lab use these images, so nothing is purged; take them down first")
    if paths.root.is_dir():
        shutil.rmtree(paths.root)
        progress(f"removed {paths.root}")


def existing_names(paths: Paths) -> set[str]:
    """Return every host of which anything exists: in the state, on disk, or running."""
    folder = paths.root / "hosts"
    on_disk = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    return set(_load_or_empty(paths).hosts) | on_disk | cgroups.names(paths.lab_id)


def status(paths: Paths, faults_of: Callable[[Paths, State, str], tuple[str, ...]]) -> list[Row]:
    """Return one row for each host, from what really runs; `faults_of` names the faults of a running host."""
    state = load(paths)
    rows = []
    for name, host in sorted(state.hosts.items()):
        row = Row(name, host.distro, host.kind, host_address(state, host), "off", scenario=host.scenario)
        pid = vm.leader(paths, name) if host.kind == "vm" else cgroups.leader(paths.lab_id, name)
        if not (paths.host(name) / "complete").exists():
            row = replace(row, state="incomplete")
        elif pid is not None:
            patience_s = 5 if host.kind == "vm" else 1
            word = "running" if container.answers_ssh(row.address, patience_s) else "no-ssh"
            try:
                active = faults_of(paths, state, name)
            except LabError:  # a guest that gives no answer must not hide the other hosts
                active = ("unknown",)
            row = replace(row, state=word, since=cgroups.started_at(pid), faults=active)
        rows.append(row)
    return rows


def ssh(paths: Paths, name: str, words: Sequence[str], user: str | None) -> NoReturn:
    """Become an ssh client to a host."""
    state = load(paths)
    host = get_host(state, name)
    target = f"{user or host.user}@{host_address(state, host)}"
    argv = ["ssh", "-i", str(paths.key), "-o", "LogLevel=ERROR", *inventory.ssh_options(paths), target, *words]
    os.execvp("ssh", argv)  # noqa: S606 - an argument list, and the process is to become ssh


def get_host(state: State, name: str) -> Host:
    """Return a host, or say which there are."""
    if name not in state.hosts:
        there = ", ".join(sorted(state.hosts)) or "none"
        raise LabError(f"{name}: there is no such lab host (there is: {there}); `peerlane lab up {name}` makes it")
    return state.hosts[name]


def host_address(state: State, host: Host) -> str:
    """Return a host's address."""
    if state.network is None:
        raise LabError(f"{host.name}: the lab has no network; `peerlane lab up {host.name}`")
    return network.address(state.network, host.octet)


def power_on(paths: Paths, name: str, progress: Progress) -> None:
    """Start a host that is off. Call with the host's lock held."""
    with lab_lock(paths):
        state = load(paths)
        host = get_host(state, name)
        number = network.ensure(paths, state)
        state = replace(state, network=number)
        save(paths, state)
        inventory.write(paths, state)
    _start(paths, host, number, progress)


def power_off(paths: Paths, name: str) -> None:
    """Cut a host's power: every process ends at once, its disk stays. Call with the host's lock held."""
    state = load(paths)
    host = get_host(state, name)
    container.release(paths, name)
    if state.network is not None:
        container.release_machine(state.network, host)


def is_running(paths: Paths, host: Host) -> bool:
    """Tell whether a host runs."""
    if host.kind == "vm":
        return vm.is_running(paths, host.name)
    return container.is_running(paths, host.name)


def _start(paths: Paths, host: Host, number: int, progress: Progress) -> None:
    (vm if host.kind == "vm" else container).start(paths, host, number, progress)


def _up_one(paths: Paths, name: str, wish: Wish, progress: Progress) -> None:
    with host_lock(paths, name):
        with lab_lock(paths):
            state = load(paths)
            host = state.hosts.get(name) or _new_host(state, name, wish)
            for asked, is_, word in (
                (wish.distro, host.distro, "release"),
                (wish.kind, host.kind, "kind"),
                (wish.scenario, host.scenario, "scenario"),
            ):
                if asked not in (None, is_):
                    raise LabError(f"{name}: exists with {word} {is_ or 'none'}; `peerlane lab down {name}` first")
            host = replace(host, user=wish.user or host.user)
            number = network.ensure(paths, state)
            moved = number != state.network
            state = replace(state, network=number).with_host(host)
            save(paths, state)
        if not moved and _is_up(paths, host, number, progress):
            with lab_lock(paths):
                inventory.write(paths, load(paths))
            return
        container.release(paths, name)
        container.release_machine(number, host)
        (vm if host.kind == "vm" else container).make(paths, host, progress)
        with lab_lock(paths):
            inventory.write(paths, load(paths))
        _start(paths, host, number, progress)


def _new_host(state: State, name: str, wish: Wish) -> Host:
    kind = wish.kind or "container"
    if wish.scenario and kind != "vm":
        raise LabError(f"--scenario {wish.scenario}: only a host of kind vm has a scenario; add --kind vm")
    scenario = (wish.scenario or scenarios.DEFAULT) if kind == "vm" else ""
    distro = wish.distro or (vm_image.DISTRO if kind == "vm" else image.DEFAULT_DISTRO)
    return Host(name, distro, kind, wish.user or "root", network.free_octet(state), scenario)


def _is_up(paths: Paths, host: Host, number: int, progress: Progress) -> bool:
    """Tell whether a host can be left as it is; a host that runs but does not answer is started anew."""
    if not is_running(paths, host):
        return False
    address = network.address(number, host.octet)
    if any(container.answers_ssh(address, 10 if host.kind == "vm" else 2) for _ in range(3)):
        progress(f"{host.name}: is up at {address}")
        return True
    progress(f"{host.name}: runs but SSH at {address} does not answer; starting it anew")
    return False


def _down_one(paths: Paths, name: str, progress: Progress) -> None:
    with host_lock(paths, name):
        state = _load_or_empty(paths)
        container.discard(paths, name)
        host = state.hosts.get(name)
        if host is not None and state.network is not None:
            container.release_machine(state.network, host)
        with lab_lock(paths):
            state = _load_or_empty(paths).without_host(name)
            save(paths, state)
            inventory.write(paths, state)
        progress(f"{name}: removed")


def _load_or_empty(paths: Paths) -> State:
    """Return the state, or an empty one where it cannot be read: taking down must always be possible."""
    try:
        return load(paths)
    except LabError:
        return State()


def _make_key(paths: Paths) -> None:
    with lab_lock(paths):
        if not (paths.key.exists() and paths.key.with_suffix(".pub").exists()):
            paths.key.unlink(missing_ok=True)
            command(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "peerlane-lab", "-f", paths.key])


def _for_each(names: Iterable[str], work: Callable[[str], None]) -> list[str]:
    """Do `work` for several hosts at once; one host's failure does not stop the others."""
    unique = list(dict.fromkeys(names))
    errors: list[str] = []
    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        for name, future in [(name, pool.submit(work, name)) for name in unique]:
            try:
                future.result()
            except LabError as error:
                line = str(error)
                errors.append(line if line.startswith(f"{name}:") else f"{name}: {line}")
            except OSError as error:
                errors.append(f"{name}: {error}")
    return errors
