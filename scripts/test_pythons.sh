#!/usr/bin/env bash
# Runs the pure suites on every supported Python that is installed, each in an environment of its own (.venv-3.12, …).
#   scripts/test_pythons.sh              all of them
#   scripts/test_pythons.sh 3.13         this one only
# Interpreters are looked for on PATH and among pyenv's versions. A version that is missing is listed at the end.
set -euo pipefail
cd "$(dirname "$0")/.."

find_python() {
  local candidate
  for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python; do
    if "$candidate" -c 'import ensurepip, venv' 2> /dev/null; then echo "$candidate"; return; fi
  done
  return 1
}

tested=() missing=() failed=()
for version in "${@:-3.11 3.12 3.13}"; do
  for minor in $version; do
    if ! python=$(find_python "$minor"); then missing+=("$minor"); continue; fi
    PYTHON=$python VENV=.venv-$minor scripts/setup_venv.sh dev
    echo "python $minor: $(".venv-$minor/bin/python" --version)"
    if ".venv-$minor/bin/pytest" -q -n "${JOBS:-2}" -p no:cacheprovider tests/unit tests/contract tests/simulation; then
      tested+=("$minor")
    else
      failed+=("$minor")
    fi
  done
done
echo "passed: ${tested[*]:-none}; failed: ${failed[*]:-none}; not installed: ${missing[*]:-none}"
[ ${#failed[@]} = 0 ] && [ ${#tested[@]} -gt 0 ]
