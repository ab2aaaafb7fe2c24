"""A merging network as the backbone of a detector of your own.

`Pyramid` turns a network into feature maps of known channels and strides. Merged tokens are put
back in their places, so maps have the sizes that a detector expects.
"""

import timm
import torch

import ltm
from ltm.detection.pyramid import Pyramid

torch.manual_seed(0)


@torch.no_grad()
def main() -> list[tuple[int, ...]]:
    """The shape of each map."""
    network = timm.create_model("mobilevit_xxs", features_only=True)
    print(ltm.merge_tokens_(network, ltm.ToMe(ratio=0.85), (128, 128)))
    backbone = Pyramid(network).eval()
    maps = backbone(torch.randn(2, 3, 128, 128))
    return [tuple(features.shape) for features in maps]


if __name__ == "__main__":
    print(main())
