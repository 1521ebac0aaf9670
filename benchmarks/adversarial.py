"""Measures each rule's error on a device, by the graph and compiled, and what the worst record adds of its bound.

    python benchmarks/adversarial.py                               # 10 000 records
    python benchmarks/adversarial.py --device cuda --tf32 --records 1000

An error is that of the sums, against one record at a time in float64. The records set both factors of each layer's
gradient: equal numbers, powers of 2 and their neighbours, positions that all but cancel, 2^-60 to 2^60 times as large
(tests/adversarial.py).
"""

import sys
from pathlib import Path

import torch
from quiet import quiet
from report import head, parser, row

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "gradients"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from adversarial import RULES, largest_error, largest_share

ERROR = 2e-4  # beyond what norms are enlarged by for rounding


def main() -> None:
    options = parser(__doc__)
    options.add_argument("rules", nargs="*", default=[*RULES], help=f"of {', '.join(RULES)}")
    options.add_argument("--records", type=int, default=10_000)
    options.add_argument("--rows", type=int, default=2, help="of the chunk in which a record is, with copies of itself")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options.add_argument(
        "--tf32", action="store_true", help="allow products in TF32, which norms and sums must not use"
    )
    given = options.parse_args()
    names, device = tuple(given.rules), given.device
    quiet()
    if given.tf32:
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
    shares = [largest_share(given.records, way, names, given.seed, device, given.rows) for way in (True, False)]
    errors = [largest_error(way, names, device) for way in (True, False)]
    print(head("rule", "error, compiled", "error, graph", "1 - share, compiled", "1 - share, graph"))
    beyond, wrong = [], []
    for rule in names:
        largest, error = [one[rule] for one in shares], [one[rule] for one in errors]
        print(row(rule, *(f"{one:.1e}" for one in error), *(f"{1 - one:.1e}" for one in largest)))
        if max(largest) > 1:
            beyond.append(rule)
        if max(error) > ERROR and not given.tf32:
            wrong.append(rule)
    print(f"{given.records} records. Beyond the bound: {', '.join(beyond) or 'none'}.")
    print(f"Wrong: {', '.join(wrong) or 'none'}.")
    sys.exit(bool(beyond or wrong))


if __name__ == "__main__":
    main()
