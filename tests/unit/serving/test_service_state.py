"""What systemd, the journal and the kernel say of a service, read from their text."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

from ansible_collections.peerlane.gpu.plugins.module_utils import service_state

TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000   998        0 4711 1 0 100 0 0
   1: 00000000:1F41 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4712 1 0 100 0 0
   2: 0100007F:1F40 0100007F:9C40 01 00000000:00000000 00:00000000 00000000   998        0 4713 1 0 20 4 30
   3: 0A00004D:1F42 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4714 1 0 100 0 0
"""


@pytest.mark.parametrize(
    ("port", "host", "inodes"),
    [
        (8000, "127.0.0.1", ["4711"]),
        (8000, "0.0.0.0", ["4711"]),
        (8000, "10.0.0.9", []),
        (8000, "::", ["4711"]),
        (8001, "127.0.0.1", ["4712"]),
        (8002, "127.0.0.1", []),
        (8002, "0.0.0.0", ["4714"]),
        (9000, "127.0.0.1", []),
    ],
)
def test_only_a_listener_on_the_same_address_is_in_the_way(port, host, inodes):
    assert service_state.listening_inodes(TABLE, port, host) == inodes


def test_the_owner_of_a_real_port_is_found():
    with socket.create_server(("127.0.0.1", 0)) as server:
        owner = service_state.port_owner(server.getsockname()[1], "127.0.0.1")
    assert "py" in owner["command"]


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        (
            "0::/system.slice/system-peerlane\\x2dmodel.slice/peerlane-model@chat.service\n",
            "peerlane-model@chat.service",
        ),
        ("12:cpu:/\n0::/system.slice/nginx.service\n", "nginx.service"),
        ("0::/user.slice/user-0.slice/session-3.scope\n", "session-3.scope"),
        ("0::/\n", ""),
    ],
)
def test_the_unit_of_a_process(text, unit):
    assert service_state.unit_of_cgroup(text) == unit


@pytest.mark.parametrize(
    ("properties", "before", "dead"),
    [
        ({"ActiveState": "active", "SubState": "running", "NRestarts": "0"}, 0, False),
        ({"ActiveState": "active", "SubState": "running", "NRestarts": "3"}, 3, False),
        ({"ActiveState": "active", "SubState": "running", "NRestarts": "1"}, 0, True),
        ({"ActiveState": "activating", "SubState": "auto-restart", "NRestarts": "0"}, 0, True),
        ({"ActiveState": "failed", "SubState": "failed", "NRestarts": "0"}, 0, True),
        ({"ActiveState": "inactive", "SubState": "dead"}, 0, True),
        ({"ActiveState": "activating", "SubState": "start"}, 0, False),
        ({}, 0, False),
    ],
)
def test_a_service_that_ended_is_dead_though_systemd_starts_it_again(properties, before, dead):
    assert service_state.is_dead(properties, before) is dead


def entry(message, invocation="a", pid="50", **more):
    return json.dumps({"MESSAGE": message, "_SYSTEMD_INVOCATION_ID": invocation, "_PID": pid, **more})


def test_log_lines_come_with_time_start_and_whether_systemd_said_them():
    text = "\n".join(
        [
            entry("one", __REALTIME_TIMESTAMP="1700000000500000", __CURSOR="s=1"),
            json.dumps({"MESSAGE": "Started x", "_PID": "1", "INVOCATION_ID": "a"}),
            entry("two\nthree"),
            entry("four", "b", __CURSOR="s=4"),
            "{broken",
            entry([79, 107, 255], "b"),
            entry(None, "b"),
        ]
    )
    entries, cursor = service_state.parse_journal(text)
    assert cursor == "s=4"
    assert entries[:2] == [[1700000000.5, "a", "one", False], [0.0, "a", "Started x", True]]
    assert [one[1:3] for one in entries[2:]] == [
        ["a", "two"], ["a", "three"], ["b", "four"], ["b", "Ok\ufffd"], ["b", ""]
    ]  # fmt: skip
    assert service_state.parse_journal("") == ([], "")


def test_this_process_is_counted_as_the_kernel_counts_it():
    row = service_state.process_row(str(os.getpid()))
    assert row["pid"] == os.getpid()
    assert row["state"] in "RS"
    assert row["cpu_s"] > 0
    assert row["char_bytes"] > 0
    assert row["mapped_bytes"] > 0
    assert service_state.process_row("999999999") == {}


def test_the_name_of_a_process_is_no_command_line():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "--api-key=secret"])
    try:
        assert "secret" not in str(service_state.process_row(str(child.pid)))
    finally:
        child.kill()
        child.wait()


def test_numbers_of_proc_files():
    text = "rchar: 120\nread_bytes: 4096\nRssFile:\t    2048 kB\nState:\tS (sleeping)\nbad\n"
    assert service_state.parse_colons(text) == {"rchar": 120, "read_bytes": 4096, "RssFile": 2048}


def test_properties_keep_equal_signs_in_values():
    assert service_state.parse_properties("A=1\nB=x=y\nno\n") == {"A": "1", "B": "x=y"}
