#!/usr/bin/env bash
# Brings the servers that `strata bench coordinator` compares with and that are not on PyPI: etcd and Redis (Debian).
# Only their programs are used: a benchmark starts its own, on free ports of loopback. Where installing a package starts
# it as a service, that one is not ours: stop it, for it takes a part of the machine.
# Does nothing, quickly, when both are there. What cannot be had is absent from the benchmark, which says so.
set -euo pipefail

missing=()
command -v etcd > /dev/null || missing+=(etcd-server)
command -v redis-server > /dev/null || missing+=(redis-server)
if [ ${#missing[@]} = 0 ]; then exit 0; fi

give_up() {
  echo "bench packages: $*" >&2
  echo "bench packages: the benchmark runs without ${missing[*]}" >&2
  exit 0
}

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

command -v apt-get > /dev/null || give_up "${missing[*]} missing, and this is no Debian; install by hand"
echo "bench packages: apt-get install ${missing[*]}"
{ as_root apt-get -qq update &&
  as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "${missing[@]}" > /dev/null; } ||
  give_up "cannot install them (not root and no sudo without a password, or no network); run: sudo apt-get install ${missing[*]}"
