"""The lab's simulated GPUs: the vfio-user messages byte by byte, and the configuration space that a kernel reads."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse import pci_config
from peerlane.lab import simulated_gpus, vfio_user
from peerlane.lab.simulated_gpus import SimulatedGpu, config_space
from peerlane.lab.vfio_user import Command

SOURCE = Path(__file__).resolve().parents[3] / "src"


def message(command: int, payload: bytes = b"", *, number: int = 7, flags: int = 0) -> bytes:
    return struct.pack("<HHIII", number, command, 16 + len(payload), flags, 0) + payload


def ask(device: vfio_user.Device, command: int, payload: bytes = b"", flags: int = 0) -> bytes | None:
    raw = message(command, payload, flags=flags)
    return vfio_user.answer(device, vfio_user.header(raw[:16]), raw[16:])


def given(answer: bytes | None) -> bytes:
    """Return the payload of an answer that must be a good one."""
    assert answer is not None
    number, _, size, flags, error = struct.unpack_from("<HHIII", answer)
    assert (number, size, flags, error) == (7, len(answer), 1, 0)
    return answer[16:]


def refused(answer: bytes | None) -> int:
    assert answer is not None
    assert len(answer) == 16
    _, _, size, flags, error = struct.unpack("<HHIII", answer)
    assert (size, flags) == (16, 0x21)
    return int(error)


@pytest.fixture
def gpu() -> SimulatedGpu:
    return SimulatedGpu(config_space(0x2BB5, 3, serial=9))


def test_the_version_is_agreed_and_another_major_one_is_not(gpu: SimulatedGpu) -> None:
    payload = given(ask(gpu, Command.VERSION, struct.pack("<HH", 0, 1) + b"{}\0"))
    assert payload[:4] == b"\0\0\0\0"
    assert payload.endswith(b"\0")
    assert json.loads(payload[4:-1])["capabilities"]["max_data_xfer_size"] == 1024 * 1024
    assert refused(ask(gpu, Command.VERSION, struct.pack("<HH", 1, 0))) == errno.EINVAL


def test_the_device_says_what_it_has(gpu: SimulatedGpu) -> None:
    assert struct.unpack("<IIII", given(ask(gpu, Command.DEVICE_GET_INFO, b"\0" * 16))) == (16, 3, 9, 5)
    regions = [
        struct.unpack("<IIIIQQ", given(ask(gpu, Command.DEVICE_GET_REGION_INFO, struct.pack("<IIII", 32, 0, index, 0))))
        for index in range(9)
    ]
    mib = 1024 * 1024
    assert [region[4] for region in regions] == [64 * mib, 256 * mib, 0, 32 * mib, 0, 0, 0, 4096, 0]
    assert [region[1] for region in regions] == [3, 3, 0, 3, 0, 0, 0, 3, 0]
    assert [region[5] for region in regions] == [index << 40 for index in range(9)]
    interrupts = [
        struct.unpack("<IIII", given(ask(gpu, Command.DEVICE_GET_IRQ_INFO, struct.pack("<IIII", 16, 0, index, 0))))
        for index in range(5)
    ]
    assert [one[2:] for one in interrupts] == [(0, 1), (1, 1), (2, 0), (3, 0), (4, 0)]
    for command in (Command.DEVICE_GET_REGION_INFO, Command.DEVICE_GET_IRQ_INFO):
        assert refused(ask(gpu, command, struct.pack("<IIII", 32, 0, 9, 0))) == errno.EINVAL


def access(offset: int, region: int, count: int, data: bytes = b"") -> bytes:
    return struct.pack("<QII", offset, region, count) + data


def test_memory_keeps_what_was_written_until_a_reset(gpu: SimulatedGpu) -> None:
    place = 64 * 1024 * 1024 - 6
    assert given(ask(gpu, Command.REGION_READ, access(place, 0, 4)))[16:] == b"\0\0\0\0"
    head = access(place, 0, 4)
    assert given(ask(gpu, Command.REGION_WRITE, head + b"\x01\x02\x03\x04")) == head
    assert given(ask(gpu, Command.REGION_READ, access(place - 1, 0, 6)))[16:] == b"\0\x01\x02\x03\x04\0"
    assert given(ask(gpu, Command.DEVICE_RESET)) == b""
    assert given(ask(gpu, Command.REGION_READ, head))[16:] == b"\0\0\0\0"


def test_only_writable_bits_of_the_configuration_space_change(gpu: SimulatedGpu) -> None:
    def config(offset: int, count: int) -> bytes:
        return given(ask(gpu, Command.REGION_READ, access(offset, 7, count)))[16:]

    assert given(ask(gpu, Command.REGION_WRITE, access(0, 7, 8, b"\xff" * 8))) == access(0, 7, 8)
    assert config(0, 8) == bytes.fromhex("de10b52b47051000")
    ask(gpu, Command.REGION_WRITE, access(0xC8, 7, 8, b"\xff" * 8))
    assert config(0xC8, 8) == bytes.fromhex("0900085032501800")
    ask(gpu, Command.DEVICE_RESET)
    assert config(4, 2) == b"\0\0"


@pytest.mark.parametrize(
    "payload",
    [
        access(4090, 7, 8),
        access(2**64 - 4, 7, 8),
        access(0, 2, 4),
        access(0, 99, 4),
        access(0, 0, 2 * 1024 * 1024),
        access(0, 0, 4)[:-1],
        b"",
    ],
)
def test_a_read_outside_is_refused(gpu: SimulatedGpu, payload: bytes) -> None:
    assert refused(ask(gpu, Command.REGION_READ, payload)) == errno.EINVAL


def test_a_write_with_another_length_is_refused_and_changes_nothing(gpu: SimulatedGpu) -> None:
    assert refused(ask(gpu, Command.REGION_WRITE, access(0, 0, 4, b"\x01\x02\x03"))) == errno.EINVAL
    assert given(ask(gpu, Command.REGION_READ, access(0, 0, 4)))[16:] == b"\0\0\0\0"


def test_what_wants_no_answer_gets_none_but_is_done(gpu: SimulatedGpu) -> None:
    assert ask(gpu, Command.REGION_WRITE, access(0, 1, 1, b"\x2a"), flags=vfio_user.FLAG_NO_REPLY) is None
    assert given(ask(gpu, Command.REGION_READ, access(0, 1, 1)))[16:] == b"\x2a"


def test_memory_maps_and_interrupts_are_agreed_to_and_the_unknown_is_refused(gpu: SimulatedGpu) -> None:
    unmap = bytes(range(24))
    assert given(ask(gpu, Command.DMA_MAP, b"\0" * 32)) == b""
    assert given(ask(gpu, Command.DMA_UNMAP, unmap + b"more")) == unmap
    assert given(ask(gpu, Command.DEVICE_SET_IRQS, b"\0" * 20)) == b""
    assert refused(ask(gpu, 200)) == errno.ENOTSUP


@pytest.mark.parametrize(
    ("raw", "word"),
    [
        (struct.pack("<HHIII", 1, 9, 15, 0, 0), "size 15"),
        (struct.pack("<HHIII", 1, 9, 2**31, 0, 0), "size 2147483648"),
        (struct.pack("<HHIII", 1, 9, 16, 1, 0), "a reply"),
    ],
)
def test_a_stream_that_is_no_vfio_user_is_recognised(raw: bytes, word: str) -> None:
    with pytest.raises(vfio_user.ProtocolError, match=word):
        vfio_user.header(raw)


@pytest.mark.parametrize("clique", [None, 0, 1, 15])
def test_the_approval_capability_is_what_the_audit_reads(clique: int | None) -> None:
    found = pci_config.approval(config_space(0x2BB5, clique, serial=1))
    if clique is None:
        assert found.state == "absent"
    else:
        assert (found.state, found.clique, found.version, found.offset) == ("present", clique, 0, 0xC8)


def test_the_capability_list_ends_and_names_the_places_of_the_real_card() -> None:
    space = config_space(0x2BB5, 0, serial=1)
    places = [space[0x34]]
    while space[places[-1] + 1]:
        places.append(space[places[-1] + 1])
    assert places == [0x40, 0x48, 0x60, 0x9C, 0xC8]
    assert [space[place] for place in places] == [0x01, 0x05, 0x10, 0x09, 0x09]
    assert space[0x60 + 0x12 : 0x60 + 0x14] == bytes([0x05, 0x01])  # LnkSta: 32 GT/s (5), x16


def test_descriptors_that_come_with_a_message_are_closed(gpu: SimulatedGpu) -> None:
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=simulated_gpus.serve, args=(theirs, gpu))
    thread.start()
    read_end, write_end = os.pipe()
    with ours:
        ours.settimeout(10)
        raw = message(Command.DMA_MAP, b"\0" * 32)
        socket.send_fds(ours, [raw[:20]], [write_end])  # cut in the middle of the payload
        os.close(write_end)
        ours.sendall(raw[20:] + message(Command.DEVICE_RESET, number=8))
        answers = b""
        while len(answers) < 32:
            answers += ours.recv(64)
        assert [struct.unpack_from("<H", answers, place)[0] for place in (0, 16)] == [7, 8]
    thread.join(timeout=10)
    assert os.read(read_end, 1) == b""  # the last writing end is closed
    os.close(read_end)


def test_the_server_serves_a_folder_of_gpus_and_saves_them_when_it_ends(tmp_path: Path) -> None:
    entries = [{"socket": f"gpu{number}.sock", "device": "2bb5", "clique": number or None} for number in range(2)]
    (tmp_path / "gpus.json").write_text(json.dumps(entries))
    saved = config_space(0x2BB5, None, serial=1)
    (tmp_path / "gpus.saved.json").write_text(json.dumps({"gpu0.sock": (saved[:4] + b"\x06" + saved[5:]).hex()}))
    argv = [sys.executable, "-m", "peerlane.lab.simulated_gpus", str(tmp_path)]
    with subprocess.Popen(argv, env={**os.environ, "PYTHONPATH": str(SOURCE)}, stderr=subprocess.PIPE) as server:
        try:
            give_up = time.monotonic() + 20
            while not (tmp_path / "gpus.ready").exists():
                assert server.poll() is None, server.stderr and server.stderr.read()
                assert time.monotonic() < give_up
                time.sleep(0.02)
            for _ in range(2):  # a client may come again
                with socket.socket(socket.AF_UNIX) as client:
                    client.settimeout(10)
                    client.connect(f"{tmp_path}/gpu1.sock")
                    client.sendall(message(Command.REGION_WRITE, access(4, 7, 1, b"\x02")))
                    assert len(client.recv(64)) == 32
        finally:
            server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=10) == 0
    kept = {name: bytes.fromhex(text) for name, text in json.loads((tmp_path / "gpus.saved.json").read_text()).items()}
    assert kept["gpu0.sock"][4] == 6
    assert kept["gpu1.sock"][4] == 2
    assert pci_config.approval(kept["gpu1.sock"]).clique == 1
