# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Ansible callback: print how long all tasks of a run took together."""

from __future__ import annotations

import time
from typing import Any

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = r"""
name: task_seconds
type: aggregate
short_description: Print how long all tasks of a run took together
description:
  - Sums the time from the start of each task to the start of the next. Starting Ansible is left out.
"""


class CallbackModule(CallbackBase):
    """Sums the time of the tasks."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "task_seconds"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self) -> None:
        """Start with no task."""
        super().__init__()
        self.started: float | None = None

    def v2_playbook_on_task_start(self, task: Any, is_conditional: bool) -> None:
        """Remember when the first task starts."""
        self.started = self.started or time.monotonic()

    def v2_playbook_on_stats(self, stats: Any) -> None:
        """Print the sum."""
        self._display.display(f"task seconds: {time.monotonic() - (self.started or time.monotonic()):.2f}")
