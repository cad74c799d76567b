#!/usr/bin/env python3
"""Cut every recorded output short, spoil it as copying does, and hold each verdict against that of the whole file.

    python tests/prefixes.py FOLDER...      every line end and 200 random byte offsets of every file
    python tests/prefixes.py --sample 5 FOLDER...

Each FOLDER holds recorded outputs of one host, or folders of them. Of a host's files one is cut, the others stay whole.
A cut text may say less than the whole one. It must not end in a traceback, nor in a bug of a rule, and no verdict may
be stronger. With ``known`` for the verdicts with the whole file and those without the file at all, a verdict with the
cut file is stronger where it

* passes a subject of a rule that ``known`` does not pass;
* fails or warns where ``known`` neither fails nor warns for that rule, or does so more mildly;
* is a statement on a higher rung of the evidence ladder than ``known`` has for that rule.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import textwrap
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "collections"), str(ROOT / "src")]

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.evidence import Content, EvidenceSet
from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.finding import SEVERITIES, Finding
from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse import intake, snapshot
from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse.intake import is_silent
from ansible_collections.peerlane.gpu.plugins.plugin_utils.rules import engine

RANDOM_CUTS = 200
_COLUMNS = 80


def crlf(text: str) -> str:
    """Give every line the end that Windows writes."""
    return text.replace("\r\n", "\n").replace("\n", "\r\n")


def prompted(text: str) -> str:
    """Put the prompt of a shell and a command in front."""
    return f"root@host:~# cat recorded\n{text}"


def indented(text: str) -> str:
    """Indent every line by four, as Markdown marks code."""
    return textwrap.indent(text, "    ")


def wrapped(text: str) -> str:
    """Break every line hard at 80 columns, as a terminal's selection does."""
    rows = (row[at : at + _COLUMNS] for row in text.split("\n") for at in range(0, max(len(row), 1), _COLUMNS))
    return "\n".join(rows)


SPOILS: dict[str, Callable[[str], str]] = {
    "as it is": lambda text: text,
    "CRLF": crlf,
    "prompt": prompted,
    "indented": indented,
    "wrapped": wrapped,
}


@dataclass(frozen=True)
class Cut:
    """One text to judge: how it was spoilt, and how many bytes of the original stand in it."""

    spoil: str
    size: int
    data: bytes


def cuts(data: bytes, sample: int | None, seed: str) -> Iterator[Cut]:
    """Yield the whole text and its prefixes, each as it is and spoilt. ``sample``: so many of each kind."""
    chance = random.Random(seed)
    line_ends = [at + 1 for at, byte in enumerate(data) if byte == 10]
    offsets = [chance.randrange(len(data) + 1) for _ in range(RANDOM_CUTS)]
    if sample is not None:
        line_ends = sorted(chance.sample(line_ends, min(sample, len(line_ends))))
        offsets = offsets[:sample]
    for name, spoil in SPOILS.items():
        for size in dict.fromkeys([len(data), *line_ends, *offsets]):
            text = data[:size].decode("utf-8", errors="replace")
            yield Cut(name, size, spoil(text).encode())


class Case:
    """The files of one host, of which one is cut at a time."""

    def __init__(self, name: str, files: Sequence[Path]) -> None:
        self.name = name
        self.data = {path.name: path.read_bytes() for path in files}

    def judge(self, name: str = "", data: bytes | None = None) -> tuple[Finding, ...]:
        """Judge the host, with other bytes for one of its files, or without it."""
        found = intake.Found()
        for one, whole in self.data.items():
            given = data if one == name else whole
            if given is not None:
                found.take(Content(given, size=len(given)), one, one)
        evidence: EvidenceSet = found.evidence(self.name)
        return engine.judge({self.name: snapshot.build(evidence)})[self.name]

    def complaints(self, sample: int | None = None, every: int = 1) -> Iterator[tuple[str, Cut, str]]:
        """Yield (file, cut, what is wrong) for each text that is judged wrongly. ``every``: one cut of so many."""
        whole = self.judge()
        for problem in bugs(whole):
            yield "", Cut("as it is", -1, b""), problem
        for name, data in self.data.items():
            known = (*whole, *self.judge(name))
            for cut in itertools.islice(cuts(data, sample, f"{self.name}/{name}"), len(name) % every, None, every):
                try:
                    findings = self.judge(name, cut.data)
                except Exception:  # whatever it is, it is what this tool looks for: the report has it whole
                    yield name, cut, traceback.format_exc()
                    continue
                for problem in [*bugs(findings), *stronger(findings, known)]:
                    yield name, cut, problem


def bugs(findings: Iterable[Finding]) -> list[str]:
    """Return the rules that raised."""
    return [one.reason for one in findings if "a bug in rule" in one.reason]


def stronger(cut: Iterable[Finding], known: Iterable[Finding]) -> list[str]:
    """Return the verdicts of a cut text that are stronger than those that are known (see the module's text)."""
    passed: set[tuple[str, str]] = set()
    severity: dict[str, int] = {}
    rung: dict[str, int] = {}
    for one in known:
        if one.state == "pass":
            passed |= {(one.rule, one.subject)}
        if one.bad:
            severity[one.rule] = min(severity.get(one.rule, len(SEVERITIES)), SEVERITIES.index(one.severity))
        rung[one.rule] = max(rung.get(one.rule, -1), -1 if one.rung is None else one.rung)
    found = []
    for one in cut:
        if one.state == "pass" and (one.rule, one.subject) not in passed:
            found.append(f"{one.rule} passes {one.subject!r}: {one.title}")
        if one.bad and SEVERITIES.index(one.severity) < severity.get(one.rule, len(SEVERITIES)):
            found.append(f"{one.rule} {one.state}s ({one.severity}) {one.subject!r}: {one.title}")
        if (
            one.state not in ("unknown", "not_applicable")
            and one.rung is not None
            and one.rung > rung.get(one.rule, -1)
        ):
            found.append(f"{one.rule} climbs to rung {one.rung} {one.subject!r}: {one.title}")
    return found


def cases(folder: Path) -> list[Case]:
    """Return the hosts of a folder: itself where it holds files, and each folder below."""
    found = []
    for place in [folder, *sorted(path for path in folder.rglob("*") if path.is_dir())]:
        files = sorted(path for path in place.iterdir() if path.is_file() and not is_silent(path.name))
        files = [path for path in files if path.name != "manifest.json" and b"\0" not in path.read_bytes()[:4096]]
        if files:
            found.append(Case(place.name, files))
    return found


def main() -> int:
    """Run over folders; print each kind of complaint once with an example, and return 1 where there is any."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--sample", type=int, metavar="N", help="only N line ends and N offsets of each file")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="write an example of each complaint there")
    arguments = parser.parse_args()
    started, count, seen = time.monotonic(), 0, Counter[str]()
    for folder in arguments.folders:
        for case in cases(folder):
            count += 1
            for name, cut, problem in case.complaints(arguments.sample):
                kind = problem.strip().splitlines()[-1]
                key = f"{case.name}/{name} [{cut.spoil}] {kind}"
                seen[key] += 1
                if seen[key] > 1:
                    continue
                print(f"{case.name}/{name} [{cut.spoil}, {cut.size} bytes]: {problem.strip()}", flush=True)
                if arguments.keep:
                    arguments.keep.mkdir(parents=True, exist_ok=True)
                    (arguments.keep / f"{len(seen):04d}-{case.name}-{name}").write_bytes(cut.data)
    took = time.monotonic() - started
    print(f"{count} hosts, {sum(seen.values())} complaints ({len(seen)} kinds), {took:.0f} s", file=sys.stderr)
    return 1 if seen else 0


if __name__ == "__main__":
    sys.exit(main())
