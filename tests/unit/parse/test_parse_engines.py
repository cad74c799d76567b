"""Engines from processes, units, containers and scripts; their limits; and no secret in any of them."""

from __future__ import annotations

import json

import pytest

from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse import engines
from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse.text import RefusedError

PROCESSES = """\
# ==> engine pid 4711 <==
name: vllm
command: /v/bin/python -m vllm.entrypoints.openai.api_server --model /m --tensor-parallel-size=4 --port 8001 --api-key k9
unit: vllm.service
environment: read
Environment NCCL_P2P_LEVEL=SYS
Environment CUDA_VISIBLE_DEVICES=0,1,2,3
Environment VLLM_API_KEY=k9
limit Max locked memory: 8388608
limit Max stack size: -1
shm_bytes: 67108864
shm_private: yes
# ==> engine pid 4712 <==
name: sglang
command: python -m sglang.launch_server --tp 2
container: 0123456789ab
environment: not readable
docker: {"Id":"0123456789abcdef","Name":"/serve","IpcMode":"private","PidMode":"","Runtime":"nvidia","ShmSize":67108864,"CapAdd":["SYS_NICE"],"Ulimits":[{"Name":"memlock","Hard":-1,"Soft":-1}]}
"""  # noqa: E501


def test_a_process_tells_limits_environment_and_place():
    vllm, sglang = engines.processes(PROCESSES, "engines")

    assert (vllm.name, vllm.origin, vllm.pid, vllm.tensor_parallel, vllm.port) == (
        "vllm",
        "unit vllm.service",
        4711,
        4,
        8001,
    )
    assert (vllm.shm_bytes, vllm.shm_private, vllm.environment_known) == (67108864, True, True)
    assert vllm.limits == {"Max locked memory": 8388608, "Max stack size": -1}
    assert set(vllm.environment) == {"NCCL_P2P_LEVEL", "CUDA_VISIBLE_DEVICES"}
    assert (sglang.origin, sglang.tensor_parallel, sglang.environment_known) == ("container serve", 2, False)
    assert (sglang.container.identity, sglang.container.capabilities) == ("0123456789ab", ("SYS_NICE",))
    assert sglang.container.ulimits == {"memlock": -1}
    assert "k9" not in repr((vllm, sglang))


@pytest.mark.parametrize(
    ("command", "kept"),
    [
        ("vllm serve m --api-key a b --port 1", "vllm serve m --api-key *** --port 1"),
        ("vllm serve m --api-key=a", "vllm serve m --api-key=***"),
        ("x --hf-token 'a b' --y", "x --hf-token *** --y"),
        ("x --tokenizer q --max-num-batched-tokens 8", "x --tokenizer q --max-num-batched-tokens 8"),
    ],
)
def test_values_of_keys_are_masked_and_nothing_else(command, kept):
    assert engines.masked(command) == kept


def inspected(**host: object) -> str:
    return "$ docker inspect serve\n" + json.dumps(
        [
            {
                "Id": "f" * 64,
                "Name": "/serve",
                "Config": {
                    "Cmd": ["--model", "m", "--api-key", "k9", "--tensor-parallel-size", "2"],
                    "Entrypoint": ["vllm", "serve"],
                    "Env": ["HF_TOKEN=k9", "NCCL_P2P_DISABLE=1", "NCCL_SECRET_KEY=k9", "PATH=/bin"],
                },
                "HostConfig": {"IpcMode": "private", "ShmSize": 67108864, **host},
            }
        ],
        indent=2,
    )


def test_docker_inspect_is_read_without_its_secrets():
    (made,) = engines.docker_inspect(inspected(), "docker.inspect")
    assert (made.name, made.origin, made.shm_bytes, made.tensor_parallel) == ("vllm", "container serve", 67108864, 2)
    assert made.environment == {"NCCL_P2P_DISABLE": "1", "PATH": "/bin"}
    assert "k9" not in repr(made)
    (host,) = engines.docker_inspect(inspected(IpcMode="host"), "docker.inspect")
    assert host.shm_bytes is None


@pytest.mark.parametrize("text", ["", "{", "[]", '[{"HostConfig": 4}]', "nothing"])
def test_what_is_no_container_is_refused(text):
    with pytest.raises(RefusedError):
        engines.docker_inspect(text, "docker.inspect")


def test_a_unit_and_its_drop_in():
    (made,) = engines.unit_file(
        '[Service]\nEnvironment="CUDA_HOME=/c" NCCL_ALGO=ring\nEnvironment="HF_TOKEN=k9"\n'
        "ExecStart=/v/bin/vllm serve m \\\n   --port 9000\nLimitMEMLOCK=infinity\nLimitNOFILE=1024:4096\n",
        "systemd.unit",
    )
    assert (made.name, made.port, made.environment) == ("vllm", 9000, {"CUDA_HOME": "/c", "NCCL_ALGO": "ring"})
    assert made.limits == {"Max locked memory": -1, "Max open files": 1024}
    assert engines.unit_file("[Unit]\nDescription=x\n[Service]\nExecStart=/bin/true\n", "systemd.unit") == ()


def test_a_script_starts_engines_with_the_variables_before_them():
    made = engines.script(
        "#!/bin/sh\nexport CUDA_VISIBLE_DEVICES=0\nnohup vllm serve a \\\n  --port 8000 > a.log 2>&1 &\n"
        "export CUDA_VISIBLE_DEVICES=2\nNCCL_DEBUG=INFO vllm serve b --port 8003 > b.log 2>&1 &\n# vllm serve c\n",
        "launch.script",
    )
    assert [(one.port, one.environment.get("CUDA_VISIBLE_DEVICES")) for one in made] == [(8000, "0"), (8003, "2")]
    assert made[1].environment["NCCL_DEBUG"] == "INFO"
    assert "log" not in made[0].command


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Limit  Soft Limit  Hard Limit  Units\nMax locked memory         65536          65536          bytes\n",
         {"Max locked memory": 65536}),
        ("Max locked memory         unlimited            unlimited            bytes     \n"
         "Max open files            1024                 524288               files\n",
         {"Max locked memory": -1, "Max open files": 1024}),
        ("max locked memory           (kbytes, -l) 8192\nopen files                          (-n) 1024\n"
         "stack size                  (kbytes, -s) unlimited\n",
         {"Max locked memory": 8192 * 1024, "Max open files": 1024, "Max stack size": -1}),
        ("nothing", {}),
    ],
)  # fmt: skip
def test_limits_of_proc_and_of_a_shell(text, expected):
    assert engines.limits(text) == expected


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("Filesystem 1K-blocks Used Available Use% Mounted on\ntmpfs 65536 0 65536 0% /dev/shm\n", 65536 * 1024),
        ("Filesystem 1B-blocks Used Available Use% Mounted on\nshm 67108864 0 67108864 0% /dev/shm\n", 67108864),
        ("Filesystem Size Used Avail Use% Mounted on\nshm 64M 0 64M 0% /dev/shm\n", 64 << 20),
        ("tmpfs 1.5G 0 1.5G 0% /dev/shm\n", 1536 << 20),
        ("tmpfs 1.5G 0 1.5G 0% /run\n", None),
    ],
)
def test_the_size_of_shared_memory_in_bytes(text, size):
    found = engines.shm_bytes(text)
    assert (found[0] if found else None) == size


def test_of_device_rules_before_and_after_the_later_count():
    text = "c 195:254 rw\nc 195:0 rw\n--- after ---\nc 195:* m\n"
    assert engines.device_rules(text) == ("c 195:* m",)


def test_stored_verdicts_keep_time_and_pairs():
    text = (
        "# ==> /root/.cache/vllm/gpu_p2p_access_cache_for_0,1.json modified 1700000000 <==\n"
        '{\n    "0->0": true,\n    "0->1": false,\n    "1->0": true,\n    "1->1": true\n}\n'
    )
    (made,) = engines.p2p_caches(text)
    assert (made.path, made.modified) == ("/root/.cache/vllm/gpu_p2p_access_cache_for_0,1.json", 1700000000)
    assert made.access == {("GPU0", "GPU1"): False, ("GPU1", "GPU0"): True}
    assert engines.p2p_caches('{"0->1": true}')[0].modified is None


def test_odd_texts_raise_nothing_but_a_refusal():
    for text in ("", "\0\0", "# ==> engine pid 1 <==", "limit x: 4", "{" * 3000, PROCESSES[:200], "'" * 99):
        engines.processes(text, "x")
        engines.unit_file(text, "x")
        engines.script(text, "x")
        engines.p2p_caches(text)
        engines.options(text)
