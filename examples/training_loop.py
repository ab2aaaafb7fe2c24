"""Fine-tune a converted network in a training loop of your own.

A converted network is an ordinary module: any loop trains it. Two things are worth knowing. Class
statistics wake LTM's informative weights; collect them before an epoch. `ltm.freeze_` makes the
network ready for deployment afterwards.
"""

import timm
import torch
import torch.nn.functional as F

import ltm

torch.manual_seed(0)


def make_images(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise of three classes: which colour is bright."""
    images, labels = torch.randn(number, 3, 32, 32), torch.arange(number) % 3
    images[torch.arange(number), labels] += 1
    return images, labels


def main() -> float:
    """Top-1 after a few steps."""
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=48, depth=4, num_heads=3,
        num_classes=3,
    )  # fmt: skip
    ltm.merge_tokens_(model, ltm.LTM(ratio=0.7))
    batches = [make_images(32) for _ in range(10)]

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(2):
        ltm.collect_statistics_(model, batches)
        for images, labels in batches:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}")

    ltm.freeze_(model.eval())
    images, labels = make_images(64)
    with torch.no_grad():
        return (model(images).argmax(dim=1) == labels).float().mean().item()


if __name__ == "__main__":
    print("top-1:", main())
