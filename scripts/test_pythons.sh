#!/usr/bin/env bash
# Runs the pure suites on every supported Python that is installed, each in an environment of its own (.venv-3.12, …).
#   scripts/test_pythons.sh              all of them
#   scripts/test_pythons.sh 3.13         this one only
# Interpreters are looked for on PATH and among pyenv's versions. The environments have the pins of the lock file. Where
# pip finds only a CUDA build of torch for a version, torch is left out there, and with it the test files that import it.
set -euo pipefail
cd "$(dirname "$0")/.."
lock=requirements/dev.txt

find_python() {
  local candidate
  for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python; do
    if "$candidate" -c 'import ensurepip, venv' 2> /dev/null; then echo "$candidate"; return; fi
  done
  return 1
}

install() { # VENV PYTHON
  local wanted
  wanted=$(cat "$lock" pyproject.toml | sha256sum)
  if [ "$(cat "$1/.pins" 2> /dev/null)" = "$wanted" ]; then return; fi
  "$2" -m venv --clear "$1"
  "$1/bin/python" -m pip install -qq --disable-pip-version-check --no-deps -r "$lock"
  "$1/bin/python" -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation --editable .
  if ! "$1/bin/python" -c 'import torch' 2> /dev/null; then "$1/bin/python" -m pip uninstall -qq -y torch; fi
  echo "$wanted" > "$1/.pins"
}

needing_torch() { # VENV: the test files that cannot be collected for this reason alone
  "$1/bin/pytest" --collect-only -q -p no:cacheprovider tests/unit 2> /dev/null |
    awk '/ ERROR collecting /{file=$4} /^E .*No module named .torch/{print file}' || true
}

passed=() missing=() failed=()
[ $# -gt 0 ] || set -- 3.11 3.12 3.13
for version in "$@"; do
  if ! python=$(find_python "$version"); then missing+=("$version"); continue; fi
  venv=.venv-$version
  install "$venv" "$python"
  left_out=()
  if ! "$venv/bin/python" -c 'import torch' 2> /dev/null; then
    for file in $(needing_torch "$venv") tests/unit/test_launch_imports.py; do # the last one imports it in children
      left_out+=("--ignore=$file")
    done
    echo "python $version: without torch; left out: ${left_out[*]#--ignore=}"
  fi
  if "$venv/bin/pytest" -q -n "${JOBS:-2}" -p no:cacheprovider "${left_out[@]}" tests/unit tests/simulation; then
    passed+=("$version")
  else
    failed+=("$version")
  fi
done
echo "passed on: ${passed[*]:-none}; failed on: ${failed[*]:-none}; not installed: ${missing[*]:-none}"
[ ${#failed[@]} = 0 ] && [ ${#passed[@]} -gt 0 ]
