"""Plans, objects of plans and Trainers in one line, for tests."""

from dataclasses import fields

from dpexp import Clipping, Gaussian, Schedules, Target, make_plan
from dpexp.accounting.sampling import POLICIES

TARGET = ("epsilon", "delta", "max_advantage", "max_tpr_at_fpr", "noise_multiplier", "accountant")
CLIPPING = ("group", "mechanism", "clip_norm", "clip_rule", "vectors")


def trainer(*callbacks, **options):
    """A quiet Trainer on the CPU, which ends after the plan's rounds."""
    import pytorch_lightning as pl  # after torchvision, which some tests import

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return pl.Trainer(callbacks=[*callbacks], **{"accelerator": "cpu", "max_epochs": -1} | quiet | options)


def policy_of(name, **given):
    """The policy of a name in a ledger."""
    return POLICIES[name](**given)


def plan_of(module, sampling="poisson", q=None, noise=None, schedules=None, **choices):
    """make_plan with the fields of its objects side by side, and q for `sampling_rate`."""
    kind = POLICIES["all" if sampling == "full_batch" else sampling] if isinstance(sampling, str) else sampling
    choices |= {} if q is None or kind is POLICIES["all"] else {"sampling_rate": q}
    sampling, target, clipping = (
        of(**{name: choices.pop(name) for name in names if choices.get(name) is not None})
        for of, names in (
            (kind, [field.name for field in fields(kind)]),
            (Target, TARGET),
            (Clipping, CLIPPING),
        )
    )
    choices = {name: value for name, value in choices.items() if value is not None}
    return make_plan(
        module, sampling=sampling, target=target, clipping=clipping, noise=noise or Gaussian(),
        schedules=Schedules(**schedules or {}),
        **choices,
    )  # fmt: skip
