"""Addresses, names, state file, inventory: the parts of the lab that need no host."""

from __future__ import annotations

import ipaddress
import json
import threading
import time
from pathlib import Path

import pytest
import yaml

from peerlane.lab import cgroups, cli, faults, inventory, network, operations, state, system
from peerlane.lab.state import Host, Paths, State
from peerlane.lab.system import LabError


def host(name: str, octet: int, **changes: str) -> Host:
    values = {"distro": "trixie", "kind": "container", "user": "root", **changes}
    return Host(name=name, octet=octet, **values)


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(tmp_path / "lab", tmp_path / "images")


def test_addresses_are_given_once_and_go_round() -> None:
    lab = State()
    given = []
    for number in range(network.LAST_OCTET - network.FIRST_OCTET + 1):
        octet = network.free_octet(lab)
        given.append(octet)
        lab = lab.with_host(host(f"h{number}", octet))
    assert given == list(range(network.FIRST_OCTET, network.LAST_OCTET + 1))
    with pytest.raises(LabError, match="all of its addresses"):
        network.free_octet(lab)
    assert network.free_octet(lab.without_host("h7")) == network.FIRST_OCTET + 7


def test_a_freed_address_is_not_the_next_to_be_given() -> None:
    lab = State().with_host(host("a", network.free_octet(State())))
    assert network.free_octet(lab.without_host("a")) == network.FIRST_OCTET + 1


def test_changing_a_host_does_not_move_the_round() -> None:
    lab = State().with_host(host("a", 10)).with_host(host("b", 11))
    assert network.free_octet(lab.with_host(host("a", 10, user="admin"))) == 12


def test_networks_in_use_are_left_alone() -> None:
    taken = [ipaddress.IPv4Network("10.77.0.0/23"), ipaddress.IPv4Network("192.168.0.0/16")]
    assert network.free_networks(taken, ["eth0", "plane2"])[:2] == [3, 4]
    assert network.free_networks([ipaddress.IPv4Network("10.0.0.0/8")], []) == []


def test_interface_names_fit_the_kernels_15_characters() -> None:
    assert len(network.veth(255, 250)) <= 15


@pytest.mark.parametrize("name", ["m1", "a", "gpu-host-3", "a" * 31])
def test_good_names(name: str) -> None:
    state.check_name(name)


@pytest.mark.parametrize("name", ["", "M1", "1m", "-m", "m-", "m_1", "a" * 32, "m.example", "../x", "lab", "trixie"])
def test_bad_names_are_refused(name: str) -> None:
    with pytest.raises(LabError, match="host name"):
        state.check_name(name)


def test_state_comes_back_as_it_was_saved(paths: Paths) -> None:
    assert state.load(paths) == State()
    lab = State(network=4).with_host(host("a", 12)).with_host(host("b", 13, distro="bookworm", user="admin"))
    state.save(paths, lab)
    assert state.load(paths) == lab
    assert [file.name for file in paths.root.iterdir()] == ["state.json"]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"schema": "peerlane.lab/1"}', '{"schema": "peerlane.lab/1", "hosts": {"a": {"x": 1}}}'],
)
def test_a_state_that_is_none_gives_one_line(paths: Paths, text: str) -> None:
    paths.root.mkdir()
    (paths.root / "state.json").write_text(text)
    with pytest.raises(LabError) as caught:
        state.load(paths)
    assert "state.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_state_of_another_version_is_not_read(paths: Paths) -> None:
    paths.root.mkdir()
    (paths.root / "state.json").write_text(json.dumps({"schema": "peerlane.lab/9", "hosts": {}}))
    with pytest.raises(LabError, match=r"peerlane\.lab/9"):
        state.load(paths)


def test_a_lock_keeps_the_second_caller_out(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    order = []

    def second() -> None:
        with state.lab_lock(paths):
            order.append("second")

    with state.lab_lock(paths):
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(0.3)
        order.append("first")
    thread.join(timeout=5)
    assert order == ["first", "second"]
    monkeypatch.setattr(state, "LOCK_WAIT_S", 0.2)
    with state.lab_lock(paths), pytest.raises(LabError, match="another lab command"), state.lab_lock(paths):
        pass


def test_labs_in_different_folders_have_different_ids(tmp_path: Path) -> None:
    assert Paths(tmp_path / "a", tmp_path).lab_id != Paths(tmp_path / "b", tmp_path).lab_id


def test_folders_follow_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PEERLANE_LAB_DIR", str(tmp_path / "lab"))
    monkeypatch.delenv("PEERLANE_LAB_IMAGES", raising=False)
    assert Paths.from_environment() == Paths(tmp_path / "lab", tmp_path / "lab/images")
    monkeypatch.setenv("PEERLANE_LAB_IMAGES", str(tmp_path / "shared"))
    assert Paths.from_environment().images == tmp_path / "shared"


def test_inventory_has_one_group_for_all_and_one_for_each_release_and_kind(paths: Paths) -> None:
    lab = State(network=3).with_host(host("m1", 10)).with_host(host("m2", 11, distro="bookworm", user="admin"))
    lab = lab.with_host(host("pve1", 12, kind="proxmox"))
    text = inventory.inventory_text(paths, lab)
    document = yaml.safe_load(text)
    assert document["lab"]["hosts"] == {
        "m1": {"ansible_host": "10.77.3.10", "ansible_user": "root"},
        "m2": {"ansible_host": "10.77.3.11", "ansible_user": "admin", "ansible_become": True},
        "pve1": {"ansible_host": "10.77.3.12", "ansible_user": "root"},
    }
    members = {group: sorted(entry["hosts"]) for group, entry in document.items() if group != "lab"}
    assert members == {"trixie": ["m1", "pve1"], "bookworm": ["m2"], "proxmox": ["pve1"]}
    arguments = document["lab"]["vars"]["ansible_ssh_common_args"]
    assert "StrictHostKeyChecking=yes" in arguments
    assert str(paths.known_hosts) in arguments


def test_an_empty_lab_has_an_empty_inventory(paths: Paths) -> None:
    document = yaml.safe_load(inventory.inventory_text(paths, State()))
    assert document["lab"]["hosts"] == {}


def test_known_hosts_names_addresses_and_skips_hosts_without_a_key() -> None:
    lab = State(network=0).with_host(host("m1", 10)).with_host(host("m2", 11))
    assert inventory.known_hosts_text(lab, {"m1": "ssh-ed25519 AAAA m1\n"}) == "10.77.0.10 ssh-ed25519 AAAA\n"


def test_cgroup_hierarchies_of_both_kinds_of_machine() -> None:
    hybrid = (
        "cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n"
        "cgroup /sys/fs/cgroup/systemd cgroup rw,xattr,name=systemd 0 0\n"
        "cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n"
    )
    assert cgroups.roots(hybrid) == [Path("/sys/fs/cgroup/systemd"), Path("/sys/fs/cgroup/unified")]
    assert cgroups.roots("cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n") == [Path("/sys/fs/cgroup")]


def test_status_says_that_the_proxmox_kind_is_simulated() -> None:
    table = cli.status_table(
        [operations.Row("pve1", "trixie", "proxmox", "10.77.0.10", "running", "2026-01-01T00:00:00Z")]
    )
    assert table.splitlines()[1].startswith("pve1  trixie  proxmox (simulated)  10.77.0.10  running")


@pytest.mark.parametrize(
    ("options", "part"),
    [({"path": "opt"}, "--path opt"), ({"path": "/"}, "--path /"), ({"free_mib": 0}, "--free-mib 0"),
     ({"delay_ms": -1}, "--delay-ms -1"), ({"rate_kbit": 0}, "--rate-kbit 0")],
)  # fmt: skip
def test_faults_that_would_be_none_are_refused(options: dict[str, object], part: str) -> None:
    with pytest.raises(LabError, match=part):
        faults.Options(**options).check()  # type: ignore[arg-type]


def test_without_root_the_lab_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PEERLANE_LAB_DIR", str(tmp_path / "lab"))
    monkeypatch.setattr(system.os, "geteuid", lambda: 1000)
    assert cli.main(["up", "m1"]) == cli.EXIT_FAILED
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "sudo" in lines[0]
    assert not (tmp_path / "lab").exists()


def test_missing_programs_are_named_with_the_line_that_installs_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PEERLANE_LAB_DIR", str(tmp_path / "lab"))
    monkeypatch.setattr(system.os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["up", "m1"]) == cli.EXIT_FAILED
    line = capsys.readouterr().err
    assert "apt-get install -y --no-install-recommends" in line
    assert "mmdebstrap" in line
    assert "systemd-container" in line


@pytest.mark.parametrize("words", [["down"], ["down", "m1", "--all"], ["down", "m1", "--purge"]])
def test_down_wants_to_know_what(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == cli.EXIT_USAGE
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_an_unknown_host_is_named_with_those_there_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], paths: Paths
) -> None:
    monkeypatch.setenv("PEERLANE_LAB_DIR", str(paths.root))
    state.save(paths, State(network=0).with_host(host("m1", 10)))
    assert cli.main(["ssh", "m2", "true"]) == cli.EXIT_FAILED
    assert "m2: there is no such lab host (there is: m1)" in capsys.readouterr().err
