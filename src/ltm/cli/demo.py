"""`ltm demo`: what `make demo` runs."""

from pathlib import Path


def demo(
    samples: int = 600, classes: int = 10, beta: float = 10.0, output: Path | None = None
) -> None:
    """Measure the information bottleneck of features made up on the spot.

    A stand-in until models can be converted here: generated features, from noise to clean classes,
    each with its information-bottleneck loss, the separable bound on it (the loss never exceeds
    bound - C0) and the constant C0.

    Example:
        ltm demo --samples 2000 --classes 20 --output runs/demo

    Args:
        samples: how many feature vectors to generate.
        classes: how many classes they fall into.
        beta: sharpness of the soft class membership.
        output: folder for metrics.json.
    """
