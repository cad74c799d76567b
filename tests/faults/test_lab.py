"""The lab itself: hosts come up, heal, suffer real faults, and leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from peerlane.lab import cgroups, container, network, state
from peerlane.lab.state import Paths

pytestmark = pytest.mark.lab
IMAGES = Path(os.environ.get("PEERLANE_LAB_IMAGES") or Path("~/.cache/peerlane/lab/images").expanduser())
REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass
class Lab:
    """A lab of its own, driven through its command line."""

    paths: Paths
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, *words: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        """Run `peerlane lab WORDS`."""
        environment = {
            **os.environ,
            "PYTHONPATH": str(REPOSITORY / "src"),
            "PEERLANE_LAB_DIR": str(self.paths.root),
            "PEERLANE_LAB_IMAGES": str(self.paths.images),
            **self.environment,
        }
        argv = [sys.executable, "-m", "peerlane.lab", *words]
        return subprocess.run(
            argv,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            stdin=subprocess.DEVNULL,
        )

    def ok(self, *words: str, timeout_s: float = 120) -> str:
        """Run `peerlane lab WORDS`, which must succeed; return stdout."""
        done = self.run(*words, timeout_s=timeout_s)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def ssh(self, name: str, command: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a command in a host over SSH."""
        return self.run("ssh", name, command, timeout_s=timeout_s)

    def row(self, name: str) -> list[str]:
        """Return a host's line of `status`, split."""
        rows = [line.split() for line in self.ok("status").splitlines()[1:]]
        return next(row for row in rows if row[0] == name)

    def leader(self, name: str) -> int:
        """Return the process id of a host's init."""
        pid = cgroups.leader(self.paths.lab_id, name)
        assert pid is not None
        return pid

    def traces(self) -> dict[str, list[str]]:
        """Return all that this lab has on the machine outside its folder, by kind."""
        known = state.load(self.paths)
        number = known.network if known.network is not None else -1
        names = (network.bridge(number), f"vb-{network.bridge(number)}-")
        links = [path.name for path in Path("/sys/class/net").iterdir()]
        rules = subprocess.run(["iptables-save"], capture_output=True, text=True, check=True).stdout.splitlines()
        running = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(self.paths.root) in line and "peerlane.lab" not in line:
                running.append(line)
        groups = [root / cgroups.TOP / self.paths.lab_id for root in cgroups.roots(Path("/proc/mounts").read_text())]
        return {
            "mounts": [line for line in Path("/proc/mounts").read_text().splitlines() if str(self.paths.root) in line],
            "links": [name for name in links if name == names[0] or name.startswith(names[1])],
            "rules": [line for line in rules if line.startswith("-A") and f"10.77.{number}." in line],
            "processes": running,
            "cgroups": [str(path) for path in groups if path.exists()],
            "nspawn": [str(path) for path in Path("/run/systemd/nspawn").glob(f"*/{names[0]}-*")],
        }


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    made = Lab(Paths(tmp_path_factory.mktemp("lab").resolve(), IMAGES))
    yield made
    made.run("down", "--all")


@pytest.fixture(scope="module")
def m1(lab: Lab) -> str:
    lab.ok("up", "m1", timeout_s=600)  # the first call ever builds the image
    return "m1"


def test_a_host_is_a_real_debian(lab: Lab, m1: str) -> None:
    answer = lab.ssh(
        m1, "systemctl is-system-running --wait; . /etc/os-release; echo $VERSION_CODENAME; hostname; id -un"
    )
    assert answer.stdout.split() == ["running", "trixie", "m1", "root"]
    assert lab.row(m1)[:2] + lab.row(m1)[4:5] == ["m1", "trixie", "running"]


def test_a_second_up_changes_nothing(lab: Lab, m1: str) -> None:
    before, inventory = lab.leader(m1), lab.paths.inventory.read_text()
    lab.ok("up", m1)
    assert lab.leader(m1) == before
    assert lab.paths.inventory.read_text() == inventory


def test_ansible_reaches_hosts_by_the_generated_inventory_as_both_users(lab: Lab, m1: str) -> None:
    for user in ("admin", "root"):
        lab.ok("up", m1, "--user", user)
        argv = ["ansible", "-i", str(lab.paths.inventory), "lab", "-m", "ansible.builtin.command", "-a", "id -un", "-o"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False, cwd=lab.paths.root)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "root" in done.stdout  # admin becomes root by sudo without a password
    assert lab.run("ssh", "--user", "admin", m1, "id -un").stdout == "admin\n"


def test_a_changed_host_key_is_refused(lab: Lab, m1: str) -> None:
    known = lab.paths.known_hosts.read_text()
    host, kind, key = known.split()
    try:
        lab.paths.known_hosts.write_text(f"{host} {kind} {key[:-8]}AAAAAAAA\n")
        assert lab.ssh(m1, "true").returncode == 255
    finally:
        lab.paths.known_hosts.write_text(known)
    assert lab.ssh(m1, "true").returncode == 0


def test_packages_come_through_the_labs_network(lab: Lab, m1: str) -> None:
    done = lab.ssh(m1, "apt-get -qq update && apt-get -qq download less && ls less_*.deb", timeout_s=120)
    assert done.returncode == 0, done.stderr


def test_a_reboot_is_a_reboot(lab: Lab, m1: str) -> None:
    before, boot = lab.leader(m1), lab.ssh(m1, "touch /root/kept; journalctl --list-boots -q | wc -l").stdout
    assert boot.strip() == "1"
    lab.ssh(m1, "systemctl reboot")
    give_up = time.monotonic() + 30
    while time.monotonic() < give_up and (cgroups.leader(lab.paths.lab_id, m1) in (None, before)):
        time.sleep(0.1)
    host = state.load(lab.paths).hosts[m1]
    container.wait_ready(lab.paths, host, network.address(state.load(lab.paths).network or 0, host.octet), 30)
    assert lab.leader(m1) != before
    assert lab.ssh(m1, "test -e /root/kept").returncode == 0


def test_up_heals_what_a_crash_left(lab: Lab, m1: str) -> None:
    lab.ssh(m1, "echo survives > /root/disk; sync")
    for pid in cgroups.processes(lab.paths.lab_id, m1):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    time.sleep(0.5)
    left = lab.traces()
    assert left["mounts"], "the crash must leave something to heal"
    assert left["cgroups"]
    assert lab.row(m1)[4] == "off"
    lab.ok("up", m1)
    assert lab.ssh(m1, "cat /root/disk").stdout == "survives\n"
    assert len(lab.traces()["mounts"]) == 1


def test_up_heals_a_lost_bridge_and_a_half_made_host(lab: Lab, m1: str) -> None:
    subprocess.run(["ip", "link", "delete", network.bridge(state.load(lab.paths).network or 0)], check=True)
    lab.ok("up", m1)
    assert lab.ssh(m1, "true").returncode == 0
    (lab.paths.host("half") / "root").mkdir(parents=True)
    lab.ok("up", "half")
    assert lab.ssh("half", "hostname").stdout == "half\n"
    lab.ok("down", "half")


def test_fault_ssh_breaks_open_connections_and_lets_no_new_one_in(lab: Lab, m1: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), "PEERLANE_LAB_DIR": str(lab.paths.root)}
    argv = [sys.executable, "-m", "peerlane.lab", "ssh", m1, "echo open; sleep 60"]
    with subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as session:
        assert session.stdout is not None
        assert session.stdout.readline() == "open\n"
        lab.ok("fault", m1, "ssh", "on")
        assert session.wait(timeout=10) == 255
    assert lab.row(m1)[4:] == ["no-ssh", lab.row(m1)[5], "ssh"]
    lab.ok("fault", m1, "ssh", "on")  # a second time is no error
    lab.ok("fault", m1, "ssh", "off")
    lab.ok("fault", m1, "ssh", "off")
    assert lab.ssh(m1, "true").returncode == 0


def test_fault_power_ends_everything_at_once_and_keeps_the_disk(lab: Lab, m1: str) -> None:
    lab.ssh(m1, "echo here > /root/before; sync")
    lab.ok("fault", m1, "power", "off")
    assert lab.row(m1)[4] == "off"
    assert cgroups.processes(lab.paths.lab_id, m1) == []
    refused = lab.run("fault", m1, "disk", "on")
    assert refused.returncode == 3
    assert "is off" in refused.stderr
    lab.ok("fault", m1, "power", "on")
    assert lab.ssh(m1, "cat /root/before").stdout == "here\n"


def test_fault_disk_is_the_kernels_no_space_left(lab: Lab, m1: str) -> None:
    lab.ssh(m1, "mkdir -p /opt/there; echo old > /opt/there/file; echo gone > /opt/deleted")
    lab.ok("fault", m1, "disk", "on", "--free-mib", "2")
    assert lab.row(m1)[6] == "disk"
    full = lab.ssh(
        m1, "cat /opt/there/file; dd if=/dev/zero of=/opt/big bs=1M count=5; rm /opt/big /opt/deleted; echo x >/opt/new"
    )
    assert "old" in full.stdout
    assert "No space left on device" in full.stderr
    lab.ok("fault", m1, "disk", "off")
    assert (
        lab.ssh(m1, "cd /opt; ls -d *; dd if=/dev/zero of=/opt/big bs=1M count=5 && rm /opt/big").stdout
        == "new\nthere\n"
    )
    assert lab.row(m1)[6] == "-"


def test_fault_slow_limits_the_rate(lab: Lab, m1: str) -> None:
    def fetch_s() -> float:
        began = time.monotonic()
        assert len(lab.ssh(m1, "head -c 400000 /dev/zero").stdout) == 400000
        return time.monotonic() - began

    plain = fetch_s()
    lab.ok("fault", m1, "slow", "on", "--rate-kbit", "1000", "--delay-ms", "20")
    slow = fetch_s()
    assert lab.row(m1)[6] == "slow"
    lab.ok("fault", m1, "slow", "off")
    assert slow > 2.5 > plain  # 400 kB at 1000 kbit/s take 3.2 s
    assert fetch_s() < 2.5


def test_fault_apt_lock_is_what_apt_waits_for(lab: Lab, m1: str) -> None:
    lab.ok("fault", m1, "apt-lock", "on")
    assert lab.row(m1)[6] == "apt-lock"
    done = lab.ssh(m1, "apt-get -qq remove -y no-such-package-at-all; dpkg --configure -a")
    assert "lock-frontend" in done.stderr
    lab.ok("fault", m1, "apt-lock", "off")
    assert lab.ssh(m1, "dpkg --configure -a").returncode == 0


def test_a_fault_for_some_seconds_ends_by_itself(lab: Lab, m1: str) -> None:
    began = time.monotonic()
    lab.ok("fault", m1, "ssh", "on", "--for", "1")
    assert time.monotonic() - began >= 1
    assert lab.ssh(m1, "true").returncode == 0


def test_several_hosts_at_once_and_down_of_one_leaves_the_others(lab: Lab, m1: str) -> None:
    lab.ok("up", "a1", "a2", "b1", "--distro", "trixie")
    addresses = {lab.row(name)[3] for name in (m1, "a1", "a2", "b1")}
    assert len(addresses) == 4
    before = lab.leader("a2")
    lab.ok("down", "a1", "b1")
    assert lab.leader("a2") == before
    assert lab.ssh("a2", "true").returncode == 0
    assert lab.run("down", "a1").returncode == 3
    lab.ok("down", "--if-exists", "a1", "a2")


def test_another_lab_with_the_same_host_name_does_not_clash(lab: Lab, m1: str, tmp_path: Path) -> None:
    other = Lab(Paths(tmp_path.resolve() / "lab", IMAGES))
    try:
        other.ok("up", m1)
        assert other.row(m1)[3].rsplit(".", 1)[0] != lab.row(m1)[3].rsplit(".", 1)[0]
        assert other.ssh(m1, "true").returncode == lab.ssh(m1, "true").returncode == 0
    finally:
        other.ok("down", "--all")
    assert lab.ssh(m1, "true").returncode == 0


def test_a_copy_where_no_overlay_can_be(lab: Lab, tmp_path: Path) -> None:
    for name in ("lower", "upper", "work", "merged"):
        (tmp_path / name).mkdir()
    layers = f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", layers, tmp_path / "merged"], check=True)
    nested = Lab(Paths(tmp_path.resolve() / "merged/lab", IMAGES))
    try:
        assert "copied" in nested.run("up", "c1").stderr
        assert nested.ssh("c1", "hostname").stdout == "c1\n"
        nested.ok("down", "c1")
    finally:
        nested.run("down", "--all")
        subprocess.run(["umount", tmp_path / "merged"], check=True)


def test_too_little_space_is_said_before_anything_is_made(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20M", "tmpfs", tmp_path], check=True)
    small = Lab(Paths(tmp_path.resolve() / "lab", IMAGES))
    try:
        done = small.run("up", "s1")
        assert done.returncode == 3
        assert "MiB free" in done.stderr.splitlines()[-1]
        small.ok("down", "--all")
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_bad_words_are_refused(lab: Lab, m1: str) -> None:
    assert lab.run("up", "Not_A_Name").returncode == 3
    assert lab.run("up", m1, "--distro", "bookworm").returncode == 3
    assert "exists with release trixie" in lab.run("up", m1, "--distro", "bookworm").stderr
    assert lab.run("fault", "nobody", "ssh", "on").returncode == 3
    assert lab.run("fault", m1, "disk", "on", "--path", "opt").returncode == 3


def test_a_proxmox_node_is_labelled_and_works(lab: Lab) -> None:
    lab.ok("up", "pve1", "--kind", "proxmox")
    assert "proxmox (simulated)" in lab.ok("status")
    seen = lab.ssh(
        "pve1", "cat /etc/motd /etc/peerlane-lab-simulated; qm status 101; qm set 101 --cpu kvm64; qm pending 101"
    )
    assert seen.stdout.count("SIMULATED") == 2
    assert "status: running" in seen.stdout
    assert "new cpu: kvm64" in seen.stdout
    line = lab.ssh("pve1", "tr '\\0' ' ' </proc/$(cat /run/qemu-server/101.pid)/cmdline").stdout
    assert line.startswith("/usr/bin/kvm -id 101 ")
    assert "-cpu host" in line
    lab.ssh("pve1", "qm shutdown 101; qm start 101")
    assert "-cpu kvm64" in lab.ssh("pve1", "tr '\\0' ' ' </proc/$(cat /run/qemu-server/101.pid)/cmdline").stdout
    lab.ok("down", "pve1")


def test_down_leaves_nothing(lab: Lab, m1: str) -> None:
    lab.ok("up", m1, "z1")
    lab.ok("fault", m1, "ssh", "on")
    lab.ok("fault", m1, "disk", "on")
    before = lab.traces()
    assert all(before[kind] for kind in ("mounts", "links", "rules", "processes", "cgroups", "nspawn")), before
    traces = lab.traces
    number = state.load(lab.paths).network
    lab.ok("down", "--all")
    assert state.load(lab.paths).network == number  # so that the traces below are looked for under the same number
    assert {kind: found for kind, found in traces().items() if found} == {}
    assert list((lab.paths.root / "hosts").iterdir()) == []


def test_down_works_with_a_broken_state_and_purge_takes_the_folder(tmp_path: Path) -> None:
    broken = Lab(Paths(tmp_path.resolve() / "lab", IMAGES))
    broken.ok("up", "m1")
    traces = broken.traces()
    (broken.paths.root / "state.json").write_text("{")
    assert broken.run("status").returncode == 3
    broken.ok("down", "--all")
    after = broken.traces()
    assert traces["mounts"]
    assert after["mounts"] == after["processes"] == after["cgroups"] == []
    links = {path.name for path in Path("/sys/class/net").iterdir()}
    assert not links & set(traces["links"])
    broken.ok("down", "--all", "--purge")
    assert not broken.paths.root.exists()
    assert IMAGES.exists()


@pytest.mark.usefixtures("m1")
def test_images_that_another_lab_uses_are_not_purged(tmp_path: Path) -> None:
    root = tmp_path.resolve()
    (root / "images").mkdir()
    for archive in IMAGES.glob("trixie-*.tar"):
        shutil.copy(archive, root / "images")
    owner, guest = Lab(Paths(root, root / "images")), Lab(Paths(root / "guest", root / "images"))
    try:
        guest.ok("up", "g1")
        done = owner.run("down", "--all", "--purge")
        assert done.returncode == 3
        assert "another lab" in done.stderr
        assert guest.ssh("g1", "true").returncode == 0
    finally:
        guest.ok("down", "--all")
    owner.ok("down", "--all", "--purge")
    assert not root.exists()
