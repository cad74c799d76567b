"""What systemd, the journal and the kernel say of a service, read from their text."""

from __future__ import annotations

import json
import socket

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


def entry(message, invocation="a", pid="50"):
    return json.dumps({"MESSAGE": message, "_SYSTEMD_INVOCATION_ID": invocation, "_PID": pid})


def test_log_lines_are_grouped_by_start_and_systemd_is_left_out():
    text = "\n".join(
        [
            entry("one"),
            entry("Started x", pid="1"),
            entry("two\nthree"),
            entry("four", "b"),
            "{broken",
            entry([79, 107, 255], "b"),
            entry(None, "b"),
        ]
    )
    assert service_state.parse_journal(text) == [["one", "two", "three"], ["four", "Ok\ufffd", ""]]
    assert service_state.parse_journal(text, after="a") == [["four", "Ok\ufffd", ""]]
    assert service_state.parse_journal(text, after="b") == []
    assert service_state.parse_journal(text, after="unknown")[0][0] == "one"


def test_properties_keep_equal_signs_in_values():
    assert service_state.parse_properties("A=1\nB=x=y\nno\n") == {"A": "1", "B": "x=y"}
