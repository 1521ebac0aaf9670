"""The numbers of a plan that can be solved for."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Knob:
    """A number of the plan that can be solved for.

    Attributes:
        rising: ε rises with it.
        whole: it is a whole number.
    """

    rising: bool
    lowest: float
    highest: float
    whole: bool = False


# `q` holds each σ_g of the averages fixed, so that σ̃_g = q n σ_g and z rise with q (paper, section 4); `q_at_fixed_z`
# holds z. `bound` scales every S_g at fixed σ̃_g.
KNOBS = {
    "noise": Knob(False, 2.0**-6, 2.0**20),
    "q": Knob(False, 2.0**-40, 1.0),
    "q_at_fixed_z": Knob(True, 2.0**-40, 1.0),
    "steps": Knob(True, 1, 2**40, whole=True),
    "bound": Knob(True, 2.0**-20, 2.0**20),
}
