#!/usr/bin/env bash
# What must hold on a GPU, and what it costs there, within 14 minutes, the most informative first: bash benchmarks/cuda.sh
# Tried without one: bash benchmarks/cuda.sh --device cpu --small. Parts, names and the tables: benchmarks/gpu.py --help
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTORCH_NVML_BASED_CUDA_CHECK=1 # an import that asks for GPUs must not keep forked processes from using them
exec "${PYTHON:-python}" benchmarks/gpu.py "$@"
