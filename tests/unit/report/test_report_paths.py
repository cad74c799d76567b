"""The table of paths: each cell with its code and the rung that this pair reached, never a higher one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import report_builders as r
import rule_builders as b

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.measurement import (
    CollectiveRow,
    Device,
    Matrix,
    Measurement,
    Timing,
)
from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.snapshot import Gpu, Snapshot
from ansible_collections.peerlane.gpu.plugins.plugin_utils.report import paths


def cell(snapshot: Snapshot, row: int, column: int) -> paths.Cell:
    table = paths.table(snapshot)
    assert table is not None
    return table.rows[row][column]


def allreduce(rung: int | None, count: int = 4, status: str = "ok") -> Measurement:
    row = CollectiveRow(1024, 256, "float", "sum", Timing(10.0, 5.0, 8.0, wrong=0))
    return Measurement(
        "allreduce", "nccl-tests", status, rung, tuple(Device(at) for at in range(count)), results=(row,)
    )


def host(**parts: object) -> Snapshot:
    return b.guest(4, **{"p2p": b.granted(4, "OK", g0_3="NS", g3_0="NS"), **parts})


WITHOUT_P2P = replace(r.copied(2), results=(Matrix("off", "bandwidth", "GB/s", ((None, 9.0), (9.0, None)), p2p=False),))


@pytest.mark.parametrize(
    ("measurements", "pair", "state", "rung"),
    [
        ({}, (0, 1), "granted", 0),
        ({}, (0, 3), "refused", 0),
        ({"p2p": (r.copied(4),)}, (0, 1), "granted", 1),
        # Without a grant the bytes went through host memory.
        ({"p2p": (r.copied(4),)}, (0, 3), "refused", 0),
        ({"p2p": (r.copied(4), r.verified(0, 1, good=True))}, (0, 1), "granted", 2),
        ({"p2p": (r.copied(4), r.verified(0, 1, good=True))}, (1, 0), "granted", 2),
        ({"p2p": (r.copied(4), r.verified(0, 1, good=True))}, (0, 2), "granted", 1),
        ({"p2p": (r.verified(1, 2, good=False),)}, (1, 2), "wrong", 0),
        ({"p2p": (r.verified(1, 2, good=False),)}, (2, 1), "wrong", 0),
        ({"p2p": (r.verified(1, 2, good=False),)}, (1, 3), "granted", 0),
        ({"allreduce": (allreduce(3),)}, (0, 1), "granted", 3),
        ({"allreduce": (allreduce(3),)}, (0, 3), "refused", 0),
        ({"allreduce": (allreduce(3, 2),)}, (1, 2), "granted", 0),
        ({"allreduce": (allreduce(None),)}, (0, 1), "granted", 0),
        ({"allreduce": (allreduce(3, status="wrong_results"),)}, (0, 1), "granted", 0),
        ({"host": (r.copied(4),)}, (0, 1), "granted", 0),
        # The control without P2P says nothing of the peer path.
        ({"p2p": (WITHOUT_P2P,)}, (0, 1), "granted", 0),
    ],
)
def test_a_cell_has_the_rung_of_its_own_pair(measurements, pair, state, rung) -> None:
    found = cell(host(measurements=measurements), *pair)

    assert (found.state, found.rung) == (state, rung)


def test_a_cell_has_code_link_and_figure() -> None:
    found = cell(r.bare(measurements={"p2p": (r.copied(8, 53.42),)}), 0, 7)

    assert (found.code, found.link, found.figure, found.rung_name) == ("OK", "SYS", "53.4 GB/s", "copied")


def test_reads_and_writes_that_differ_are_both_there() -> None:
    mixed = {"r": b.matrix("r", 2, "OK"), "w": b.matrix("w", 2, "NS")}
    found = cell(b.guest(2, p2p=mixed), 0, 1)

    assert (found.code, found.state) == ("OK/NS", "refused")
    assert found.said == "reads OK, writes NS"


def test_what_was_not_read_is_unknown_with_the_reason() -> None:
    table = paths.table(b.guest(2, topology=b.topology(2)))

    assert table is not None
    assert {(one.code, one.state, one.rung) for one in table.cells} == {("?", "unknown", None)}
    assert any("not known" in note for note in table.notes)


def test_a_test_s_own_word_of_peer_access_is_a_claim() -> None:
    access = {("GPU0", "GPU1"): True, ("GPU1", "GPU0"): False}
    run = replace(r.copied(2), rung=None, results=(), access=access)
    snapshot = b.guest(2, measurements={"p2p": (run,)})

    assert [(one.code, one.state, one.rung) for one in (cell(snapshot, 0, 1), cell(snapshot, 1, 0))] == [
        ("yes", "granted", 0),
        ("no", "refused", 0),
    ]


def test_a_test_that_numbers_gpus_in_another_order_is_translated_by_the_bus() -> None:
    known = b.fact(tuple(Gpu(index=at, bus_id=f"0000:{bus}:00.0") for at, bus in enumerate(("0d", "12", "a1"))))
    run = replace(r.verified(0, 1, good=True), devices=(Device(0, bus="a1"), Device(1, bus="0000:12:00.0")))
    snapshot = b.guest(3, gpus=known, p2p=b.granted(3), measurements={"p2p": (run,)})

    assert cell(snapshot, 2, 1).rung == 2
    assert cell(snapshot, 0, 1).rung == 0


def test_fewer_than_two_gpus_have_no_table() -> None:
    assert paths.table(b.guest(1)) is None
    assert paths.table(b.snapshot(None)) is None


def test_failures_are_said_below_the_table() -> None:
    table = paths.table(host(measurements={"p2p": (r.verified(1, 2, good=False),)}))

    assert table is not None
    assert "simpleP2P, p2p: ended with wrong results: nan." in table.notes
