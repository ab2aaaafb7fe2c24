"""`ltm demo`: what `make demo` runs."""

from pathlib import Path

from ltm.cli.results import open_folder, write_metrics


def demo(
    samples: int = 600,
    classes: int = 10,
    beta: float = 10.0,
    seed: int = 0,
    output: Path | None = None,
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
        seed: of the generated features.
        output: folder for metrics.json.
    """
    for name, value in (("samples", samples), ("classes", classes)):
        if value < 1:
            raise ValueError(f"{name} is {value}: at least 1 is needed")
    open_folder(output)

    import torch
    from rich.console import Console
    from rich.table import Table

    from ltm.core.bottleneck import information_bottleneck

    torch.manual_seed(seed)
    labels = torch.randint(classes, (samples,))
    centres = torch.randn(classes, 64)
    images = 0.2 * torch.randn(classes, 3, 8, 8)[labels] + torch.randn(samples, 3, 8, 8)

    table = Table(
        "features", "IB loss", "bound", "C0", "bound - C0", title="Information bottleneck"
    )
    metrics: dict[str, dict[str, float]] = {}
    for name, share in (("noise", 0.0), ("mostly noise", 0.2), ("clean classes", 1.0)):
        merged = share * centres[labels] + (1 - share) * torch.randn(samples, 64)
        result = information_bottleneck(merged, images, labels, classes, beta)
        loss, bound, c0 = float(result.loss), float(result.bound), float(result.c0)
        table.add_row(name, *(f"{value:.3f}" for value in (loss, bound, c0, bound - c0)))
        metrics[name] = {"loss": loss, "bound": bound, "c0": c0}

    console = Console()
    console.print(table)
    console.print("In nats, generated data; lower is better, and loss <= bound - C0 always holds.")
    write_metrics(output, metrics)
