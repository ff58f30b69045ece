#!/usr/bin/env bash
# Writes openapi/*.json from the server's sources and generates the page's types from them.
# Run it after a change of the HTTP API; `git diff web/openapi` then shows what the page must follow.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-../.venv/bin/python}
export PYTHONPATH=../src
"$python" -m strata.dashboard.openapi > openapi/dashboard.json.new
mv openapi/dashboard.json.new openapi/dashboard.json
"$python" -m strata.dashboard.openapi explorer > openapi/explorer.json.new
mv openapi/explorer.json.new openapi/explorer.json
npm run --silent api
