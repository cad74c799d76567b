#!/bin/sh
# Set up what the demo and the tests need on a fresh Debian or Ubuntu machine: a Python environment in .venv, and, where
# this machine can start lab hosts, the tools for them. Says each step; installs nothing that is already there.
set -eu

cd "$(dirname "$0")/.."
venv=${PEERLANE_VENV:-.venv}
extras=${1:-test}

say() { printf '== %s\n' "$*" >&2; }

as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    elif command -v sudo >/dev/null 2>&1; then
        say "needs root: $*"
        sudo "$@"
    else
        return 1
    fi
}

install_packages() {
    say "installing $* (needs root)"
    log=$(mktemp)
    if as_root env DEBIAN_FRONTEND=noninteractive apt-get update -qq >"$log" 2>&1 &&
        as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >>"$log" 2>&1; then
        rm -f "$log"
        return 0
    fi
    tail -n 5 "$log" >&2
    return 1
}

usable_python() {
    "$1" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    for candidate in ${PEERLANE_PYTHON:-} python3 /usr/bin/python3 python3.13 python3.12 python3.11; do
        if usable_python "$candidate"; then
            printf '%s\n' "$candidate"
            return 0
        fi
    done
    return 1
}

if ! python=$(find_python); then
    install_packages python3 python3-venv || {
        say "no Python 3.11 or newer with venv, and no root to install it: apt-get install python3-venv"
        exit 2
    }
    python=$(find_python) || {
        say "this release has only $(python3 --version 2>&1): Peerlane needs Python 3.11 (Debian 12, Ubuntu 24.04 or newer)"
        exit 2
    }
fi

stamp=$(cksum pyproject.toml | cut -d' ' -f1)-$extras
if [ "$(cat "$venv/ready" 2>/dev/null || true)" != "$stamp" ]; then
    say "Python environment in $venv ($("$python" --version))"
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --editable ".[$extras]" >&2
    printf '%s\n' "$stamp" >"$venv/ready"
fi

missing=
for pair in systemd-nspawn:systemd-container mmdebstrap:mmdebstrap iptables:iptables ip:iproute2 ssh:openssh-client; do
    command -v "${pair%%:*}" >/dev/null 2>&1 || missing="$missing ${pair#*:}"
done
if [ -n "$missing" ]; then
    # shellcheck disable=SC2086  # a list of package names
    install_packages $missing || say "no lab hosts here:$missing missing and no root to install them"
fi
