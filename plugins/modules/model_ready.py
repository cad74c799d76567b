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
  - Shows how far the start is. Says within seconds when the service ends before it is ready, with the cause from its
    log.
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
service:
  description: Properties of the unit, as C(systemctl show) gives them.
  returned: always
  type: dict
failed_because:
  description: Why the service is not ready; empty where it is. Of use where the caller keeps the task from failing.
  returned: always
  type: str
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

import time

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.peerlane.gpu.plugins.module_utils import ask, service_state

POLL_S = 0.25


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
            "step_s": {"type": "int", "default": 4},
        },
        supports_check_mode=True,
    )
    options = module.params
    unit = options["unit"]
    service = service_state.service_properties(unit)
    counted = service.get("NRestarts", "0")
    before = options["restarts_before"]
    if before is None:
        before = int(counted) if counted.isdigit() else 0
    result = {"changed": False, "dead": False, "answer": None, "log_runs": [], "restarts_before": before}

    def ended():
        return service_state.is_dead(service_state.service_properties(unit), before)

    until = time.monotonic() + options["step_s"]
    while True:
        result["dead"] = service_state.is_dead(service, before)
        result["http"] = "" if result["dead"] else ask.health(options["url"])
        if result["dead"] or result["http"] == "ok" or time.monotonic() > until:
            break
        time.sleep(POLL_S)
        service = service_state.service_properties(unit)
    if result["http"] == "ok":
        body = {
            "model": options["model"],
            "prompt": options["prompt"],
            "max_tokens": options["max_tokens"],
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "logprobs": 1,
        }
        result["answer"] = ask.ask(options["url"], body, options["answer_timeout_s"], ended, options["api_key"] or "")
        service = service_state.service_properties(unit)
        result["dead"] = service_state.is_dead(service, before)
    if result["dead"] or not result["answer"]:
        result["log_runs"] = service_state.log_runs(unit, options["invocation_before"] or "")
    result["service"] = service
    module.exit_json(**result)


if __name__ == "__main__":
    main()
