"""The simulated qm keeps Proxmox's rule: a running VM's change waits, a stopped VM's does not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from peerlane.lab import proxmox
from peerlane.lab.simulated import proxmox_tools as tools


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for number in (101, 102):
        (tmp_path / f"{number}.conf").write_text((proxmox.SOURCES / f"{number}.conf").read_text())
    mapping = tmp_path / "pci.cfg"
    mapping.write_text(proxmox.mapping_text("node1"))
    monkeypatch.setattr(tools, "CONFIGS", tmp_path)
    monkeypatch.setattr(tools, "PIDS", tmp_path / "pids")
    monkeypatch.setattr(tools, "MAPPING", mapping)
    monkeypatch.setattr(tools, "NODE", "node1")
    (tmp_path / "pids").mkdir()
    return tmp_path


def running(node: Path, vmid: int) -> None:
    (node / f"pids/{vmid}.pid").write_text(str(os.getpid()))


def said(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    tools.qm(list(words))
    return capsys.readouterr().out.splitlines()


def test_a_running_vms_change_waits(node: Path, capsys: pytest.CaptureFixture[str]) -> None:
    running(node, 101)
    assert said(capsys, "set", "101", "--cpu", "kvm64", "--delete", "args") == [
        "update VM 101: -cpu kvm64 -delete args"
    ]
    lines = said(capsys, "pending", "101")
    assert [line for line in lines if " cpu:" in line] == ["cur cpu: host", "new cpu: kvm64"]
    assert next(line for line in lines if " args:" in line).startswith("del args: -set device")
    assert "cpu: kvm64" in said(capsys, "config", "101")
    assert "cpu: host" in said(capsys, "config", "101", "--current")
    assert "[PENDING]\ncpu: kvm64\ndelete: args\n" in (node / "101.conf").read_text()


def test_a_change_back_ends_the_waiting(node: Path, capsys: pytest.CaptureFixture[str]) -> None:
    running(node, 101)
    said(capsys, "set", "101", "--cpu", "kvm64")
    said(capsys, "set", "101", "--cpu", "host")
    assert "[PENDING]" not in (node / "101.conf").read_text()


def test_a_stopped_vm_takes_it_at_once_and_keeps_its_snapshots(node: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, "set", "102", "--cpu", "host")
    text = (node / "102.conf").read_text()
    assert "\ncpu: host\n" in text.partition("[")[0]
    assert "[PENDING]\nballoon: 0\n" in text
    assert "[before_gpus]\ncores: 16\ncpu: x86-64-v2-AES\n" in text
    assert text.startswith("#two GPUs")


def test_a_whole_card_gets_ids_with_a_dot_and_a_single_function_none(
    node: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, single = said(capsys, "showcmd", "102")[0], said(capsys, "showcmd", "101")[0]
    assert "host=0000:41:00.1,id=hostpci0.1,bus=ich9-pcie-port-1,addr=0x0.1" in whole
    assert "host=0000:21:00.0,id=hostpci1,bus=ich9-pcie-port-2,addr=0x0" in single  # through mapping=gpu1
    assert "balloon" not in whole + single  # pending in 102, set in 101


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["set", "999", "--cpu", "host"], "Configuration file 'nodes/node1/qemu-server/999.conf' does not exist"),
        (["set", "101", "--colour", "red"], "Unknown option: colour"),
        (["set", "101", "--cpu"], "400 unable to parse option"),
        (["migrate", "101"], "ERROR: unknown command 'qm migrate' (SIMULATED"),
        (["config"], "400 not enough arguments"),
    ],
)
def test_bad_words_end_with_an_error(
    node: Path, capsys: pytest.CaptureFixture[str], words: list[str], line: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        tools.qm(words)
    assert caught.value.code != 0
    assert capsys.readouterr().err.startswith(line)


@pytest.mark.parametrize("tool", [tools.qm, tools.pvesh, tools.pveversion, tools.kvm])
def test_help_begins_with_the_label(tool: object, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        tool(["--help"])  # type: ignore[operator]
    except SystemExit as ended:
        assert ended.code == 0
    assert capsys.readouterr().out.startswith("SIMULATED ")
