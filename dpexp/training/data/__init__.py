"""Data sets as LightningDataModules."""

from dpexp.training.data.datasets import Adult, Cifar10, Digits, FashionMnist, Mnist, Synthetic, TensorData
from dpexp.training.data.features import Backbone, Features, Joined, RandomFeatures, Scattering
from dpexp.training.data.tables import Table
from dpexp.training.data.text import Plays, Shakespeare

__all__ = [
    "Adult", "Backbone", "Cifar10", "Digits", "FashionMnist", "Features", "Joined", "Mnist", "Plays", "RandomFeatures",
    "Scattering", "Shakespeare", "Synthetic", "Table", "TensorData",
]  # fmt: skip
