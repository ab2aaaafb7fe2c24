"""Zero-shot classification with a CLIP whose vision tower merges tokens.

Weights and words are random here, so only the mechanics show. For real ones, take
`CLIPModel.from_pretrained("openai/clip-vit-base-patch16")` and its `CLIPProcessor`.
"""

import torch
from transformers import CLIPConfig, CLIPModel

import ltm

torch.manual_seed(0)
small = {
    "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 3,
}  # fmt: skip
words = {"vocab_size": 100, "bos_token_id": 98, "eos_token_id": 99, "max_position_embeddings": 8}
config = CLIPConfig(
    text_config={**small, **words},
    vision_config={**small, "image_size": 96, "patch_size": 8},
    projection_dim=32,
)


@torch.no_grad()
def main() -> torch.Tensor:
    """The probability of each class for each image, with merging."""
    clip = CLIPModel(config).eval()
    images = torch.randn(4, 3, 96, 96)
    prompts = torch.randint(0, 98, (3, 8))  # "a photo of a cat", ... as the processor gives them
    prompts[:, -1] = 99

    before = clip(input_ids=prompts, pixel_values=images).logits_per_image.softmax(dim=-1)
    print(ltm.merge_tokens_(clip.vision_model, ltm.LTM(ratio=0.6)))
    after = clip(input_ids=prompts, pixel_values=images).logits_per_image.softmax(dim=-1)
    print(f"largest change of a probability: {(after - before).abs().max():.4f}")
    return after


if __name__ == "__main__":
    print(main())
