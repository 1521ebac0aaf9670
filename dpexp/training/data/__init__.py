"""Data sets as LightningDataModules. Normalisation constants are published ones, never computed from the data."""

from dpexp.training.data.base import TensorData
from dpexp.training.data.features import Backbone, Features, Joined, RandomFeatures, Scattering
from dpexp.training.data.images import Cifar10, Digits, FashionMnist, Mnist
from dpexp.training.data.tabular import Adult, Synthetic
from dpexp.training.data.text import Plays, Shakespeare

__all__ = [
    "Adult", "Backbone", "Cifar10", "Digits", "FashionMnist", "Features", "Joined", "Mnist", "Plays", "RandomFeatures",
    "Scattering", "Shakespeare", "Synthetic", "TensorData",
]  # fmt: skip
