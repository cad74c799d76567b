"""nvbandwidth, as text and as JSON. The texts are made by hand in its own format."""

from __future__ import annotations

import json

import pytest

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.finding import RUNG_COPIED
from ansible_collections.peerlane.gpu.plugins.plugin_utils.measure import nvbandwidth

TEXT = """\
nvbandwidth Version: v0.8
Built from Git version: v0.8

CUDA Runtime Version: 13000
Driver Version: 580.10.05

Device 0: NVIDIA A40 (00000000:0a:00)
Device 1: NVIDIA A40 (00000001:b1:00)

Running host_to_device_memcpy_ce.
memcpy CE CPU(row) -> GPU(column) bandwidth (GB/s)
           0         1
 0     24.50     24.60

SUM host_to_device_memcpy_ce 49.10

Running device_to_device_memcpy_write_ce.
memcpy CE GPU(row) -> GPU(column) bandwidth (GB/s)
           0         1
 0       N/A     22.10
 1     22.20       N/A

SUM device_to_device_memcpy_write_ce 44.30

Running device_to_device_latency_sm.
Device to Device Latency SM GPU(row) <-> GPU(column) latency (ns)
           0         1
 0       N/A    900.00
 1    910.00       N/A

SUM device_to_device_latency_sm 1810.00
"""


def test_host_and_gpu_tables_are_measurements_of_their_own():
    peer, host = nvbandwidth.text(TEXT.splitlines())

    assert (peer.kind, peer.rung, peer.status) == ("p2p", RUNG_COPIED, "ok")
    assert (host.kind, host.rung) == ("host", None)
    assert [one.bus for one in peer.devices] == ["0000:0a:00", "0001:b1:00"]
    write, latency = peer.matrices
    assert (write.operation, write.cells) == ("write", ((None, 22.1), (22.2, None)))
    assert (latency.quantity, latency.unit) == ("latency", "ns")
    assert peer.numbers["device_to_device_memcpy_write_ce.sum"] == 44.3
    assert peer.numbers["device_to_device_memcpy_write_ce.max_gbps"] == 22.2
    assert peer.numbers["driver_version"] == "580.10.05"


def test_before_0_8_the_latency_between_gpus_is_not_believed():
    (peer, _) = nvbandwidth.text(TEXT.replace("v0.8", "v0.7").splitlines())
    assert [one.quantity for one in peer.matrices] == ["bandwidth"]


def test_a_table_without_its_sum_may_have_lost_rows():
    cut = TEXT[: TEXT.index("SUM device_to_device_memcpy_write_ce")]
    peer = nvbandwidth.text(cut.splitlines())[0]
    assert (peer.status, peer.complete, peer.matrices[0].complete) == ("inconclusive", False, False)


def document(**more: object) -> str:
    test = {
        "name": "device_to_device_memcpy_read_ce",
        "status": "Passed",
        "bandwidth_description": "memcpy CE GPU(row) -> GPU(column) bandwidth (GB/s)",
        "bandwidth_matrix": [["N/A", "22.1"], ["22.2", "N/A"]],
        "sum": 44.3,
        **more,
    }
    return json.dumps(
        {
            "nvbandwidth": {
                "version": "v0.8",
                "Driver Version": "580.10.05",
                "GPU Device list": ["0: NVIDIA A40 (00000000:0a:00)", "1: NVIDIA A40 (00000000:0b:00)"],
                "testcases": [test],
            }
        }
    )


def test_json_numbers_are_strings():
    (peer,) = nvbandwidth.from_json("some line\n" + document())
    assert peer.matrices[0].cells == ((None, 22.1), (22.2, None))
    assert (peer.status, peer.numbers["device_to_device_memcpy_read_ce.sum"]) == ("ok", 44.3)
    assert [one.bus for one in peer.devices] == ["0000:0a:00", "0000:0b:00"]


def test_a_failed_test_is_an_error_though_the_tool_ends_with_0():
    (peer,) = nvbandwidth.from_json(document(status="Error", error="CUDA_ERROR_UNKNOWN"))
    assert (peer.status, peer.rung) == ("error", None)
    assert "CUDA_ERROR_UNKNOWN" in peer.failure


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"nvbandwidth": 3}', '{"nvbandwidth": {"testcases": [4]}}', "{" * 9999]
)
def test_other_documents_are_no_measurement(text):
    assert nvbandwidth.from_json(text) == ()
