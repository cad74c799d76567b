#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Ansible module: wait until a model service has answered a known prompt."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: model_ready
short_description: Wait until a model service has answered a known prompt
version_added: "0.1.0"
author:
  - The Peerlane authors (@peerlane)
description:
  - A health page alone says little. A model that computes NaN, or whose GPUs wait for each other for ever, is healthy
    by that measure. So this sends a prompt and judges the answer.
  - Shows how far the start is, and how long it still takes, from the engine's log or from the bytes that it read. Says
    within seconds when the service dies, with the cause from its log, also where its first process lives on after a
    worker died; and when it stands still.
options:
  unit:
    description: Unit of the service.
    type: str
    required: true
  url:
    description: Address of the service, as seen from its host.
    type: str
    required: true
  model:
    description: Name of the model in requests.
    type: str
    required: true
  prompt:
    description: Prompt to send.
    type: str
    default: "The capital of France is"
  max_tokens:
    description: Tokens to ask for.
    type: int
    default: 16
  answer:
    description: Text that the prompt must be answered with, greedily. Without it any healthy text will do.
    type: str
  api_key:
    description: Key that the service wants, where it does.
    type: str
  timeout_s:
    description: Seconds to wait in all. A large model can take more than half an hour to load.
    type: int
    default: 3600
  answer_timeout_s:
    description:
      - Seconds to wait for the whole answer once the service listens. The first one can include the compilation of
        kernels.
    type: int
    default: 600
  restarts_before:
    description:
      - Automatic restarts of the unit that are no news. Without it those counted at the beginning; after an intended
        start it is V(0).
    type: int
  invocation_before:
    description:
      - Invocation id of the unit before it was started. What it logged until then says nothing about this start.
    type: str
  model_path:
    description:
      - Folder or file of the weights. Its size tells how far a load is whose log is silent.
    type: path
  stall_after_s:
    description:
      - Seconds without CPU time, bytes and log lines (or with a stopped process) after which the service counts as
        stalled. V(0) waits for ever.
    type: int
    default: 300
  give_up_on:
    description:
      - Regular expression of log lines after which nothing good can come. The action plugin sets it.
    type: str
    default: ""
  cursor:
    description: Where the last step ended in the journal. The action plugin sets it.
    type: str
    default: ""
  step_s:
    description: Seconds after which one step on the host returns, so that progress can be shown.
    type: int
    default: 4
attributes:
  check_mode:
    description: Does nothing, because in check mode there may be no service yet.
    support: full
  diff_mode:
    description: Changes nothing, so there is no difference to show.
    support: none
"""

EXAMPLES = r"""
- name: Wait for the model
  peerlane.gpu.model_ready:
    unit: peerlane-model@chat.service
    url: http://127.0.0.1:8000
    model: small-model
    prompt: "user: Who are you?\nassistant:"
    max_tokens: 80
"""

RETURN = r"""
state:
  description:
    - V(loading); V(ready), it answered the known prompt; V(serving), it did, and works on other requests too;
      V(stalled), it stands still; V(dead); V(degraded), it answers, but wrongly.
  returned: always
  type: str
answer:
  description:
    - C(text), C(completion_tokens), C(first_token_ms) in milliseconds, C(tokens_per_s) over the
      whole request with its prompt, C(null_logprobs), C(error).
  returned: success
  type: dict
url:
  description: Address of the service.
  returned: success
  type: str
waited_s:
  description: Seconds that were waited.
  returned: success
  type: float
stage:
  description: The furthest stage that the log tells of the start, such as V(weights) or V(capturing).
  returned: always
  type: str
service:
  description: Properties of the unit, as C(systemctl show) gives them.
  returned: always
  type: dict
failed_because:
  description: Why the service is not ready; empty where it is. Of use where the caller keeps the task from failing.
  returned: always
  type: str
cause:
  description:
    - Why the service died, C(line), C(advice) and C(kind). C(noticed_s) says how many seconds passed between the fatal
      line, or the end of its process, and this verdict.
  returned: where it died
  type: dict
log:
  description: Last lines that the service logged.
  returned: failure
  type: list
  elements: str
http:
  description: How the health page answers.
  returned: always
  type: str
dead:
  description: Whether the service ended.
  returned: always
  type: bool
"""

import os
import re
import time

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.peerlane.gpu.plugins.module_utils import ask, service_state

POLL_S = 0.25
# The journal and the processes are looked at this often.
LOOK_S = 1.0
# What follows a fatal line in the log is its traceback: it gets this long to be written.
TRACEBACK_S = 1.5
METRIC = re.compile(
    r"^((?:vllm:num_requests_running|vllm:generation_tokens_total|sglang:num_running_reqs|"
    r"sglang:generation_tokens_total|llamacpp:requests_processing|llamacpp:tokens_predicted_total)(?:\{[^}]*\})? \S+)",
    re.MULTILINE,
)
WEIGHTS = (".gguf", ".safetensors", ".bin", ".pt")


class Watch:
    """Reads one service: its unit, its journal from a cursor on, its processes."""

    def __init__(self, options):
        self.unit = options["unit"]
        self.cursor = options["cursor"]
        self.give_up_on = re.compile(options["give_up_on"]) if options["give_up_on"] else None
        self.stall_after_s = options["stall_after_s"]
        self.service = service_state.service_properties(self.unit)
        self.before = options["restarts_before"]
        if self.before is None:
            counted = self.service.get("NRestarts", "0")
            self.before = int(counted) if counted.isdigit() else 0
        self.entries = []
        self.samples = []
        self.fatal = False
        self.looked_at = 0.0
        self.moved_at = time.monotonic()
        self.look()

    def look(self):
        """Read the unit; and, where the last look is some time ago, its journal and its processes."""
        self.service = service_state.service_properties(self.unit)
        if time.monotonic() - self.looked_at < LOOK_S:
            return
        self.looked_at = time.monotonic()
        entries = self._read_journal()
        if self.give_up_on and any(self.give_up_on.search(line) for line in self._of_this_start(entries)):
            self.fatal = True
        rows = service_state.unit_processes(self.unit)
        last = self.samples[-1]["processes"] if self.samples else []
        if entries or [(row["pid"], row["cpu_s"]) for row in rows] != [(row["pid"], row["cpu_s"]) for row in last]:
            self.moved_at = time.monotonic()
        self.samples.append({"at": time.time(), "processes": rows})

    def _of_this_start(self, entries):
        current = self.service.get("InvocationID", "")
        return [line for _at, invocation, line, manager in entries if invocation == current and not manager]

    def _read_journal(self):
        entries, self.cursor = service_state.log_entries(self.unit, self.cursor)
        self.entries += entries
        return entries

    @property
    def dead(self):
        """Whether the unit ended since the restarts were counted."""
        return service_state.is_dead(self.service, self.before)

    def hopeless(self):
        """Whether waiting for an answer is of no use. Looks again."""
        self.look()
        still_s = time.monotonic() - self.moved_at
        return self.dead or self.fatal or (self.stall_after_s > 0 and still_s > self.stall_after_s)

    def finish(self):
        """Read what comes late: the rest of a traceback, the kernel's word on an end."""
        if self.dead or self.fatal:
            time.sleep(TRACEBACK_S)
            self.service = service_state.service_properties(self.unit)
            self._read_journal()
        return {
            "dead": self.dead,
            "service": self.service,
            "entries": self.entries,
            "cursor": self.cursor,
            "samples": self.samples,
            "restarts_before": self.before,
            "now": time.time(),
            "age_s": age_s(self.service),
            "kernel": service_state.kernel_lines(time.time() - 600) if self.dead or self.fatal else [],
        }


def age_s(service):
    """Return for how many seconds the main process has run, None where systemd does not tell."""
    stamp = service.get("ExecMainStartTimestampMonotonic", "")
    if not stamp.isdigit() or stamp == "0":
        return None
    return max(time.clock_gettime(time.CLOCK_MONOTONIC) - int(stamp) / 1e6, 0.0)


def weight_bytes(path):
    """Return the bytes of the weight files at a path, by the end of their names."""
    found = {}
    names = [os.path.join(path, name) for name in os.listdir(path)] if os.path.isdir(path) else [path]
    for name in names:
        kind = os.path.splitext(name)[1]
        if kind in WEIGHTS and os.path.isfile(name):
            found[kind] = found.get(kind, 0) + os.path.getsize(name)
    return found


def main():
    """Run one step: wait a little for the health page, then ask."""
    module = AnsibleModule(
        argument_spec={
            "unit": {"type": "str", "required": True},
            "url": {"type": "str", "required": True},
            "model": {"type": "str", "required": True},
            "prompt": {"type": "str", "default": "The capital of France is"},
            "max_tokens": {"type": "int", "default": 16},
            "answer": {"type": "str"},
            "api_key": {"type": "str", "no_log": True},
            "timeout_s": {"type": "int", "default": 3600},
            "answer_timeout_s": {"type": "int", "default": 600},
            "restarts_before": {"type": "int"},
            "invocation_before": {"type": "str"},
            "model_path": {"type": "path"},
            "stall_after_s": {"type": "int", "default": 300},
            "give_up_on": {"type": "str", "default": ""},
            "cursor": {"type": "str", "default": ""},
            "step_s": {"type": "int", "default": 4},
        },
        supports_check_mode=True,
    )
    options = module.params
    result = {"changed": False, "answer": None, "metrics": []}
    if options["model_path"] and not options["cursor"]:
        result["weight_bytes"] = weight_bytes(options["model_path"])
    until = time.monotonic() + options["step_s"]
    watch = Watch(options)
    while True:
        result["http"] = "" if watch.dead else ask.health(options["url"])
        if watch.dead or watch.fatal or result["http"] == "ok" or time.monotonic() > until:
            break
        time.sleep(POLL_S)
        watch.look()
    if result["http"] == "ok" and not watch.dead:
        body = {
            "model": options["model"],
            "prompt": options["prompt"],
            "max_tokens": options["max_tokens"],
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "logprobs": 1,
        }
        key = options["api_key"] or ""
        result["metrics"].append(METRIC.findall(ask.metrics(options["url"], key)))
        result["answer"] = ask.ask(options["url"], body, options["answer_timeout_s"], watch.hopeless, key)
        result["metrics"].append(METRIC.findall(ask.metrics(options["url"], key)))
        watch.look()
    result.update(watch.finish())
    module.exit_json(**result)


if __name__ == "__main__":
    main()
