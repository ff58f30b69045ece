#!/usr/bin/env bash
# Writes openapi/*.json from the server's sources and generates the page's types from them.
# Run it after a change of the HTTP API; `git diff web/openapi` then shows what the page must follow.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-../.venv/bin/python}
export PYTHONPATH=../src
"$python" -m strata.dashboard.openapi > openapi/dashboard.json.new
mv openapi/dashboard.json.new openapi/dashboard.json
"$python" - > openapi/explorer.json.new << 'PYTHON'
import json
import sys

from fastapi import FastAPI

from strata.dashboard.explorer.places import Places
from strata.dashboard.explorer.routes import make_router

app = FastAPI(title="Strata checkpoint explorer", version="1")
app.include_router(make_router(Places([])))
json.dump(app.openapi(), sys.stdout, indent=2, sort_keys=True)
PYTHON
mv openapi/explorer.json.new openapi/explorer.json
npm run --silent api
