"""What a second `provision` costs that finds everything right: its tasks' time against that of the first, in one run.

    make bench                        # on a fresh lab host that it starts and stops
    python benchmarks/provision/run.py

The playbook is `peerlane.gpu.provision`, the model the lab's own, so nothing big is fetched: on a host with a driver
and real weights the first run takes longer, and the ratio is smaller. The second run must report `changed=0`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from peerlane.lab.demo import serving_inventory
from peerlane.lab.state import Paths

ROOT = Path(__file__).resolve().parents[2]
HOST = "bench-provision"


def lab(*words: str) -> None:
    """Run a command of the lab."""
    subprocess.run([sys.executable, "-m", "peerlane.lab", *words], check=True, stdout=sys.stderr)


def inventory(folder: Path) -> Path:
    """Train the lab's model and write an inventory that serves it."""
    model = folder / "lab-tiny"
    subprocess.run(
        [sys.executable, "-m", "peerlane.lab.tiny_model", str(model), "--variant", "a"], check=True, stdout=2
    )
    golden = json.loads((model / "golden.json").read_text(encoding="utf-8"))
    return serving_inventory(folder, Paths.from_environment(), HOST, model, golden)


def tasks_s(hosts: Path) -> tuple[float, str]:
    """Run the playbook; return the seconds between the start of each task and the next, summed, and the recap."""
    environment = os.environ | {
        "ANSIBLE_CALLBACK_PLUGINS": str(Path(__file__).parent / "callback_plugins"),
        "ANSIBLE_CALLBACKS_ENABLED": "task_seconds",
    }
    command = ["ansible-playbook", "-i", str(hosts), "peerlane.gpu.provision"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    spent = re.search(r"^task seconds: ([\d.]+)$", done.stdout, re.MULTILINE)
    recap = re.search(rf"^{HOST} +: (.*)$", done.stdout, re.MULTILINE)
    if done.returncode or not spent or not recap:
        sys.exit(f"provision ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-1000:]}")
    return float(spent[1]), recap[1]


def main() -> None:
    """Provision a fresh host twice and print the ratio."""
    lab("up", HOST)
    try:
        with tempfile.TemporaryDirectory() as folder:
            hosts = inventory(Path(folder))
            first, _ = tasks_s(hosts)
            second, recap = tasks_s(hosts)
    finally:
        lab("down", HOST)
    print(f"first provision   {first:6.1f} s of tasks")
    print(f"second provision  {second:6.1f} s of tasks   {recap}")
    print(f"ratio             {second / first:6.2f}")
    if not re.search(r"\bchanged=0\b", recap):
        sys.exit("the second run changed something")


if __name__ == "__main__":
    main()
