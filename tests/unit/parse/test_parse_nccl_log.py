"""NCCL's log and topology: paths, settings, failures and hangs, from the line formats of 2.7 to 2.32."""

from __future__ import annotations

import time

import pytest

from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse import nccl_log, nccl_topology
from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse.text import RefusedError

HEAD = "n1:10:20 [0] NCCL INFO "


def parse(*said: str):
    return nccl_log.parse("\n".join(f"{HEAD}{one}" for one in said))


@pytest.mark.parametrize(
    ("line", "path", "transport"),
    [
        ("Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read", "p2p", "P2P/CUMEM"),
        ("Channel 00/0 : 0[0] -> 1[1] via P2P/IPC", "p2p", "P2P/IPC"),
        ("Channel 00/0 : 0[0] -> 1[1] via P2P/direct pointer", "p2p", "P2P/direct pointer"),
        ("Ring 00 : 0[41000] -> 1[42000] via P2P/IPC", "p2p", "P2P/IPC"),
        ("Channel 00 : 0[0] -> 1[1] via SHM/direct/direct", "shm", "SHM/direct"),
        ("Channel 00 : 0[0] -> 1[1] via SHM/direct", "shm", "SHM/direct"),
        ("Channel 00/0 : 0[0] -> 1[1] [send] via NET/Socket/0", "net", "NET/Socket"),
    ],
)
def test_each_transport_is_counted(line, path, transport):
    made = parse(line, line)
    assert (made.path, dict(made.transports)) == (path, {transport: 2})


def test_two_kinds_of_path_are_no_path():
    made = parse("Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM", "Channel 00 : 1[1] -> 0[0] via SHM/direct/direct")
    assert made.path == "mixed"


def test_the_head_of_a_run_comes_out():
    made = parse(
        "Bootstrap : Using eno1:10.0.0.2<0>",
        "cudaDriverVersion 12080",
        "NCCL version 2.26.5+cuda12.9",
        "NCCL_P2P_LEVEL set by environment to SYS",
        "NCCL_COLLNET_ENABLE set by environment to 0.",
        "NET/Socket : Using [0]eno1:10.0.0.2<0> [1]wg0:10.9.0.2<0>",
        "Using network Socket",
        "comm 0x5 rank 1 nranks 4 cudaDev 1 nvmlDev 3 busId 41000 commId 0x7 - Init COMPLETE",
        "Check P2P Type isAllDirectP2p 0 directMode 0 isAllCudaP2p 1",
        "4 coll channels, 0 collnet channels, 0 nvls channels, 4 p2p channels, 4 p2p channels per peer",
        "Pattern 4, crossNic 0, nChannels 2, bw 15.000000/15.000000, type SYS/PIX, sameChannels 1",
        "AllReduce: 12288 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..0}",
        "P2P is disabled between connected GPUs 0 and 1. You can repress this message with NCCL_IGNORE_DISABLED_P2P=1.",
    )
    assert (made.version, made.cuda_driver_version, made.network) == ("2.26.5+cuda12.9", 12080, "Socket")
    assert (made.bootstrap_interface, made.socket_interfaces) == ("eno1", ("eno1", "wg0"))
    assert made.settings == (("NCCL_P2P_LEVEL", "SYS"), ("NCCL_COLLNET_ENABLE", "0"))
    assert (made.ranks, made.bus_ids, made.init_complete) == (4, ("41000",), True)
    assert (made.all_direct_p2p, made.all_cuda_p2p, made.coll_channels) == (False, True, 4)
    assert (len(made.graphs), len(made.choices)) == (1, 1)
    assert "P2P is disabled" in made.p2p_refused


def test_a_failure_keeps_its_place_and_its_number():
    row = "n1:7:8 [0] transport/shm.cc:590 NCCL WARN Cuda failure 217 'peer access is not supported'"
    (failure,) = nccl_log.parse(f"{row}\n{row}").failures
    assert (failure.file, failure.line, failure.cuda_error, failure.excerpt) == ("transport/shm.cc", 590, 217, row)


def test_a_release_that_wants_too_much_shared_memory():
    made = parse("ncclMaxSharedMem 90000 exceeds device/fn maxSharedMem 80000")
    assert made.shared_memory == (90000, 80000)


def watchdog(rank: int, sequence: int, last: int) -> str:
    head = f"[rank{rank}]:[E1001 16:06:04.5 ProcessGroupNCCL.cpp:607] "
    return (
        f"{head}[Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={sequence}, "
        "OpType=ALLREDUCE, NumelIn=128, NumelOut=128, Timeout(ms)=600000) ran for 600009 milliseconds.\n"
        f"{head}[PG 0 (default_pg) Rank {rank}] Exception (either an error or timeout) detected by watchdog at work: "
        f"{sequence}, last enqueued NCCL work: {sequence}, last completed NCCL work: {last}.\n"
    )


def test_a_watchdog_tells_rank_operation_and_the_last_that_ended():
    made = nccl_log.parse(watchdog(2, 1, -1) + watchdog(0, 1, -1))
    assert [
        (one.rank, one.operation, one.sequence, one.elements, one.timeout_ms, one.last_completed) for one in made.hung
    ] == [
        (2, "ALLREDUCE", 1, 128, 600000, -1),
        (0, "ALLREDUCE", 1, 128, 600000, -1),
    ]


def test_what_has_no_line_of_nccl_is_no_log():
    assert nccl_log.parse("hello\nNCCL is a library\n") is None
    assert nccl_log.parse("") is None


def test_a_long_log_is_read_quickly_and_kept_small():
    row = f"{HEAD}Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\n"
    noise = "INFO 01-01 10:00:00 Avg generation throughput: 12 tokens/s\n" * 5
    warn = "".join(f"n1:1:1 [0] a.cc:{one} NCCL WARN number {one}\n" for one in range(500))
    started = time.perf_counter()
    made = nccl_log.parse((row + noise) * 20000 + warn + "x" * 2_000_000)
    assert time.perf_counter() - started < 10
    assert made.transports["P2P/CUMEM"] == 20000
    assert len(made.failures) <= 64


TOPOLOGY = """\
<system version="1">
  <cpu numaid="-1" affinity="ffff" arch="x86_64" vendor="AuthenticAMD" familyid="175" modelid="17">
    <pci busid="0000:00:10.0" class="0x030200" vendor="0x10de" device="0x2bb5" link_speed="" link_width="0">
      <gpu dev="0" sm="120" rank="0" gdr="0"/>
    </pci>
    <pci busid="0000:00:1c.0" class="0x060400" link_speed="2.5 GT/s PCIe" link_width="1">
      <pci busid="0000:01:00.0" class="0x030000" link_speed="32.0 GT/s PCIe" link_width="16"><gpu dev="1"/></pci>
    </pci>
    <nic><net name="eth0" dev="0" speed="10000"/></nic>
  </cpu>
</system>
"""


def test_a_topology_says_where_nccl_guesses():
    made = nccl_topology.parse(TOPOLOGY, "/t.xml")
    assert made.gpu_bus_ids == ("0000:00:10.0", "0000:01:00.0")
    assert (made.numa_unknown, made.links_unknown, made.gpus_on_cpu, made.path) == (1, 1, 1, "/t.xml")


def test_a_cut_topology_is_read_as_far_as_it_goes():
    for upto in range(0, len(TOPOLOGY), 7):
        try:
            made = nccl_topology.parse(TOPOLOGY[:upto])
        except RefusedError:
            continue
        assert set(made.gpu_bus_ids) <= {"0000:00:10.0", "0000:01:00.0"}
