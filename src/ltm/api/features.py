"""Use the features of a converted network: average them, or restore one token per patch."""

from __future__ import annotations

from torch import Tensor, nn

from ltm.adapters.blocks import Tokens
from ltm.api.conversion import conversion_of
from ltm.core.merge import pool_by_size, restore_through


def pool_tokens(model: nn.Module, features: Tensor) -> Tensor:
    """The mean over patches, `b t c -> b c`, with tokens weighted by size.

    `features` come from the last forward, or from an earlier `forward_features`.
    """
    tokens, num_prefix = _known(model, features)
    patches = features[:, num_prefix:]
    if tokens.size is None:
        return patches.mean(dim=1)
    return pool_by_size(patches, tokens.size[:, num_prefix:], "avg")


def restore_tokens(model: nn.Module, features: Tensor) -> Tensor:
    """One token per patch, `b t c -> b n c`, as in the original network.

    Patches that were merged get the same token. Prefix tokens come first, as before.
    """
    tokens, _ = _known(model, features)
    return restore_through(tokens.merges, features)


def _known(model: nn.Module, features: Tensor) -> tuple[Tokens, int]:
    done = conversion_of(model)
    if features.ndim != 3:
        raise ValueError(
            f"features: got {features.ndim} dimensions; tokens of a sequence have 3. Maps of grid "
            "networks have their full size in forward_intermediates."
        )
    tokens = done.leaving(features)
    left = features.shape[1] if tokens.size is None else tokens.size.shape[1]
    batch = 1 if tokens.size is None else tokens.size.shape[0]
    if left != features.shape[1] or batch not in (1, features.shape[0]):
        raise ValueError(
            f"features: got {tuple(features.shape[:2])} images and tokens; the last forward left "
            f"{left} tokens of {batch} images. Give what it returned."
        )
    return tokens, done.sites[0].num_prefix if done.sites else 0
