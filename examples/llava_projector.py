"""Fewer image tokens for a language model: a CLIP tower that merges, and a projector as LLaVA's.

LLaVA reads the tokens that enter the last layer of its tower, `hidden_states[-2]`, leaves the class
token out and maps the rest to the width of the language model. The tower here has random weights;
take `CLIPVisionModel.from_pretrained("openai/clip-vit-large-patch14-336")` for real ones.
"""

import torch
from torch import Tensor, nn
from transformers import CLIPVisionConfig, CLIPVisionModel

import ltm

NUM_TOKENS = 144


class Projector(nn.Module):
    """Two linear layers from the width of the tower to that of the language model."""

    def __init__(self, width: int, language_width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, language_width), nn.GELU(), nn.Linear(language_width, language_width)
        )

    def forward(self, tower: CLIPVisionModel, images: Tensor) -> Tensor:
        hidden = tower(images, output_hidden_states=True).hidden_states
        return self.layers(hidden[-2][:, 1:])


@torch.no_grad()
def main() -> tuple[int, ...]:
    """Project one image with all its tokens, then with the merged ones."""
    config = CLIPVisionConfig(
        image_size=336, patch_size=14, hidden_size=64, intermediate_size=128,
        num_hidden_layers=6, num_attention_heads=2,
    )  # fmt: skip
    tower, projector = CLIPVisionModel(config).eval(), Projector(64, 96).eval()
    images = torch.randn(1, 3, 336, 336)
    print("tokens before:", projector(tower, images).shape[1])
    print(ltm.merge_tokens_(tower, ltm.LTM(num_tokens=NUM_TOKENS)))
    image_tokens = projector(tower, images)
    print("tokens after:", image_tokens.shape[1])
    return tuple(image_tokens.shape)


if __name__ == "__main__":
    main()
