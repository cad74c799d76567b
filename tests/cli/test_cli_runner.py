"""The parts with Ansible, on hosts that need no lab: this machine, and addresses where nobody answers."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from peerlane import playbook
from peerlane.progress import Progress

# As Ansible after a KeyboardInterrupt that got lost: it goes on, and its next SIGINT is not caught.
DEAF = """
import signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell ignores it for what it starts in the background
worker = subprocess.Popen(["sleep", "60"])
signal.signal(signal.SIGINT, lambda *_: signal.signal(signal.SIGINT, signal.SIG_DFL))
print(worker.pid, flush=True)
time.sleep(60)
"""

LOCAL = "{ansible_connection: local, ansible_become: false, ansible_python_interpreter: /usr/bin/python3}"


@pytest.fixture
def closed_port():
    """A port of this machine where nobody listens, as long as the test runs."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def test_doctor_reports_each_check_and_each_host(peerlane, tmp_path, closed_port):
    place = tmp_path / "hosts.yml"
    place.write_text(
        f"all:\n  hosts:\n    here: {LOCAL}\n"
        f"    gone: {{ansible_host: 127.0.0.1, ansible_port: {closed_port}, ansible_user: nobody}}\n"
    )
    done = peerlane("doctor", "-i", place)

    assert done.returncode == 4
    assert done.stdout.startswith("here: ")
    assert "gone: Doctor: it refuses connections to the SSH port; start sshd there, or correct" in done.stderr
    assert "the clock agrees with this machine" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr


def test_a_hypervisor_is_asked_for_less(peerlane, tmp_path):
    place = tmp_path / "hosts.yml"
    place.write_text(f"all:\n  hosts:\n    here: {LOCAL}\nhypervisors:\n  hosts:\n    pve: {LOCAL}\n")
    blocks = peerlane("doctor", "-i", place).stdout.split("\n\n")

    assert any(block.startswith("pve: ") and "systemd" not in block for block in blocks)
    assert any(block.startswith("here: ") and "systemd" in block for block in blocks)


def test_the_line_of_verbose_is_the_same_run(peerlane, environment, tmp_path):
    place = tmp_path / "hosts.yml"
    place.write_text(f"all:\n  hosts:\n    here: {LOCAL}\n    other: {LOCAL}\n")
    done = peerlane("doctor", "-i", place, "-l", "here", "-e", "text=a b", "-v")
    line = done.stderr.splitlines()[0]
    words = shlex.split(line)
    again = subprocess.run(
        words, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )

    assert words[:2] == ["ansible-playbook", "peerlane.gpu.doctor"]
    assert '\'{"text": "a b"}\'' in line
    assert "here: Doctor: Check the host" in done.stderr
    assert "other" not in done.stdout
    assert (again.returncode == 0) == (done.returncode == 0)
    assert "here" in again.stdout


def test_a_wrong_value_is_refused_on_the_host_before_it_is_asked(peerlane, tmp_path):
    place = tmp_path / "hosts.yml"
    place.write_text(f"all:\n  hosts:\n    here: {LOCAL}\n  vars:\n    nccl_settings_state: maybe\n")
    done = peerlane("provision", "-i", place)

    assert done.returncode == 2
    assert f"here: Check: {place}:5: nccl_settings_state is 'maybe'; present or absent is wanted" in done.stderr
    assert "Audit" not in done.stderr


def test_a_run_leaves_its_log_and_no_secret(peerlane, environment, tmp_path, closed_port):
    environment["SOME_API_TOKEN"] = "sesame-open-1234"
    place = tmp_path / "hosts.yml"
    place.write_text(f"all:\n  hosts:\n    gone: {{ansible_host: 127.0.0.1, ansible_port: {closed_port}}}\n")
    done = peerlane("doctor", "-i", place)
    runs = tmp_path / "state" / "peerlane" / "runs"
    (run,) = list(runs.iterdir())

    assert f"the whole log is {run}" in done.stderr
    assert run.stat().st_mode & 0o077 == 0
    for kept in run.rglob("*"):
        if kept.is_file():
            assert "sesame-open-1234" not in kept.read_text(errors="replace"), kept


def test_host_key_checking_stays_on(peerlane, environment, tmp_path, closed_port):
    place = tmp_path / "hosts.yml"
    place.write_text("all:\n  hosts:\n    here: {ansible_connection: local}\n")
    seen = subprocess.run(
        [
            sys.executable,
            "-c",
            "import ansible_runner, peerlane.playbook as p, peerlane.hosts as h, sys\n"
            "real = ansible_runner.interface.init_runner\n"
            "def spy(**k):\n"
            "    global made; made = real(**k); return made\n"
            "ansible_runner.interface.init_runner = spy\n"
            f"p.run('doctor', h.Target(({str(place)!r},), hosts=('here',)), extra={{}})\n"
            "print('ANSIBLE_HOST_KEY_CHECKING' in made.config.env)\n",
        ],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert seen.stdout.strip().splitlines()[-1] == "False", seen.stderr


def test_a_password_cannot_be_asked_without_a_terminal(environment, tmp_path):
    place = tmp_path / "hosts.yml"
    place.write_text("all:\n  hosts:\n    here: {ansible_connection: local}\n")
    done = subprocess.run(
        [sys.executable, "-m", "peerlane", "doctor", "-i", str(place), "-K"],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        start_new_session=True,
        check=False,
    )

    assert done.returncode == 2
    assert "-K: there is no terminal to ask for the sudo password" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_run_and_leaves_no_process(environment, tmp_path, number):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes the connection and never says a word
        port = silent.getsockname()[1]
        place = tmp_path / "hosts.yml"
        place.write_text(f"all:\n  hosts:\n    mute: {{ansible_host: 127.0.0.1, ansible_port: {port}}}\n")
        environment["ANSIBLE_TIMEOUT"] = "60"
        process = subprocess.Popen(
            [sys.executable, "-m", "peerlane", "doctor", "-i", str(place)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        silent.settimeout(60)
        with contextlib.closing(silent.accept()[0]):
            time.sleep(0.5)
            sent = time.monotonic()
            process.send_signal(number)
            _, said = process.communicate(timeout=30)

    assert process.returncode == 130, said
    assert time.monotonic() - sent < 15
    assert "interrupted" in said
    assert "Traceback" not in said
    left = subprocess.run(["pgrep", "-f", str(place)], capture_output=True, text=True, check=False).stdout.split()
    assert [pid for pid in left if int(pid) != os.getpid()] == []


def runs(pid: int) -> bool:
    """Whether a process still runs. A zombie has ended, whenever its parent gets round to noticing."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("second_signal", [True, False])
def test_a_run_that_does_not_heed_the_signal_is_ended_with_its_workers(monkeypatch, second_signal):
    monkeypatch.setattr(playbook, "_PATIENCE_S", 60.0 if second_signal else 0.5)
    with subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE, text=True) as deaf:
        worker = int(deaf.stdout.readline())
        watch = playbook._Watch(Progress((), False), frozenset(), {})
        watch.pid = deaf.pid
        watch.interrupt(signal.SIGINT, None)
        watch.insist()
        time.sleep(0.2)
        assert deaf.poll() is None
        if second_signal:
            watch.interrupt(signal.SIGINT, None)
        else:
            time.sleep(0.5)
            watch.insist()
        assert deaf.wait(timeout=10) == -signal.SIGINT
        deadline = time.monotonic() + 10
        while runs(worker):
            assert time.monotonic() < deadline
            time.sleep(0.1)
