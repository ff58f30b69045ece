#!/usr/bin/env bash
# Creates a virtual environment from a lock file; exits at once if it already matches the lock.
#   scripts/setup_venv.sh demo    .venv with `strata`, torch and pyarrow     (make demo)
#   scripts/setup_venv.sh dev     .venv with everything that the tests use   (make setup); includes demo
#   scripts/setup_venv.sh peers   .venv-peers with the peers of benchmarks   (make bench-setup)
#   scripts/setup_venv.sh peers-dashboard   .venv-peers-dashboard with those of `strata bench dashboard`, which need
#                                 older packages                            (make bench-setup)
# PYTHON names the interpreter; the default is the first one that is new enough.
set -euo pipefail
cd "$(dirname "$0")/.."

die() { echo "setup: $*" >&2; exit 1; }

stage=${1:-}
case $stage in
  demo | dev) venv=.venv ;;
  peers | peers-dashboard) venv=.venv-$stage ;;
  *) die "usage: $0 demo|dev|peers|peers-dashboard" ;;
esac
lock=requirements/$stage.txt

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; }

find_python() {
  if [ -n "${PYTHON:-}" ]; then
    is_new_enough "$PYTHON" || die "PYTHON=$PYTHON does not run or is older than Python 3.11; set another one"
    echo "$PYTHON"
    return
  fi
  local candidate
  for candidate in python3 python3.11 python3.12 python3.13 python3.14; do
    if is_new_enough "$candidate"; then echo "$candidate"; return; fi
  done
  die "no Python 3.11 or newer on PATH; install one (Debian: apt-get install python3 python3-venv), or set PYTHON"
}

# Everything that an environment depends on, including its path: its scripts contain absolute paths.
fingerprint() {
  cat "requirements/$1.txt" pyproject.toml src/strata/_version.py scripts/setup_venv.sh - <<< "$minor $PWD" | sha256sum
}

is_current() {
  [ "$(cat "$venv/.strata-$1" 2> /dev/null)" = "$(fingerprint "$1")" ] &&
    "$venv/bin/python" -I scripts/missing_pins.py "requirements/$1.txt" "$venv" > /dev/null 2>&1
}

# An environment that was moved, belongs to another Python or has lost its pip must be created again.
is_usable() {
  [ "$("$venv/bin/python" -I -c "$print_minor" 2> /dev/null)" = "$minor" ] &&
    grep -qsF "$PWD/$venv/bin/" "$venv/bin/pip" && [ -d "$venv/lib/python$minor/site-packages/pip" ]
}

print_minor='import sys; print("%d.%d" % sys.version_info[:2])'
python=$(find_python)
minor=$("$python" -c "$print_minor")

if is_current "$stage" || { [ "$stage" = demo ] && is_current dev; }; then exit 0; fi

mkdir -p .build
exec 9> ".build/setup$venv.lock"
flock --timeout 1800 9 || die "another setup has held .build/setup$venv.lock for 30 minutes; end it and try again"
if is_current "$stage"; then exit 0; fi # the other setup has created it

if ! is_usable; then
  "$python" -c 'import ensurepip, venv' 2> /dev/null ||
    die "$python has no venv module; install it (Debian: apt-get install python3-venv)"
  echo "setup: creating $venv with Python $minor"
  "$python" -m venv --clear "$venv"
fi
rm -f "$venv/.strata-$stage" # an incomplete installation must not look complete

pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-input -qq "$@"; }

# --no-deps everywhere: the lock is complete, and pip must not choose versions.
torch=$(grep '^torch==' "$lock" || true)
if [ -n "$torch" ]; then
  echo "setup: $torch"
  pip install --no-deps "$torch"
fi
echo "setup: $(grep -c == "$lock") packages from $lock"
pip install --no-deps -r "$lock"
if ! "$venv/bin/python" -I scripts/missing_pins.py "$lock" "$venv" > /dev/null; then
  # pip trusts its records of installed packages; a damaged record needs --force-reinstall.
  pip install --no-deps --force-reinstall $("$venv/bin/python" -I scripts/missing_pins.py "$lock" "$venv" || true)
fi
[ "$venv" != .venv ] || pip install --no-deps --no-build-isolation --editable .
# torchrec requires the CUDA build of fbgemm and one old version of torchmetrics, and works with others.
conflicts=$("$venv/bin/python" -m pip --disable-pip-version-check check) ||
  ! grep -vE '^torchrec .* (requires fbgemm-gpu, which is not installed|has requirement torchmetrics==)' >&2 \
    <<< "$conflicts" ||
  die "the versions in $lock conflict. If torch lacks nvidia packages, pip found the CUDA build: configure pip \
for the CPU build (CONTRIBUTING.md). Otherwise run 'make lock'"

fingerprint "$stage" > "$venv/.strata-$stage"
echo "setup: $venv is ready ($stage)"
