# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Controller half of ``model_ready``: repeats the step on the host, shows progress, judges the answer."""

from __future__ import annotations

import time
from typing import Any

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from ansible_collections.peerlane.gpu.plugins.plugin_utils.model import ready
from ansible_collections.peerlane.gpu.plugins.plugin_utils.model.progress import duration_text

display = Display()

# A stage that lasts is said again after this time, so that a person sees that somebody still waits.
SAY_AGAIN_S = 30.0

# Log lines that a failure shows.
LOG_LINES = 25


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
        host = (task_vars or {}).get("inventory_hostname", "")
        unit = str(arguments.get("unit", ""))
        timeout_s = float(arguments.get("timeout_s") or 3600)
        started = time.monotonic()
        said, said_at = "", -SAY_AGAIN_S
        while True:
            step = self._execute_module("peerlane.gpu.model_ready", module_args=arguments, task_vars=task_vars)
            if step.get("failed"):
                result.update(step)
                return result
            arguments["restarts_before"] = step["restarts_before"]
            waited = time.monotonic() - started
            judgement = ready.judge(step, unit, arguments.get("answer"))
            if judgement.verdict == "waiting" and waited > timeout_s:
                judgement = ready.Judgement(
                    "wrong", f"{unit} is not ready after {duration_text(waited)}, last seen: {judgement.text}"
                )
            if judgement.verdict != "waiting":
                break
            if judgement.text != said or waited - said_at >= SAY_AGAIN_S:
                said, said_at = judgement.text, waited
                display.display(f"{host}: {unit}: {said} ({duration_text(waited)})")
        log = [line for run in step.pop("log_runs", None) or [] for line in run]
        if step.get("answer"):
            step["answer"].pop("tokens", None)
        result.update(step)
        result.update(changed=False, url=arguments.get("url"), waited_s=round(waited, 1), msg=judgement.text)
        result["failed_because"] = "" if judgement.verdict == "ready" else judgement.text
        if judgement.verdict != "ready":
            result.update(failed=True, log=log[-LOG_LINES:])
        return result
