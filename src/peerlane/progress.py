"""Progress on stderr: a live table with one line per host on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass, field

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from peerlane.output import say, write_result

# A log must show that a long task is alive, and must not be made of such lines.
_STILL_S = 30.0
_NOTE_S = 15.0


@dataclass
class Row:
    """What one host is at. ``started`` is a monotonic time in seconds, None where nothing runs."""

    phase: str = ""
    task: str = ""
    state: str = "waits"
    started: float | None = None
    changed: int = 0
    note: str = ""
    said: float = field(default_factory=time.monotonic)


class Progress:
    """The state of all hosts, and plain lines about it. Called from the runner's thread and from the main one."""

    def __init__(self, hosts: tuple[str, ...], verbose: bool) -> None:
        self.rows = {host: Row() for host in hosts}
        self.verbose = verbose
        self.phase = ""
        self._began = time.monotonic()
        self._lock = threading.Lock()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def start_phase(self, phase: str) -> None:
        """Say that a play or a role begins."""
        if phase != self.phase:
            self.phase = phase
            self._line(phase)

    def start_task(self, host: str, phase: str, task: str) -> None:
        """Say that a host begins a task."""
        with self._lock:
            row = self.rows.setdefault(host, Row())
            row.phase, row.task, row.note, row.state = phase, task, "", "runs"
            row.started = row.said = time.monotonic()
        self.start_phase(phase)
        if self.verbose:
            self._line(f"{host}: {phase}: {task}")

    def end_task(self, host: str, state: str, changed: bool = False) -> None:
        """Say how a host's task ended: ok, failed, unreachable."""
        with self._lock:
            row = self.rows.setdefault(host, Row())
            row.state, row.started, row.note = state, None, ""
            row.changed += changed
            phase, task = row.phase, row.task
        if changed:
            self._line(f"{host}: {phase}: {task}: changed")
        elif state in ("failed", "unreachable"):
            self._line(f"{host}: {phase}: {task}: {state}")

    def note(self, host: str, text: str) -> None:
        """Show what a long task says about itself."""
        with self._lock:
            row, now = self.rows.setdefault(host, Row()), time.monotonic()
            first = not row.note
            row.note = text
            if not first and now - row.said < _NOTE_S:
                return
            row.said = now
        self._line(f"{host}: {text}")

    def show(self, text: str) -> None:
        """Show a line that belongs to no host."""
        say(text)

    def result(self, text: str) -> None:
        """Write a part of the result while the run goes on."""
        write_result(text)

    def tick(self) -> None:
        """Say of tasks that take long that they are still at it. Called about once a second."""
        now = time.monotonic()
        with self._lock:
            late = [
                (host, row.phase, row.task, now - row.started)
                for host, row in self.rows.items()
                if row.started is not None and now - row.said >= _STILL_S
            ]
            for host, *_ in late:
                self.rows[host].said = now
        for host, phase, task, seconds in late:
            self._line(f"{host}: {phase}: {task}: still at it after {seconds:.0f} s")

    def elapsed_s(self) -> float:
        """Return the seconds since the run began."""
        return time.monotonic() - self._began

    def _line(self, text: str) -> None:
        say(f"[{self.elapsed_s():5.0f} s] {text}")


class LiveProgress(Progress):
    """The same as a table that is drawn anew four times a second, and gone at the end."""

    def __init__(self, hosts: tuple[str, ...], verbose: bool) -> None:
        super().__init__(hosts, verbose)
        self._console = Console(stderr=True, highlight=False)
        self._live = Live(
            console=self._console,
            get_renderable=self._table,
            refresh_per_second=4,
            transient=True,
            redirect_stdout=False,
        )

    def __enter__(self) -> LiveProgress:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, text: str) -> None:
        """Show a line above the table."""
        self._console.print(Text(text))

    def result(self, text: str) -> None:
        """Write a part of the result; the table makes room for it, as both may be on one terminal."""
        self._live.stop()
        write_result(text)
        self._live.start()

    def tick(self) -> None:
        """The table itself shows how long a task takes."""

    def _line(self, text: str) -> None:
        if self.verbose:
            self._console.print(Text(f"[{self.elapsed_s():5.0f} s] {text}", style="dim"))

    def _table(self) -> Group:
        table = Table(box=None, padding=(0, 2, 0, 0), show_header=False, expand=True)
        for _ in range(2):
            table.add_column(no_wrap=True)
        table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        table.add_column(justify="right", no_wrap=True)
        now = time.monotonic()
        with self._lock:
            rows = [(host, Row(**vars(row))) for host, row in self.rows.items()]
        for host, row in rows:
            style = {"failed": "red", "unreachable": "red", "runs": "cyan"}.get(row.state, "")
            took = f"{now - row.started:.0f} s" if row.started is not None else row.state
            table.add_row(
                Text(host, style="bold"), Text(row.phase), Text(row.note or row.task), Text(took, style=style)
            )
        return Group(table, Text(f"{self.phase or 'starts'} · {self.elapsed_s():.0f} s", style="dim"))


def progress(hosts: tuple[str, ...], verbose: bool) -> Progress:
    """Return the live table where stderr is a terminal, plain lines where it is not."""
    return LiveProgress(hosts, verbose) if sys.stderr is not None and sys.stderr.isatty() else Progress(hosts, verbose)
