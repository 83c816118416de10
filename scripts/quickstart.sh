#!/bin/sh
# From a bare clone to a trained model: a virtual environment, the package, and the default recipe on eight fake CPU devices.
# Needs Python 3.11 or newer and the package index. Usage: scripts/quickstart.sh [settings of `jaxpara train gpt_tiny`]
# PYTHON: the interpreter to use. VENV: where the environment goes (default: .venv in the clone).
set -eu
clone=$(cd "$(dirname "$0")/.." && pwd)
venv=${VENV:-$clone/.venv}

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

python=
for candidate in ${PYTHON:-python3 python python3.14 python3.13 python3.12 python3.11}; do
    if new_enough "$candidate"; then python=$candidate; break; fi
done
if [ -z "$python" ]; then
    echo "quickstart: no Python 3.11 or newer found${PYTHON:+ as $PYTHON}. Install one, or name it: PYTHON=/path/to/python3 $0" >&2
    exit 2
fi

if ! [ -x "$venv/bin/jaxpara" ]; then
    echo "Making $venv with $("$python" --version) and installing jaxpara into it …"
    if ! "$python" -m venv "$venv"; then
        echo "quickstart: $python cannot make virtual environments. On Debian and Ubuntu: apt install python3-venv" >&2
        exit 2
    fi
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable "$clone"
fi

exec "$venv/bin/jaxpara" train gpt_tiny "$@"
