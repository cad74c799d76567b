"""Lab hosts as systemd-nspawn containers: an overlay over the base image, an own network, a real init."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from pathlib import Path

from . import cgroups, image, network, proxmox
from .state import Host, Paths, write_atomically
from .system import LabError, Progress, command, require_space

READY_TIMEOUT_S = 60
CLONE_MIB = 300
SUPERVISOR = Path(__file__).with_name("supervise.sh")


def is_running(paths: Paths, name: str) -> bool:
    """Tell whether the host's init runs."""
    return cgroups.leader(paths.lab_id, name) is not None


def answers_ssh(address: str, timeout_s: float = 2) -> bool:
    """Tell whether an SSH server greets at this address."""
    try:
        with socket.create_connection((address, 22), timeout=timeout_s) as connection:
            connection.settimeout(timeout_s)
            return connection.recv(4).startswith(b"SSH")
    except OSError:
        return False


def make(paths: Paths, host: Host, progress: Progress) -> None:
    """Make the host's disk from the base image, unless it is complete. What an interrupted call left is made anew."""
    folder = paths.host(host.name)
    if (folder / "complete").exists():
        return
    tree = image.ensure(paths, host.distro, progress)
    if folder.exists():
        discard(paths, host.name)
    require_space(paths.root, CLONE_MIB, f"host {host.name}")
    (folder / "root").mkdir(parents=True)
    (folder / "base").write_text(str(tree), encoding="utf-8")
    for part in ("upper", "work"):
        (folder / part).mkdir()
    if not _mount_overlay(folder):
        progress(f"{host.name}: {folder} cannot hold an overlay, so the image is copied (slower)")
        shutil.rmtree(folder / "upper")
        command(["cp", "-a", "--reflink=auto", f"{tree}/.", folder / "root"], timeout_s=300)
    _personalise(paths, host)
    (folder / "complete").touch()


def start(paths: Paths, host: Host, network_number: int, progress: Progress) -> None:
    """Start a stopped host and wait until it can be used."""
    folder = paths.host(host.name)
    root = folder / "root"
    release(paths, host.name)
    if (folder / "upper").is_dir() and not root.is_mount() and not _mount_overlay(folder):
        raise LabError(f"{host.name}: its overlay cannot be mounted; `peerlane lab down {host.name}` and up again")
    address = network.address(network_number, host.octet)
    write_atomically(
        root / "etc/systemd/network/10-host0.network",
        f"[Match]\nName=host0\n[Link]\nMTUBytes={network.uplink_mtu()}\n"
        f"[Network]\nAddress={address}/24\nGateway={network.gateway(network_number)}\n"
        "LinkLocalAddressing=no\nIPv6AcceptRA=no\n",
    )
    resolv = root / "etc/resolv.conf"
    resolv.unlink(missing_ok=True)
    resolv.write_text(nameservers(), encoding="utf-8")
    machine = network.machine(network_number, host.octet)
    _delete_link(network.veth(network_number, host.octet))
    nspawn = [
        "systemd-nspawn",
        "--quiet",
        f"--directory={root}",
        f"--machine={machine}",
        f"--hostname={host.name}",
        "--boot",
        "--register=no",
        "--keep-unit",
        f"--network-bridge={network.bridge(network_number)}",
        "--resolv-conf=off",
        "--timezone=off",
        "--link-journal=no",
    ]
    groups = [str(directory) for directory in cgroups.make(paths.lab_id, host.name)]
    with (folder / "console.log").open("ab") as console:
        subprocess.Popen(
            ["/bin/sh", str(SUPERVISOR), *groups, "--", *nspawn],
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
            start_new_session=True,
            cwd="/",
            # The container's cgroup layout is that of a present-day host, whatever this machine's is.
            env={
                "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1",
                "UNIFIED_CGROUP_HIERARCHY": "1",
            },
        )
    began = time.monotonic()
    wait_ready(paths, host, address)
    progress(
        f"{host.name}: {image.DISTROS[host.distro]} at {address}, ready {time.monotonic() - began:.1f} s after start"
    )


def wait_ready(paths: Paths, host: Host, address: str, timeout_s: float = READY_TIMEOUT_S) -> None:
    """Wait until SSH greets and every user may log in; an early death is reported with the console's last line."""
    began = time.monotonic()
    while time.monotonic() - began < timeout_s:
        pid = cgroups.leader(paths.lab_id, host.name)
        if pid is not None and answers_ssh(address) and not Path(f"/proc/{pid}/root/run/nologin").exists():
            return
        if time.monotonic() - began > 2 and not cgroups.processes(paths.lab_id, host.name):
            raise LabError(f"{host.name}: the container ended at once: {_last_console_line(paths, host.name)}")
        time.sleep(0.1)
    raise LabError(
        f"{host.name}: no SSH at {address} within {timeout_s:g} s; last console line: "
        f"{_last_console_line(paths, host.name)}"
    )


def release(paths: Paths, name: str) -> None:
    """End all processes of a host at once and free its mounts, links and groups; its disk stays."""
    cgroups.kill(paths.lab_id, name)
    cgroups.remove(paths.lab_id, name)
    _unmount(paths.host(name) / "root")


def release_machine(network_number: int, host: Host) -> None:
    """Free what the machine keeps for the host's address: cable, nspawn's run-time folders, SSH cut, connections."""
    machine = network.machine(network_number, host.octet)
    _delete_link(network.veth(network_number, host.octet))
    for folder in Path("/run/systemd/nspawn").glob(f"*/{machine}"):
        _unmount(folder)
        if folder.is_dir():
            shutil.rmtree(folder)
    address = network.address(network_number, host.octet)
    for rule in network.cut_rules(address):
        network.delete_rule(rule)
    network.break_connections(address)


def discard(paths: Paths, name: str) -> None:
    """Release a host and delete its disk."""
    release(paths, name)
    folder = paths.host(name)
    if folder.is_dir():
        shutil.rmtree(folder)


def inside(paths: Paths, name: str, argv: list[str], *, check: bool = True, timeout_s: float = 30) -> str:
    """Run a program inside a running host without SSH, as root, and return its output."""
    pid = cgroups.leader(paths.lab_id, name)
    if pid is None:
        raise LabError(f"{name} is not running")
    enter = ["nsenter", f"--target={pid}", "--mount", "--uts", "--ipc", "--net", "--pid", "--root", "--wd"]
    return command([*enter, "--", *argv], check=check, timeout_s=timeout_s).stdout


def _mount_overlay(folder: Path) -> bool:
    base = Path((folder / "base").read_text(encoding="utf-8"))
    if not base.is_dir():
        raise LabError(f"{base}: the image under {folder.name} is gone; `peerlane lab down {folder.name}` and up again")
    layers = [str(path).replace("\\", "\\\\").replace(":", "\\:").replace(",", "\\,") for path in (base, folder)]
    plain = f"lowerdir={layers[0]},upperdir={layers[1]}/upper,workdir={layers[1]}/work"
    for options in (f"{plain},redirect_dir=on", plain):
        done = command(["mount", "-t", "overlay", "overlay", "-o", options, folder / "root"], check=False)
        if done.returncode == 0:
            return True
    return False


def _unmount(where: Path) -> None:
    """Unmount as often as something is mounted there; a busy mount is detached and ends with its last user."""
    for _ in range(10):
        if not where.is_mount():
            return
        if command(["umount", where], check=False).returncode != 0:
            command(["umount", "--lazy", where])
    raise LabError(f"{where}: still mounted after ten attempts")


def _delete_link(name: str) -> None:
    if Path(f"/sys/class/net/{name}").exists():
        command(["ip", "link", "delete", name], check=False)


def nameservers() -> str:
    """Return the machine's name servers; a resolver on the machine's own loopback is no use inside a host."""
    for file in (Path("/etc/resolv.conf"), Path("/run/systemd/resolve/resolv.conf")):
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        kept = [line for line in lines if line.startswith("nameserver") and not image.LOOPBACK.search(line)]
        if kept:
            return "\n".join(kept + [line for line in lines if line.startswith("search")]) + "\n"
    return "# this machine has no name server that a lab host could reach\n"


def _personalise(paths: Paths, host: Host) -> None:
    """Give a fresh disk its name, host key and accounts."""
    root = paths.host(host.name) / "root"
    (root / "etc/hostname").write_text(f"{host.name}\n", encoding="utf-8")
    (root / "etc/hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {host.name}\n::1 localhost\n", encoding="utf-8")
    key = root / "etc/ssh/ssh_host_ed25519_key"
    command(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", host.name, "-f", key])
    shutil.copyfile(key.with_suffix(".pub"), paths.host(host.name) / "host_key.pub")
    public = paths.key.with_suffix(".pub").read_text(encoding="utf-8")
    for home in ("root", "home/admin"):
        owner = (root / home).stat()
        ssh = root / home / ".ssh"
        ssh.mkdir(mode=0o700, exist_ok=True)
        (ssh / "authorized_keys").write_text(public, encoding="utf-8")
        for path in (ssh, ssh / "authorized_keys"):
            shutil.chown(path, owner.st_uid, owner.st_gid)
    if host.kind == "proxmox":
        proxmox.furnish(root, host.name)


def _last_console_line(paths: Paths, name: str) -> str:
    try:
        text = (paths.host(name) / "console.log").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return "none"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "none"
