"""A release is named by its content, its files are literal, and what stands in its way is said before."""

from __future__ import annotations

import dataclasses
import subprocess

import pytest

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.errors import InputError
from ansible_collections.peerlane.gpu.plugins.plugin_utils.model import engines, release

ENGINE = engines.engine("llama_cpp")
UNIT = "peerlane-model@chat.service"
SETTINGS = release.Settings(
    service="chat",
    engine_home="/opt/peerlane/engines/llama_cpp-1+ab",
    model_path="/opt/peerlane/models/m@1",
    alias="m",
    host="127.0.0.1",
    port=8000,
    arguments={},
    environment={},
    drain_timeout_s=60,
)
SEEN = {
    "systemd": True,
    "engine": {"engine": "llama_cpp", "version": "1"},
    "model": {"exists": True, "formats": ["gguf"], "complaint": ""},
    "port_owner": {},
}


def planned(nccl="", **changes):
    return release.plan(ENGINE, dataclasses.replace(SETTINGS, **changes), nccl, {"engine_version": "1"})


def test_the_same_settings_give_the_same_name():
    assert planned()["id"] == planned()["id"]


@pytest.mark.parametrize(
    "changes",
    [
        {"model_path": "/opt/peerlane/models/m@2"},
        {"engine_home": "/opt/peerlane/engines/llama_cpp-2+ab"},
        {"arguments": {"ctx_size": 1}},
        {"environment": {"A": "1"}},
        {"port": 8001},
        {"nccl": "NCCL_P2P_DISABLE=1\n"},
    ],
)
def test_whatever_changes_the_service_changes_the_name(changes):
    assert planned(**changes)["id"] != planned()["id"]


def test_a_known_prompt_is_no_part_of_the_name():
    other = release.plan(ENGINE, SETTINGS, "", {"engine_version": "1", "golden": {"prompt": "x"}})
    assert other["id"] == planned()["id"]


def test_arguments_of_a_dictionary_become_words():
    plan = planned(
        arguments={"ctx_size": 8192, "flag": True, "off": False, "none": None, "names": ["a", "b"], "json": {"k": 1}}
    )
    words = plan["args"].splitlines()
    assert words[:4] == ["--model", "/opt/peerlane/models/m@1", "--alias", "m"]
    assert words[10:] == ["--ctx-size", "8192", "--flag", "--names", "a", "b", "--json", '{"k": 1}']


def test_a_list_of_words_is_taken_as_it_is():
    assert planned(arguments=["--ctx-size", 8192])["args"].splitlines()[-2:] == ["--ctx-size", "8192"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"arguments": {"port": 9}}, "--port is set by the role"),
        ({"arguments": ["--model=/x"]}, "--model is set by the role"),
        ({"arguments": ["a\nb"]}, "spans lines"),
        ({"environment": {"A B": "1"}}, "is no name"),
        ({"environment": {"A": "1\n2"}}, "spans lines"),
        ({"service": "Chat_1"}, "no service name"),
        ({"port": 80}, "without privileges"),
        ({"port": 70000}, "1024 to 65535"),
        ({"engine_home": ""}, "run the role inference_engine first"),
        ({"model_path": ""}, "run the role model_weights first"),
    ],
)
def test_settings_that_cannot_work_are_refused_in_one_line(changes, says):
    with pytest.raises(InputError) as refused:
        planned(**changes)
    assert says in refused.value.line()
    assert "\n" not in refused.value.line().replace(repr("a\nb"), "")


def test_environment_values_survive_a_shell_like_reader(tmp_path):
    values = {"A": 'say "hi"', "B": "$HOME `id`", "C": "back\\slash", "D": " blanks ", "E": "#x"}
    path = tmp_path / "env"
    path.write_text(release.environment_text(values))
    # A POSIX shell reads double quotes by the same rules as systemd's EnvironmentFile.
    script = f""". {path}; printf '%s\\n' "$A" "$B" "$C" "$D" "$E" """
    out = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout
    assert out.splitlines() == list(values.values())


def test_the_record_holds_names_of_variables_and_no_values():
    record = planned(environment={"TOKEN": "hidden"})["record"]
    assert record["env_names"] == ["TOKEN"]
    assert "hidden" not in str(record)


def test_nccl_settings_are_kept_in_the_record():
    assert planned(nccl="# c\nNCCL_P2P_DISABLE=1\n\nX = 2\n")["record"]["nccl"] == {"NCCL_P2P_DISABLE": "1", "X": "2"}


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("fd00::5", "http://[fd00::5]:8000"),
        ("10.0.0.5", "http://10.0.0.5:8000"),
    ],
)
def test_a_release_knows_where_its_own_host_reaches_it(host, url):
    assert planned(host=host)["record"]["url"] == url


@pytest.mark.parametrize(
    ("seen", "settings", "says"),
    [
        ({}, {}, None),
        ({"systemd": False}, {}, "does not run systemd"),
        ({"engine": {}}, {}, "no engine in"),
        ({"engine": {"engine": "vllm"}}, {}, "holds vllm, not llama_cpp"),
        ({"model": {"exists": False}}, {}, "does not exist"),
        ({"model": {"exists": True, "formats": ["safetensors"]}}, {}, "is no model for llama_cpp: it needs gguf"),
        ({"model": {"exists": True, "formats": []}}, {}, "found neither"),
        ({"model": {"exists": True, "formats": ["gguf"], "complaint": "m.gguf is truncated"}}, {}, "is truncated"),
        ({}, {"model_path": "/home/u/m"}, "sandbox can't see it"),
        (
            {"port_owner": {"pid": 7, "command": "nginx", "unit": "nginx.service"}},
            {},
            "port 8000 is taken by nginx (pid 7) of nginx.service: stop it, or set model_service_port",
        ),
        ({"port_owner": {"pid": None, "command": "", "unit": ""}}, {}, "taken by a process that can't be seen"),
        ({"port_owner": {"pid": 9, "command": "python", "unit": UNIT}}, {}, None),
    ],
)
def test_obstacles_are_said_before_anything_is_changed(seen, settings, says):
    found = release.obstacles(ENGINE, dataclasses.replace(SETTINGS, **settings), UNIT, SEEN | seen, False)
    if says is None:
        assert found == ()
    else:
        assert len(found) == 1
        assert says in found[0]


def test_a_check_on_a_new_host_passes_over_what_is_still_to_come():
    seen = SEEN | {"engine": {}, "model": {"exists": False}}
    assert release.obstacles(ENGINE, SETTINGS, UNIT, seen, True) == ()


# --- engines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("vllm", "not in this release of Peerlane; available: llama_cpp"),
        ("sglang", "not in this release"),
        ("lama_cpp", "did you mean llama_cpp?"),
        ("", "available: llama_cpp"),
    ],
)
def test_an_engine_that_is_not_there_is_refused(name, says):
    with pytest.raises(InputError, match="inference_engine_name") as refused:
        engines.engine(name)
    assert says in refused.value.line()


def test_a_version_without_a_lock_is_refused():
    with pytest.raises(InputError, match="has no lock"):
        engines.version_of(ENGINE, "1.0")
    assert engines.version_of(ENGINE, "") == ENGINE.newest


def test_every_lock_pins_every_line_with_hashes():
    from pathlib import Path

    files = Path(__file__).parents[3] / "roles" / "inference_engine" / "files"
    for one in engines.ENGINES.values():
        assert (files / one.launcher).is_file()
        for version, lock in one.versions.items():
            text = (files / lock).read_text()
            assert version in text
            pins = [line for line in text.splitlines() if line and not line.startswith(("#", " "))]
            assert pins
            assert all("==" in line and line.endswith("\\") for line in pins)
            assert text.count("--hash=sha256:") >= len(pins)
