"""A host's answers are judged without the host: every problem is one line that says what to do."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from ansible_collections.peerlane.gpu.plugins.plugin_utils.model import preflight
from ansible_collections.peerlane.gpu.plugins.plugin_utils.model.preflight import Wanted

GOOD = {
    "now": "1000",
    "uid": "0",
    "python": "/usr/bin/python3 3.11.2",
    "os_id": "debian",
    "os_version": "12",
    "os_name": "Debian GNU/Linux 12 (bookworm)",
    "arch": "x86_64",
    "dpkg_arch": "amd64",
    "cpu_flags": "fpu avx2 fma f16c bmi2",
    "pid1": "systemd",
    "systemd": "yes",
    "disk": "/opt|/dev/vda1 100000000 1 50000000 2% /\ndisk\t/var|/dev/vda1 100000000 1 50000000 2% /",
    "registry": "http://deb.debian.org/debian|0|Fetched",
}
WANTED = Wanted(
    interpreter="/usr/bin/python3",
    login="admin",
    engine="llama_cpp",
    cpu_flags=("avx2", "fma"),
    formats=("gguf",),
    port=8000,
    service="main",
    model_path="/data/m.gguf",
    model_home="/opt/peerlane/models/m@1",
)
MODEL = {"model_kind": "file", "model_magic": "GGUF"}


def answers(**changed: str | None) -> preflight.Answers:
    values = {key: value for key, value in {**GOOD, **MODEL, **changed}.items() if value is not None}
    body = "\n".join(f"{key}\t{value}" for key, value in values.items())
    return preflight.parse(f"Welcome!\nuid\t77\npeerlane-preflight-begin\n{body}\npeerlane-preflight-end\nbye\n")


def problems(wanted: Wanted = WANTED, offset_s: float | None = 0.0, **changed: str | None) -> list[str]:
    checks = preflight.judge(answers(**changed), wanted, offset_s)
    return [one.line() for one in checks if one.state != "ok"]


def test_a_fit_host_has_no_problem():
    assert problems() == []


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"uid": "1000"}, "admin did not become root; "),
        ({"os_id": "fedora", "os_version": "42", "os_name": "Fedora 42"}, "Fedora 42 is not supported; supported are"),
        ({"os_version": "11"}, "is not supported"),
        ({"os_id": None, "os_version": None, "os_name": None}, "an unnamed system"),
        ({"proxmox": "yes"}, "is a Proxmox node; put it in the group hypervisors"),
        ({"arch": "i686"}, "i686 is a 32-bit host; Peerlane needs x86_64"),
        ({"arch": "aarch64"}, "aarch64 is not supported"),
        ({"dpkg_arch": "i386"}, "a 32-bit userland (i386) runs on a 64-bit kernel"),
        ({"cpu_flags": "fpu fma"}, "the CPU shows no avx2, which the engine llama_cpp needs; set the VM's CPU type"),
        ({"python": None}, "/usr/bin/python3 (ansible_python_interpreter) does not run; as root: apt install python3"),
        ({"python": "/usr/bin/python3 3.6.8"}, "/usr/bin/python3 is Python 3.6.8; 3.9 is the oldest that works; use"),
        (
            {"python": "/usr/bin/python3 3.6.8\npython\t/usr/local/bin/python3.11 3.11.4"},
            "set ansible_python_interpreter: /usr/local/bin/python3.11",
        ),
        (
            {"container": "docker", "pid1": "sh", "systemd": None},
            "a docker container without systemd (process 1 is sh); use a container that boots an init",
        ),
        ({"pid1": "runit", "systemd": None}, "process 1 is runit, not systemd"),
        ({"disk": "/opt|/dev/vda1 9 9 500000 99% /"}, "only 0.5 GiB free on /opt (file system /); 1 GiB are needed"),
        ({"disk": "/opt|"}, "df did not say how much is free on /opt"),
        (
            {"lock": "/var/lib/dpkg/lock-frontend|812|apt-get|/system.slice/apt-daily.service"},
            "apt-get (pid 812, apt-daily.service) holds the apt lock /var/lib/dpkg/lock-frontend; wait until",
        ),
        ({"broken": "iF |nvidia-driver\nbroken\tiU |libnvidia-ml1"}, "half installed: nvidia-driver, libnvidia-ml1; "),
        (
            {"registry": "http://deb.debian.org/debian|100|E: Failed  E: Could not resolve 'deb.debian.org'"},
            "http://deb.debian.org/debian does not answer (Could not resolve 'deb.debian.org'); packages from there",
        ),
        ({"registry": "https://pypi.org/simple|124|"}, "does not answer (no answer in time)"),
        (
            {"listener": "8000|77|nginx|/system.slice/nginx.service"},
            "port 8000 is taken by nginx (pid 77, nginx.service); stop it, or set model_service_port",
        ),
        ({"listener": "8000|||"}, "port 8000 is taken by a process that cannot be seen"),
        ({"model_kind": "missing"}, "there is no /data/m.gguf on the host; correct model_weights_source"),
        ({"model_magic": ""}, "/data/m.gguf is no model (no GGUF mark); name a GGUF file"),
        ({"model_kind": "folder", "model_file": "notes.txt"}, "is no model (no weights)"),
        ({"model_kind": "folder", "model_file": "a.safetensors"}, "is no model (no config.json)"),
        (
            {"model_kind": "folder", "model_file": "config.json\nmodel_file\ta.safetensors"},
            "holds safetensors, which the engine does not read; name a GGUF file",
        ),
    ],
)
def test_each_problem_is_one_line_that_says_what_to_do(changed, line):
    found = problems(**changed)

    assert len(found) == 1, found
    assert line in found[0]
    assert "; " in found[0]
    assert "\n" not in found[0]


@pytest.mark.parametrize(
    ("offset_s", "state"), [(0.0, "ok"), (4.9, "ok"), (-30, "warn"), (299, "warn"), (301, "stop"), (None, "unknown")]
)
def test_a_clock_is_judged_by_its_distance(offset_s, state):
    checks = preflight.judge(answers(), WANTED, offset_s)

    assert {one.name: one.state for one in checks}["clock"] == state


def test_the_clock_agrees_where_the_answer_lies_between_the_two_stamps():
    said = answers()

    assert preflight.clock_offset_s(said, 999.2, 1000.9) == 0.0
    assert preflight.clock_offset_s(said, 900.0, 901.0) == 99.0
    assert preflight.clock_offset_s(said, 1100.0, 1101.0) == -99.0
    assert preflight.clock_offset_s(answers(now="?"), 0, 1) is None


def test_the_own_service_on_its_port_is_no_problem():
    unit = "8000|77|python3|/system.slice/system-peerlane/peerlane-model@main.service"

    assert problems(listener=unit) == []
    assert problems(listener=unit.replace("@main", "@other")) != []


def test_a_model_that_is_there_already_needs_no_source():
    assert problems(model_kind="there") == []


def test_a_hypervisor_is_only_asked_for_what_reading_needs():
    checks = preflight.judge(answers(proxmox="yes", os_id="x", lock="/x|1|apt|"), Wanted(audit_only=True), 0.0)

    assert {one.name for one in checks} == {"sudo", "python", "clock"}
    assert preflight.stops(checks) == []


def test_a_half_answer_is_unknown_and_an_empty_one_a_stop():
    half = preflight.parse("peerlane-preflight-begin\nuid\t0\n")

    assert any(one.state == "unknown" and "stopped answering" in one.text for one in preflight.judge(half, Wanted()))
    assert preflight.judge(preflight.parse("nothing\n"), Wanted())[0].state == "stop"


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("Missing sudo password", "sudo asks admin for a password and none was given; run again with -K"),
        ("sudo: a password is required", "none was given"),
        ("Incorrect sudo password", "sudo refused the password of admin"),
        ("sudo: 3 incorrect password attempts", "sudo refused the password"),
        ("admin is not in the sudoers file.", "admin may not use sudo; as root"),
        ("/bin/sh: 1: sudo: not found", "sudo is not installed"),
        ("Timeout (12s) waiting for privilege escalation prompt: ", "sudo did not answer in time"),
    ],
)
def test_sudo_troubles_are_told_apart(message, line):
    found = preflight.become_problem(message, "admin")

    assert found is not None
    assert line in found.line()


def test_other_troubles_are_not_blamed_on_sudo():
    assert preflight.become_problem("Connection refused", "admin") is None
    assert preflight.become_problem("Permission denied (publickey,password).", "admin") is None


def test_a_model_on_this_machine_is_looked_at_here(tmp_path):
    good = tmp_path / "m.gguf"
    good.write_bytes(b"GGUF\x03")
    (tmp_path / "bad.gguf").write_bytes(b"\x00\x01")

    assert preflight.model_on_controller(good, ("gguf",)).state == "ok"
    assert preflight.model_on_controller(tmp_path, ("gguf",)).state == "ok"
    assert "no GGUF mark" in preflight.model_on_controller(tmp_path / "bad.gguf", ("gguf",)).text
    assert "cannot be read" in preflight.model_on_controller(tmp_path / "none", ("gguf",)).text


def test_the_script_runs_here_and_answers_in_order(tmp_path):
    model = tmp_path / "it's a model"
    model.mkdir()
    (model / "x.gguf").write_bytes(b"GGUF")
    wanted = Wanted(interpreter="/usr/bin/python3", port=1, model_path=str(model))

    done = subprocess.run(
        ["/bin/sh", "-c", preflight.command(wanted)], capture_output=True, text=True, timeout=120, check=False
    )
    said = preflight.parse(done.stdout)

    assert said.complete, done.stderr
    assert said.first("now").isdigit()
    assert said.first("model_kind") == "folder"
    assert said.every("model_file") == ("x.gguf",)
    assert said.first("arch")
    assert len(said.every("disk")) == 2
    assert not list(Path("/run").glob("peerlane-preflight.*"))


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_likes_the_script():
    text = preflight.script(WANTED)
    # SC1091: /etc/os-release is the host's, not ours.
    done = subprocess.run(
        ["shellcheck", "-s", "sh", "-e", "SC1091", "-"], input=text, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout
