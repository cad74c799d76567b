"""What Ansible says of a failed host becomes one line with what to do. The messages are OpenSSH's and Ansible's own."""

from __future__ import annotations

from collections import Counter

import pytest

from peerlane import failures, provision
from peerlane.playbook import Host, Outcome

CHANGED_KEY = """Failed to connect to the host via ssh: @@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
IT IS POSSIBLE THAT SOMEONE IS DOING SOMETHING NASTY!
Someone could be eavesdropping on you right now (man-in-the-middle attack)!
Offending ED25519 key in /home/me/.ssh/known_hosts:7
Host key for 192.0.2.20 has changed and you have requested strict checking.
Host key verification failed."""


@pytest.mark.parametrize(
    ("message", "line"),
    [
        (
            CHANGED_KEY,
            "its SSH host key has changed; if the host was installed anew: "
            "ssh-keygen -R 192.0.2.20 -f /home/me/.ssh/known_hosts; if not, find out why before you connect",
        ),
        (
            "No ED25519 host key is known for x.\nHost key verification failed.",
            "its SSH host key is not known here;",
        ),
        ("ssh: connect to host x port 22: Connection refused", "it refuses connections to the SSH port; start sshd"),
        ("ssh: connect to host x port 22: Connection timed out", "it did not answer in time; is it up"),
        ("ssh: connect to host x port 22: No route to host", "there is no route to it; is it up"),
        ("ssh: Could not resolve hostname x: Name or service not known", "its name cannot be resolved; correct"),
        ("admin@x: Permission denied (publickey,password).", "it refused the login (publickey,password); check"),
        (
            "no such identity: /k: No such file or directory\nadmin@x: Permission denied (publickey).",
            "the private key file is missing; correct ansible_ssh_private_key_file",
        ),
        ("Permissions 0644 for '/k' are too open.\nLoad key: bad permissions", "may be read by others; chmod 600"),
        ("kex_exchange_identification: Connection closed by remote host", "the connection was cut; is it rebooting?"),
        ("Data could not be sent to remote host. client_loop: send disconnect: Broken pipe", "the connection was cut"),
        ("no matching host key type found. Their offer: ssh-rsa", "share no SSH algorithm"),
        ("something quite new", "it cannot be reached: something quite new; try: ssh admin@192.0.2.20"),
    ],
)
def test_the_ways_to_be_unreachable_are_told_apart(message, line):
    said = failures.unreachable_line(message, "admin@192.0.2.20")

    assert said.startswith(line) or line in said
    assert "\n" not in said


def test_a_key_of_another_port_is_named_as_ssh_keygen_wants_it():
    assert "ssh-keygen -R '[192.0.2.20]:2222' -f" in failures.unreachable_line(CHANGED_KEY, "-p 2222 admin@192.0.2.20")


@pytest.mark.parametrize(
    ("result", "lines"),
    [
        ({"msg": "no room; free some"}, ["no room; free some"]),
        ({"msg": "Task failed: Action failed: two\n  words"}, ["two words"]),
        ({"problems": ["a; b", "c; d"], "msg": "a; b\nc; d"}, ["a; b", "c; d"]),
        (
            {"msg": "non-zero return code", "rc": 7, "stderr": "x\ny: no such\n"},
            ["ended with 7: y: no such"],
        ),
        ({"msg": "", "rc": 1, "stdout": "", "stderr": ""}, ["ended with 1: it said nothing"]),
        (
            {
                "msg": "One or more items failed",
                "results": [{"msg": "fine"}, {"failed": True, "msg": "apt said no", "item": "nvidia-open"}],
            },
            ["apt said no (item nvidia-open)"],
        ),
        ({"censored": "the output has been hidden"}, ["the output has been hidden"]),
    ],
)
def test_a_failed_task_is_said_in_lines(result, lines):
    assert failures.failure_lines(result) == lines


@pytest.mark.parametrize(
    ("result", "line"),
    [
        (
            {"msg": "Missing sudo password"},
            "sudo asks the login user for a password and none was given; run",
        ),
        ({"msg": "Incorrect sudo password"}, "sudo refused the password of the login user"),
        (
            {"msg": "Ansible requires Python 3.8 or newer on the target. Current version: 3.6.8"},
            "its Python is too old (Ansible requires Python 3.8 or newer on the target. Current version: 3.6.8); set",
        ),
        (
            {
                "msg": "Module result deserialization failed: No start of json char found",
                "module_stderr": '  File "<stdin>", line 3\nSyntaxError: future feature annotations is not defined\n',
            },
            "its Python is too old; set ansible_python_interpreter to a Python 3.9 or newer",
        ),
        (
            {"msg": "Module result deserialization failed: No start of json char found", "module_stderr": "Killed\n"},
            "its Python ran no module: Killed",
        ),
        (
            {"msg": "The module interpreter '/usr/bin/python3' was not found."},
            "was not found.; set ansible_python_interpreter, or as root: apt install python3",
        ),
    ],
)
def test_known_troubles_say_what_to_do(result, line):
    (said,) = failures.failure_lines(result)

    assert line in said


def test_a_page_of_text_is_cut():
    (said,) = failures.failure_lines({"msg": "word " * 1000})

    assert len(said) <= 400
    assert said.endswith("…")


@pytest.mark.parametrize(
    ("hosts", "error", "code"),
    [
        ([Host()], "", 0),
        ([Host("failed", blocked=True), Host()], "", 1),
        ([Host("failed", bad_input=True), Host("failed", blocked=True)], "", 2),
        ([Host("failed"), Host("failed", bad_input=True)], "", 3),
        ([Host()], "it would not start", 3),
        ([Host("unreachable"), Host("failed")], "", 4),
    ],
)
def test_the_exit_code_is_the_worst_that_happened(hosts, error, code):
    assert Outcome({str(number): host for number, host in enumerate(hosts)}, error=error).exit_code() == code
    assert Outcome(interrupted=True).exit_code() == 130


def test_changed_tasks_are_counted_by_role():
    text = provision.report("box:\n  service  x", Counter(nvidia_driver=2, model_service=1, audit=0), check=False)

    assert text == "box:\n  changed          nvidia_driver 2, model_service 1\n  service  x\n\n"
    assert "would change     nothing" in provision.report("box:\n  x", Counter(), check=True)
