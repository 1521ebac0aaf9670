"""Releases before training: sums over all records that are released once, and what a model makes of them.

A new one is one file here and one in conf/prepare.
"""

from dpexp.privacy.preparations.class_counts import ClassCounts
from dpexp.privacy.preparations.pca import Pca
from dpexp.privacy.preparations.preparation import Preparation, Prepared
from dpexp.privacy.preparations.standardise import Standardise
from dpexp.privacy.preparations.whiten import Whiten

__all__ = ["ClassCounts", "Pca", "Preparation", "Prepared", "Standardise", "Whiten"]
