"""Records made to hurt, by rule: what one of them at most adds of its bound, which must be below 1.

    python benchmarks/hostile.py                     # 10 000 records, by the compiled graph and the graph itself
    python benchmarks/hostile.py --records 1000 --seed 7

Records set both factors of each layer's gradient: equal numbers, powers of 2 and their neighbours, positions that all
but cancel, 2^-60 to 2^60 times as large (tests/hostile.py).
"""

import argparse
import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from hostile import largest_share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = [largest_share(arguments.records, compile, seed=arguments.seed) for compile in (True, False)]
    print("| rule | 1 - share, compiled | 1 - share |\n| --- | --- | --- |")
    for rule in found[0]:
        print(f"| {rule} | " + " | ".join(f"{1 - shares[rule]:.1e}" for shares in found) + " |")
    beyond = [rule for shares in found for rule, share in shares.items() if share > 1]
    print(f"{arguments.records} records: {', '.join(beyond) or 'none'} beyond the bound.")
    sys.exit(bool(beyond))


if __name__ == "__main__":
    main()
