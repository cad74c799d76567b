#!/bin/sh
# Keeps one lab host running: supervise.sh CGROUP_DIR... -- NSPAWN_COMMAND...
# Enters the given cgroup directories, starts the container, and starts it again when it was rebooted (exit 133).
set -u
while [ "$1" != -- ]; do
    echo $$ >"$1/cgroup.procs" || exit 1
    shift
done
shift
code=133
while [ "$code" = 133 ]; do
    code=0
    "$@" || code=$?
done
exit "$code"
