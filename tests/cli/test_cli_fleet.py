"""A large fleet as JSON: written host by host, read again where it does not fit, and the same text as at once."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.errors import InputError
from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.evidence import load
from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse import intake, snapshot
from ansible_collections.peerlane.gpu.plugins.plugin_utils.report import audit_json
from ansible_collections.peerlane.gpu.plugins.plugin_utils.rules import engine
from peerlane import audit, cli, fleet

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "eight-gpu-guest"
PAIRS = 26


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """26 guests with their hypervisors: more hosts than are indented. Names put each pair apart."""
    above = tmp_path_factory.mktemp("fleet")
    for number in range(PAIRS):
        uuid = f"0a1b2c3d-1111-4222-8333-{number:012d}"
        for name, source in ((f"a-guest{number}", "llm-guest"), (f"b-node{number}", "pve-node")):
            folder = shutil.copytree(EXAMPLE / source, above / name)
            for file in ("dmi.txt", "pve.conf.101.txt"):
                if (folder / file).exists():
                    text = (folder / file).read_text()
                    (folder / file).write_text(text.replace("0a1b2c3d-1111-4222-8333-444455556666", uuid))
            manifest = json.loads((folder / "manifest.json").read_text())
            (folder / "manifest.json").write_text(json.dumps({**manifest, "host": name}))
    return above


def audited(place: Path, out: Path, *words: str) -> tuple[int, str]:
    code = cli.main(["audit", "--from", str(place), "--format", "json", "-o", str(out), *words])
    return code, re.sub(r'"generated_at":"[^"]*"', '"generated_at":"NOW"', out.read_text())


def at_once(place: Path) -> str:
    hosts = {one.host: snapshot.build(one) for one in intake.read([place])}
    return audit_json.text(audit_json.document(hosts, engine.judge(hosts), generated_at="NOW"))


@pytest.mark.parametrize("room", [10**9, 300_000, 0])
def test_host_by_host_is_the_same_text_as_at_once(place, tmp_path, monkeypatch, room) -> None:
    monkeypatch.setattr(audit, "KEPT_CHARACTERS", room)
    monkeypatch.setattr(fleet.Aside, "ROOM", min(room, 10**6))
    code, text = audited(place, tmp_path / "out.json")
    assert code == 1
    assert text == at_once(place)
    guest = json.loads(text)["hosts"]["a-guest7"]
    assert "b-node7: pve.conf.101" in str(guest["findings"])


def test_a_large_fleet_can_go_to_stdout_and_need_not_fail(place, peerlane) -> None:
    done = peerlane("audit", "--from", place, "--format", "json", "--fail-on", "never")
    assert done.returncode == 0
    assert len(json.loads(done.stdout)["hosts"]) == 2 * PAIRS


def test_a_masked_fleet_is_masked_when_it_is_read_again_too(place, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(audit, "KEPT_CHARACTERS", 0)
    code, text = audited(place, tmp_path / "out.json", "--redact")
    assert code == 1
    assert "a-guest7" not in text and "444455556666" not in text
    assert len(json.loads(text)["hosts"]) == 2 * PAIRS


def test_a_snapshot_that_goes_while_it_is_read_is_named(place, tmp_path) -> None:
    gone = shutil.copytree(place / "a-guest1", tmp_path / "gone")
    hosts = fleet.FleetOfFiles(room=0)
    hosts.add(load(gone), lambda: audit._again(str(gone), "a-guest1", None))
    assert hosts["a-guest1"].host == "a-guest1"
    hosts.release([])
    shutil.rmtree(gone)
    with pytest.raises(InputError) as caught:
        hosts["a-guest1"]
    assert re.match(rf"{gone}: changed while the audit read it \(.*No such file", caught.value.line())


def test_what_is_laid_aside_comes_back_once(monkeypatch) -> None:
    monkeypatch.setattr(fleet.Aside, "ROOM", 10)
    aside = fleet.Aside()
    texts = {"a": "12345678", "b": "é" * 20, "c": "", "d": "x" * 30}
    for name, text in texts.items():
        aside.put(name, text)
    assert {name: aside.take(name) for name in "dbca"} == texts
    assert [aside.take(name) for name in "abcde"] == [None] * 5
