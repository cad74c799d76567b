"""Run the real command line as a user does: as a process of its own, in a folder that is not the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment without the settings of whoever runs the tests."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("ANSIBLE_", "XDG_", "PEERLANE_"))}
    return {
        **env,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "collections")]),
        "PATH": os.pathsep.join([sysconfig.get_path("scripts"), env["PATH"]]),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "NO_COLOR": "1",
    }


@pytest.fixture
def peerlane(tmp_path: Path, environment: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run ``peerlane WORDS`` and return what it said. No run may end in a traceback, whatever it was given."""
    work = tmp_path / "work"
    work.mkdir()

    def run(*words: object, stdin: str = "", timeout_s: int = 120) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "peerlane", *map(str, words)],
            cwd=work,
            env=environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done

    run.work = work  # type: ignore[attr-defined]
    return run
