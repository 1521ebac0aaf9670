"""Data sets as LightningDataModules."""

from dpexp.training.data.datasets import Adult, Cifar10, Digits, FashionMnist, Mnist, Shakespeare, Synthetic, TensorData
from dpexp.training.data.features import (
    Backbone,
    Deskewed,
    Features,
    Joined,
    LumaAndChroma,
    Mirrored,
    RandomFeatures,
    Scattering,
)
from dpexp.training.data.images import HuggingFace, Images
from dpexp.training.data.tables import Table

__all__ = [
    "Adult", "Backbone", "Cifar10", "Deskewed", "Digits", "FashionMnist", "Features", "HuggingFace", "Images", "Joined",
    "LumaAndChroma", "Mirrored", "Mnist", "RandomFeatures", "Scattering", "Shakespeare", "Synthetic", "Table",
    "TensorData",
]  # fmt: skip
