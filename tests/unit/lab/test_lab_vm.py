"""Virtual machines of the lab: scenarios, QEMU's command line, its two sockets, and the simulated Proxmox VM."""

from __future__ import annotations

import base64
import io
import itertools
import json
import os
import socket
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse import proxmox as proxmox_parser
from peerlane.lab import cli, container, operations, proxmox, qemu, scenarios, state, vm, vm_image
from peerlane.lab.scenarios import SCENARIOS, Gpu, Scenario, gpu_addresses
from peerlane.lab.state import Host, Paths, State
from peerlane.lab.system import LabError, Progress


def words(scenario: Scenario, incoming: str | None = None) -> list[str]:
    return qemu.arguments(
        scenario, name="n1", kernel="/k", initrd="/i", tap=9, mac="52:54:00:4d:00:0a", uuid="u", incoming=incoming
    )


def devices(scenario: Scenario) -> list[str]:
    given = words(scenario)
    return [word for flag, word in itertools.pairwise(given) if flag == "-device"]


def test_each_gpu_has_a_port_of_its_own_and_a_socket() -> None:
    for scenario in SCENARIOS.values():
        found = devices(scenario)
        gpus = [json.loads(word) for word in found if word.startswith("{")]
        assert [gpu["bus"] for gpu in gpus] == [f"port{number}" for number in range(len(scenario.gpus))]
        assert len({gpu["socket"]["path"] for gpu in gpus}) == len(gpus)
        for gpu in gpus:
            assert sum(f",id={gpu['bus']}," in word for word in found) == 1
        for option in ("chassis", "slot"):
            numbers = [word.split(f"{option}=")[1].split(",")[0] for word in found if f"{option}=" in word]
            assert len(numbers) == len(set(numbers))


def test_the_switch_has_its_ports_and_the_iommu_its_kernel_word() -> None:
    plain, switch = SCENARIOS["guest"], SCENARIOS["switch"]
    assert sum(word.startswith("xio3130-downstream") for word in devices(switch)) == 2
    assert not any("x3130" in word for word in devices(plain))
    assert any(word.startswith("intel-iommu") for word in devices(switch))
    assert "intel_iommu=on iommu=pt" in next(word for word in words(switch) if word.startswith("root="))
    assert "iommu" not in " ".join(words(plain))
    assert "-incoming" not in words(plain)
    assert words(plain, "/lab/images/state")[-2:] == ["-incoming", "file:/lab/images/state"]


@pytest.mark.parametrize(
    ("places", "addresses"),
    [
        ("rr", ["01", "02"]),
        ("ssrr", ["03", "04", "05", "06"]),
        ("rs", ["04", "03"]),
        ("s", ["03"]),
    ],
)
def test_addresses_follow_the_ports(places: str, addresses: list[str]) -> None:
    gpus = tuple(Gpu("switch" if place == "s" else "root") for place in places)
    assert gpu_addresses(Scenario("x", gpus)) == [f"0000:{bus}:00.0" for bus in addresses]


def test_the_scenarios_are_those_that_the_audit_is_tried_on() -> None:
    assert [gpu.clique for gpu in SCENARIOS["guest"].gpus] == [None] * 8
    assert [gpu.clique for gpu in SCENARIOS["guest-approved"].gpus] == [0] * 8
    for name in ("switch", "hypervisor"):
        on, off = SCENARIOS[name], SCENARIOS[f"{name}-acs-off"]
        assert off == replace(on, acs=False, text=off.text)
    prints = [scenario.fingerprint for scenario in SCENARIOS.values()]
    assert len(set(prints)) == len(prints)


def test_a_saved_state_is_another_when_the_machine_or_its_preparation_is(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario, tree = SCENARIOS["hypervisor"], Path("/images/qemu-1")
    first = vm._saved_fingerprint(scenario, tree)
    assert vm._saved_fingerprint(scenario, tree) == first
    assert vm._saved_fingerprint(scenario, Path("/images/qemu-2")) != first
    assert vm._saved_fingerprint(replace(scenario, vfio=False), tree) != first
    monkeypatch.setattr(qemu, "MEMORY_MIB", 2048)
    assert vm._saved_fingerprint(scenario, tree) != first


def test_registers_are_written_back_with_the_command_last() -> None:
    space = bytearray(64)
    space[4:6], space[0x3C] = b"\x03\x01", 0x0A
    space[0x10:0x1C] = bytes.fromhex("000000f8 0c000060 fe000000")
    told = vm._registers(bytes(space)).split()
    assert told[:3] == ["10.l=f8000000", "14.l=6000000c", "18.l=000000fe"]
    assert told[-2:] == ["3c.b=0a", "4.w=0103"]


PASSED = [proxmox.Passed("0000:03:00.0", "2bb5", 10), proxmox.Passed("0000:05:00.0", "2bb5", 12)]


def test_the_simulated_config_passes_the_guests_own_gpus() -> None:
    text = proxmox.config_text(PASSED)
    assert "SIMULATED" in text.splitlines()[0]
    config = proxmox_parser.conf("101", text, "pve.conf.101")
    assert [one.paths for one in config.hostpci] == [("0000:03:00.0",), ("0000:05:00.0",)]
    lines = text.splitlines()
    assert "hostpci0: 0000:03:00.0,pcie=1" in lines
    assert "hostpci1: 0000:05:00.0,pcie=1" in lines
    assert not any(line.startswith("hostpci2") for line in lines)
    assert text.count("x-nv-gpudirect-clique=0") == 2
    assert lines[1:] == sorted(lines[1:])


def test_the_archive_holds_files_and_links_alone_and_says_that_it_is_simulated() -> None:
    with tarfile.open(fileobj=io.BytesIO(proxmox.archive("n0", PASSED, "GPUs are simulated.\n"))) as tar:
        assert not any(member.isdir() for member in tar)
        names = set(tar.getnames())
        assert {"etc/pve/nodes/n0/qemu-server/101.conf", "usr/sbin/qm", "etc/peerlane-lab-simulated"} <= names
        motd = tar.extractfile("etc/motd")
        assert motd is not None
        assert motd.read().decode() == "GPUs are simulated.\n" + proxmox.NOTICE
        devices_file = tar.extractfile("usr/share/peerlane-lab/pci.json")
        assert devices_file is not None
        assert [entry["iommugroup"] for entry in json.load(devices_file)] == [10, 12]


def test_a_host_keeps_its_scenario_and_old_states_still_load(tmp_path: Path) -> None:
    paths = Paths(tmp_path, tmp_path / "images")
    made = Host("g1", "trixie", "vm", "root", 10, "switch")
    state.save(paths, State(network=3, last_octet=10, hosts={"g1": made}))
    assert state.load(paths).hosts["g1"] == made
    document = json.loads((tmp_path / "state.json").read_text())
    del document["hosts"]["g1"]["scenario"]
    (tmp_path / "state.json").write_text(json.dumps(document))
    assert state.load(paths).hosts["g1"].scenario == ""


def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    paths = Paths(tmp_path, tmp_path / "images")
    with pytest.raises(LabError, match="only a host of kind vm has a scenario"):
        operations._new_host(State(), "c1", operations.Wish(scenario="guest"))
    with pytest.raises(LabError, match="hosts of kind vm are Debian 13"):
        operations.up(paths, ["g1"], operations.Wish(kind="vm", distro="bookworm"), Progress())
    assert operations._new_host(State(), "g1", operations.Wish(kind="vm")).scenario == scenarios.DEFAULT


def test_scenarios_and_status_say_what_is_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["scenarios"]) == 0
    told = capsys.readouterr().out
    assert all(name in told for name in SCENARIOS)
    row = operations.Row("g1", "trixie", "vm", "10.77.0.10", "running", scenario="guest")
    assert "vm guest (simulated GPUs)" in cli.status_table([row])
    assert "SIMULATED" in vm_image.NOTICE


def test_a_guest_that_gives_no_answer_does_not_hide_the_other_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = Paths(tmp_path, tmp_path / "images")
    names = ("g1", "g2")
    hosts = {name: Host(name, "trixie", "vm", "root", 10 + number, "guest") for number, name in enumerate(names)}
    state.save(paths, State(network=3, last_octet=11, hosts=hosts))
    for name in names:
        paths.host(name).mkdir(parents=True)
        (paths.host(name) / "complete").touch()
    monkeypatch.setattr(vm, "leader", lambda _paths, _name: os.getpid())
    monkeypatch.setattr(container, "answers_ssh", lambda _address, _timeout_s: True)

    def faults_of(_paths: Paths, _state: State, name: str) -> tuple[str, ...]:
        if name == "g1":
            raise LabError("agent.sock gave no answer within 60 s")
        return ("ssh",)

    rows = operations.status(paths, faults_of)
    assert [(row.name, row.state, row.faults) for row in rows] == [
        ("g1", "running", ("unknown",)),
        ("g2", "running", ("ssh",)),
    ]


# --- a simulated QEMU: a socket that answers from a script ----------------------------------------------------------


@contextmanager
def simulated_socket(folder: Path, name: str, talk: Callable[[Any], None]) -> Iterator[None]:
    place = socket.socket(socket.AF_UNIX)
    place.bind(str(folder / name))
    place.listen(1)

    def serve() -> None:
        connection, _ = place.accept()
        with connection, connection.makefile("rwb") as stream:
            talk(stream)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        thread.join(timeout=10)
        place.close()


def tell(stream: Any, document: Any, before: bytes = b"") -> None:
    stream.write(before + json.dumps(document).encode() + b"\n")
    stream.flush()


def hear(stream: Any) -> Any:
    return json.loads(stream.readline().lstrip(b"\xff"))


def test_a_restored_guest_is_let_run_only_when_its_state_is_read(tmp_path: Path) -> None:
    heard = []

    def talk(stream: Any) -> None:
        tell(stream, {"QMP": {}})
        answers = iter(["inmigrate", "paused"])
        while not heard or heard[-1] != "cont":
            heard.append(hear(stream)["execute"])
            tell(stream, {"event": "SOMETHING"})
            tell(stream, {"return": {"status": next(answers)} if heard[-1] == "query-status" else {}})

    with simulated_socket(tmp_path, qemu.MONITOR, talk):
        qemu.wait_running(tmp_path, 10)
    assert heard == ["qmp_capabilities", "query-status", "query-status", "cont"]


def test_a_state_that_is_not_saved_is_an_error_with_qemus_words(tmp_path: Path) -> None:
    def talk(stream: Any) -> None:
        tell(stream, {"QMP": {}})
        while (order := hear(stream)["execute"]) != "query-migrate":
            tell(stream, {"return": {}})
        assert order
        tell(stream, {"return": {"status": "failed", "error-desc": "no space"}})

    with simulated_socket(tmp_path, qemu.MONITOR, talk), pytest.raises(LabError, match="not saved: no space"):
        qemu.save(tmp_path, "/lab/host/state", 10)


def test_a_refused_order_and_a_missing_socket_are_one_line(tmp_path: Path) -> None:
    def talk(stream: Any) -> None:
        tell(stream, {"QMP": {}})
        hear(stream)
        tell(stream, {"error": {"class": "GenericError", "desc": "not now"}})

    with simulated_socket(tmp_path, qemu.MONITOR, talk), pytest.raises(LabError, match="refuses qmp_capabilities"):
        qemu.wait_running(tmp_path, 10)
    (tmp_path / "none").mkdir()
    with pytest.raises(LabError, match=r"none: qmp\.sock: No such file"):
        qemu.wait_running(tmp_path / "none", 10)


def test_the_agent_is_asked_past_what_an_earlier_caller_left(tmp_path: Path) -> None:
    given = []

    def talk(stream: Any) -> None:
        mark = hear(stream)["arguments"]["id"]
        tell(stream, {"return": "late answer to another"})
        tell(stream, {"return": mark}, before=b"\xff")
        given.append(hear(stream)["arguments"])
        tell(stream, {"return": {"pid": 5}})
        for document in (
            {"exited": False},
            {"exited": True, "exitcode": 3, "out-data": base64.b64encode(b"out").decode()},
        ):
            hear(stream)
            tell(stream, {"return": document})

    with simulated_socket(tmp_path, qemu.AGENT, talk), qemu.agent(tmp_path, 10) as agent:
        assert agent.run(["/bin/cat", "x"], b"text") == (3, "out", "")
    assert given == [{"path": "/bin/cat", "arg": ["x"], "capture-output": True, "input-data": "dGV4dA=="}]


def test_a_silent_guest_is_not_waited_for_without_end(tmp_path: Path) -> None:
    end = threading.Event()
    with (
        simulated_socket(tmp_path, qemu.AGENT, lambda _: bool(end.wait(10)) and None),
        pytest.raises(LabError, match=r"gave no answer within 0\.2 s"),
    ):
        try:
            with qemu.agent(tmp_path, 0.2) as agent:
                agent("guest-ping")
        finally:
            end.set()
