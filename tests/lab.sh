#!/bin/sh
# tests/lab.sh [deep]: every role on lab hosts (molecule: converge, idempotence, verify), then the faults (pytest).
# Two scenarios run side by side, each in a lab of its own. `deep` runs the long ones instead: real DKMS builds, three
# hosts with a fault in one. Where no lab host can start, it says why and ends well.
set -eu

cd "$(dirname "$0")/.."
venv=${PEERLANE_VENV:-.venv}
PATH=$(cd "$venv/bin" && pwd):$PATH
export PATH
kind=${1:-fast}
logs=${PEERLANE_TEST_LOGS:-$(mktemp -d)}
mkdir -p "$logs"

say() { printf '== %s\n' "$*" >&2; }

if ! why=$(python -c 'from peerlane.lab.system import require_machine; require_machine()' 2>&1); then
    say "lab tests skipped: $(printf '%s' "$why" | tail -n 1)"
    exit 0
fi

scenarios=
for place in molecule/*/converge.yml; do
    name=$(basename "$(dirname "$place")")
    case $name in *_deep | *_dkms) length=deep ;; *) length=fast ;; esac
    if [ "$length" = "$kind" ]; then scenarios="$scenarios $name"; fi
done

# The images come first, once: two scenarios would else wait for each other.
say "base images"
python -c 'from peerlane.lab import image, system, state
paths = state.Paths.from_environment()
paths.root.mkdir(parents=True, exist_ok=True)
for distro in sorted(image.DISTROS, reverse=True):
    image.ensure(paths, distro, system.Progress())' >&2

one() {
    started=$(date +%s)
    if molecule/run "$1" >"$logs/$1.log" 2>&1; then
        say "$1: passed in $(($(date +%s) - started)) s"
        : >"$logs/$1.passed"
    else
        say "$1: FAILED; the end of its log:"
        tail -n 60 "$logs/$1.log" >&2
    fi
}

at_once=0
for name in $scenarios; do
    rm -f "$logs/$name.passed"
    one "$name" &
    at_once=$((at_once + 1))
    if [ $((at_once % 2)) = 0 ]; then wait; fi
done
wait

passed=0 failed=0
for name in $scenarios; do
    if [ -e "$logs/$name.passed" ]; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
done
say "scenarios: $passed passed, $failed failed"

marks='lab and not deep'
[ "$kind" = deep ] && marks='lab and deep'
code=0
python -m pytest tests/faults -m "$marks" || code=$?
if [ "$code" = 5 ]; then code=0; fi
[ "$failed" = 0 ] && exit "$code"
exit 1
