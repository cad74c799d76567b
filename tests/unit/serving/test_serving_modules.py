"""The modules of the serving half, run as modules: what they change, what they say, and what check mode leaves."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from ansible.module_utils.testing import patch_module_args

from ansible_collections.peerlane.gpu.plugins.modules import (
    engine_venv,
    model_files,
    model_service_info,
    service_release,
)

sys.path.insert(0, str(Path(__file__).parents[2]))
from simulated_hub import SimulatedHub


@pytest.fixture
def run(capsys):
    def call(module, check=False, **options):
        with patch_module_args({**options, "_ansible_check_mode": check}), pytest.raises(SystemExit):
            module.main()
        return json.loads(capsys.readouterr().out)

    return call


def tree(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in Path(folder).rglob("*")
    }


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# --- service_release -------------------------------------------------------------------------------------------------


def release(root, name, **more):
    return {
        "root": str(root),
        "id": name,
        "args": f"--name\n{name}\n",
        "env": "",
        "record": {"id": name},
        "engine_home": "/opt/e",
        **more,
    }


def test_a_release_is_placed_and_switched_to_once(run, tmp_path):
    first = run(service_release, **release(tmp_path, "one"))
    again = run(service_release, **release(tmp_path, "one"))

    assert (first["changed"], first["before"], again["changed"]) == (True, "", False)
    assert (tmp_path / "current" / "args").read_text() == "--name\none\n"
    assert (tmp_path / "current" / "env").stat().st_mode & 0o777 == 0o600
    assert str((tmp_path / "current" / "engine").readlink()) == "/opt/e"
    assert "created_at" in json.loads((tmp_path / "current" / "release.json").read_text())


def test_check_mode_says_the_change_and_makes_none(run, tmp_path):
    result = run(service_release, check=True, **release(tmp_path / "s", "one"))
    assert result["changed"]
    assert result["diff"]["after"] == "--name\none\n"
    assert tree(tmp_path) == {}


def test_current_and_previous_and_one_more_stay(run, tmp_path):
    for name in ("one", "two", "three", "four", "five"):
        last = run(service_release, **release(tmp_path, name, record={"id": name}))
        record = tmp_path / "releases" / name / "release.json"
        # Names in the order of their making: the clock of the record has whole seconds.
        record.write_text(json.dumps({"created_at": {"one": "1", "two": "2", "three": "3"}.get(name, "4")}))
    assert names(tmp_path / "releases") == ["five", "four", "three"]
    assert last["removed"] == ["two"]
    assert str((tmp_path / "previous").readlink()) == "releases/four"


def test_going_back_needs_only_the_name(run, tmp_path):
    run(service_release, **release(tmp_path, "one"))
    run(service_release, **release(tmp_path, "two"))
    back = run(service_release, root=str(tmp_path), id="one")
    assert back["switched"]
    assert str((tmp_path / "current").readlink()) == "releases/one"
    assert str((tmp_path / "previous").readlink()) == "releases/two"


def test_clearing_away_never_takes_the_current_or_the_previous_one(run, tmp_path):
    for name in ("one", "two"):
        run(service_release, **release(tmp_path, name))
    run(service_release, root=str(tmp_path), id="one", keep=0)
    assert names(tmp_path / "releases") == ["one", "two"]


def test_an_interrupted_placing_leaves_nothing(run, tmp_path):
    (tmp_path / "releases" / ".building-x").mkdir(parents=True)
    run(service_release, **release(tmp_path, "one"))
    assert names(tmp_path / "releases") == ["one"]


def test_an_unknown_release_is_one_line(run, tmp_path):
    result = run(service_release, root=str(tmp_path), id="none")
    assert result["failed"]
    assert result["msg"] == f"{tmp_path} has no release none, and its content is not given"


# --- model_files -----------------------------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "m.gguf").write_bytes(b"GGUF" + b"\3\0\0\0" + b"\0" * 24)
    (folder / "notes.txt").write_text("a note\n")
    return folder


def files_of(tmp_path, source, **more):
    options = {"path": str(tmp_path / "models" / "m@1"), "name": "m", "revision": "1", "source": str(source)}
    return options | {"reserve_mb": 0} | more


def test_a_model_is_brought_once(run, tmp_path, source):
    first = run(model_files, **files_of(tmp_path, source))
    again = run(model_files, **files_of(tmp_path, source))
    assert (first["changed"], first["complete"], first["brought"]) == (True, True, ["m.gguf", "notes.txt"])
    assert (again["changed"], again["complete"], again["brought"]) == (False, True, [])
    assert "m.gguf" in first["diff"]["after"]


def test_a_check_run_brings_nothing(run, tmp_path, source):
    before = tree(tmp_path)
    result = run(model_files, check=True, **files_of(tmp_path, source))
    assert (result["changed"], result["complete"]) == (True, False)
    assert tree(tmp_path) == before


def test_damage_is_named_and_mended(run, tmp_path, source):
    run(model_files, **files_of(tmp_path, source))
    (tmp_path / "models" / "m@1" / "notes.txt").write_text("a")
    result = run(model_files, **files_of(tmp_path, source))
    assert result["damaged"] == {"notes.txt": "is truncated: 1 of 7 bytes"}
    assert result["brought"] == ["notes.txt"]
    assert "notes.txt is truncated: 1 of 7 bytes" in str(result["warnings"])
    assert (tmp_path / "models" / "m@1" / "notes.txt").read_text() == "a note\n"


def test_changed_content_at_the_same_revision_is_refused(run, tmp_path, source):
    run(model_files, **files_of(tmp_path, source))
    (source / "notes.txt").write_text("another note\n")
    result = run(model_files, **files_of(tmp_path, source))
    assert "another notes.txt: a revision is immutable" in result["msg"]
    assert (tmp_path / "models" / "m@1" / "notes.txt").read_text() == "a note\n"


def test_a_step_without_time_goes_on_in_the_next_one(run, tmp_path, source):
    first = run(model_files, **files_of(tmp_path, source, budget_s=0))
    assert (first["changed"], first["complete"]) == (True, False)
    assert run(model_files, **files_of(tmp_path, source))["complete"]


def test_files_of_another_try_are_kept_where_they_are_right(run, tmp_path, source):
    folder = tmp_path / "models" / "m@1"
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("a note\n")
    (folder / "stranger").write_text("x")
    result = run(model_files, **files_of(tmp_path, source))
    assert names(folder) == ["m.gguf", "manifest.json", "notes.txt"]
    assert result["complete"]


def test_a_hub_is_asked_once_for_a_revision(run, tmp_path, source):
    hub = SimulatedHub(source, "org/m").start()
    options = files_of(tmp_path, "hf://org/m", endpoint=hub.address)
    first = run(model_files, **options)
    asked = len(hub.asked)
    again = run(model_files, **options)
    asked_again = len(hub.asked)
    (tmp_path / "models" / "m@1" / "m.gguf").write_bytes(b"GG")
    mended = run(model_files, **options)
    hub.shutdown()
    hub.server_close()

    assert (first["complete"], again["changed"], asked_again) == (True, False, asked)
    assert mended["brought"] == ["m.gguf"]
    assert tree(source)["m.gguf"] == (tmp_path / "models" / "m@1" / "m.gguf").read_bytes()


def test_an_endpoint_that_is_no_web_address_is_refused(run, tmp_path):
    result = run(model_files, **files_of(tmp_path, "hf://org/m", endpoint="file:///etc"))
    assert result["msg"] == "endpoint 'file:///etc' is no http(s) address"


# --- engine_venv, model_service_info ---------------------------------------------------------------------------------


def venv(tmp_path, **more):
    return {
        "home": str(tmp_path / "engines" / "e-1"),
        "engine": "e",
        "version": "1",
        "import_name": "json",
        "lock": "",
        "launcher": "print('served')\n",
    } | more


def test_a_check_run_builds_nothing(run, tmp_path):
    result = run(engine_venv, check=True, **venv(tmp_path))
    assert result["changed"]
    assert tree(tmp_path) == {}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"python": "/none/python3"}, "/none/python3 can't be run"),
        ({"oldest_python": "9.0"}, "e needs 9.0 or newer"),
        ({"disk_mb": 10**12}, "not enough space"),
        ({"wheelhouse": "/none"}, "the wheelhouse /none is no folder"),
        ({"cpu_flags": ["fpu", "no_such_feature"]}, "e needs the CPU features no_such_feature, which this CPU"),
    ],
)
def test_what_cannot_be_built_is_said_before(run, tmp_path, options, says):
    result = run(engine_venv, **venv(tmp_path, **options))
    assert says in result["msg"]
    assert tree(tmp_path) == {}


def test_missing_packages_come_before_the_build(run, tmp_path):
    options = venv(tmp_path, packages=["dpkg", "no-such-package"])
    result = run(engine_venv, **options)
    assert result["missing_packages"] == ["no-such-package"] and not result["changed"]
    assert tree(tmp_path) == {}
    assert run(engine_venv, check=True, **options)["changed"]


def test_a_python_that_others_cannot_reach_is_refused(run, tmp_path):
    hidden = tmp_path / "hidden"
    hidden.mkdir(mode=0o700)
    (hidden / "python3").write_text('#!/bin/sh\nexec /usr/bin/python3 "$@"\n')
    (hidden / "python3").chmod(0o755)
    tmp_path.chmod(0o755)
    result = run(engine_venv, **venv(tmp_path, python=str(hidden / "python3")))
    assert "can't enter, so the service user could not run it" in result["msg"]


def test_a_host_without_anything_is_seen_as_it_is(run, tmp_path):
    seen = run(
        model_service_info,
        unit="peerlane-model@none.service",
        service_root=str(tmp_path / "s"),
        engine_home=str(tmp_path / "e"),
        model_path=str(tmp_path / "m"),
        port=1,
        nccl_env=str(tmp_path / "nccl.env"),
    )
    assert (seen["engine"], seen["model"]["exists"], seen["current"], seen["nccl"]) == ({}, False, "", "")


def test_a_model_of_both_formats_is_seen_as_both(run, tmp_path, source):
    (source / "config.json").write_text("{}")
    (source / "m.safetensors").write_bytes(b"\0")
    seen = run(model_service_info, unit="x", service_root="/s", engine_home="/e", model_path=str(source), port=1)
    assert seen["model"]["formats"] == ["gguf", "safetensors"]
    assert seen["model"]["complaint"] == "m.safetensors has no safetensors header"
