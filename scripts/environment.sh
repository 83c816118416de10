# Sourced by the other scripts: finds a Python, makes .venv once, installs jaxpara into it. $1: what to install (".", ".[test]").
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ -z "${PYTHON:-}" ]; then
    for candidate in python3 python3.13 python3.12 python3.11; do
        if command -v "$candidate" > /dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; then
            PYTHON=$candidate
            break
        fi
    done
fi
if [ -z "${PYTHON:-}" ]; then
    echo "jaxpara needs Python 3.11 or newer; none was found on PATH. Set PYTHON to one." >&2
    exit 1
fi

# the stamp holds what was installed from, so that a changed pyproject.toml or another wish installs again
wish="$1 $(cksum < pyproject.toml) $("$PYTHON" --version 2>&1)"
if [ "$(cat .venv/jaxpara-installed 2> /dev/null)" != "$wish" ]; then
    echo "Installing jaxpara into .venv (once) ..."
    rm -rf .venv
    "$PYTHON" -m venv .venv
    .venv/bin/python -m pip install -qq --disable-pip-version-check --editable "$1"
    echo "$wish" > .venv/jaxpara-installed
fi
