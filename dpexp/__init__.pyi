"""The names of the package, which `dpexp/__init__.py` imports when they are first used.

Type checkers read them here.
"""

from .accounting.accountants import delta as delta, epsilon as epsilon
from .accounting.ledger import Ledger as Ledger, read_ledger as read_ledger
from .accounting.sampling import (
    Poisson as Poisson,
    TruncatedPoisson as TruncatedPoisson,
    FixedSize as FixedSize,
    Shuffle as Shuffle,
    FullBatch as FullBatch,
    CyclicPoisson as CyclicPoisson,
    RandomAllocation as RandomAllocation,
)
from .commands.build import plan as plan
from .commands.command_line import compose as compose
from .commands.saved_jobs import load as load
from .errors import ConfigError as ConfigError
from .privacy.callback import PrivacyCallback as PrivacyCallback
from .privacy.normalization import (
    GroupNormalization as GroupNormalization,
    FrozenBatchNorm as FrozenBatchNorm,
    PrivateBatchNorm as PrivateBatchNorm,
)
from .privacy.plan.adaptive_clipping import AdaptiveClipNorm as AdaptiveClipNorm
from .privacy.plan.allocation import (
    Proportional as Proportional,
    DimensionAdjusted as DimensionAdjusted,
    MinVariance as MinVariance,
    Weighted as Weighted,
    Explicit as Explicit,
)
from .privacy.plan.clipping import (
    FixedClipNorm as FixedClipNorm,
    UniformClipNorm as UniformClipNorm,
    DimensionClipNorm as DimensionClipNorm,
    Separate as Separate,
    Joint as Joint,
    Abadi as Abadi,
    Automatic as Automatic,
    Psac as Psac,
    Global as Global,
)
from .privacy.plan.groups import Groups as Groups, flat as flat, per_layer as per_layer, conv_fc as conv_fc
from .privacy.plan.make import make_plan as make_plan, Clipping as Clipping
from .privacy.plan.options import (
    Target as Target,
    Gaussian as Gaussian,
    Banded as Banded,
    Schedules as Schedules,
    Sampling as Sampling,
    Noise as Noise,
)
from .privacy.plan.plan import PrivacyPlan as PrivacyPlan
from .privacy.private import Private as Private
from .privacy.private_metrics import release as release, weigh as weigh
from .privacy.sampling.privacy_unit import (
    Example as Example,
    Microbatch as Microbatch,
    User as User,
    LocalTraining as LocalTraining,
)
from .training.classifier import Classifier as Classifier, views as views

__version__: str
