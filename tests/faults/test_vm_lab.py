"""Virtual machines of the lab: what the audit says of a real kernel with simulated GPUs, live and from the files.

Each scenario is booted and saved at its first use (minutes); what is measured and judged here starts from that state.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from test_lab import IMAGES, REPOSITORY, Lab

from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse import intake, snapshot
from ansible_collections.peerlane.gpu.plugins.plugin_utils.report import facts
from ansible_collections.peerlane.gpu.plugins.plugin_utils.rules import engine
from peerlane.lab import scenarios, state, vm
from peerlane.lab.scenarios import gpu_addresses
from peerlane.lab.state import Paths

pytestmark = [pytest.mark.lab, pytest.mark.deep]

BUILD_TIMEOUT_S = 900
LIMIT_S = 60  # issue: restore, audit and verdict in under a minute


@dataclass(frozen=True)
class Audited:
    """One scenario: restored, audited over SSH, and judged again from the files."""

    document: dict[str, Any]
    again: dict[str, Any]
    text: str
    text_again: str
    folder: Path
    took_s: float
    cpu_s: float
    busy: bool

    @property
    def host(self) -> Any:
        """Return the only host of the live audit."""
        return self.document["hosts"]["g1"]

    def findings(self, rule: str) -> list[dict[str, Any]]:
        """Return what a rule said."""
        return [one for one in self.host["findings"] if one["rule"] == rule]

    def states(self, rule: str) -> set[str]:
        """Return the states of a rule's verdicts."""
        return {one["state"] for one in self.findings(rule)}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    made = Lab(Paths(tmp_path_factory.mktemp("vm").resolve(), IMAGES))
    yield made
    made.run("down", "--all")


def peerlane(lab: Lab, *words: str) -> subprocess.CompletedProcess[str]:
    path = f"{REPOSITORY / 'src'}:{REPOSITORY / 'collections'}"
    environment = {**os.environ, "PYTHONPATH": path, "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, "-m", "peerlane", *words],
        env=environment,
        cwd=lab.paths.root,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def cpu_seconds(lab: Lab) -> float:
    """Return the processor time that QEMU has used since it was started."""
    pid = vm.leader(lab.paths, "g1")
    assert pid is not None
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime and stime of proc(5)


@pytest.fixture(scope="module")
def audited(lab: Lab) -> Mapping[str, Audited]:
    """Audit every scenario, one virtual machine at a time."""
    found = {}
    for scenario in scenarios.SCENARIOS:
        lab.ok("up", "g1", "--kind", "vm", "--scenario", scenario, timeout_s=BUILD_TIMEOUT_S)
        lab.ok("down", "g1")  # from here on, the scenario's saved state is there
        folder = lab.paths.root / "snapshots" / scenario
        live, saved = lab.paths.root / f"{scenario}.json", lab.paths.root / f"{scenario}-again.json"
        busy = os.getloadavg()[0] > (os.cpu_count() or 1) + 1  # one virtual machine that just ended counts too
        began, used = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        lab.ok("up", "g1", "--kind", "vm", "--scenario", scenario, timeout_s=300)
        inventory = str(lab.paths.inventory)
        done = peerlane(lab, "audit", "-i", inventory, "--save", str(folder), "--format", "json", "-o", str(live))
        took_s = time.monotonic() - began
        assert done.returncode in (0, 1), done.stderr
        cpu_s = cpu_seconds(lab) + sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - sum(used[:2])
        lab.ok("down", "g1")
        again = peerlane(lab, "audit", "--from", str(folder), "--format", "json", "-o", str(saved))
        assert again.returncode == done.returncode, again.stderr
        texts = [peerlane(lab, "audit", "--from", str(folder), "-v").stdout for _ in range(2)]
        found[scenario] = Audited(
            json.loads(live.read_text()), json.loads(saved.read_text()), texts[0], texts[1], folder, took_s, cpu_s, busy
        )
    return found


@pytest.mark.parametrize("scenario", scenarios.SCENARIOS)
def test_live_and_from_files_are_the_same_to_the_byte_except_for_times(
    audited: Mapping[str, Audited], scenario: str
) -> None:
    one = audited[scenario]
    documents = [json.dumps({**document, "generated_at": ""}) for document in (one.document, one.again)]
    assert documents[0] == documents[1]
    assert one.text == one.text_again
    assert len(one.host["findings"]) > 30


@pytest.mark.parametrize("scenario", scenarios.SCENARIOS)
def test_restore_audit_and_verdict_take_less_than_a_minute(audited: Mapping[str, Audited], scenario: str) -> None:
    one = audited[scenario]
    if one.busy and one.took_s >= LIMIT_S:
        pytest.skip(f"others keep this machine busy: {one.took_s:.0f} s, {one.cpu_s:.0f} s of it processor time")
    assert one.took_s < LIMIT_S


@pytest.mark.parametrize("scenario", scenarios.SCENARIOS)
def test_no_rule_fails_on_a_real_kernels_evidence(audited: Mapping[str, Audited], scenario: str) -> None:
    assert [one["reason"] for one in audited[scenario].host["findings"] if "a bug in" in one["reason"]] == []


@pytest.mark.parametrize("scenario", scenarios.SCENARIOS)
def test_the_kernel_sees_the_gpus_where_the_scenario_puts_them(audited: Mapping[str, Audited], scenario: str) -> None:
    (evidence,) = intake.read([audited[scenario].folder], None)
    seen = snapshot.build(evidence)
    made = scenarios.SCENARIOS[scenario]
    gpus = [one for one in (seen.pci.functions.value or {}).values() if one.is_nvidia]
    assert sorted(one.bdf for one in gpus) == sorted(gpu_addresses(made))
    assert {(one.device, one.class_code) for one in gpus} == {("2bb5", "0302")}
    assert {(one.link_speed_gt, one.link_width) for one in gpus} == {(32.0, 16)}
    assert {one.driver for one in gpus} == {"vfio-pci" if made.vfio else ""}
    assert {one.iommu_group is not None for one in gpus} == {made.iommu}
    assert {one.regions[1].size_bytes for one in gpus} == {256 * 1024 * 1024}
    # What the firmware wrote into the GPUs is there after the restore.
    assert {(bytes.fromhex(one.config_hex)[0x10:0x28] == b"\0" * 24) for one in gpus} == {False}


def test_eight_gpus_without_the_approval_capability(audited: Mapping[str, Audited]) -> None:
    one = audited["guest"]
    assert "8x RTX PRO 6000 Blackwell Server Edition" in one.text
    assert one.states("D1") == {"unknown"}  # no driver, so no matrix: the capability's absence alone is no failure
    assert "has no P2P clique" in one.findings("D1")[0]["title"]
    assert one.states("F1") == {"fail"}
    assert one.states("B11") == {"pass"}


def test_eight_gpus_with_the_approval_capability(audited: Mapping[str, Audited]) -> None:
    one = audited["guest-approved"]
    assert one.states("D1") == {"pass"}
    assert one.states("D2") == {"pass"}


@pytest.mark.parametrize(("scenario", "word"), [("switch", "+"), ("switch-acs-off", "-")])
def test_acs_of_the_root_ports_is_read_from_the_registers(
    audited: Mapping[str, Audited], scenario: str, word: str
) -> None:
    (evidence,) = intake.read([audited[scenario].folder], None)
    functions = snapshot.build(evidence).pci.functions.value or {}
    ports = {one.bdf: one.acs_ctl for one in functions.values() if one.class_code == "0604" and one.acs_ctl}
    assert len(ports) == 3  # the root ports above the switch and above the two other GPUs; the switch has no ACS
    assert {control["ReqRedir"] for control in ports.values()} == {word == "+"}
    way = []
    below = functions["0000:03:00.0"]
    while below.parent:
        below = functions[below.parent]
        way.append(below.bdf)
    assert way == ["0000:02:00.0", "0000:01:00.0", "0000:00:10.0"]


def test_a_hypervisor_keeps_acs(audited: Mapping[str, Audited]) -> None:
    on, off = audited["hypervisor"], audited["hypervisor-acs-off"]
    assert on.host["role"] == off.host["role"] == "hypervisor"
    assert on.states("C13") == {"pass"}
    failed = [one for one in off.findings("C13") if one["state"] == "fail"]
    assert sorted(one["subject"] for one in failed) == sorted(gpu_addresses(scenarios.SCENARIOS["hypervisor"]))
    assert {one["severity"] for one in failed} == {"critical"}
    assert "ACSCtl" in failed[0]["evidence"][0]["excerpt"]


def test_what_a_playbook_gets_is_what_the_files_give(lab: Lab) -> None:
    lab.ok("up", "g1", "--kind", "vm", "--scenario", "guest-approved", timeout_s=300)
    folder = lab.paths.root / "playbook"
    words = ["-m", "peerlane.gpu.host_evidence", "-a", f"save_to={folder}", "-i", str(lab.paths.inventory), "g1"]
    done = subprocess.run(
        ["ansible", *words],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        cwd=lab.paths.root,
        env={**os.environ, "ANSIBLE_COLLECTIONS_PATH": str(REPOSITORY / "collections")},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    live = json.loads(done.stdout.partition(" => ")[2])["ansible_facts"]["peerlane"]
    (evidence,) = intake.read([folder], None)
    seen = snapshot.build(evidence)
    saved = facts.facts(seen, engine.judge({"g1": seen})["g1"])
    assert json.dumps(live, sort_keys=True) == json.dumps(saved, sort_keys=True)
    lab.ok("down", "g1")


def test_a_killed_machine_comes_back_with_its_disk_and_down_leaves_nothing(lab: Lab) -> None:
    lab.ok("up", "g1", "--kind", "vm", "--scenario", "switch", timeout_s=300)
    assert lab.ssh("g1", "echo kept > /root/kept; sync; hostname").stdout == "g1\n"
    assert lab.row("g1")[:3] == ["g1", "trixie", "vm"]
    assert vm.uses(lab.paths.images)
    pid = vm.leader(lab.paths, "g1")
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    time.sleep(0.5)
    assert " off " in next(line for line in lab.ok("status").splitlines() if line.startswith("g1 "))
    lab.ok("up", "g1", timeout_s=600)  # boots from its disk
    assert lab.ssh("g1", "cat /root/kept; lspci -d 10de: | wc -l").stdout == "kept\n4\n"
    lab.ok("fault", "g1", "apt-lock", "on")
    lab.ok("fault", "g1", "ssh", "on")
    assert lab.run("status").stdout.splitlines()[1].endswith("ssh apt-lock")
    before = lab.traces()
    assert all(before[kind] for kind in ("links", "rules", "processes", "cgroups")), before
    lab.ok("down", "g1")
    assert {kind: found for kind, found in lab.traces().items() if found} == {}


def test_an_up_that_was_killed_is_cleared_away(lab: Lab) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY / "src"),
        "PEERLANE_LAB_DIR": str(lab.paths.root),
        "PEERLANE_LAB_IMAGES": str(lab.paths.images),
    }
    argv = [sys.executable, "-m", "peerlane.lab", "up", "k1", "--kind", "vm", "--scenario", "guest"]
    with subprocess.Popen(argv, env=environment, stderr=subprocess.DEVNULL) as started:
        give_up = time.monotonic() + 60
        while vm.leader(lab.paths, "k1") is None:
            assert time.monotonic() < give_up
            time.sleep(0.05)
        started.kill()
    assert lab.traces()["processes"]
    lab.ok("down", "k1")
    assert {kind: found for kind, found in lab.traces().items() if found} == {}
    assert "k1" not in state.load(lab.paths).hosts


def test_each_host_of_a_scenario_is_its_own_and_reaches_the_labs_containers(lab: Lab) -> None:
    lab.ok("up", "c1")
    container_address = lab.row("c1")[3]
    greeting = f"import socket; print(socket.create_connection(('{container_address}', 22), 20).recv(3))"
    own = []
    for name in ("t1", "t2"):
        lab.ok("up", name, "--kind", "vm", "--scenario", "switch", timeout_s=300)
        own.append(
            lab.ssh(name, "hostname; cat /sys/class/net/eth0/address; ssh-keygen -l -f /etc/ssh/*_key.pub").stdout
        )
        assert own[-1].startswith(f"{name}\n")
        assert abs(int(lab.ssh(name, "date +%s").stdout) - time.time()) < 30
        assert lab.ssh(name, f'python3 -c "{greeting}"').stdout == "b'SSH'\n"
        lab.ok("down", name)
    assert not set(own[0].splitlines()) & set(own[1].splitlines())
    lab.ok("down", "c1")
