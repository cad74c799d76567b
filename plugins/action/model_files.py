# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Controller half of ``model_files``: calls the module step by step and shows how far it is."""

from __future__ import annotations

import time
from typing import Any

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from ansible_collections.peerlane.gpu.plugins.plugin_utils.model.progress import transfer_line

display = Display()

MOST_IDLE_STEPS = 10


class ActionModule(ActionBase):
    """Repeat the module until the model is complete. Each step is bounded on the target."""

    TRANSFERS_FILES = False

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Run the steps and join their results."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        host = (task_vars or {}).get("inventory_hostname", "")
        started = time.monotonic()
        steps: list[dict[str, Any]] = []
        idle_steps = 0
        while True:
            step = self._execute_module("peerlane.gpu.model_files", task_vars=task_vars)
            steps.append(step)
            if step.get("failed") or step.get("complete") or not step.get("changed") or self._task.check_mode:
                break
            # A step without one new byte is possible while a large file is hashed, many in a row are not.
            grown = len(steps) < 2 or step["done_bytes"] > steps[-2]["done_bytes"]
            idle_steps = 0 if grown else idle_steps + 1
            if idle_steps >= MOST_IDLE_STEPS:
                step["failed"] = True
                step["msg"] = f"no byte of {step['path']} came in {idle_steps} steps; run again to go on from there"
                break
            display.display(f"{host}: {transfer_line(step, time.monotonic() - started)}")
        result.update(steps[-1])
        result["changed"] = any(one.get("changed", False) for one in steps)
        result["brought"] = sorted({path for one in steps for path in one.get("brought") or []})
        result["damaged"] = {path: text for one in steps for path, text in (one.get("damaged") or {}).items()}
        if "diff" in steps[0] and "diff" in steps[-1]:
            result["diff"] = {**steps[-1]["diff"], "before": steps[0]["diff"]["before"]}
        return result
