"""No cut and no spoilt copy of a recorded output says more than the whole one: a sample of tests/prefixes.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.finding import Finding

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tests"))
import prefixes  # noqa: E402

FOLDERS = (ROOT / "tests/fixtures", ROOT / "docs/examples")
# Of each file and for each of the five ways of being spoilt: so many line ends and random offsets, one cut of EVERY.
SAMPLE, EVERY = 2, 6


@pytest.mark.parametrize(
    "case", [one for folder in FOLDERS for one in prefixes.cases(folder)], ids=lambda one: one.name
)
def test_no_verdict_is_stronger_than_on_the_whole_file(case):
    complaints = [
        f"{name} [{cut.spoil}, {cut.size}]: {problem}" for name, cut, problem in case.complaints(SAMPLE, EVERY)
    ]

    assert complaints == []


def finding(state, rule="D5", subject="", severity="high", rung=None):
    return Finding(rule, "h", state, "title", severity=severity, subject=subject, rung=rung)


@pytest.mark.parametrize(
    ("cut", "known", "complaints"),
    [
        (finding("pass"), finding("fail"), 1),
        (finding("pass"), finding("pass"), 0),
        (finding("pass", subject="a"), finding("pass", subject="b"), 1),
        (finding("fail"), finding("unknown"), 1),
        (finding("fail", subject="a"), finding("fail", subject="b"), 0),
        (finding("warn", severity="low"), finding("fail"), 0),
        (finding("fail", severity="critical"), finding("fail"), 1),
        (finding("unknown"), finding("fail"), 0),
        (finding("info", rung=2), finding("info", rung=0), 1),
        (finding("info", rung=0), finding("info", rung=2), 0),
        (finding("unknown", rung=2), finding("info", rung=0), 0),
    ],
)
def test_what_stronger_means(cut, known, complaints):
    assert len(prefixes.stronger([cut], [known])) == complaints


def test_the_cuts_are_prefixes_and_the_whole_text_is_one_of_them():
    data = b"a\nbb\nccc\n" * 20
    found = list(prefixes.cuts(data, None, "seed"))

    assert {cut.spoil for cut in found} == set(prefixes.SPOILS)
    for cut in found:
        if cut.spoil == "as it is":
            assert data.startswith(cut.data)
            assert cut.size == len(cut.data)
    assert {at + 1 for at, byte in enumerate(data) if byte == 10} <= {cut.size for cut in found}
    assert any(cut.data == prefixes.crlf(data.decode()).encode() for cut in found if cut.spoil == "CRLF")
