"""Vision towers of Hugging Face transformers. Imported when a network of it comes, never before."""

from ltm.adapters.transformers import (
    clip as clip,
    dinov2 as dinov2,
    dinov3 as dinov3,
    siglip as siglip,
    siglip2 as siglip2,
    vit as vit,
)
