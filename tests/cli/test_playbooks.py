"""Every playbook is valid by its full name from any folder, and applies the roles of the plan in its order."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from ansible_collections.peerlane.gpu.plugins.plugin_utils.model import provision

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
