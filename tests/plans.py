"""Plans, objects of plans and Trainers in one line, for tests."""

from dpexp import Clipping, Noise, Sampling, Schedules, Target, make_plan

SAMPLING = ("sampling_rate", "expected_batch_size", "max_batch_size", "partitions", "num_selected", "steps", "epochs")
TARGET = ("epsilon", "delta", "max_advantage", "max_tpr_at_fpr", "noise_multiplier", "accountant")
CLIPPING = ("group", "mechanism", "clip_norm", "clip_rule", "vectors")


def trainer(*callbacks, **options):
    """A quiet Trainer on the CPU, which ends after the plan's rounds."""
    import pytorch_lightning as pl  # after torchvision, which some tests import

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return pl.Trainer(callbacks=[*callbacks], **{"accelerator": "cpu", "max_epochs": -1} | quiet | options)


def plan_of(module, sampling="poisson", q=None, noise="gaussian", schedules=None, **choices):
    """make_plan with the fields of its objects side by side, and q for `sampling_rate`."""
    choices |= {} if q is None else {"sampling_rate": q}
    sampling, target, clipping = (
        of(**first, **{name: choices.pop(name) for name in names if choices.get(name) is not None})
        for of, names, first in (
            (Sampling, SAMPLING, {"policy": sampling}),
            (Target, TARGET, {}),
            (Clipping, CLIPPING, {}),
        )
    )
    noise = Noise(noise) if isinstance(noise, str) else noise
    choices = {name: value for name, value in choices.items() if name not in (*SAMPLING, *TARGET, *CLIPPING)}
    return make_plan(
        module, sampling=sampling, target=target, clipping=clipping, noise=noise,
        schedules=Schedules(**schedules or {}),
        **choices,
    )  # fmt: skip
