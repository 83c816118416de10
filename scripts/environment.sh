# Sourced by the other scripts, with $1 = "" or "[test]": finds a Python, makes a virtual environment, installs jaxpara into it.
# PYTHON: the interpreter to use. VENV: where the environment goes (default: .venv in the clone). Sets $clone and $venv.
set -eu
clone=$(cd "$(dirname "$0")/.." && pwd)
venv=${VENV:-$clone/.venv}

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

python=
for candidate in ${PYTHON:-python3 python python3.14 python3.13 python3.12 python3.11}; do
    if new_enough "$candidate"; then python=$candidate; break; fi
done
if [ -z "$python" ]; then
    echo "jaxpara needs Python 3.11 or newer; none was found${PYTHON:+ as $PYTHON}. Install one, or name it: PYTHON=/path/to/python3 $0" >&2
    exit 2
fi

if ! [ -x "$venv/bin/python" ]; then
    echo "Making $venv with $("$python" --version) ..."
    if ! "$python" -m venv "$venv"; then
        echo "$python cannot make virtual environments. On Debian and Ubuntu: apt install python3-venv" >&2
        exit 2
    fi
fi

# the stamp says what was installed from, so that a changed pyproject.toml installs again
wish="$1 $clone $(cksum < "$clone/pyproject.toml")"
if ! grep -qsxF "$wish" "$venv/jaxpara-installed"; then
    echo "Installing jaxpara$1 into $venv ..."
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check --editable "$clone$1"
    echo "$wish" >> "$venv/jaxpara-installed"
fi
