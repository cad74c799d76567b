#!/bin/sh
# Run the tests that need no host on the other supported ansible-core: the environment of `make test` has one of the two
# (2.19 on Python 3.11, 2.21 on 3.12 and newer). Where no fitting Python is here, a lab host lends its own.
set -eu

cd "$(dirname "$0")/.."
venv=${PEERLANE_VENV:-.venv}
cache=${XDG_CACHE_HOME:-$HOME/.cache}/peerlane
# The rooms that think import no Ansible; what stands beside it does.
tests="tests/unit/collect tests/unit/docs tests/unit/lab tests/unit/modules tests/unit/serving tests/cli"

say() { printf '== %s\n' "$*" >&2; }

have=$("$venv/bin/python" -c 'import ansible.release as r; print(".".join(r.__version__.split(".")[:2]))')
case $have in
    2.19) want=2.21 oldest=12 ;;
    *) want=2.19 oldest=11 ;;
esac

usable() {
    "$1" -c "import sys, ensurepip, venv; sys.exit(not (3, $oldest) <= sys.version_info[:2] <= (3, 13))" >/dev/null 2>&1
}

check="-m pytest -q -n auto -p no:cacheprovider $tests"

for python in ${PEERLANE_PYTHON_2:-} python3.13 python3.12 python3.11 python3; do
    usable "$python" || continue
    place=$cache/core-$want
    "$place/bin/python" -c "import xdist" 2>/dev/null || {
        say "ansible-core $want on $("$python" --version) in $place"
        "$python" -m venv "$place"
        "$place/bin/python" -m pip install --quiet "ansible-core==$want.*" pytest pytest-xdist ansible-runner rich pyyaml jinja2
    }
    say "tests on ansible-core $want"
    # shellcheck disable=SC2086  # a list of arguments
    PATH="$place/bin:$PATH" PYTHONPATH=src exec "$place/bin/python" $check
done

if ! "$venv/bin/python" -c 'from peerlane.lab.system import require_machine; require_machine()' >/dev/null 2>&1; then
    say "ansible-core $want not tested: no Python 3.$oldest or newer here, and no lab hosts"
    exit 0
fi
say "no Python 3.$oldest or newer here: a lab host (Debian 13) lends its own for ansible-core $want"
lab="$venv/bin/python -m peerlane.lab"
$lab up core --distro trixie >&2
trap '$lab down core >&2' EXIT
git ls-files -z --cached --others --exclude-standard | tar --null --files-from=- -cf - |
    $lab ssh core "rm -rf /root/peerlane && mkdir /root/peerlane && tar -C /root/peerlane -xf -"
$lab ssh core "set -e; cd /root/peerlane; DEBIAN_FRONTEND=noninteractive
apt-get update -q >/dev/null
apt-get install -y -q --no-install-recommends python3-venv openssh-client git >/dev/null
python3 -m venv /root/venv
set -a; . /etc/environment; set +a
/root/venv/bin/python -m pip install --quiet 'ansible-core==$want.*' pytest pytest-xdist ansible-runner rich pyyaml jinja2
PATH=/root/venv/bin:\$PATH PYTHONPATH=src /root/venv/bin/python $check"
