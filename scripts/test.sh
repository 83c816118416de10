#!/usr/bin/env bash
# Runs the tests in .venv, making it first. Arguments go to pytest; --all also runs those marked slow.
if [ "${1:-}" = "--all" ]; then shift; marks="slow or not slow"; else marks="not slow"; fi
. "$(dirname "$0")/environment.sh" ".[test]"
exec .venv/bin/python -m pytest -n "${TEST_PROCESSES:-2}" --dist worksteal -q -m "$marks" "$@"
