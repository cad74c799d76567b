"""How much one round trip saves: the snapshot of a host against the same sources as separate tasks, in one run.

    make bench                        # on a lab host that it starts and stops
    python benchmarks/audit/run.py HOST -i INVENTORY

All arms go over the same SSH connection, in turns; the figures are ratios of the medians. The second arm is what a
playbook of `command` and `slurp` tasks costs: one task, and so one round trip, per source. The third is a bare
`ansible.builtin.setup`, which most playbooks run before anything else. Last comes how fast recorded hosts are judged
(`judge.py`).
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "collections"), str(ROOT / "src")]

from ansible_collections.peerlane.gpu.plugins.module_utils.evidence_sources import SOURCES  # noqa: E402
from peerlane.lab.state import Paths  # noqa: E402


def separate_tasks() -> list[dict[str, object]]:
    """Return one task per source. A source that the host lacks ends at once there, too, so it is allowed to fail."""
    tasks: list[dict[str, object]] = []
    for source in SOURCES:
        command = source.get("argv") or ["sh", "-c", f"cat {source.get('path', '/proc/version')}"]
        tasks.append(
            {
                "name": source["source"],
                "ansible.builtin.command": {"argv": command},
                "changed_when": False,
                "ignore_errors": True,
            }
        )
    return tasks


def play(tasks: list[dict[str, object]], host: str, folder: Path, name: str) -> Path:
    """Write a playbook that runs these tasks."""
    path = folder / f"{name}.yml"
    path.write_text(yaml.safe_dump([{"hosts": host, "gather_facts": False, "become": True, "tasks": tasks}]))
    return path


def seconds(playbook: Path, inventory: str) -> float:
    """Run a playbook and return its wall time."""
    started = time.monotonic()
    subprocess.run(
        ["ansible-playbook", "-i", inventory, str(playbook)],
        cwd=ROOT,
        check=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    return time.monotonic() - started


def main() -> int:
    """Print the ratio."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("host", nargs="?", default="bench")
    options.add_argument("-i", "--inventory")
    options.add_argument("-n", "--runs", type=int, default=3)
    args = options.parse_args()
    lab = [sys.executable, "-m", "peerlane.lab"]
    own = args.inventory is None
    if own:
        subprocess.run([*lab, "up", args.host], check=True)
        args.inventory = str(Paths.from_environment().inventory)
    try:
        with tempfile.TemporaryDirectory() as name:
            one = play([{"peerlane.gpu.host_evidence": {}}], args.host, Path(name), "one")
            many = play(separate_tasks(), args.host, Path(name), "many")
            setup = play([{"ansible.builtin.setup": {}}], args.host, Path(name), "setup")
            empty = play([{"ansible.builtin.meta": "noop"}], args.host, Path(name), "empty")
            seconds(one, args.inventory)
            books = (one, many, setup, empty)
            rows = [tuple(seconds(book, args.inventory) for book in books) for _ in range(args.runs)]
    finally:
        if own:
            subprocess.run([*lab, "down", args.host], check=True)
    single, separate, setup_s, start = (statistics.median(column) for column in zip(*rows, strict=True))
    ratio = statistics.median((row[1] - row[3]) / (row[0] - row[3]) for row in rows)
    to_setup = statistics.median((row[0] - row[3]) / (row[2] - row[3]) for row in rows)
    print(f"sources: {len(SOURCES)}, runs: {args.runs} of each arm, in turns")
    print(f"one call: {single:.2f} s, separate tasks: {separate:.2f} s, a bare setup: {setup_s:.2f} s")
    print(f"ansible-playbook without a task: {start:.2f} s")
    print(f"separate tasks to one call: {separate / single:.1f}x, without ansible's own start: {ratio:.1f}x")
    print(f"one call to a bare setup: {single / setup_s:.2f}x, without ansible's own start: {to_setup:.2f}x")
    print("== judging what was recorded", flush=True)
    return subprocess.run([sys.executable, str(ROOT / "benchmarks" / "audit" / "judge.py")], check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
