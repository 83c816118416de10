#!/bin/sh
# From a bare clone to a trained model: a virtual environment, the package, and the default recipe on eight fake CPU devices.
# Needs Python 3.11 or newer and the package index. Usage: scripts/quickstart.sh [settings of `jaxpara train gpt_tiny`]
set -- "" "$@"
. "$(dirname "$0")/environment.sh"
shift
exec "$venv/bin/jaxpara" train gpt_tiny "$@"
