"""`python -m dpexp evaluate RUN` measures a trained model on its test set once more.

RUN is a job's folder or an MLflow run id. Options: uri=sqlite:///outputs/mlflow.db, the store that has the run.
"""

from collections.abc import Sequence

from lightning_fabric.utilities.exceptions import MisconfigurationException

from dpexp.commands.arguments import Arguments
from dpexp.commands.building import make, quieten
from dpexp.commands.saved import configuration, located, restored, trainer_of
from dpexp.errors import ConfigError
from dpexp.showing.terminal import measured


def evaluate(arguments: Sequence[str]) -> dict[str, float]:
    """Prints and returns the metrics of the test set.

    Raises:
        ConfigError: there is no such run, it kept no model, or its data have no test set.
    """
    given = Arguments.parsed("evaluate", __doc__, arguments, {"uri": None})
    if given is None:
        return {}
    quieten()
    with located(given.run, given.options["uri"]) as folder:
        cfg = configuration(folder)
        trainer = trainer_of(cfg)
        module = restored(cfg, folder, trainer)
    try:
        found = trainer.test(module, datamodule=make("data.module", cfg.data.module), verbose=False)
    except MisconfigurationException as error:
        raise ConfigError(f"evaluate: {' '.join(str(error).split())}") from error
    metrics = {name: value for part in found for name, value in part.items()}
    measured(metrics)
    return metrics
