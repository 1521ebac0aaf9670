"""Data sets as LightningDataModules. Their normalisation constants are published ones, never computed here."""

from dpexp.training.data.adult import Adult
from dpexp.training.data.cifar10 import Cifar10
from dpexp.training.data.digits import Digits
from dpexp.training.data.features import Backbone, Features, Joined, RandomFeatures, Scattering
from dpexp.training.data.idx import FashionMnist, Mnist
from dpexp.training.data.plays import Plays
from dpexp.training.data.shakespeare import Shakespeare
from dpexp.training.data.synthetic import Synthetic
from dpexp.training.data.tensors import TensorData

__all__ = [
    "Adult", "Backbone", "Cifar10", "Digits", "FashionMnist", "Features", "Joined", "Mnist", "Plays", "RandomFeatures",
    "Scattering", "Shakespeare", "Synthetic", "TensorData",
]  # fmt: skip
