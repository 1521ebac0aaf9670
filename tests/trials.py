"""Frames of trials, made by hand."""

import json
import math

from pandas import DataFrame

from dpexp.tracking.read import TRIAL

FIRST = {
    "data": "digits", "model": "cnn", "group": "flat", "mechanism": "separate", "clip_norm": "uniform",
    "clip_rule": "abadi",
    "allocation": "proportional", "sampling": "poisson", "status": "FINISHED", "private": "yes", "error": "",
    "epsilon": math.nan, "epsilon_planned": math.nan, "test_accuracy": 0.5, "delta": 1e-5, "knob": "noise_multiplier",
    "test_loss": math.nan, "knob_value": math.nan, "noise_multiplier": math.nan, "sampling_rate": 0.1,
    "accountant": "pld",
}  # fmt: skip
PARAMETERS = {
    "data.n": "1437", "optimizer._target_": "torch.optim.SGD", "optimizer.lr": "0.1", "privacy.epsilon": "None",
    "privacy.noise_multiplier": "None", "sampling.epochs": "5.0", "sampling.expected_batch_size": "64.0",
}  # fmt: skip
TWIN = {"private": "no: trained without privacy", "epsilon": math.nan} | dict.fromkeys(
    ("group", "mechanism", "clip_norm", "clip_rule", "allocation", "sampling")
)


def trials(*rows, **same):
    """One row a trial. A key with a dot is a parameter of its configuration; of a target ε 0.999 is spent."""
    made = []
    for k, given in enumerate(rows):
        row = same | given
        parameters = PARAMETERS | {key: str(value) for key, value in row.items() if "." in key}
        settings = {key: row.get(key) for key in ("group", "mechanism", "allocation", "clip_norm")}
        parameters |= {f"{key}._target_": f"dpexp.{value}" for key, value in settings.items() if value}
        target = row.get("privacy.epsilon")
        solved = {"epsilon": 0.999 * target, "knob_value": 5 / target} if target is not None else {"epsilon": 1.0}
        made.append(
            FIRST
            | {"run_id": f"run{k}", "name": f"trial {k}", "seed": str(k), "trial": str(k), "start": k}
            | solved
            | {key: value for key, value in row.items() if "." not in key}
            | {"configuration": json.dumps(parameters, sort_keys=True)}
        )
    return DataFrame(made, columns=list(TRIAL))


def trials_by_column(columns, **same):
    """The same, from a list of values for each key."""
    return trials(*DataFrame(columns).to_dict("records"), **same)
