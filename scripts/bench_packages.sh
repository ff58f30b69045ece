#!/usr/bin/env bash
# Installs what benchmarks need from Debian: etcd and Redis, with which `strata bench coordinator` compares, and Chromium,
# in which `strata bench dashboard` opens pages.
# A benchmark starts its own servers on free loopback ports. If the package starts a service, stop it: it takes CPU time
# from the benchmark.
# Exits at once if all are installed. What is missing is left out of the benchmark, which reports it.
set -euo pipefail

missing=()
command -v etcd > /dev/null || missing+=(etcd-server)
command -v redis-server > /dev/null || missing+=(redis-server)
command -v chromium > /dev/null || missing+=(chromium)
if [ ${#missing[@]} = 0 ]; then exit 0; fi

give_up() {
  echo "bench packages: $*" >&2
  echo "bench packages: the benchmark runs without ${missing[*]}" >&2
  exit 0
}

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

command -v apt-get > /dev/null || give_up "${missing[*]} missing, and apt-get is not available; install them by hand"
echo "bench packages: apt-get install ${missing[*]}"
{ as_root apt-get -qq update &&
  as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "${missing[@]}" > /dev/null; } ||
  give_up "cannot install them (no root, no sudo without a password, or no network); run: sudo apt-get install ${missing[*]}"
