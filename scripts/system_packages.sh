#!/usr/bin/env bash
# Installs what the tests need from outside PyPI: PostgreSQL, iproute2, Chromium and Node.js (Debian), and a gRPC client
# for Node.js (npm, pinned in package-lock.json).
# Exits at once if everything is installed. Tests skip if something cannot be installed; with CI=true this script fails.
set -euo pipefail
cd "$(dirname "$0")/.."
node_dir=tests/integration/node

give_up() {
  echo "system packages: $*" >&2
  if [ "${CI:-}" = true ]; then exit 1; fi
  echo "system packages: tests that need PostgreSQL, network namespaces, Chromium or Node.js may be skipped" >&2
  exit 0
}

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

install_debian() {
  command -v apt-get > /dev/null || give_up "$* missing, and apt-get is not available; install them by hand"
  echo "system packages: apt-get install $*"
  { as_root apt-get -qq update && as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y "$@" > /dev/null; } ||
    give_up "cannot install $* (no root, no sudo without a password, or no network); run: sudo apt-get install $*"
}

has() { command -v "$1" > /dev/null; }

# Only the programs of the postgresql package are used: each test session creates its own cluster.
if ! compgen -G '/usr/lib/postgresql/*/bin/initdb' > /dev/null; then
  install_debian postgresql
fi

has ip || install_debian iproute2

has chromium || install_debian chromium

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
