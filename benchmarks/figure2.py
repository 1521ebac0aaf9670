"""Figure 2 of Abadi et al. 2016 with every accountant: ε against epochs at q = 0.01, σ = 4, δ = 1e-5.

python benchmarks/figure2.py        # writes docs/figure2.png and prints the figures at 100 epochs
"""

import math

from matplotlib.figure import Figure
from report import DOCS

from dpexp.accounting.accountants import epsilon
from dpexp.accounting.composition import best_split
from dpexp.accounting.coverage import NAMES
from dpexp.accounting.ledger import Ledger, Round, SumQueryEvent
from dpexp.accounting.sampling import sampling_event

Q, SIGMA, DELTA, N = 0.01, 4.0, 1e-5, 60_000


def ledger(rounds: int) -> Ledger:
    one = Round(sampling_event("poisson", Q, N), (SumQueryEvent("all", 1.0, SIGMA),))
    return Ledger("add_remove", {one: rounds})


def as_printed(z: float, q: float, rounds: int, delta: float) -> float:
    """The curve "strong composition" of Abadi et al. 2016, figure 2.

    ε₀ = √(2 ln(1.25/δ₀))/z, amplified to (qε₀, qδ₀), composed after Dwork, Rothblum & Vadhan 2010. It is no bound: the
    formula for ε₀ holds only for ε₀ < 1, and the amplification omits constant factors.
    """

    def at(share: float) -> float:
        each = q * math.sqrt(2 * math.log(1.25 * q * rounds / (share * delta))) / z
        return math.sqrt(2 * rounds * math.log(1 / ((1 - share) * delta))) * each + rounds * each * math.expm1(each)

    return best_split(at)


if __name__ == "__main__":
    epochs = [1, *range(10, 401, 10)]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="epochs", ylabel="ε", title="q = 0.01, σ = 4, δ = 1e-5", yscale="log")
    for name in NAMES:
        values = [epsilon(ledger(round(e / Q)), DELTA, name) for e in epochs]
        axes.plot(epochs, values, label=name)
        print(f"{name:10} {epsilon(ledger(10_000), DELTA, name):8.4f} at 100 epochs")
    printed = [as_printed(SIGMA, Q, round(e / Q), DELTA) for e in epochs]
    axes.plot(epochs, printed, label="strong, as printed in Abadi et al. 2016 (no bound)", color="grey", linestyle=":")
    print(f"{'as printed':10} {as_printed(SIGMA, Q, 10_000, DELTA):8.4f} at 100 epochs (no bound)")
    axes.set_xlim(0, 400)
    axes.set_yticks([0.1, 1, 10, 100, 1000], labels=["0.1", "1", "10", "100", "1000"])
    axes.grid(alpha=0.3)
    figure.legend(fontsize="small", loc="outside lower center", ncols=3)
    figure.savefig(DOCS / "figure2.png", dpi=110)
