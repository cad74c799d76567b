"""nccl-tests: wrong values count more than bandwidth, and a right value proves a path only where the path is known."""

from __future__ import annotations

import json

import pytest

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.finding import RUNG_REDUCED
from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.runtime import NcclLog
from ansible_collections.peerlane.gpu.plugins.plugin_utils.measure import nccl_tests

HEAD = """\
# nccl-tests version 2.17.8 nccl-headers=22902 nccl-library=22902
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 2 minBytes 8 maxBytes 16 step: 2(factor) warmup iters: 1 iters: 20 agg iters: 1 validation: 1 graph: 0
#
# Using devices
#  Rank  0 Group  0 Pid     11 on    node1 device  0 [0000:0a:00] NVIDIA A40
#  Rank  1 Group  0 Pid     12 on    node1 device  1 [0000:0b:00] NVIDIA A40
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)
"""
ROWS = """\
         8           2   float     sum    -1   12.50    0.01    0.02       0    12.41    0.01    0.02       0
        16           4   float     sum    -1   12.60    0.02    0.03       {0}    12.42    0.02    0.04       {1}
"""
END = """\
# Out of bounds values : {0} {1}
# Avg bus bandwidth    : 0.0275
#
"""
GOOD = HEAD + ROWS.format(0, 0) + END.format(0, "OK")
P2P, SHM = NcclLog(transports={"P2P/CUMEM": 4}), NcclLog(transports={"SHM/direct": 4})
MIXED = NcclLog(transports={"P2P/CUMEM": 4, "SHM/direct": 1})
OFF = NcclLog(transports={"P2P/CUMEM": 4}, settings=(("NCCL_P2P_DISABLE", "1"),))


def read(text: str, log: NcclLog | None = None, p2p_off: bool | None = None):
    return nccl_tests.text(text.splitlines(), log, p2p_off)


@pytest.mark.parametrize(
    ("log", "p2p_off", "rung"),
    [
        (P2P, None, RUNG_REDUCED),
        (None, None, None),  # the path is not known
        (SHM, None, None),
        (MIXED, None, None),
        (OFF, None, None),
        (P2P, True, None),
    ],
)
def test_a_right_result_proves_a_path_only_where_its_log_names_it(log, p2p_off, rung):
    made = read(GOOD, log, p2p_off)
    assert (made.status, made.rung) == ("ok", rung)


def test_rows_ranks_and_numbers_come_out():
    made = read(GOOD, P2P)
    assert (made.kind, made.hosts, made.numbers["ranks"]) == ("allreduce", ("node1",), 2)
    assert [(row.size_bytes, row.out_of_place.time_us, row.in_place.busbw_gbps) for row in made.rows] == [
        (8, 12.5, 0.02),
        (16, 12.6, 0.04),
    ]
    assert (made.numbers["average_busbw_gbps"], made.numbers["max_busbw_gbps"]) == (0.0275, 0.04)


def test_one_wrong_value_is_a_failure_whatever_the_bandwidth():
    made = read(HEAD + ROWS.format(3, 1) + END.format(2, "FAILED"), P2P)
    assert (made.status, made.rung) == ("wrong_results", None)
    assert [(row.size_bytes, row.out_of_place.wrong, row.in_place.wrong) for row in made.rows if row.wrong] == [
        (16, 3, 1)
    ]


def test_a_cut_run_is_never_right_before_its_verdict() -> None:
    for upto in range(len(GOOD)):
        made = read(GOOD[:upto], P2P)
        assert made is None or made.status in ("ok", "inconclusive"), upto
        if upto < GOOD.index("# Out of bounds"):
            assert made is None or made.status == "inconclusive", upto


def test_two_hosts_say_nothing_of_peer_paths():
    assert read(GOOD.replace("node1 device  1", "node2 device  1"), P2P).rung is None


def test_one_rank_has_no_bus_traffic():
    alone = "\n".join(row for row in GOOD.split("\n") if "Rank  1" not in row)
    made = read(alone.replace("0.02    0.04       0", "0.02    0.00     N/A"), P2P)
    assert (made.status, made.rung, made.numbers["ranks"]) == ("ok", None, 1)
    assert made.rows[1].in_place.wrong is None


def test_without_validation_nothing_was_checked():
    assert read(GOOD.replace("validation: 1", "validation: 0"), P2P).rung is None


def test_a_test_that_did_not_start_names_its_error_and_processes():
    made = read(
        HEAD
        + "node1: Test CUDA failure common.cu:1304 'CUDA-capable device(s) is/are busy or unavailable'\n"
        + " .. node1 pid 11: Test failure common.cu:1189\n .. node1 pid 12: Test failure common.cu:1189\n"
    )
    assert (made.status, made.failure) == ("error", "CUDA-capable device(s) is/are busy or unavailable")
    assert made.numbers["failed_pids"] == "11 12"


def test_old_columns_and_those_of_single_iterations_are_not_mixed_up():
    old = GOOD.replace("   root ", "").replace("  #wrong", "   error").replace("    -1 ", " ")
    made = read(old)
    assert [row.out_of_place.time_us for row in made.rows] == [12.5, 12.6]
    assert made.rows[0].out_of_place.wrong is None
    wide = HEAD + "  8  2  float  sum  -1  12.5 0.01 0.02 0 1.0 2.0 3.0 4.0  12.4 0.01 0.05 7 1.0 2.0 3.0 4.0\n"
    made = read(wide)
    assert (made.rows[0].in_place.busbw_gbps, made.rows[0].in_place.wrong, made.status) == (0.05, 7, "wrong_results")


def test_json_keeps_one_variable_of_the_environment():
    document = {
        "version": 3,
        "start_time": "2026-01-01 10:00:00",
        "args": ["./build/all_reduce_perf", "-g", "2"],
        "env": ["HF_TOKEN=secret", "NCCL_P2P_DISABLE=1"],
        "nccl_version": 22902,
        "config": {
            "validation": 1,
            "devices": [{"rank": 0, "pid": 1, "hostname": "n", "device_hex": "0000:0a:00", "device_info": "A40"}] * 2,
        },
        "results": [
            {"size": 8, "count": 2, "type": "float", "redop": "sum",
             "out_of_place": {"time": 12.5, "alg_bw": 0.01, "bus_bw": 0.02, "nwrong": 0.0},
             "in_place": {"time": 12.5, "alg_bw": 0.01, "bus_bw": 0.02, "nwrong": None}}
        ],
        "out_of_bounds": {"count": 0, "okay": "true"},
        "average_bus_bandwidth": {"bandwidth": 0.02, "okay": "unchecked"},
    }  # fmt: skip
    made = nccl_tests.from_json(json.dumps(document))
    assert (made.kind, made.status, made.p2p_off, made.started_at) == ("allreduce", "ok", True, "2026-01-01 10:00:00")
    assert (made.rows[0].out_of_place.wrong, made.rows[0].in_place.wrong) == (0, None)
    assert "secret" not in repr(made)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"results": [], "x": 1}', '{"nccl_version": 1}'])
def test_other_documents_are_no_measurement(text):
    assert nccl_tests.from_json(text) is None


@pytest.mark.parametrize("text", ["", "8 2 float sum", "# Out of", "x" * 9000])
def test_other_texts_are_no_measurement(text):
    assert read(text) is None
