"""pfl, a simulation of federated learning: each record is a user, who takes one step of SGD."""

from importlib.metadata import version  # measured

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback  # measured
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics  # measured
from pfl.model.pytorch import PyTorchModel
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from pfl.privacy.privacy_accountant import PLDPrivacyAccountant
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism
from setting import BATCH, BOUND, DELTA, EPSILON, LR, MOMENTUM, ROUNDS, N, report, tick
from torch import nn
from torch.nn.functional import cross_entropy
from torch_work import accuracy, data, model


class Classifier(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def loss(self, x, y):
        return cross_entropy(self.module(x), y)

    def metrics(self, x, y):
        return {}


class Tick(TrainingProcessCallback):  # measured
    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):  # measured
        tick()  # measured
        return False, Metrics()  # measured


process = {"num_compositions": ROUNDS, "sampling_probability": BATCH / N, "mechanism": "gaussian"}
accountant = PLDPrivacyAccountant(**process, epsilon=EPSILON, delta=DELTA)
x, y = data("train").tensors
sampler = get_user_sampler("minimize_reuse", range(N))
users = FederatedDataset(lambda i: PyTorchTensorDataset((x[i : i + 1], y[i : i + 1]), user_id=i), sampler)
classifier = Classifier(model())
backend = SimulatedBackend(
    training_data=users,
    val_data=users,
    postprocessors=[CentrallyAppliedPrivacyMechanism(GaussianMechanism.from_privacy_accountant(accountant, BOUND))],
)
FederatedAveraging().run(
    algorithm_params=NNAlgorithmParams(
        central_num_iterations=ROUNDS, evaluation_frequency=ROUNDS + 1, train_cohort_size=BATCH, val_cohort_size=None
    ),
    backend=backend,
    model=PyTorchModel(classifier, torch.optim.SGD, torch.optim.SGD(classifier.parameters(), LR, MOMENTUM)),
    model_train_params=NNTrainHyperParams(local_num_epochs=1, local_learning_rate=1.0, local_batch_size=None),
    model_eval_params=None,
    callbacks=[Tick()],  # measured
)
z = accountant.cohort_noise_parameter
spent = PLDPrivacyAccountant(**process, noise_parameter=z, delta=DELTA).epsilon
report(version("pfl"), accuracy(classifier.module), z, spent)
