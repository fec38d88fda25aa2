#!/bin/bash
# Unpack wheels (or parts of wheels) for benchmarks.items:  benchmarks/peers/install.sh WHEELS... TARGET
# TARGET gets site/, coda_kernels/ (a package `coda` that is not ours) and stubs/. Needs no network.
set -euo pipefail
target=${*: -1}
mkdir -p "$target"/{wheels,site,coda_kernels,stubs}
for folder in "${@:1:$#-1}"; do cp "$folder"/*.whl* "$target/wheels/"; done
cd "$target"
for first in wheels/*.part-aa; do
    [ -e "$first" ] && cat "${first%.part-aa}".part-* > "${first%.part-aa}" && rm "${first%.part-aa}".part-*
done
for wheel in wheels/*.whl; do
    case $wheel in */coda_kernels-*) into=coda_kernels ;; *) into=site ;; esac
    "${PYTHON:-python3}" -m zipfile -e "$wheel" "$into"
done
echo 'def set_trace(*args, **options): raise RuntimeError("ipdb is not installed")' > stubs/ipdb.py
