"""What was asked for: every setting of the suite, in frozen types that are checked once.

A value of these types is valid wherever it appears: YAML files and command-line text are checked
when they become one (`parsing.parse`), and no code behind that border checks them again.
"""

from oasis_eval.spec.models import (
    DirSource,
    Dtype,
    GgufSource,
    HubSource,
    ModelCard,
    NamedSource,
    PackageSource,
    Source,
)
from oasis_eval.spec.quantization import (
    Backend,
    Calibration,
    Execution,
    Gptq,
    Granularity,
    Hadamard,
    NumberType,
    QuantScheme,
    RangeEstimator,
    Region,
    ScaleType,
    SmoothQuant,
    TensorFormat,
    Transform,
)
from oasis_eval.spec.runs import EvaluationSpec, ImportedRun, RunSpec, Settings, TaskRef
from oasis_eval.spec.sweeps import SEED, Exclusion, Inclusion, SweepSpec
from oasis_eval.spec.tables import Dimension, TableSpec
from oasis_eval.spec.training import BackboneSpec, TextSource, TrainRecipe

__all__ = [
    "BackboneSpec",
    "Backend",
    "Calibration",
    "Dimension",
    "DirSource",
    "Dtype",
    "EvaluationSpec",
    "Exclusion",
    "Execution",
    "GgufSource",
    "Gptq",
    "Granularity",
    "Hadamard",
    "HubSource",
    "ImportedRun",
    "Inclusion",
    "ModelCard",
    "NamedSource",
    "NumberType",
    "PackageSource",
    "QuantScheme",
    "RangeEstimator",
    "Region",
    "RunSpec",
    "SEED",
    "ScaleType",
    "Settings",
    "SmoothQuant",
    "Source",
    "SweepSpec",
    "TableSpec",
    "TaskRef",
    "TensorFormat",
    "TextSource",
    "TrainRecipe",
    "Transform",
]
