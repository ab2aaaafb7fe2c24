"""Maps of tokens: weights that sum to one, groups that cover every patch, counts that add up."""

import pytest
import torch
from torch import nn

import ltm
from ltm.evaluation.bottleneck import watchable
from ltm.evaluation.measurement import tokens_by_block
from ltm.methods import methods
from ltm.report.pictures import Scenes
from ltm.report.tracing import DROPPED, SiteMap, at_block, trace


@pytest.mark.parametrize("method", methods())
def test_weights_of_every_token_sum_to_one(method: str, vit: nn.Module, scenes: Scenes) -> None:
    ltm.merge_tokens_(vit, methods()[method](per_block=0.8))
    maps = trace(vit, scenes.inputs)
    assert [site.block for site in maps] == sorted(site.block for site in maps)
    for site in maps:
        assert site.grid == (8, 8)
        sums = site.weights.sum(1)
        alive = sums > 0
        torch.testing.assert_close(sums[alive], torch.ones_like(sums[alive]))
        for image in range(len(scenes)):
            assert site.num_tokens(image) == int(alive[image].sum())


def test_a_target_has_the_weights_of_its_own_token(vit: nn.Module, scenes: Scenes) -> None:
    ltm.merge_tokens_(vit, ltm.ToMe(per_block=0.8))
    site = trace(vit, scenes.inputs)[-1]
    for row, column in ((0, 0), (3, 5), (7, 7)):
        weights = site.of_target(1, (row, column))
        assert weights.shape == (8, 8)
        assert weights[row, column] > 0
        assert weights.sum() == pytest.approx(1, abs=1e-5)
        same = site.group_grid(1) == site.group_grid(1)[row, column]
        assert ((weights > 0) == same).all()


def test_a_dropped_patch_has_no_weights_and_no_group() -> None:
    weights = torch.tensor([[[1.0, 0.0], [0.0, 0.5], [0.0, 0.5], [0.0, 0.0]]])
    site = SiteMap(block=0, grid=(2, 2), weights=weights)
    assert site.groups().tolist() == [[0, 1, 1, DROPPED]]
    assert site.of_target(0, (1, 1)).sum() == 0
    assert site.num_tokens(0) == 2


@pytest.mark.parametrize("patch", [(8, 0), (0, -1), (3, 8)])
def test_a_target_outside_the_image_is_refused(
    patch: tuple[int, int], vit: nn.Module, scenes: Scenes
) -> None:
    ltm.merge_tokens_(vit, ltm.ToMe(per_block=0.8))
    with pytest.raises(ValueError, match="rows go from 0 to 7, columns from 0 to 7"):
        trace(vit, scenes.inputs)[0].of_target(0, patch)


def test_tokens_by_block_are_those_planned(vit: nn.Module, scenes: Scenes) -> None:
    with watchable(vit) as watched:
        assert tokens_by_block(watched, scenes.inputs) == dict.fromkeys(range(4), 64.0)
    report = ltm.merge_tokens_(vit, ltm.ToMe(per_block=0.8))
    planned = {site.block: float(site.num_out) for site in report.sites}
    assert tokens_by_block(vit, scenes.inputs) == planned


def test_before_the_first_merge_every_patch_is_alone() -> None:
    later = SiteMap(block=5, grid=(2, 2), weights=torch.full((1, 4, 1), 0.25))
    assert at_block([later], 7, (2, 2), 1) is later
    early = at_block([later], 4, (2, 2), 1)
    assert early.groups().tolist() == [[0, 1, 2, 3]]
