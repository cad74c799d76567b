"""When the full disk ends, what was written, changed and deleted meanwhile goes to where it belongs."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from peerlane.lab.inside import disk_full


def test_new_and_changed_entries_arrive_with_their_modes(tmp_path: Path) -> None:
    upper, lower = tmp_path / "upper", tmp_path / "lower"
    (lower / "kept").mkdir(parents=True)
    (lower / "kept/old").write_text("old")
    (lower / "changed").write_text("before")
    (upper / "kept").mkdir(parents=True)
    (upper / "kept/new").write_text("new")
    (upper / "changed").write_text("after")
    (upper / "changed").chmod(0o750)
    (upper / "link").symlink_to("changed")
    (upper / "made/deep").mkdir(parents=True)
    disk_full.merge(upper, lower)
    assert sorted(str(path.relative_to(lower)) for path in lower.rglob("*")) == [
        "changed", "kept", "kept/new", "kept/old", "link", "made", "made/deep",
    ]  # fmt: skip
    assert (lower / "changed").read_text() == "after"
    assert stat.S_IMODE((lower / "changed").stat().st_mode) == 0o750
    assert (lower / "link").readlink() == Path("changed")


def test_a_directory_in_the_place_of_a_file_and_the_other_way(tmp_path: Path) -> None:
    upper, lower = tmp_path / "upper", tmp_path / "lower"
    (lower / "tree/inner").mkdir(parents=True)
    (lower / "file").write_text("x")
    (upper / "file").mkdir(parents=True)
    (upper / "tree").write_text("now a file")
    disk_full.merge(upper, lower)
    assert (lower / "file").is_dir()
    assert (lower / "tree").read_text() == "now a file"


@pytest.mark.skipif(os.geteuid() != 0, reason="an overlay's mark of a deleted file can only be made by root")
def test_deleted_entries_go(tmp_path: Path) -> None:
    upper, lower = tmp_path / "upper", tmp_path / "lower"
    (lower / "tree/inner").mkdir(parents=True)
    (lower / "file").write_text("x")
    upper.mkdir()
    for name in ("file", "tree"):
        os.mknod(upper / name, stat.S_IFCHR, 0)
    disk_full.merge(upper, lower)
    assert list(lower.iterdir()) == []
