#!/bin/bash
# Download the peers' wheels, for Python 3.12 on x86-64, into a folder:  benchmarks/peers/fetch.sh [FOLDER]
# With PART_BYTES, larger wheels are cut into parts of that size (NAME.whl.part-aa, ...), which install.sh joins.
set -euo pipefail
folder=${1:-.peers/wheels}
mkdir -p "$folder"
platforms=()
for version in 2_28 2_27 2_24 2_17; do platforms+=(--platform "manylinux_${version}_x86_64"); done
"${PYTHON:-python3}" -m pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    "${platforms[@]}" -d "$folder" \
    quack-kernels==0.6.1 coda-kernels==0.2 liger-kernel==0.8.5 fla-core==0.6.0 einops==0.8.2 \
    apache-tvm-ffi==0.1.15.post2 torch-c-dlpack-ext==0.1.5 nvidia-cutlass-dsl==4.6.0 \
    nvidia-cutlass-dsl-libs-base==4.6.0 nvidia-cutlass-dsl-libs-core==4.6.0 nvidia-cutlass-dsl-libs-cu13==4.6.0
if [ -n "${PART_BYTES:-}" ]; then
    for wheel in "$folder"/*.whl; do
        if [ "$(stat -c %s "$wheel")" -gt "$PART_BYTES" ]; then
            split -b "$PART_BYTES" "$wheel" "$wheel.part-" && rm "$wheel"
        fi
    done
fi
