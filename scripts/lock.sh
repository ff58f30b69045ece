#!/usr/bin/env bash
# Writes requirements/*.txt: the exact versions for the tests, the demo and the benchmarks of peers.
# pip resolves them and installs nothing. Versions in the files are kept; `scripts/lock.sh --upgrade` takes the newest.
set -euo pipefail
cd "$(dirname "$0")/.."

torch=torch==2.13.0 # exact: an open range would select the newest, with gigabytes of CUDA packages
backend=(hatchling editables) # what an editable install without build isolation needs
dev=("$torch" "${backend[@]}" '.[torch,postgres,cloud,data,iceberg,delta,lance,ray,functions,servers,torchrec,tune,plots,wandb,otel,dev]')
demo=("$torch" "${backend[@]}" '.[torch,data]')
# The peers of the benchmarks. mosaicml-streaming is not among them: it requires older versions of numpy and xxhash.
peers=("$torch" ax-platform datasets grpcio litdata numpy orbax-checkpoint pandas pillow protobuf psutil pyarrow safetensors
  scikit-learn spdl torch-dataloader-utils uhashring webdataset pyre-extensions tensordict torchmetrics==1.0.3 tqdm)
# The peers of `strata bench dashboard`: MLflow and trackio need older versions of pyarrow and pillow than the others.
dashboards=(mlflow optuna-dashboard playwright 'ray[default]' tensorboard trackio)
# pip cannot resolve torchrec: it requires fbgemm-gpu, the CUDA build, and torchmetrics==1.0.3, and works with the CPU
# build and with later versions. What else it requires is in the extra `torchrec` and among the peers. Later versions need
# a later torch.
torchrec=torchrec==1.8.0
fbgemm=fbgemm-gpu-cpu==1.8.0 # the extra has it, too

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"

# resolve NAME REQUIREMENT…: writes requirements/NAME.txt, constrained by $work/NAME.constraints
resolve() {
  local name=$1
  shift
  "$work/venv/bin/pip" install -qq --dry-run --ignore-installed --report "$work/$name.json" \
    --constraint "$work/$name.constraints" "$@"
  "$work/venv/bin/python" - "$work/$name.json" > "requirements/$name.txt" <<'PYTHON'
import json, platform, sys

print(f"# Made by `make lock` with Python {'.'.join(platform.python_version_tuple()[:2])}; do not edit. Complete, so install it with --no-deps.")
print("# No hashes: torch's CPU build carries the same version as the CUDA build and other bytes.")
found = [item["metadata"] for item in json.load(open(sys.argv[1]))["install"]]
for package in sorted(found, key=lambda package: package["name"].lower()):
    if package["name"] != "strata-runtime":
        print(f"{package['name']}=={package['version'].partition('+')[0]}")
PYTHON
  echo "lock: requirements/$name.txt, $(grep -c == "requirements/$name.txt") packages"
}

for name in dev peers peers-dashboard; do
  : > "$work/$name.constraints"
  if [ "${1:-}" != --upgrade ] && [ -f "requirements/$name.txt" ]; then cp "requirements/$name.txt" "$work/$name.constraints"; fi
done
resolve dev "${dev[@]}"
echo "$torchrec" >> requirements/dev.txt
cp requirements/dev.txt "$work/demo.constraints" # demo has the same versions as dev
resolve demo "${demo[@]}"
resolve peers "${peers[@]}"
resolve peers-dashboard "${dashboards[@]}"
printf '%s\n' "$torchrec" "$fbgemm" >> requirements/peers.txt
