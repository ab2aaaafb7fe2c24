"""What LTMP drops is restored from what is most like it: alone, in a batch, and masked alike."""

import pytest
import torch
from torch import Tensor

import ltm
from ltm.core.merge import Merge
from ltm.methods import LTMP
from ltm.methods.base import Hints, Site
from toys import pictures, size_of, toy


def decide(tokens: Tensor, attention: Tensor, num_prefix: int) -> Merge:
    number = tokens.shape[1] - num_prefix
    site = Site(
        block=0,
        depth=1,
        width=tokens.shape[2],
        num_prefix=num_prefix,
        num_classes=2,
        grid=(1, number),
        num_in=number,
        num_out=number // 2,
    )
    merger = LTMP(merge_threshold=0.6, prune_threshold=0.5).build(site).eval()
    return merger(tokens, Hints(num_out=number // 2, keys=tokens, attention=attention)).merge


@pytest.mark.parametrize("num_prefix", [0, 1])
def test_removing_and_masking_restore_the_same_in_any_batch(
    num_prefix: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randn(6, 21, 4, generator=generator)
    attention = torch.rand(6, 21, generator=generator)
    # Images that keep different numbers of tokens.
    attention[:3] += 0.4

    def restored(chosen: slice) -> Tensor:
        merge = decide(tokens[chosen], attention[chosen], num_prefix)
        return merge.restore(merge(tokens[chosen]))

    together = restored(slice(None))
    alone = torch.cat([restored(slice(i, i + 1)) for i in range(6)])
    torch.testing.assert_close(together, alone)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    torch.testing.assert_close(restored(slice(None)), together)


def test_a_pruned_token_is_restored_from_the_most_similar_one_left() -> None:
    tokens = torch.tensor([[[1.0, 0], [0, 1], [0.9, 0.6], [-1, 0.1]]])
    attention = torch.tensor([[1.0, 1, 0, 1]])
    merge = decide(tokens, attention, 0)
    assert merge.num_out == 3
    back = merge.restore(merge(tokens))
    torch.testing.assert_close(back[0, 2], tokens[0, 0])


@pytest.mark.parametrize("name", ["efficientvit", "mobilevit"])
def test_predictions_on_grids_do_not_depend_on_batch_mates(name: str) -> None:
    model, size = toy(name), size_of(name)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 1.0
    with torch.no_grad():
        # Untrained, all tokens are alike, and rounding decides which of them leave.
        model.train()(torch.randn(16, 3, size, size))
    model.eval()
    config = LTMP(per_block=0.8, merge_threshold=0.5, prune_threshold=0.02)
    ltm.merge_tokens_(model, config, image_size=size)
    images = pictures(name, 3)
    with torch.no_grad():
        together = model(images)
        alone = torch.cat([model(image[None]) for image in images])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
