"""Small files in one call: what is written, kept, removed and reported, and that check mode leaves everything alone."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args

from ansible_collections.peerlane.gpu.plugins.modules import text_files

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*files: dict[str, Any], check: bool = False, **options: Any) -> dict[str, Any]:
        given = {"files": list(files), **options, "_ansible_check_mode": check, "_ansible_diff": True}
        with patch_module_args(given), pytest.raises(SystemExit):
            text_files.main()
        answer: dict[str, Any] = json.loads(capsys.readouterr().out)
        return answer

    return call


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_files_and_their_folders_are_written_once(run: Run, tmp_path: Path) -> None:
    one, two = tmp_path / "one.conf", tmp_path / "a/b/two.conf"
    files = ({"path": str(one), "content": "1\n"}, {"path": str(two), "content": "2 \u00e4\n", "mode": "0600"})

    first = run(*files)
    again = run(*files)

    assert first["changed"] and first["paths"] == [str(one), str(two)]
    assert not again["changed"] and again["paths"] == [] and again["diff"] == []
    assert one.read_text() == "1\n" and two.read_text() == "2 \u00e4\n"
    assert (mode(one), mode(two), mode(two.parent)) == (0o644, 0o600, 0o755)


def test_check_mode_tells_the_same_and_writes_nothing(run: Run, tmp_path: Path) -> None:
    there, new = tmp_path / "there", tmp_path / "deep/new"
    there.write_text("old\n")
    files = ({"path": str(there)}, {"path": str(new), "content": "x\n"})

    told = run(*files, check=True)

    assert told["paths"] == [str(there), str(new)] and told["changed"]
    assert [(one["before"], one["after"]) for one in told["diff"]] == [("old\n", ""), ("", "x\n")]
    assert there.read_text() == "old\n" and not new.parent.exists()
    assert run(*files)["paths"] == told["paths"] and not there.exists()


def test_what_was_there_is_kept_only_where_asked(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "settings"
    path.write_text("mine\n")

    kept = run({"path": str(path), "content": "new\n"}, backup=True)

    assert Path(kept["backups"][str(path)]).read_text() == "mine\n"
    assert run({"path": str(path)})["backups"] == {} and not path.exists()
    assert not run({"path": str(path)})["changed"]


def test_a_wrong_mode_alone_is_a_change(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "unit"
    path.write_text("same\n")
    path.chmod(0o666)
    wanted = {"path": str(path), "content": "same\n"}

    assert run(wanted, check=True)["changed"] and mode(path) == 0o666
    assert run(wanted)["changed"] and mode(path) == 0o644
    assert not run(wanted)["changed"]


def test_a_folder_in_the_way_gives_one_line(run: Run, tmp_path: Path) -> None:
    answer = run({"path": str(tmp_path), "content": "x\n"})

    assert answer["failed"] and answer["msg"] == f"{tmp_path}: Is a directory"
