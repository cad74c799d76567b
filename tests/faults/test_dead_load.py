"""Deaths of a model service, each caused for real: the state, the cause, and how soon they are told."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from test_lab import IMAGES, REPOSITORY, Lab

from peerlane.lab.state import Paths

pytestmark = [pytest.mark.lab, pytest.mark.deep]


def benchmark():
    """The module of benchmarks/dead_load, which causes the deaths."""
    spec = importlib.util.spec_from_file_location("dead_load", REPOSITORY / "benchmarks/dead_load/run.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["dead_load"] = module
    spec.loader.exec_module(module)
    return module


def test_each_death_is_told_with_its_cause_within_ten_seconds(tmp_path: Path):
    dead_load = benchmark()
    lab = Lab(Paths(tmp_path.resolve() / "lab", IMAGES))
    try:
        lab.ok("up", dead_load.HOST, timeout_s=600)
        found = dead_load.verdicts(dead_load.CASES, lab.paths, tmp_path, progress=True)
        told = {case.name: dead_load.complaint(case, said) for case, said in zip(dead_load.CASES, found, strict=True)}
        assert len(told) >= 11
        assert {name: wrong for name, wrong in told.items() if wrong} == {}
    finally:
        lab.run("down", "--all")
