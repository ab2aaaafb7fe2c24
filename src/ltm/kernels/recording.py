"""Whether a network is being recorded for somewhere else."""

import torch


def is_recorded() -> bool:
    """Whether a network is exported: it has to run where our own operators are not known.

    The flag itself is read: torch.compile before 2.12 takes `is_exporting` for true.
    """
    flag: bool | None = getattr(torch.compiler, "_is_exporting_flag", None)
    exporting = torch.compiler.is_exporting() if flag is None else flag
    return exporting or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
