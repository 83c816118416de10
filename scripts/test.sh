#!/bin/sh
# The tests, in a virtual environment that this makes. Arguments go to pytest; --all, first, also runs those marked slow.
# EXTRAS: further extras of jaxpara to install, such as tpu, to compile for TPU as well (CI does).
# TEST_PROCESSES: how many at a time (default 2). ROTATION: which part of the long tail to run (default: by the day of the year).
marks="not slow"
if [ "${1:-}" = "--all" ]; then shift; marks="slow or not slow"; fi
set -- "[test${EXTRAS:+,$EXTRAS}]" "$@"
. "$(dirname "$0")/environment.sh"
shift
cd "$clone"
export ROTATION="${ROTATION:-$(date +%-j)}"
exec "$venv/bin/python" -m pytest -n "${TEST_PROCESSES:-2}" --dist worksteal -q -m "$marks" "$@"
