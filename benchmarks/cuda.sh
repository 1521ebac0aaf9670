#!/usr/bin/env bash
# What must hold on a GPU, and what it costs there, in one go: bash benchmarks/cuda.sh
# Everything but the GPU's table of docs/speed.md can be tried without one: bash benchmarks/cuda.sh --device cpu --small
set -euo pipefail
cd "$(dirname "$0")/.."
device=cuda small=
while [ $# -gt 0 ]; do
    case $1 in
        --device) device=$2; shift 2 ;;
        --small) small=yes; shift ;;
        *) echo "cuda.sh: $1 is unknown; known: --device cuda|cpu, --small" >&2; exit 2 ;;
    esac
done
python=${PYTHON:-python}
kept=$(mktemp -d)
trap 'rm -rf "$kept"' EXIT
trainer=$([ "$device" = cuda ] && echo gpu || echo cpu)
job="$python -m dpexp trainer=$trainer tracking.uri=sqlite:///$kept/runs.db"
rules=() models=() records=2000 rounds=() steps=470 numbers=1e9
if [ "$small" ]; then
    rules=(linear "table, held") models=(tabular) records=20 rounds=(--rounds 20 --warm-up 5 --repeat 1) steps=20 numbers=1e6
fi

echo "== Every rule, by graph and compiled: bounds and sums, in full precision, also where TF32 is allowed"
$python benchmarks/adversarial.py "${rules[@]}" --records $records --device $device
$python benchmarks/adversarial.py "${rules[@]}" --records $records --device $device --tf32

echo "== The supported models (docs/zoo.md): what is otherwise here"
[ "$small" ] || $python tests/gradients/test_models.py $device

echo "== Noise: speed and distribution"
$python benchmarks/noise.py --device $device --numbers $numbers

echo "== The callback: a whole job, with records in chunks that fit, compiled, and in half precision"
for options in "" "trainer.max_physical_batch_size=auto" "trainer.compile=true" "trainer.precision=bf16-mixed"; do
    echo "-- $options"
    $job sampling.steps=$steps hydra.run.dir="$kept/job_${options//[^a-z0-9]/_}" $options | grep -E "The step is|Test accuracy|ε ="
done

echo "== Two processes"
if [ $device = cpu ] || [ "$($python -c 'import torch; print(torch.cuda.device_count())')" -ge 2 ]; then
    $job sampling.steps=$steps trainer.strategy=ddp trainer.devices=2 hydra.run.dir="$kept/two" | grep -E "Test accuracy|ε ="
else
    echo "not run: one GPU"
fi

echo "== A round against plain training and Opacus"
write=$([ "$device" = cuda ] && [ ! "$small" ] && echo --write || true)
$python benchmarks/step.py "${models[@]}" "${rounds[@]}" --device $device $write
