"""The collector finds engines with limits and containers, and brings none of their secrets or of anyone's files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ansible_collections.peerlane.gpu.plugins.module_utils import engine_probes
from ansible_collections.peerlane.gpu.plugins.module_utils.evidence_probes import NotHereError
from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse import engines

LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max stack size            8388608              unlimited            bytes
Max locked memory         unlimited            unlimited            bytes
Max open files            1024                 524288               files
"""


def process(root: Path, pid: int, *words: str, parent: int = 1, environ: str = "", cgroup: str = "") -> Path:
    place = root / "proc" / str(pid)
    place.mkdir(parents=True)
    (place / "cmdline").write_bytes(b"\0".join(word.encode() for word in words) + b"\0")
    (place / "status").write_text(f"Name:\tx\nPPid:\t{parent}\n")
    (place / "limits").write_text(LIMITS)
    (place / "environ").write_bytes(environ.encode().replace(b"|", b"\0"))
    (place / "cgroup").write_text(cgroup)
    return place


@pytest.fixture
def host(tmp_path: Path) -> Path:
    process(tmp_path, 41, "/v/bin/python", "/v/bin/vllm", "serve", "m")
    process(
        tmp_path,
        42,
        "/v/bin/python",
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--tensor-parallel-size",
        "2",
        "--api-key",
        "k9-secret",
        environ="HF_TOKEN=k9-secret|NCCL_P2P_LEVEL=SYS|NCCL_SECRET_KEY=k9-secret|VLLM_API_KEY=k9-secret|"
        "CUDA_VISIBLE_DEVICES=0,1|HOME=/h|VLLM_CACHE_ROOT=/cache|NCCL_TOPO_FILE=/topo.xml",
        cgroup="0::/system.slice/vllm.service\n",
    )
    process(tmp_path, 43, "/v/bin/python", "-m", "vllm.entrypoints.openai.api_server", "worker", parent=42)
    process(tmp_path, 44, "grep", "vllm serve")
    process(
        tmp_path,
        45,
        "python3",
        "-m",
        "sglang.launch_server",
        cgroup="0::/system.slice/docker-" + "0a" * 32 + ".scope\n",
    )
    return tmp_path


def test_each_engine_is_told_once_with_limits_and_place(host):
    told = engines.processes(engine_probes.engines(str(host)), "engines")

    assert [(one.pid, one.name, one.origin) for one in told] == [
        (41, "vllm", "process 41"),
        (42, "vllm", "unit vllm.service"),
        (45, "sglang", "process 45"),
    ]
    vllm = told[1]
    assert vllm.limits == {"Max locked memory": -1, "Max open files": 1024, "Max stack size": 8388608}
    assert vllm.tensor_parallel == 2
    assert set(vllm.environment) == {"NCCL_P2P_LEVEL", "CUDA_VISIBLE_DEVICES", "VLLM_CACHE_ROOT", "NCCL_TOPO_FILE"}
    assert told[2].container.identity == "0a" * 6


def test_no_secret_reaches_the_evidence(host):
    text = engine_probes.engines(str(host))
    assert "k9-secret" not in text
    assert "HOME=" not in text
    assert "--api-key ***" in text


def test_an_environment_that_cannot_be_read_is_said(host):
    (host / "proc/42/environ").unlink()
    told = engines.processes(engine_probes.engines(str(host)), "engines")
    assert (told[1].environment, told[1].environment_known) == ({}, False)


def test_no_engine_is_an_answer(tmp_path):
    (tmp_path / "proc").mkdir()
    assert engine_probes.engines(str(tmp_path)) == ""


VERDICT = '{\n    "0->0": true,\n    "0->1": false\n}'


def test_stored_verdicts_are_found_in_homes_and_where_engines_keep_them(host):
    home = host / "home/someone/.cache/vllm"
    own = host / "proc/42/root/cache"
    for place in (home, own):
        place.mkdir(parents=True)
        (place / "gpu_p2p_access_cache_for_0,1.json").write_text(VERDICT)
        os.utime(place / "gpu_p2p_access_cache_for_0,1.json", (1_700_000_000, 1_700_000_000))
    made = engines.p2p_caches(engine_probes.p2p_caches(str(host)))
    assert [one.modified for one in made] == [1_700_000_000, 1_700_000_000]
    assert "/cache/gpu_p2p_access_cache_for_0,1.json" in [one.path for one in made]


@pytest.mark.parametrize(
    "probe", [engine_probes.p2p_caches, engine_probes.nccl_files, engine_probes.nccl_topology_file]
)
def test_a_path_that_a_user_chose_brings_no_other_file(host, probe):
    secret = host / "etc/shadow"
    secret.parent.mkdir()
    secret.write_text("root:$6$secret:1:0:::::\n")
    home = host / "home/someone"
    (home / ".cache/vllm").mkdir(parents=True)
    (home / ".cache/vllm/gpu_p2p_access_cache_for_0.json").symlink_to(secret)
    (home / ".nccl.conf").symlink_to(secret)
    (host / "proc/42/root").mkdir()
    (host / "proc/42/root/topo.xml").symlink_to(secret)
    with pytest.raises(NotHereError):
        probe(str(host))


def test_the_nccl_lines_of_a_users_file_are_kept_alone(host):
    home = host / "home/someone"
    home.mkdir(parents=True)
    (home / ".nccl.conf").write_text("# note\nNCCL_P2P_LEVEL=SYS\nAWS_SECRET=k9\n NCCL_ALGO = Ring\n")
    text = engine_probes.nccl_files(str(host))
    assert "NCCL_P2P_LEVEL=SYS\n NCCL_ALGO = Ring\n" in text
    assert "k9" not in text


def test_the_topology_that_nccl_is_given_is_brought_with_its_path(host):
    (host / "proc/42/root").mkdir()
    (host / "proc/42/root/topo.xml").write_text('<system version="1"></system>\n')
    assert engine_probes.nccl_topology_file(str(host)) == '# ==> /topo.xml <==\n<system version="1"></system>\n'
    with pytest.raises(NotHereError):
        engine_probes.nccl_topology(str(host))


JOURNAL = """\
INFO 01-02 10:00:00 [utils.py:1] non-default args: {'model': 'm', 'api_key': ['k9-secret']}
INFO 01-02 10:00:00 [logger.py:1] Received request cmpl-1: prompt: 'Error: my secret diary'
INFO 01-02 10:00:01 [custom_all_reduce.py:1] Custom allreduce is disabled because your platform lacks GPU P2P capability
INFO 01-02 10:00:02 [x.py:1] a line of no use
ERROR 01-02 10:00:03 [core.py:1] torch.OutOfMemoryError: CUDA out of memory.
"""


def test_of_a_units_journal_the_telling_lines_come_and_no_prompt_and_no_key(host, monkeypatch):
    asked = []

    def run(argv, timeout_s, max_bytes):
        asked.append(argv)
        units = "vllm.service loaded active running x\npeerlane-model@a.service loaded failed failed x\n"
        said = units if argv[0] == "systemctl" else JOURNAL if "vllm.service" in argv else ""
        return {"rc": 0, "stdout": said, "stderr": "", "reason": "", "command": argv[0]}

    monkeypatch.setattr(engine_probes.bounded, "run", run)
    text = engine_probes.engine_logs(str(host))

    assert text.startswith("# ==> unit vllm.service <==\n")
    assert "Custom allreduce is disabled" in text
    assert "CUDA out of memory" in text
    assert "k9-secret" not in text
    assert "diary" not in text
    assert "no use" not in text
    assert [argv[2] for argv in asked if argv[0] == "journalctl"] == ["peerlane-model@a.service", "vllm.service"]
