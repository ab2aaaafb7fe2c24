"""Learnable token merging for vision transformers.

Names are imported when first used, so that `import ltm` costs next to nothing.
"""

from typing import TYPE_CHECKING

from ltm.extras import lazy_names

if TYPE_CHECKING:
    from ltm.api import (
        capture as capture,
        collect_statistics_ as collect_statistics_,
        freeze_ as freeze_,
        gmacs as gmacs,
        load as load,
        merge_maps as merge_maps,
        merge_tokens_ as merge_tokens_,
        pool_tokens as pool_tokens,
        restore_tokens as restore_tokens,
        save as save,
        set_ratio_ as set_ratio_,
        token_counts as token_counts,
        unmerge_tokens_ as unmerge_tokens_,
    )
    from ltm.calibration.calibration import (
        CalibrateResult as CalibrateResult,
        calibrate as calibrate,
    )
    from ltm.calibration.settings import CalibrateSettings as CalibrateSettings
    from ltm.compression.compress import CompressResult as CompressResult, compress as compress
    from ltm.compression.settings import CompressSettings as CompressSettings
    from ltm.core.bottleneck import (
        InformationBottleneck as InformationBottleneck,
        image_features as image_features,
        information_bottleneck as information_bottleneck,
    )
    from ltm.deployment.embedding import EmbedResult as EmbedResult, embed as embed
    from ltm.deployment.export import ExportResult as ExportResult, export as export
    from ltm.deployment.prediction import Predictions as Predictions, predict as predict
    from ltm.deployment.predictor import BatchPredictor as BatchPredictor
    from ltm.deployment.settings import (
        EmbedSettings as EmbedSettings,
        ExportSettings as ExportSettings,
        PredictSettings as PredictSettings,
    )
    from ltm.evaluation.benchmark import BenchmarkResult as BenchmarkResult, benchmark as benchmark
    from ltm.evaluation.evaluate import EvaluateResult as EvaluateResult, evaluate as evaluate
    from ltm.evaluation.settings import (
        BenchmarkSettings as BenchmarkSettings,
        EvaluateSettings as EvaluateSettings,
    )
    from ltm.methods import (
        DTEM as DTEM,
        LTM as LTM,
        LTMP as LTMP,
        ByFamily as ByFamily,
        DiffRate as DiffRate,
        Informative as Informative,
        Learned as Learned,
        Matched as Matched,
        PiToMe as PiToMe,
        ToFu as ToFu,
        ToMe as ToMe,
    )
    from ltm.models import ModelSource as ModelSource
    from ltm.report.settings import VisualizeSettings as VisualizeSettings
    from ltm.report.visualization import (
        VisualizeResult as VisualizeResult,
        visualize as visualize,
    )
    from ltm.training.run import (
        TrainResult as TrainResult,
        finetune as finetune,
        train as train,
    )
    from ltm.training.settings import TrainSettings as TrainSettings

__version__ = "0.2.0"

_HOMES = {
    "ltm.api": (
        "capture",
        "collect_statistics_",
        "freeze_",
        "gmacs",
        "load",
        "merge_maps",
        "merge_tokens_",
        "pool_tokens",
        "restore_tokens",
        "save",
        "set_ratio_",
        "token_counts",
        "unmerge_tokens_",
    ),
    "ltm.calibration.calibration": ("CalibrateResult", "calibrate"),
    "ltm.calibration.settings": ("CalibrateSettings",),
    "ltm.compression.compress": ("CompressResult", "compress"),
    "ltm.compression.settings": ("CompressSettings",),
    "ltm.core.bottleneck": ("InformationBottleneck", "image_features", "information_bottleneck"),
    "ltm.deployment.embedding": ("EmbedResult", "embed"),
    "ltm.deployment.export": ("ExportResult", "export"),
    "ltm.deployment.prediction": ("Predictions", "predict"),
    "ltm.deployment.predictor": ("BatchPredictor",),
    "ltm.deployment.settings": ("EmbedSettings", "ExportSettings", "PredictSettings"),
    "ltm.evaluation.benchmark": ("BenchmarkResult", "benchmark"),
    "ltm.evaluation.evaluate": ("EvaluateResult", "evaluate"),
    "ltm.evaluation.settings": ("BenchmarkSettings", "EvaluateSettings"),
    "ltm.methods": (
        "ByFamily",
        "Informative",
        "LTM",
        "LTMP",
        "Learned",
        "Matched",
        "DTEM",
        "DiffRate",
        "PiToMe",
        "ToFu",
        "ToMe",
    ),
    "ltm.models": ("ModelSource",),
    "ltm.report.settings": ("VisualizeSettings",),
    "ltm.report.visualization": ("VisualizeResult", "visualize"),
    "ltm.training.run": ("TrainResult", "finetune", "train"),
    "ltm.training.settings": ("TrainSettings",),
}
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
