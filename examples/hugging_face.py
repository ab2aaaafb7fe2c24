"""A Hugging Face classifier that merges tokens: convert, save, load.

The network has random weights here. For real ones, take
`ViTForImageClassification.from_pretrained("google/vit-base-patch16-224")`.
"""

import tempfile

import torch
from transformers import ViTConfig, ViTForImageClassification

import ltm

torch.manual_seed(0)
config = ViTConfig(
    image_size=96, patch_size=8, hidden_size=48, intermediate_size=96,
    num_hidden_layers=6, num_attention_heads=3, num_labels=10,
)  # fmt: skip


@torch.no_grad()
def main() -> float:
    """How far the loaded network's outputs are from those of the saved one."""
    model = ViTForImageClassification(config).eval()
    images = torch.randn(4, 3, 96, 96)

    print(ltm.merge_tokens_(model, ltm.LTM(ratio=0.6)))
    logits = model(images).logits

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)  # config.json also says how it merges
        again = ltm.load(folder).eval()
    return (again(images).logits - logits).abs().max().item()


if __name__ == "__main__":
    print("largest difference after loading:", main())
