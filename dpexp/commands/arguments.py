"""The commands of `python -m dpexp`, and the arguments of those that take one run."""

from collections.abc import Collection, Sequence

from dpexp.errors import ConfigError

# command -> what `python -m dpexp help` prints
COMMANDS = {
    "account": """\
`python -m dpexp account SOURCE [SOURCE ...] [key=value ...]` computes the privacy cost of ledgers.

A SOURCE is a ledger file, a job's output folder or an MLflow run id. Several are composed, as runs on the same data.
With data.id=NAME: what all runs on that data set have spent, and how much of a budget remains. Then budget=… names
another budget than that of the runs, uri=… may list several stores, and SOURCES are further ledgers or folders.

    accountant=pld    or rdp, moments, strong, basic, gdp; several as pld,rdp; or all
    delta=1e-5        default: the run's own
    epsilon=1         also print the δ at this ε
    adjacency=…       add_remove, replace_one or replace_null; default: the ledger's own
    figure=F.png      draw ε(δ), and the errors of a membership test
    write=true        log ε and the risk figures as metrics to the MLflow run
    uri=…             where MLflow runs are; default: $MLFLOW_TRACKING_URI, or outputs/mlflow.db here""",
    "audit": """\
`python -m dpexp audit [OVERRIDE ...]` attacks a job's plan, and compares what it finds with what is claimed.

It takes the overrides of a job: `audit group=conv_fc mechanism=joint sampling=fixed_size`. Canaries whose gradients
have a coordinate each are put into the data; callback, Trainer, sampler, noise and ledger are the job's. The exit
status is not 0 if a claim is refuted. An audit can refute a claim, and never proves one. A job with audit=dirac trains
first.""",
    "evaluate": """\
`python -m dpexp evaluate RUN` measures a trained model on its test set once more.

RUN is a job's folder or an MLflow run id. Options:
    uri=sqlite:///outputs/mlflow.db   the store that has the run""",
    "predict": """\
`python -m dpexp predict RUN data=inputs.npy` lets a trained model predict.

RUN is a job's folder or an MLflow run id. Options:
    data=FILE             inputs, one per row: .npy, .npz (its first array), .pt (a tensor) or .csv (numbers)
    out=predictions.csv   where the predictions go: for a classifier, class and probabilities
    uri=sqlite:///outputs/mlflow.db""",
    "report": """\
`python -m dpexp report [SOURCE ...] [key=value ...]` writes a page that compares the trials of sweeps and their costs.

A SOURCE is the name of an MLflow experiment (default: dpexp), a parent run's id (which stands for its children) or a
single run's id.

    out=FOLDER    for report.html and the figures; default: outputs/report
    uri=…         where MLflow runs are; default: $MLFLOW_TRACKING_URI, or outputs/mlflow.db here""",
    "resume": """\
`python -m dpexp resume RUN` continues an interrupted training in the same folder, ledger and MLflow run.

RUN is a job's folder, or the MLflow run id of a job of this machine. Options:
    uri=sqlite:///outputs/mlflow.db   the store that has the run""",
    "version": "`python -m dpexp version` prints the version of dpexp.",
    "help": """\
`python -m dpexp help [NAME]` lists the options, with the comments of the YAML files.

NAME is a configuration group, a value or section of the configuration, or a command; `--config-dir FOLDER` adds groups
of your own.""",
}


def run_and_options(command: str, arguments: Sequence[str], known: Collection[str]) -> tuple[str, dict[str, str]]:
    """The run and the options of a command line `RUN key=value …`; `known`: the keys of the options.

    Raises:
        ConfigError: not exactly one run, or an unknown option.
    """
    options = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    runs = [argument for argument in arguments if "=" not in argument]
    for key in options:
        if key not in known:
            raise ConfigError(f"{command}: {key} is unknown; known: {', '.join(known)}.")
    if len(runs) != 1:
        raise ConfigError(f"{command} needs one job's folder or MLflow run id; see {command} --help.")
    return runs[0], options
