"""Every rule on a device, by the graph and compiled: sums against one record at a time in float64, and what a record
that is made to hurt at most adds of its bound.

    python benchmarks/adversarial.py                               # 10 000 records
    python benchmarks/adversarial.py --device cuda --tf32 --records 1000

Such records set both factors of each layer's gradient: equal numbers, powers of 2 and their neighbours, positions that
all but cancel, 2^-60 to 2^60 times as large (tests/adversarial.py).
"""

import argparse
import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "gradients"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from adversarial import RULES, largest_error, largest_share

ERROR = 2e-4  # beyond what norms are enlarged by for rounding


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rules", nargs="*", help=f"of {', '.join(RULES)}")
    parser.add_argument("--records", type=int, default=10_000)
    parser.add_argument("--rows", type=int, default=2, help="of the chunk in which a record is, with copies of itself")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--tf32", action="store_true", help="allow products in TF32, which norms and sums must not use")
    arguments = parser.parse_args()
    names, device = tuple(arguments.rules or RULES), arguments.device
    torch.set_num_threads(1)
    if arguments.tf32:
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
    warnings.simplefilter("ignore")
    ways = {"compiled": True, "graph": False}
    given = arguments.records, names, arguments.seed, device, arguments.rows
    shares = [largest_share(given[0], compile, *given[1:]) for compile in ways.values()]
    errors = [largest_error(compile, names, device) for compile in ways.values()]
    print("| rule | " + " | ".join([*(f"error, {w}" for w in ways), *(f"1 - share, {w}" for w in ways)]) + " |")
    print("| --- " * (1 + 2 * len(ways)) + "|")
    for rule in names:
        cells = [f"{one[rule]:.1e}" for one in errors] + [f"{1 - one[rule]:.1e}" for one in shares]
        print(f"| {rule} | " + " | ".join(cells) + " |")
    beyond = {rule for rule in names if any(one[rule] > 1 for one in shares)}
    wrong = {rule for rule in names if not arguments.tf32 and any(one[rule] > ERROR for one in errors)}
    said = (f"{what}: {', '.join(some) or 'none'}" for what, some in (("beyond the bound", beyond), ("wrong", wrong)))
    print(f"{arguments.records} records. {'; '.join(said)}.")
    sys.exit(bool(beyond or wrong))


if __name__ == "__main__":
    main()
