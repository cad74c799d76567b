#!/bin/sh
# tests/lab.sh [deep]: every role on lab hosts (molecule: converge, idempotence, verify), then the faults (pytest).
# Two scenarios run side by side, each in a lab of its own. `deep` runs the long ones instead: real DKMS builds, three
# hosts with a fault in one. Where no lab host can start, it says why and ends well.
set -eu

cd "$(dirname "$0")/.."
venv=${PEERLANE_VENV:-.venv}
PATH=$(cd "$venv/bin" && pwd):$PATH
export PATH
say() { printf '== %s\n' "$*" >&2; }

one() { # LOGS SCENARIO
    started=$(date +%s)
    rm -f "$1/$2.passed"
    if molecule/run "$2" >"$1/$2.log" 2>&1; then
        say "$2: passed in $(($(date +%s) - started)) s"
        : >"$1/$2.passed"
    else
        say "$2: FAILED; the end of its log:"
        tail -n 60 "$1/$2.log" >&2
    fi
}

if [ "${1:-}" = --one ]; then
    one "$2" "$3"
    exit 0
fi

kind=${1:-fast}
logs=${PEERLANE_TEST_LOGS:-$(mktemp -d)}
mkdir -p "$logs"

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

# shellcheck disable=SC2086  # a list of names
printf '%s\n' $scenarios | sort -r | xargs -P 2 -n 1 sh tests/lab.sh --one "$logs" || true

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
