"""The whole path on lab hosts: a fresh host to a served model, and what is left when a host fails on the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from test_lab import IMAGES, REPOSITORY, Lab

from peerlane.lab import tiny_model
from peerlane.lab.state import Paths

pytestmark = pytest.mark.lab
PORT = 8000

# Kind, mode, owner and content of everything that a run could change. Left out is what a running system changes by
# itself: logs, the state of timers and of the clock, the last login.
TREE = r"""
own='^/(proc|sys|dev|run|tmp|var/tmp|var/log|var/lib/systemd|var/lib/wtmpdb|var/lib/lastlog)(/|$)'
find / -xdev -printf '%p %y %m %U:%G %l\n' | grep -Ev "$own" | sort
find / -xdev -type f -print | grep -Ev "$own" | sort | tr '\n' '\0' | xargs -0 sha256sum
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    made = Lab(Paths(tmp_path_factory.mktemp("provision").resolve(), IMAGES))
    yield made
    made.run("down", "--all")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("models") / "lab-tiny"
    tiny_model.make(place, "a")
    return place


def inventory(lab: Lab, model: Path, names: list[str]) -> Path:
    """The lab's inventory with what a user sets for a model."""
    group = yaml.safe_load(lab.paths.inventory.read_text())["lab"]
    group["hosts"] = {name: group["hosts"][name] for name in names}
    group["vars"].update(
        {
            "model_weights_name": "lab-tiny",
            "model_weights_source": str(model),
            "model_weights_source_on": "controller",
            "model_service_name": "tiny",
            "model_service_host": "0.0.0.0",
            "model_service_port": PORT,
            "model_service_golden": tiny_model.golden("a"),
        }
    )
    place = model.parent / f"{'-'.join(names)}.yml"
    place.write_text(yaml.safe_dump({"lab": group}))
    return place


def peerlane(*words: str, timeout_s: float = 900) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "peerlane", *words],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "src")},
    )


def answer(lab: Lab, name: str, within_s: float = 30) -> str:
    """Ask the model on this host the known prompt; wait for a service that is still starting."""
    address = lab.row(name)[3]
    golden = tiny_model.golden("a")
    body = {"prompt": golden["prompt"], "max_tokens": golden["max_tokens"], "temperature": 0}
    request = urllib.request.Request(
        f"http://{address}:{PORT}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    deadline = time.monotonic() + within_s
    while True:
        try:
            with urllib.request.urlopen(request, timeout=10) as reply:
                return str(json.load(reply)["choices"][0]["text"])
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def assert_serves(lab: Lab, name: str) -> None:
    assert tiny_model.golden("a")["answer"].strip() in answer(lab, name)


def host_lines(stderr: str, name: str) -> list[str]:
    """The lines of the end of a run that name this host's failure."""
    return [line for line in stderr.splitlines() if line.startswith(f"{name}: ")]


def test_a_fresh_host_is_provisioned_checked_rebooted_and_left_alone_by_a_second_run(lab, model):
    lab.ok("up", "fresh", timeout_s=600)
    hosts = inventory(lab, model, ["fresh"])

    before = lab.ssh("fresh", TREE).stdout
    dry = peerlane("provision", "-i", str(hosts), "--check")
    after = lab.ssh("fresh", TREE).stdout
    assert dry.returncode == 0, dry.stderr
    assert "would change" in dry.stdout
    assert len(before.splitlines()) > 1000
    assert sorted(set(before.splitlines()) ^ set(after.splitlines())) == []

    first = peerlane("provision", "-i", str(hosts))
    assert first.returncode == 0, first.stderr
    assert tiny_model.golden("a")["answer"].strip() in first.stdout
    assert_serves(lab, "fresh")

    second = peerlane("provision", "-i", str(hosts))
    assert second.returncode == 0, second.stderr
    assert "changed          nothing" in second.stdout

    lab.ssh("fresh", "systemctl reboot")
    time.sleep(2)
    assert_serves(lab, "fresh")


@pytest.mark.deep
@pytest.mark.parametrize("fault", ["apt-lock", "disk", "ssh", "reboot"])
def test_of_three_hosts_the_faulty_one_says_what_and_where_and_a_second_run_finishes_it(lab, model, fault):
    names = [f"{fault}{number}" for number in (1, 2, 3)]
    bad = names[1]
    lab.ok("up", *names, timeout_s=600)
    hosts = inventory(lab, model, names)
    try:
        if fault in ("apt-lock", "disk"):
            lab.ok("fault", bad, fault, "on")
            run = peerlane("provision", "-i", str(hosts))
        else:
            run = _with_fault_in_the_middle(lab, hosts, bad, fault)
        assert run.returncode == (4 if fault in ("ssh", "reboot") else 3), run.stderr
        (line,) = host_lines(run.stderr, bad)[-1:]
        assert {"apt-lock": "lock", "disk": "free on /opt", "ssh": "SSH", "reboot": ""}[fault].lower() in line.lower()
        for name in (names[0], names[2]):
            assert_serves(lab, name)

        if fault != "reboot":
            lab.ok("fault", bad, fault, "off")
        again = peerlane("provision", "-i", str(hosts))
        assert again.returncode == 0, again.stderr
        assert_serves(lab, bad)
    finally:
        lab.run("down", *names)


def _with_fault_in_the_middle(lab: Lab, hosts: Path, bad: str, fault: str) -> subprocess.CompletedProcess[str]:
    """Start a provision, and give one host its fault once the engine is being built there."""
    log = hosts.with_suffix(".log")
    with log.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "peerlane", "provision", "-i", str(hosts)],
            stdout=subprocess.PIPE,
            stderr=stream,
            text=True,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY / "src")},
        )
        deadline = time.monotonic() + 600
        while "inference_engine" not in log.read_text().partition("] Provision")[2]:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.5)
        if fault == "ssh":
            lab.ok("fault", bad, "ssh", "on")
        else:
            lab.ssh(bad, "systemctl reboot --force --force")
        out, _ = process.communicate(timeout=900)
    return subprocess.CompletedProcess([], process.returncode, out, log.read_text())
