"""Every playbook is valid by its full name from any folder, and applies the roles of the plan in its order."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ansible_collections.peerlane.gpu.plugins.plugin_utils.model import provision
from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse import intake, snapshot
from ansible_collections.peerlane.gpu.plugins.plugin_utils.rules import engine

PLAYBOOKS = Path(__file__).resolve().parents[2] / "playbooks"


@pytest.mark.parametrize("name", sorted(place.stem for place in PLAYBOOKS.glob("*.yml")))
def test_a_playbook_passes_the_syntax_check(environment, tmp_path, name):
    place = tmp_path / "hosts.yml"
    place.write_text("all:\n  hosts:\n    a:\nhypervisors:\n  hosts:\n    pve:\n")
    done = subprocess.run(
        ["ansible-playbook", f"peerlane.gpu.{name}", "-i", str(place), "--syntax-check"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    assert "DEPRECAT" not in done.stderr


def test_hypervisors_are_read_and_never_provisioned(environment, tmp_path):
    place = tmp_path / "hosts.yml"
    place.write_text("all:\n  hosts:\n    a:\nhypervisors:\n  hosts:\n    pve:\n")
    done = subprocess.run(
        ["ansible-playbook", "peerlane.gpu.provision", "-i", str(place), "--list-hosts"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    plays = done.stdout.split("  play #")[1:]

    assert len(plays) == 6
    for play in plays:
        hosts = {line.strip() for line in play.splitlines()} & {"a", "pve"}
        assert hosts == ({"a", "pve"} if "Audit" in play.splitlines()[0] else {"a"}), play


def test_the_roles_are_those_of_the_plan_in_its_order():
    plays = yaml.safe_load((PLAYBOOKS / "provision.yml").read_text())
    (play,) = [one for one in plays if "roles" in one]

    assert [one["role"] for one in play["roles"]] == [f"peerlane.gpu.{role}" for role in provision.ROLES]
    assert all(f"'{role}' in" in one["when"] for role, one in zip(provision.ROLES, play["roles"], strict=True))
    assert not any("any_errors_fatal" in one or "max_fail_percentage" in one for one in plays)


GATE = """
- hosts: llm-guest
  gather_facts: false
  tasks:
    - peerlane.gpu.provision_summary:
        stage: plan
        snapshots: {snapshots}
      register: made
    - ansible.builtin.debug:
        msg: "{{{{ made.msg.splitlines() }}}}"
    - peerlane.gpu.provision_summary:
        stage: gate
"""
EXAMPLE = PLAYBOOKS.parent / "docs" / "examples" / "eight-gpu-guest"


def _gate(environment, tmp_path, snapshots, *words):
    place = tmp_path / "hosts.yml"
    place.write_text("all:\n  hosts:\n    llm-guest:\nhypervisors:\n  hosts:\n    pve-node:\n")
    play = tmp_path / "gate.yml"
    play.write_text(GATE.format(snapshots=snapshots))
    done = subprocess.run(
        ["ansible-playbook", str(play), "-i", str(place), *words],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def _blocking(folders):
    fleet = {one.host: snapshot.build(one) for one in intake.read(folders, None)}
    return engine.blocking(engine.judge(fleet)["llm-guest"])


def test_a_blocking_finding_stops_a_host_until_it_is_accepted(environment, tmp_path):
    copy = tmp_path / "snapshots"
    shutil.copytree(EXAMPLE, copy)
    (copy / "llm-guest" / "nvidia_smi.txt").write_text(
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
        "Make sure that the latest NVIDIA driver is installed and running.\n"
    )
    off = ("-e", "nvidia_driver_enabled=false")

    code, said = _gate(environment, tmp_path, copy, *off)
    ids = sorted(set(re.findall(r"accept it: -e peerlane_accept_findings=(\w+)", said)))
    assert code == 2, said
    assert ids
    assert set(ids) <= set(_blocking([copy]))
    code, said = _gate(environment, tmp_path, copy, *off, "-e", f"peerlane_accept_findings={','.join(ids)}")
    assert code == 0, said


def test_a_guest_is_judged_with_its_hypervisor(environment, tmp_path):
    alone, joined = set(_blocking([EXAMPLE / "llm-guest"])), set(_blocking([EXAMPLE]))
    _, said = _gate(environment, tmp_path, EXAMPLE)
    (line,) = [one for one in said.splitlines() if "  handled " in one]

    assert set(re.findall(r"(\w\d+) \(", line)) == joined
    assert alone, "the guest alone has findings too"


def test_a_plan_without_an_audit_is_refused(environment, tmp_path):
    code, said = _gate(environment, tmp_path, tmp_path / "none")

    assert code == 2
    assert "no audit of this host has run; run peerlane.gpu.host_evidence first" in said


def test_an_audit_keeps_what_the_inventory_says_of_a_guests_home(environment, tmp_path):
    (tmp_path / "hosts.yml").write_text(
        "all:\n  hosts:\n    gpu-vm:\n      ansible_connection: local\n      ansible_become: false\n"
        f"      ansible_python_interpreter: {sys.executable}\n      node: pve7\n"
        "      peerlane_hypervisor: '{{ node }}'\n      peerlane_vmid: 101\n"
    )
    subprocess.run(
        ["ansible-playbook", "peerlane.gpu.audit", "-i", "hosts.yml", "-e", "peerlane_save_to=snapshots"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )
    manifest = json.loads((tmp_path / "snapshots/gpu-vm/manifest.json").read_text())

    assert manifest["inventory"] == {"hypervisor": "pve7", "vmid": "101"}
