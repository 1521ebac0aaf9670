"""A trained model in MLflow's format, loaded by `mlflow.pytorch` and `mlflow.pyfunc`, and in its model registry."""

import json
import logging
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlflow
import mlflow.pyfunc
import mlflow.pytorch
import torch
from mlflow import MlflowClient
from mlflow.entities import LoggedModelOutput
from mlflow.exceptions import MlflowException
from mlflow.models import Model, infer_signature
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind

from dpexp.errors import ConfigError

_MAX_DESCRIPTION = 5000  # characters
_REQUIREMENTS = ("torch", "pytorch-lightning", "numpy")
_STATE = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


class _InFloat32(nn.Module):
    """Wraps a module whose dtype NumPy lacks: inputs and outputs are float32."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.module, self.dtype = module, dtype

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.module(x.to(self.dtype))
        return outputs.float()


def save_as_mlflow(module: nn.Module, example: Tensor, folder: Path) -> None:
    """Writes a model folder in MLflow's format, without a server.

    Args:
        example: public inputs [2, …]; they are converted to the module's dtype.
    """
    dtype = next((weights.dtype for weights in module.parameters() if weights.is_floating_point()), torch.float32)
    if example.is_floating_point():
        example = example.float() if dtype == torch.bfloat16 else example.to(dtype)
        module = _InFloat32(module, dtype) if dtype == torch.bfloat16 else module
    with torch.no_grad():
        outputs = module(example)
    logging.getLogger("mlflow").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mlflow.pytorch.save_model(
            module,
            str(folder),
            signature=infer_signature(example.numpy(), outputs.numpy()),
            input_example=example.numpy(),
            pip_requirements=[f"{name}=={version(name).partition('+')[0]}" for name in _REQUIREMENTS],
            serialization_format="pt2",
        )
        _remove_unused_state(folder / "data" / "model.pt2")


def save_raw_as_mlflow(job: Path, example: Any, folder: Path, loader: str) -> None:
    """Writes a model folder in MLflow's format for inputs as users have them. Where it is served, dpexp is needed.

    Args:
        job: the folder of the finished job.
        example: two public inputs, a table.
        loader: the module whose `_load_pyfunc` loads a job's folder.
    """
    logging.getLogger("mlflow").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as files, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("config.yaml", "weights.safetensors"):
            shutil.copy(job / name, files)
        mlflow.pyfunc.save_model(
            str(folder), loader_module=loader, data_path=files, input_example=example,
            pip_requirements=[f"{name}=={version(name).partition('+')[0]}" for name in ("dpexp", *_REQUIREMENTS)],
        )  # fmt: skip


def _remove_unused_state(path: Path) -> None:
    """Removes the parameters, buffers and constants that no output depends on, such as a bank of records, and source
    paths from an exported graph."""
    exported = torch.export.load(path)
    signature, graph = exported.graph_signature, exported.graph
    unused = {node.name: node for node in graph.nodes if node.op == "placeholder" and not node.users}
    for spec in list(signature.input_specs):
        if spec.kind in _STATE and spec.arg.name in unused:
            graph.erase_node(unused[spec.arg.name])
            signature.input_specs.remove(spec)
            exported.constants.pop(spec.target, None)
            exported.state_dict.pop(spec.target, None)
    for part in exported.graph_module.modules():
        for node in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
            for key in ("stack_trace", "nn_module_stack", "source_fn_stack"):
                node.meta.pop(key, None)
    exported.graph_module.recompile()
    torch.export.save(exported, path)


def description(job: Path) -> str:
    """The model card in a job's folder, cut to the length that MLflow allows."""
    text = (job / "card.md").read_text()
    return text if len(text) <= _MAX_DESCRIPTION else text[:_MAX_DESCRIPTION] + "…\n\nThe rest is in card.md."


def send_model(
    client: MlflowClient, run_id: str, folder: Path, rounds: int, tags: Mapping[str, str], name: str | None
) -> None:
    """Logs a model folder as a model of a run, and registers it as a version of `name`, if given."""
    run = client.get_run(run_id)
    card = description(folder.parent)
    logged = client.create_logged_model(
        run.info.experiment_id, "model", source_run_id=run_id, tags={**tags, "mlflow.note.content": card}
    )
    model = Model.load(str(folder))
    model.run_id, model.model_id = run_id, logged.model_id
    model.save(str(folder / "MLmodel"))
    client.log_model_artifacts(logged.model_id, str(folder))
    client.finalize_logged_model(logged.model_id, "READY")
    client.log_outputs(run_id, [LoggedModelOutput(logged.model_id, rounds)])
    if name is not None:
        try:
            client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        version = client.create_model_version(
            name, logged.artifact_location, run_id, tags=dict(tags), description=card, model_id=logged.model_id
        )
        known = [{"name": name, "version": version.version}]
        client.set_logged_model_tags(logged.model_id, {"mlflow.modelVersions": json.dumps(known)})


def check_name(client: MlflowClient, name: str) -> None:
    """Refuses a name that the model registry would refuse."""
    try:
        client.search_registered_models(f"name = '{name}'")
    except MlflowException as error:
        raise ConfigError(f"register={name} cannot be used: {' '.join(str(error).split())}") from error
    if not name or any(character in name for character in "/:.%\"'"):
        raise ConfigError(f"register={name} is no name for a model: it must have none of / : . % and quotation marks.")
