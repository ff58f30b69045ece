#!/usr/bin/env bash
# Brings what the tests need from outside PyPI: PostgreSQL's server, iproute2 and Node.js (Debian), and the latter's gRPC
# client (npm, pinned in package-lock.json).
# Does nothing, quickly, when all is there. What cannot be had makes tests skip and say so; under CI=true it is a failure.
set -euo pipefail
cd "$(dirname "$0")/.."
node_dir=tests/integration/node

give_up() {
  echo "system packages: $*" >&2
  if [ "${CI:-}" = true ]; then exit 1; fi
  echo "system packages: the tests that need PostgreSQL, a network of their own or Node.js may skip" >&2
  exit 0
}

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

install_debian() {
  command -v apt-get > /dev/null || give_up "$* missing, and this is no Debian; install them by hand"
  echo "system packages: apt-get install $*"
  { as_root apt-get -qq update && as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y "$@" > /dev/null; } ||
    give_up "cannot install $* (not root and no sudo without a password, or no network); run: sudo apt-get install $*"
}

has() { command -v "$1" > /dev/null; }

# Of Debian's postgresql only the programs are used: each test session makes a cluster of its own.
if ! compgen -G '/usr/lib/postgresql/*/bin/initdb' > /dev/null; then
  install_debian postgresql
fi

has ip || install_debian iproute2

wanted=$(cat "$node_dir/package.json" "$node_dir/package-lock.json" | sha256sum)
stamp=$node_dir/node_modules/.strata-stamp
if has node && [ "$(cat "$stamp" 2> /dev/null)" = "$wanted" ]; then exit 0; fi

if ! has node; then
  install_debian nodejs npm
elif ! has npm; then
  install_debian npm
fi
echo "system packages: npm ci in $node_dir"
npm --prefix "$node_dir" ci --silent || give_up "npm ci failed; run it in $node_dir to see why"
echo "$wanted" > "$stamp"
