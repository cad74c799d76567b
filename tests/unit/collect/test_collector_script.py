"""The shell collector makes the same snapshot as the module, and bounds everything that it runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ansible_collections.peerlane.gpu.plugins.module_utils import evidence
from ansible_collections.peerlane.gpu.plugins.module_utils.evidence_sources import SOURCES
from ansible_collections.peerlane.gpu.plugins.plugin_utils.core import evidence as evidence_room
from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse import snapshot
from peerlane import collect

SHELLS = [name for name in ("dash", "bash", "sh") if shutil.which(name)]
# Their values change from one reading to the next, or they name the process that asks.
CHANGING = {"proc.meminfo", "proc.stat", "proc.interrupts", "memory", "kernel_log", "df.shm", "peerlane.services"}
# What only the module reads: it looks into processes and takes apart what they were started with.
ONLY_THE_MODULE = {"engine.log", "engines", "p2p_caches", "nccl.topology", "nccl.topology_file"}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    place = tmp_path / "collect.sh"
    place.write_text(collect.script())
    return place


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder of simulated tools in front of PATH."""
    place = tmp_path / "tools"
    place.mkdir()
    return place


def fake(tools: Path, name: str, body: str) -> None:
    (tools / name).write_text(f"#!/bin/sh\n# simulated\n{body}\n")
    (tools / name).chmod(0o755)


def run(script: Path, *words: str, shell: str = "sh", tools: Path | None = None) -> subprocess.CompletedProcess[str]:
    path = f"{tools}:{os.environ['PATH']}" if tools else os.environ["PATH"]
    command = [shell, str(script), *words]
    env = {**os.environ, "PATH": path}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)


def only(*names: str) -> str:
    """Return the script with these sources alone."""
    text = collect.script()
    head, _, rest = text.partition("# --- all sources")
    calls, _, tail = rest.partition("# --- the manifest")
    kept = [line for line in calls.splitlines() if line.split()[1:2] and line.split()[1] in names]
    return f"{head}# --- all sources\n" + "\n".join(kept) + f"\n# --- the manifest{tail}"


def function(call: str) -> str:
    """Return the script's functions with one call behind them."""
    return collect.script().partition("# --- all sources")[0] + call + "\n"


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck comes with the tools of `make test`")
def test_shellcheck_has_nothing_to_say(script):
    done = subprocess.run(["shellcheck", "-s", "sh", str(script)], capture_output=True, text=True, check=False)

    assert done.stdout + done.stderr == ""


@pytest.mark.parametrize("shell", SHELLS)
def test_it_makes_the_snapshot_that_the_module_makes(script, tmp_path, shell):
    done = run(script, str(tmp_path / "out"), shell=shell)
    made = evidence_room.load(tmp_path / "out")
    live = evidence_room.from_module("x", {"evidence": evidence.collect(20)})

    assert (done.returncode, done.stdout) == (0, "")
    assert sorted(made.entries) == sorted(live.entries)
    for source, entry in live.entries.items():
        if source in CHANGING or source.partition("@")[0] in ONLY_THE_MODULE:
            continue
        other = made.entries[source]
        assert other.stdout == entry.stdout, source
        assert (other.rc, other.command, other.path, other.truncated) == (
            entry.rc,
            entry.command,
            entry.path,
            entry.truncated,
        ), source
        assert bool(other.reason) == bool(entry.reason), source
    assert made.privileged is (os.geteuid() == 0)
    assert snapshot.build(made).kernel.release == snapshot.build(live).kernel.release
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "out" / "manifest.json").stat().st_mode & 0o777 == 0o600


def test_each_source_of_the_module_is_asked_for():
    text = collect.script()
    asked = {line.split()[1] for line in text.splitlines() if re.match(r"(?:\w+_source|absent) \S+ ", line)}

    assert {source["source"] for source in SOURCES} <= asked
    missing = {one["source"] for one in SOURCES if f"absent {one['source']} " in text}
    assert missing == ONLY_THE_MODULE


def test_a_command_that_hangs_is_ended(tmp_path, tools):
    fake(tools, "lspci", "echo first; exec sleep 60")
    place = tmp_path / "collect.sh"
    place.write_text(only("lspci.vvv", "uname"))

    done = run(place, "-t", "1", str(tmp_path / "out"), tools=tools)
    made = evidence_room.load(tmp_path / "out")

    assert done.returncode == 0
    assert made.entries["lspci.vvv"].reason == "no answer within 1 s"
    assert made.entries["lspci.vvv"].rc is None
    assert made.entries["lspci.vvv"].stdout == "first\n"
    assert made.entries["lspci.vvv"].elapsed_ms >= 900
    assert made.entries["uname"].rc == 0


def test_what_a_command_says_becomes_valid_json(tmp_path, tools):
    fake(tools, "lspci", r"""printf 'a "b" \\ c\td\001\r\nn\303\251 \377\n' >&2; echo out; exit 7""")
    place = tmp_path / "collect.sh"
    place.write_text(only("lspci.vvv"))

    run(place, str(tmp_path / "out"), tools=tools)
    text = (tmp_path / "out" / "manifest.json").read_text(errors="replace")

    assert json.loads(text)["evidence"][0]["stderr"] == 'a "b" \\ c\td\r\nné \ufffd\n'
    assert json.loads(text)["evidence"][0]["rc"] == 7


def test_a_long_output_is_cut_and_marked(tmp_path, tools):
    fake(tools, "lspci", "yes 0123456789 | head -c 3000000")
    fake(tools, "dmesg", "seq 1 500000")
    place = tmp_path / "collect.sh"
    place.write_text(only("lspci.vvv", "kernel_log"))

    run(place, str(tmp_path / "out"), tools=tools)
    made = evidence_room.load(tmp_path / "out")
    log = made.entries["kernel_log"].stdout.splitlines()

    assert made.entries["lspci.vvv"].truncated
    assert len(made.entries["lspci.vvv"].stdout) == 2 * 1024 * 1024
    assert made.entries["kernel_log"].truncated
    assert (log[0], log[-1]) == ("1", "500000")


def test_a_missing_command_and_a_missing_file_are_reasons(tmp_path):
    place = tmp_path / "collect.sh"
    text = only("lspci.vvv", "etc.nccl.conf")
    place.write_text(text.replace(" lspci -D", " no-such-tool -D").replace("/etc/nccl.conf", "/no/such/file"))

    run(place, str(tmp_path / "out"))
    made = evidence_room.load(tmp_path / "out")

    assert made.entries["lspci.vvv"].reason == "no-such-tool: command not found"
    assert made.entries["etc.nccl.conf"].reason == "/no/such/file: No such file or directory"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-x"], "usage:"),
        (["-t", "0"], "-t 0: is no number of seconds"),
        (["-t", "x"], "-t x: is no number of seconds"),
        (["a", "b"], "usage:"),
        (["FULL"], "exists and is not empty"),
        (["FILE/x"], "cannot be made"),
    ],
)
def test_bad_words_are_one_line(script, tmp_path, words, said):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    named = [word.replace("FULL", str(tmp_path / "full")).replace("FILE", str(tmp_path / "full/x")) for word in words]

    done = run(script, *named)

    assert done.returncode == 2
    assert said in done.stderr


def test_it_packs_what_the_audit_reads(tmp_path):
    from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse import intake

    place = tmp_path / "collect.sh"
    place.write_text(only("uname", "os_release"))
    run(place, "-z", str(tmp_path / "box"))

    assert intake.read([tmp_path / "box.tar.gz"]) == intake.read([tmp_path / "box"])


SECRETS = {
    "pve.conf": "name: llm\ncipassword: $5$abc\nsshkeys: ssh-rsa%20AAAA\nscsi0: local:vm-1,serial=ABC123,size=4G\n",
    "pve.qm_pending": "cur cipassword: x\nnew cipassword: y\ncur cpu: host\n",
    "libvirt.domains": (
        "<graphics passwd='geheim' port='1'/>\n<qemu:env name='A' value='B'/>\n"
        "<entry name='serial'>S1</entry>\n<serial>S2</serial>\n"
    ),
    "nvidia_smi.q": (
        "    Serial Number                 : 1652823054321\n    Serial Number                 : N/A\n"
        "    Chassis Serial Number         : 77\n        Name                      : python --api-key abc def\n"
        "    Product Name                  : NVIDIA A30\n"
    ),
    "kernel_log": "[    1.0] NVRM: GPU at PCI:0000:01:00: GPU-1\n[    1.1] NVRM: GPU Board Serial Number: 165282\n",
    "lspci.vvv": "\tCapabilities: [150 v1] Device Serial Number 04-3f-72-ff-fe-b1-c0-de\n\tLnkSta: Speed 16GT/s\n",
}


@pytest.mark.parametrize("source", sorted(SECRETS))
@pytest.mark.parametrize("serials", [False, True])
def test_it_hides_what_the_module_hides(tmp_path, source, serials):
    given = next(one for one in SOURCES if one["source"] == source)
    expected = SECRETS[source]
    for key in ("mask",) if serials else ("mask", "mask_serials"):
        expected = re.sub(given[key], evidence._mask, expected) if key in given else expected
    place = tmp_path / "hide.sh"
    place.write_text(function("hide"))
    words = ["sh", str(place), *(["-s"] if serials else []), str(tmp_path / "out")]

    done = subprocess.run(words, input=SECRETS[source], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout == expected


def test_config_space_loses_its_serial_number_and_the_zeros_at_its_end(tmp_path):
    data = bytearray(512)
    data[0:4] = bytes.fromhex("de10b52b")
    data[0x100:0x104] = (0x0001 | 2 << 16 | 0x148 << 20).to_bytes(4, "little")
    data[0x148:0x14C] = (0x0003 | 1 << 16).to_bytes(4, "little")
    data[0x14C:0x154] = bytes.fromhex("1122334455667788")
    (tmp_path / "config").write_bytes(bytes(data))
    place = tmp_path / "config.sh"
    place.write_text(function(f"config_hex {tmp_path / 'config'}"))

    kept, masked = (
        subprocess.run(
            ["sh", str(place), *words, str(tmp_path / "out")], capture_output=True, text=True, timeout=60, check=True
        ).stdout
        for words in (["-s"], [])
    )

    assert kept == f"config_bytes: 512\nconfig: {bytes(data).rstrip(bytes(1)).hex()}\n"
    data[0x14C:0x154] = bytes(8)
    assert masked == f"config_bytes: 512\nconfig: {bytes(data).rstrip(bytes(1)).hex()}\n"
