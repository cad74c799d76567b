"""Run one of the collection's playbooks, show its progress, and say how each host fared."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import ansible_runner

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.errors import InputError
from ansible_collections.peerlane.gpu.plugins.plugin_utils.model import preflight
from peerlane import failures, hosts, output
from peerlane.progress import Progress, progress

# Each run leaves its log; the last ones are kept.
_KEPT_RUNS = 20

# A dry run leaves nothing on a host, not even Ansible's own temporary folder in the home of the login user: where the
# session has a folder of its own, it ends with the session.
_CHECK_ENVIRONMENT = {"ANSIBLE_REMOTE_TEMP": "${XDG_RUNTIME_DIR:-$HOME}/.ansible/tmp"}

# Ansible ends within two seconds of a SIGINT, also on a busy machine.
_PATIENCE_S = 10.0

# Lines with this mark come from action plugins that say how far a long task is: "peerlane: HOST: text".
_NOTE = "peerlane: "


@dataclass
class Host:
    """How one host fared. ``lines``: what and what to do, where it failed. ``changed``: changed tasks by role."""

    state: str = "ok"
    phase: str = ""
    lines: tuple[str, ...] = ()
    blocked: bool = False
    bad_input: bool = False
    changed: Counter[str] = field(default_factory=Counter)


@dataclass
class Outcome:
    """How a run ended. ``results``: for each action of this collection, its last result by host."""

    hosts: dict[str, Host] = field(default_factory=dict)
    results: dict[str, dict[str, Mapping[str, Any]]] = field(default_factory=dict)
    error: str = ""
    interrupted: bool = False
    log: Path | None = None

    def bad(self) -> list[tuple[str, Host]]:
        """Return the hosts that did not finish."""
        return [(name, host) for name, host in sorted(self.hosts.items()) if host.state != "ok"]

    def exit_code(self) -> int:
        """Return the exit code of design section 8: the worst that happened to any host."""
        if self.interrupted:
            return output.EXIT_INTERRUPTED
        states = {host.state for host in self.hosts.values()}
        if "unreachable" in states:
            return output.EXIT_UNREACHABLE
        failed = [host for host in self.hosts.values() if host.state == "failed"]
        if self.error or any(not host.blocked and not host.bad_input for host in failed):
            return output.EXIT_FAILED
        if any(host.bad_input for host in failed):
            return output.EXIT_USAGE
        return output.EXIT_BLOCKING if failed else output.EXIT_OK

    def complain(self) -> None:
        """Print one line for each problem of each host that did not finish."""
        for name, host in self.bad():
            for line in host.lines:
                output.say(f"{name}: {host.phase}: {line}")
        if self.error:
            output.say(f"peerlane: {self.error}")
        if self.interrupted:
            output.say("peerlane: interrupted; run the same command again, finished steps are not repeated")
        elif (
            self.error or any(not host.blocked and not host.bad_input for _, host in self.bad())
        ) and self.log is not None:
            output.say(f"peerlane: the whole log is {self.log}")


def arguments_of(
    verb: str, target: hosts.Target, extra: Mapping[str, Any], flags: Sequence[str] = ()
) -> tuple[str, list[str]]:
    """Return the playbook and its arguments, as ``ansible-playbook`` takes them."""
    words: list[str] = []
    for source in target.inventory:
        words += ["-i", source]
    if target.limit:
        words += ["-l", target.limit]
    words += flags
    if extra:
        words += ["-e", json.dumps(extra, sort_keys=True)]
    return f"peerlane.gpu.{verb}", words


def run(
    verb: str,
    target: hosts.Target,
    *,
    extra: Mapping[str, Any],
    flags: Sequence[str] = (),
    verbose: bool = False,
    become_password: str | None = None,
    folder: Path | None = None,
    live_results: frozenset[str] = frozenset(),
) -> Outcome:
    """Run a playbook to its end and return how each host fared. Ctrl-C stops it in good order.

    ``live_results``: names in ``Outcome.results`` whose text is printed as soon as it is there.
    """
    playbook, words = arguments_of(verb, target, extra, flags)
    if verbose:
        output.say(shlex.join(["ansible-playbook", playbook, *words]))
    folder = folder or run_folder(verb)
    with progress(target.hosts, verbose) as shown, _password_file(become_password) as password_env:
        watch = _Watch(shown, live_results, target.addresses)
        runner = ansible_runner.interface.init_runner(
            private_data_dir=str(folder),
            project_dir=str(Path.cwd()),
            playbook=playbook,
            cmdline=shlex.join(words),
            envvars={**hosts.environment(), **password_env, **(_CHECK_ENVIRONMENT if "--check" in flags else {})},
            settings={"pexpect_timeout": 1},
            suppress_env_files=True,
            quiet=True,
            event_handler=watch.event,
            # Without one, runner installs its own SIGINT handler and kills with SIGKILL.
            cancel_callback=lambda: watch.interrupted and watch.pid is None,
        )
        if "ANSIBLE_HOST_KEY_CHECKING" not in os.environ:
            runner.config.env.pop("ANSIBLE_HOST_KEY_CHECKING", None)  # runner would switch the check off
        thread = threading.Thread(target=runner.run)
        with _signals(watch):
            thread.start()
            while thread.is_alive():
                thread.join(1.0)
                shown.tick()
                watch.insist()
    artifacts = Path(runner.config.artifact_dir)
    (artifacts / "command").unlink(missing_ok=True)  # runner writes the whole environment there
    return watch.outcome(int(runner.rc if runner.rc is not None else 1), artifacts / "stdout")


class _Watch:
    """Follow the runner's events. They arrive in the runner's thread, one after the other."""

    def __init__(self, shown: Progress, live_results: frozenset[str], addresses: Mapping[str, str]) -> None:
        self.shown = shown
        self.addresses = addresses
        self.live_results = live_results
        self.pid: int | None = None
        self.interrupted = False
        self._asked = 0.0
        self._hosts: dict[str, Host] = {name: Host() for name in shown.rows}
        self._results: dict[str, dict[str, Mapping[str, Any]]] = {}
        self._stats: Mapping[str, Any] = {}
        self._play = ""
        self._errors: list[str] = []
        self._touched: set[str] = set()

    def interrupt(self, _number: int, _frame: FrameType | None) -> None:
        """Pass a signal on as SIGINT, so that Ansible ends its workers itself. A second one does not wait."""
        if self.interrupted:
            self._end_all()
            return
        self.shown.show("peerlane: stopping; Ctrl-C again ends it at once")
        self.interrupted, self._asked = True, time.monotonic()
        _send(self.pid)

    def insist(self) -> None:
        """End a run that did not heed the signal. Ansible can lose its KeyboardInterrupt, and goes on then."""
        if self.interrupted and time.monotonic() - self._asked > _PATIENCE_S:
            self._asked = time.monotonic()
            self._end_all()

    def _end_all(self) -> None:
        """Signal the workers, which end their own ssh, and then Ansible, whose second SIGINT is not caught any more."""
        if self.pid is not None:
            try:
                children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text(encoding="ascii").split()
            except OSError:
                children = []
            for child in children:
                _send(int(child))
            _send(self.pid)

    def event(self, event: Mapping[str, Any]) -> bool:
        """Take one event; False keeps it out of the run's folder."""
        if isinstance(event.get("pid"), int):
            self.pid = event["pid"]
        name, data = str(event.get("event") or ""), event.get("event_data") or {}
        if name == "playbook_on_play_start":
            self._play = str(data.get("name") or "")
            self.shown.start_phase(self._play)
        elif name == "playbook_on_stats":
            self._stats = data
        elif name in ("verbose", "error", "warning", "system_warning"):
            self._said(str(event.get("stdout") or ""))
        elif name == "runner_on_file_diff":
            self.shown.result(failures.plain(str(event.get("stdout") or "")) + "\n")
        elif name.startswith("runner_on_") and data.get("host"):
            self._host_event(name.removeprefix("runner_on_"), str(data["host"]), data)
        return False

    def _host_event(self, kind: str, name: str, data: Mapping[str, Any]) -> None:
        phase, task = str(data.get("role") or self._play).rpartition(".")[2], str(data.get("task") or "")
        result = data.get("res") or {}
        host = self._hosts.setdefault(name, Host())
        self._touched.add(name)
        action = str(data.get("resolved_action") or data.get("task_action") or "")
        if action.startswith("peerlane.gpu.") and kind in ("ok", "failed"):
            stage = str(result.get("stage") or "")
            key = action.rpartition(".")[2] + (f".{stage}" if stage else "")
            self._results.setdefault(key, {})[name] = result
            if key in self.live_results:
                self.shown.result(f"{result.get('msg')}\n\n")
        if kind == "start":
            self.shown.start_task(name, phase, task)
        elif kind == "ok":
            host.changed[phase] += bool(result.get("changed"))
            self.shown.end_task(name, "ok", bool(result.get("changed")))
        elif kind == "skipped":
            self.shown.end_task(name, "ok")
        elif kind == "failed" and not data.get("ignore_errors"):
            host.phase = phase
            host.blocked, host.bad_input = bool(result.get("peerlane_blocking")), bool(result.get("bad_input"))
            host.lines = tuple(failures.failure_lines(result))
            self.shown.end_task(name, "failed")
        elif kind == "unreachable":
            host.phase = phase
            host.lines = (self._unreachable(result, name),)
            self.shown.end_task(name, "unreachable")

    def _unreachable(self, result: Mapping[str, Any], name: str) -> str:
        message = str(result.get("msg") or "")
        sudo = preflight.become_problem(message, "")
        if sudo is not None:
            return sudo.line()
        return failures.unreachable_line(message, self.addresses.get(name, name))

    def _said(self, text: str) -> None:
        for line in text.splitlines():
            line = failures.plain(line)
            if line.startswith(_NOTE):
                host, _, note = line.removeprefix(_NOTE).partition(": ")
                self.shown.note(host, note)
            elif line.startswith(("[ERROR]", "ERROR!")):
                self._errors.append(line.removeprefix("[ERROR]:").removeprefix("ERROR!").strip())
            elif self.shown.verbose and line.strip():
                self.shown.show(line)

    def outcome(self, code: int, log: Path) -> Outcome:
        """Join what was seen with Ansible's own account of each host: a rescued failure is none."""
        failed, dark = self._stats.get("failures") or {}, self._stats.get("dark") or {}
        for name, host in self._hosts.items():
            host.state = "unreachable" if name in dark else "failed" if name in failed else "ok"
            if host.state == "ok":
                host.lines = ()
        error = ""
        if code != 0 and not self.interrupted and not failed and not dark:
            said = self._errors[0] if self._errors else f"ansible-playbook ended with {code} and said nothing"
            error = failures.one_line(said)
        if not self.interrupted and not self._touched and not error:
            error = "no host took part; does the inventory have hosts outside the group hypervisors?"
        return Outcome(self._hosts, self._results, error, self.interrupted, log if log.exists() else None)


def _send(pid: int | None) -> None:
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT)


@contextmanager
def _signals(watch: _Watch) -> Iterator[None]:
    before = {one: signal.signal(one, watch.interrupt) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _password_file(password: str | None) -> Iterator[dict[str, str]]:
    """Hand the sudo password to Ansible in a file that only this user can read, for the time of the run."""
    if password is None:
        yield {}
        return
    descriptor, place = tempfile.mkstemp(prefix="peerlane-", dir=os.environ.get("XDG_RUNTIME_DIR") or None)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(password + "\n")
        yield {"ANSIBLE_BECOME_PASSWORD_FILE": place}
    finally:
        Path(place).unlink(missing_ok=True)


def run_folder(verb: str) -> Path:
    """Make the folder of a new run, and remove the oldest ones."""
    runs = output.state_folder() / "runs"
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    folder = runs / f"{stamp}-{verb}-{os.getpid()}"
    try:
        folder.mkdir(parents=True, mode=0o700)
    except OSError as error:
        raise InputError(
            f"cannot be made: {error.strerror}", str(folder), "set XDG_STATE_HOME to a folder of yours"
        ) from None
    for old in sorted(one for one in runs.iterdir() if one.is_dir())[:-_KEPT_RUNS]:
        shutil.rmtree(old, ignore_errors=True)
    return folder
