"""p2pBandwidthLatencyTest, simpleP2P and the samples' summary: tables with units, and the rung that each run reached.

The texts are made by hand in the samples' own format, with neutral values.
"""

from __future__ import annotations

import pytest

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.finding import (
    RUNG_CLAIMED,
    RUNG_COPIED,
    RUNG_DELIVERED,
)
from ansible_collections.peerlane.gpu.plugins.plugin_utils.measure import p2p_samples

TEST = """\
[P2P (Peer-to-Peer) GPU Bandwidth Latency Test]
Device: 0, NVIDIA A40, pciBusID: a, pciDeviceID: 0, pciDomainID:0
Device: 1, NVIDIA A40, pciBusID: b1, pciDeviceID: 0, pciDomainID:1
Device=0 CAN Access Peer Device=1
Device=1 CANNOT Access Peer Device=0

P2P Connectivity Matrix
     D\\D     0     1
     0\t     1     1
     1\t     0     1
Unidirectional P2P=Disabled Bandwidth Matrix (GB/s)
   D\\D     0      1 
     0 600.10  11.20 
     1  11.30 601.50 
Unidirectional P2P=Enabled Bandwidth (P2P Writes) Matrix (GB/s)
   D\\D     0      1 
     0 600.20  25.10 
     1  25.20 601.60 
Bidirectional P2P=Disabled Bandwidth Matrix (GB/s)
   D\\D     0      1 
     0 600.30  17.00 
     1  17.10 601.70 
Bidirectional P2P=Enabled Bandwidth Matrix (GB/s)
   D\\D     0      1 
     0 600.40  50.10 
     1  50.20 601.80 
P2P=Disabled Latency Matrix (us)
   GPU     0      1 
     0   1.50  12.10 
     1  12.20   1.60 

   CPU     0      1 
     0   2.50   6.10 
     1   6.20   2.60 
P2P=Enabled Latency (P2P Writes) Matrix (us)
   GPU     0      1 
     0   1.50   0.90 
     1   0.91   1.60 
"""  # noqa: W291


def rows(text: str) -> list[str]:
    return text.splitlines()


def test_each_table_has_its_unit_switch_and_direction():
    made = p2p_samples.bandwidth_latency(rows(TEST))

    assert (made.status, made.rung, made.complete) == ("ok", RUNG_COPIED, True)
    assert [(one.bus, one.name) for one in made.devices] == [("0000:0a:00", "NVIDIA A40"), ("0001:b1:00", "NVIDIA A40")]
    by_name = {one.name: one for one in made.matrices}
    assert by_name["one_way_on_write"].cells == ((600.2, 25.1), (25.2, 601.6))
    assert (by_name["one_way_off"].p2p, by_name["both_ways_on"].both_ways) == (False, True)
    assert (by_name["latency_gpu_on_write"].unit, by_name["latency_cpu_off"].ends) == ("us", "host")
    assert by_name["both_ways_on"].between() == {("GPU0", "GPU1"): 50.1, ("GPU1", "GPU0"): 50.2}


def test_peer_access_is_kept_by_direction():
    made = p2p_samples.bandwidth_latency(rows(TEST))
    assert made.access == {("GPU0", "GPU1"): True, ("GPU1", "GPU0"): False}


def test_a_cut_run_is_never_more_than_the_whole() -> None:
    whole = {one.name: one for one in p2p_samples.bandwidth_latency(rows(TEST)).matrices}
    for upto in range(len(TEST)):
        made = p2p_samples.bandwidth_latency(rows(TEST[:upto]))
        if made is None:
            continue
        assert (made.rung or 0) <= RUNG_COPIED
        assert not made.complete or upto > TEST.index("Bidirectional P2P=Enabled")
        for one in made.matrices:
            for pair, value in one.between().items():
                assert whole[one.name].between()[pair] == value, upto


def test_capability_lines_alone_are_a_claim_and_a_cut_one_says_so():
    made = p2p_samples.bandwidth_latency(rows("\n".join(TEST.split("\n")[1:4]) + "\nDevice=1 CAN"))
    assert (made.rung, made.status, made.complete) == (RUNG_CLAIMED, "inconclusive", False)


def test_a_wide_table_that_was_wrapped_is_not_whole():
    columns = range(14)
    line = "     0 " + " ".join(f"{9.25:6.2f}" for _ in columns)
    text = [
        "Unidirectional P2P=Enabled Bandwidth (P2P Writes) Matrix (GB/s)",
        "   D\\D " + " ".join(f"{x:6d}" for x in columns),
    ]
    wrapped = [part for row in [*text, line] for part in (row[:80], row[80:]) if part]
    made = p2p_samples.bandwidth_latency(wrapped)
    assert made is None or not any(one.complete for one in made.matrices)


PASSED = """\
[./simpleP2P] - Starting...
Checking for multiple GPUs...
CUDA-capable device count: 2
> Peer access from NVIDIA A40 (GPU0) -> NVIDIA A40 (GPU1) : Yes
> Peer access from NVIDIA A40 (GPU1) -> NVIDIA A40 (GPU0) : Yes
Enabling peer access between GPU0 and GPU1...
cudaMemcpyPeer / cudaMemcpy between GPU0 and GPU1: 21.50GB/s
Run kernel on GPU1, taking source data from GPU0 and writing to GPU1...
Run kernel on GPU0, taking source data from GPU1 and writing to GPU0...
Copy data back to host from GPU0 and verify results...
Disabling peer access...
Shutting down...
Test passed
"""


@pytest.mark.parametrize(
    ("text", "status", "rung", "verified"),
    [
        (PASSED, "ok", RUNG_DELIVERED, True),
        # Without its last line the run proves no more than its copy.
        (PASSED.replace("Test passed\n", ""), "inconclusive", RUNG_COPIED, None),
        (PASSED.replace("Test passed", "Test passe"), "inconclusive", RUNG_COPIED, None),
        (
            PASSED.replace("Disabling", "Verification error @ element 3: val = 0.000000, ref = 12.000000\nDisabling"),
            "wrong_results",
            RUNG_COPIED,
            False,
        ),
        (PASSED.replace("Test passed", "Test failed!"), "error", RUNG_COPIED, None),
        (PASSED.split("Enabling")[0], "inconclusive", RUNG_CLAIMED, None),
    ],
)
def test_only_a_run_that_says_passed_reaches_delivery(text, status, rung, verified):
    made = p2p_samples.simple_p2p(rows(text))
    assert (made.status, made.rung) == (status, rung)
    assert [one.verified for one in made.copies] in ([verified], [])


def test_nan_is_kept_as_the_first_error():
    made = p2p_samples.simple_p2p(["Run kernel on GPU1, taking source data from GPU0 and writing to GPU1...",
                                   "Verification error @ element 7: val = nan, ref = 28.000000"])  # fmt: skip
    assert made.copies[0].first_error == {"element": "7", "value": "nan", "expected": "28.000000"}
    assert made.copies[0].devices == ("GPU0", "GPU1")


def test_a_waived_test_is_unsupported():
    made = p2p_samples.simple_p2p(
        ["[simpleP2P] - Starting...", "Peer to Peer access is not available amongst GPUs in the system, waiving test."]
    )
    assert (made.status, made.rung) == ("unsupported", None)


@pytest.mark.parametrize(
    ("row", "status"),
    [
        ("  simpleP2P : Failed (code 1)", "error"),
        ("  p2pBandwidthLatencyTest : Timeout (code -1)", "hang"),
        ("  simpleCUFFT : Failed (code 1)", None),
    ],
)
def test_a_summary_tells_that_a_sample_failed_not_why(row, status):
    made = p2p_samples.samples_summary(["Test Summary:", "Failed runs (1):", row])
    assert (made.status if made else None) == status


@pytest.mark.parametrize("text", ["", "hello", "Device: x", "a" * 5000, "P2P Connectivity Matrix"])
def test_other_texts_are_no_measurement(text):
    assert p2p_samples.bandwidth_latency(rows(text)) is None
    assert p2p_samples.simple_p2p(rows(text)) is None
    assert p2p_samples.samples_summary(rows(text)) is None
