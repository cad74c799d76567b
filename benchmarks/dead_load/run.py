"""What a dying model service is said to have died of, and how soon: each death is caused for real on a lab host.

    make bench                                      # on a lab host that it starts and stops
    python benchmarks/dead_load/run.py [CASE...]    # some of them

The engine is llama.cpp under the unit of the role model_service. Each case breaks one thing, starts the service and
lets the module model_ready watch it. ``seconds``: from the fatal line in the log (or the end of the process) to the
verdict; for a service that ends nowhere, from the start of the watch. Exit code 1 where a case is not told right.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "src"))

from peerlane.lab import cgroups, operations, state, tiny_model  # noqa: E402
from peerlane.lab.state import Paths  # noqa: E402
from peerlane.lab.system import LabError, Progress  # noqa: E402

HOST = "dead-load"
UNIT = "peerlane-model@mortal.service"
SERVICE = "/opt/peerlane/services/mortal/current"
PORT = 8000
# The promise: a death is told within this time of its fatal line.
NOTICED_WITHIN_S = 10.0
MODELS = {"a": "", "a-nan": "nan", "a-truncated": "truncated"}
# A unit that can't even be set up fails here; what is said of it is the point.
START = f"systemctl reset-failed {UNIT}; systemctl restart {UNIT} || true"

# Where the machine has the memory controller of cgroup v1, a lab host's systemd can't limit memory. So its init goes
# into a limited group for the moment in which it starts the service, from outside; what it starts stays there.
GROUP = "/sys/fs/cgroup/memory/peerlane-dead-load"
LIMITED = f"""
set -eu
group={GROUP}
back=/sys/fs/cgroup/memory$(sed -n 's/^[0-9]*:memory://p' /proc/@init@/cgroup)
mkdir -p $group
echo @init@ > $group/cgroup.procs
@ssh@ "sed -i '/^--ctx-size$/{{n;s/.*/1000000/}}' {SERVICE}/args; {START}"
echo @init@ > $back/cgroup.procs
echo 100M > $group/memory.limit_in_bytes
"""


@dataclass(frozen=True)
class Case:
    """One death: shell lines that cause it on the host, and what must be said of it.

    ``outside``: lines for the machine that runs the lab, in place of those for the host; ``@init@`` stands for the
    process id of the host's init there, ``@ssh@`` for the words that run a command on the host.
    """

    name: str
    cause: str
    state: str
    says: str
    undo: str = ""
    outside: str = ""
    options: dict[str, Any] = field(default_factory=dict)


def _argument(name: str, value: str) -> str:
    """Return shell lines that change one argument of the release and start the service."""
    place = f"{SERVICE}/args"
    return f"sed -i '/^--{name}$/{{n;s#.*#{value}#}}' {place}; {START}"


def _setting(line: str) -> str:
    """Return shell lines that add one line to the unit's [Service]."""
    place = f"/run/systemd/system/{UNIT}.d"
    return f"mkdir -p {place}; printf '[Service]\\n{line}\\n' > {place}/90.conf; systemctl daemon-reload; "


UNSET = f"rm -rf /run/systemd/system/{UNIT}.d; systemctl daemon-reload"
CASES = (
    Case("bad flag", f"printf -- '--no-such-flag\\n1\\n' >> {SERVICE}/args; {START}", "dead", "unrecognized arguments"),
    Case("missing model", _argument("model", "/opt/models/none"), "dead", "model /opt/models/none does not exist"),
    Case("truncated weights", _argument("model", "/opt/models/a-truncated"), "dead", "not within the file bounds"),
    Case(
        "bad file",
        "mkdir -p /opt/models/bad; sed s/token_embd/token_emcd/ /opt/models/a/model.gguf > /opt/models/bad/model.gguf; "
        + _argument("model", "/opt/models/bad"),
        "dead",
        "tensor 'token_embd.weight' not found",
    ),
    Case("NaN weights", _argument("model", "/opt/models/a-nan"), "degraded", "computes NaN"),
    Case(
        "port in use",
        f"systemctl stop {UNIT}; systemd-run --quiet --unit=squatter python3 -m http.server {PORT}; sleep 1; {START}",
        "dead",
        "the port is taken",
        undo="systemctl stop squatter",
    ),
    Case(
        "no memory (rlimit)",
        _setting("LimitAS=1G") + _argument("ctx-size", "4000000"),
        "dead",
        "not enough memory",
        undo=UNSET,
    ),
    Case(
        "no memory (cgroup)",
        _setting("MemoryMax=100M\\nMemorySwapMax=0") + _argument("ctx-size", "1000000"),
        "dead",
        "for lack of memory",
        undo=UNSET,
        outside=LIMITED if Path("/sys/fs/cgroup/memory").is_dir() else "",
    ),
    Case(
        "disk full",
        f"systemctl stop {UNIT}; rm -rf /var/cache/peerlane/mortal /var/cache/private/peerlane; "
        f"mount -t tmpfs -o size=4k,nr_inodes=1 none /var/cache/peerlane; {START}",
        "dead",
        "No space left on device",
        undo="umount /var/cache/peerlane",
    ),
    Case(
        "kill -9",
        f"{START}; pid=$(systemctl show --value --property=MainPID {UNIT}); kill -STOP $pid; "
        "systemd-run --quiet --on-active=6 kill -9 $pid",
        "dead",
        "killed (SIGKILL)",
    ),
    Case(
        "SIGSTOP",
        f"{START}; kill -STOP $(systemctl show --value --property=MainPID {UNIT})",
        "stalled",
        "is stopped (by SIGSTOP",
        undo=f"systemctl kill --signal=KILL {UNIT}",
        options={"stall_after_s": 8},
    ),
)


def play(cases: Sequence[Case], paths: Paths, golden: dict[str, Any], models: Path, out: Path) -> list[dict[str, Any]]:
    """Return the playbook: the engine and the service as a user gets them, then each case in turn."""
    ready = {
        "unit": UNIT,
        "url": f"http://127.0.0.1:{PORT}",
        "model": "tiny",
        "model_path": "/opt/models/a",
        "timeout_s": 60,
        "restarts_before": 0,
        **golden,
    }
    tasks: list[dict[str, Any]] = [
        {
            "ansible.builtin.copy": {
                "src": f"{models}/{{{{ item }}}}/model.gguf",
                "dest": "/opt/models/{{ item }}/",
                "directory_mode": "0755",
                "mode": "0644",
            },
            "loop": list(MODELS),
        },
        {"ansible.builtin.include_role": {"name": "peerlane.gpu.inference_engine"}},
        {
            "ansible.builtin.include_role": {"name": "peerlane.gpu.model_service"},
            "vars": {
                "model_service_name": "mortal",
                "model_service_model_name": "tiny",
                "model_service_model_path": "/opt/models/a",
                "model_service_args": {"threads": 1, "parallel": 1, "ctx_size": 4096},
                "model_service_golden": golden,
            },
        },
        {"ansible.builtin.shell": f"cp {SERVICE}/args /root/args"},
    ]
    for number, case in enumerate(cases):
        seen = f"__seen_{number}"
        tasks += [
            {
                "ansible.builtin.command": f"systemctl show --value --property=InvocationID {UNIT}",
                "register": "__before",
            },
            {"ansible.builtin.shell": case.cause}
            if not case.outside
            else {"ansible.builtin.shell": _outside(case, paths), "delegate_to": "localhost"},
            {
                "peerlane.gpu.model_ready": {
                    **ready,
                    **case.options,
                    "invocation_before": "{{ __before.stdout_lines[0] }}",
                },
                "register": seen,
                "ignore_errors": True,
            },
            {
                "ansible.builtin.copy": {
                    "dest": f"{out}/{number}.json",
                    "content": f"{{{{ {seen} | to_json }}}}",
                    "mode": "0644",
                },
                "delegate_to": "localhost",
                "become": False,
            },
            {
                "ansible.builtin.shell": f"{case.undo or 'true'}\nsystemctl stop {UNIT}; cp /root/args {SERVICE}/args",
            },
        ]
        if case.outside:
            tasks.append({"ansible.builtin.command": f"rmdir {GROUP}", "delegate_to": "localhost"})
    return [{"hosts": HOST, "gather_facts": False, "become": True, "tasks": tasks}]


def _outside(case: Case, paths: Paths) -> str:
    address = operations.host_address(state.load(paths), state.load(paths).hosts[HOST])
    ssh = f"ssh -i {paths.key} -o UserKnownHostsFile={paths.known_hosts} root@{address}"
    return case.outside.replace("@init@", str(cgroups.leader(paths.lab_id, HOST))).replace("@ssh@", ssh)


def verdicts(cases: Sequence[Case], paths: Paths, folder: Path, progress: bool) -> list[dict[str, Any]]:
    """Cause each death on the running lab host; return what model_ready said of each."""
    models = paths.images.parent / "tiny-models"
    for name, fault in MODELS.items():
        if not (models / name / "golden.json").exists():
            tiny_model.make(models / name, "a", fault)
    playbook = folder / "play.yml"
    tasks = play(cases, paths, tiny_model.golden("a"), models, folder)
    playbook.write_text(yaml.safe_dump(tasks, sort_keys=False), encoding="utf-8")
    subprocess.run(
        ["ansible-playbook", "-i", str(paths.inventory), str(playbook)],
        cwd=ROOT,
        check=True,
        stdin=subprocess.DEVNULL,
        stdout=None if progress else subprocess.DEVNULL,
    )
    return [json.loads((folder / f"{number}.json").read_text(encoding="utf-8")) for number in range(len(cases))]


def seconds(said: dict[str, Any]) -> float:
    """Return how long it took until the verdict."""
    noticed = (said.get("cause") or {}).get("noticed_s")
    return float(said["waited_s"] if noticed is None else noticed)


def complaint(case: Case, said: dict[str, Any]) -> str:
    """Return what is wrong with what was said of a case, "" where it is right."""
    if said.get("state") != case.state:
        return f"state {said.get('state')}, not {case.state}"
    if case.says not in said["msg"]:
        return f"does not say {case.says!r}"
    if case.state == "dead" and seconds(said) > NOTICED_WITHIN_S:
        return f"took more than {NOTICED_WITHIN_S:g} s"
    return ""


def main() -> int:
    """Run the cases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(case.name for case in CASES))
    parser.add_argument("--verbose", action="store_true", help="show the playbook as it runs")
    options = parser.parse_args()
    if unknown := set(options.cases) - {case.name for case in CASES}:
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    cases = [case for case in CASES if not options.cases or case.name in options.cases]
    paths = Paths.from_environment()
    started = time.monotonic()
    try:
        errors = operations.up(paths, [HOST], operations.Wish(), Progress())
    except LabError as error:
        errors = [str(error)]
    if errors:
        print("\n".join(errors), file=sys.stderr)
        return 3
    try:
        with tempfile.TemporaryDirectory() as folder:
            found = verdicts(cases, paths, Path(folder), options.verbose)
    finally:
        operations.down(paths, [HOST], Progress())
    wrong = 0
    print(f"{'case':<20} {'state':<9} {'seconds':>7}  cause")
    for case, said in zip(cases, found, strict=True):
        problem = complaint(case, said)
        wrong += bool(problem)
        print(f"{case.name:<20} {said.get('state', '?'):<9} {seconds(said):>7.1f}  {said.get('msg', '')}")
        if problem:
            print(f"  WRONG: {problem}")
    print(f"{len(cases) - wrong} of {len(cases)} told right, in {time.monotonic() - started:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
