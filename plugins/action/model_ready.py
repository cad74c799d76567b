# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Controller half of ``model_ready``: repeats the step on the host, shows progress, judges what was seen."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import Any

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from ansible_collections.peerlane.gpu.plugins.plugin_utils.model import ready
from ansible_collections.peerlane.gpu.plugins.plugin_utils.model.progress import duration_text
from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse import engine_log

display = Display()

# A stage is said when it begins; while it lasts, new figures are said after the first time, the same after the second.
SAY_PROGRESS_S = 15.0
SAY_AGAIN_S = 30.0

# Log lines that a failure shows.
LOG_LINES = 25
# What a step brings for the judgement alone.
RAW = ("entries", "samples", "metrics", "kernel", "cursor", "now", "age_s", "weight_bytes")


class ActionModule(ActionBase):
    """Wait for a model service."""

    TRANSFERS_FILES = False

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Repeat steps until the service is ready, dead, wrong, or the time is over."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        if self._task.check_mode:
            result.update(changed=False, skipped=True, msg="nothing is asked in check mode")
            return result
        unit = str(arguments.get("unit", ""))
        after = str(arguments.get("invocation_before") or "")
        timeout_s = float(arguments.get("timeout_s") or 3600)
        stall_after_s = float(arguments.get("stall_after_s", 300))
        arguments["give_up_on"] = engine_log.FATAL
        say = _Say(f"{(task_vars or {}).get('inventory_hostname', '')}: {unit}")
        started = time.monotonic()
        watch = ready.Watch()
        while True:
            step = self._execute_module("peerlane.gpu.model_ready", module_args=arguments, task_vars=task_vars)
            if step.get("failed"):
                result.update(step)
                return result
            arguments["restarts_before"] = step["restarts_before"]
            arguments["cursor"] = step["cursor"]
            waited = time.monotonic() - started
            watch = ready.observe(watch, step)
            judgement = ready.judge(step, unit, arguments.get("answer"), watch, after, stall_after_s)
            if judgement.verdict == "waiting" and waited > timeout_s:
                text = f"{unit} is not ready after {duration_text(waited)}, last seen: {judgement.text}"
                judgement = replace(judgement, verdict="wrong", text=text)
            if judgement.verdict != "waiting":
                break
            say.progress(judgement, waited)
        log = [line for run in watch.runs(after) for _at, line in run]
        for name in RAW:
            step.pop(name, None)
        if step.get("answer"):
            step["answer"].pop("tokens", None)
        result.update(step)
        result.update(changed=False, url=arguments.get("url"), waited_s=round(waited, 1), msg=judgement.text)
        result.update(state=judgement.state, stage=judgement.stage)
        if judgement.cause is not None:
            result["cause"] = {**asdict(judgement.cause), "noticed_s": judgement.noticed_s}
        result["failed_because"] = "" if judgement.verdict == "ready" else judgement.text
        if judgement.verdict != "ready":
            result.update(failed=True, log=log[-LOG_LINES:])
        return result


class _Say:
    """Shows progress as it goes, without a line for each look."""

    def __init__(self, who: str) -> None:
        self.who = who
        self.stage: str | None = None
        self.text = ""
        self.at = 0.0

    def progress(self, judgement: ready.Judgement, waited: float) -> None:
        """Show a new stage at once, the same one with other figures or none after some time."""
        pause = SAY_PROGRESS_S if judgement.text != self.text else SAY_AGAIN_S
        stage = judgement.stage or judgement.text
        if stage == self.stage and waited - self.at < pause:
            return
        self.stage, self.text, self.at = stage, judgement.text, waited
        display.display(f"{self.who}: {self.text} ({duration_text(waited)})")
