"""Use the features of a converted network: average them, or restore one token per patch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn

from ltm.adapters.blocks import Tokens
from ltm.api.conversion import conversion_of
from ltm.core.merge import pool_by_size, restore_through


def pool_tokens(model: nn.Module, features: Any) -> Tensor:
    """The mean over patches, `b t c -> b c`, with tokens weighted by size.

    `features` are what the network returned in any forward: tokens, an output of transformers, one
    of its `hidden_states`, or NaFlexVit's dict. Other tensors, such as a cast copy, are taken for
    those of the last forward; they are refused while you hold features of an earlier one.
    """
    x, tokens, num_prefix = _known(model, features)
    patches = x[:, num_prefix:]
    if tokens.size is None:
        return patches.mean(dim=1)
    return pool_by_size(patches, tokens.size[:, num_prefix:], "avg")


def restore_tokens(model: nn.Module, features: Any) -> Tensor:
    """One token per patch, `b t c -> b n c`, as in the original network.

    Patches that were merged get the same token. Prefix tokens come first, as before. `features` are
    those that `pool_tokens` takes.
    """
    x, tokens, _ = _known(model, features)
    return restore_through(tokens.merges, x)


def _known(model: nn.Module, features: Any) -> tuple[Tensor, Tokens, int]:
    """The tokens themselves, what is known about them, and how many are no patches."""
    done, x = conversion_of(model), _tokens_in(features)
    if x.ndim != 3:
        raise ValueError(
            f"features: got {x.ndim} dimensions; tokens of a sequence have 3. Maps of grid "
            "networks have their full size in forward_intermediates."
        )
    tokens = done.leaving(x)
    left = x.shape[1] if tokens.size is None else tokens.size.shape[1]
    batch = 1 if tokens.size is None else tokens.size.shape[0]
    if left != x.shape[1] or batch not in (1, x.shape[0]):
        raise ValueError(
            f"features: got {tuple(x.shape[:2])} images and tokens; the last forward left "
            f"{left} tokens of {batch} images. Give what it returned."
        )
    return x, tokens, done.sites[0].num_prefix if done.sites else 0


def _tokens_in(features: Any) -> Tensor:
    """The tokens in what a network returns: a tensor, an output of transformers, NaFlex's dict."""
    found = features
    if isinstance(features, Mapping):
        outputs = cast("Mapping[str, Any]", features)
        found = outputs.get("last_hidden_state", outputs.get("patches"))
    if not isinstance(found, Tensor):
        raise ValueError(
            f"features: got {type(features).__name__}; give the tokens that the network returned, "
            "a tensor of images, tokens and channels."
        )
    return found
