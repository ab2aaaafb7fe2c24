"""What the page knows about a picture, on the networks that come with the package."""

import re
from pathlib import Path

import pytest
import torch

from ltm import LTM
from ltm.api import conversion_of, merging_copy
from ltm.data.shapes import example_pictures
from ltm.evaluation.measurement import tokens_by_block
from ltm.methods import methods
from ltm.report.pictures import prepare
from ltm.web.inspection import inspect
from ltm.web.networks import (
    Networks,
    as_network,
    embedded_network,
    embedded_pictures,
)
from ltm.web.page import Handlers
from ltm.web.rendering import LEAST_SIDE, draw_groups, draw_token, layer_table, share_of, summary

pytestmark = pytest.mark.slow

VIT = "demo_vit"


@pytest.fixture(scope="module")
def networks() -> Networks:
    return Networks({VIT: embedded_network(VIT)})


def test_the_examples_are_known_before_and_after_merging(networks: Networks) -> None:
    for picture in embedded_pictures(3):
        seen = inspect(networks[VIT], networks.merging(VIT, "LTM", 0.5), picture.image, rounds=0)
        assert seen.before[0].name == seen.after[0].name == picture.name


def test_a_picture_is_inspected(networks: Networks) -> None:
    name = VIT
    merging = networks.merging(name, "LTM", 0.6)
    picture = example_pictures(1)[0].image
    seen = inspect(networks[name], merging, picture, rounds=1)
    assert len(seen.before) == len(seen.after) == 5
    assert seen.before[0].probability >= seen.before[1].probability
    assert seen.mmacs_after <= 0.6 * seen.mmacs_before
    assert seen.timing is not None
    assert len(seen.layers) == len(seen.tokens)
    assert seen.layers[-1].tokens_after < seen.layers[-1].tokens_before
    assert [layer.tokens_before for layer in seen.layers] == [784] * 6
    left = tokens_by_block(merging, prepare([picture], [""], networks[name].spec).inputs)
    assert left
    assert all(seen.layers[block].tokens_after == number for block, number in left.items())
    last = len(seen.layers) - 1
    assert draw_groups(seen, last).shape[0] >= LEAST_SIDE
    assert "→" in summary(seen)
    assert layer_table(seen).count("<tr>") == 1 + len(seen.layers)


def test_a_share_of_one_changes_nothing(networks: Networks) -> None:
    picture = example_pictures(1)[0].image
    for method in ("LTM", "ToMe"):
        seen = inspect(networks[VIT], networks.merging(VIT, method, 1.0), picture, rounds=0)
        assert seen.before == seen.after
        assert seen.timing is None
        view = draw_token(seen, 0, share_of(seen, 0, 0))
        assert view.caption == "After block 0, the patch in row 1, column 1 is a token of its own."


def test_the_token_under_a_click_is_the_one_described(networks: Networks) -> None:
    seen = inspect(
        networks[VIT], networks.merging(VIT, "LTM", 0.6), example_pictures(1)[0].image, rounds=0
    )
    height, width = draw_groups(seen, 5).shape[:2]
    point = share_of(seen, width - 1, height // 2)
    said = draw_token(seen, 5, point).caption
    assert "the patch in row 15, column 28" in said
    least, most = map(float, re.findall(r"([\d.]+)%", said))
    assert least < most
    weights = seen.tokens[5].of_target(0, (14, 27))
    assert weights[14, 27] > 0
    torch.testing.assert_close(float(weights.sum()), 1.0, atol=1e-4, rtol=0)


def test_merging_copies_share_their_weights_and_few_are_kept(networks: Networks) -> None:
    original = dict(networks[VIT].model.named_parameters())
    few = Networks(networks.by_name, kept=2)
    first = few.merging(VIT, "ToFu", 0.9)
    for method in ("LTM", "ToMe", "ToFu"):
        copied = dict(few.merging(VIT, method, 1.0).named_parameters())
        assert all(copied[path] is weight for path, weight in original.items())
    assert few.merging(VIT, "ToFu", 1.0) is few.merging(VIT, "ToFu", 1.0)
    assert few.merging(VIT, "ToFu", 0.9) is not first


def test_what_is_not_known_is_named(networks: Networks) -> None:
    with pytest.raises(ValueError, match="model: got ResNet; known are demo_vit"):
        networks.merging("ResNet", "LTM", 0.7)
    with pytest.raises(ValueError, match="method: got EViT; known are LTM, LTMP, ToFu, ToMe"):
        networks.merging(VIT, "EViT", 0.7)
    with pytest.raises(ValueError, match="embedded is ResNet: known are demo_vit"):
        embedded_network("ResNet")


def test_a_saved_network_is_shown_as_saved(networks: Networks) -> None:
    vit = networks[VIT]
    saved = networks.merging(VIT, "LTM", 0.6)
    own = as_network("own", saved, vit.spec, vit.class_names)
    titles = {method.title for method in methods().values()}
    assert own.methods[0] == "as saved"
    assert sorted(own.methods[1:]) == sorted(titles - {"LTMP"})  # LTMP would need images
    shown = Networks({"own": own})
    picture = example_pictures(1)[0].image
    seen = inspect(own, shown.merging("own", "as saved", 0.9), picture, rounds=0)
    plain = inspect(vit, saved, picture, rounds=0)
    assert seen.before == plain.before
    assert seen.after == plain.after


def test_a_saved_network_moves_with_the_ratio(networks: Networks, tmp_path: Path) -> None:
    vit = networks[VIT]
    config = LTM(ratio=0.6, weights="uniform")
    own = as_network("own", merging_copy(vit.model, config), vit.spec, vit.class_names)
    handlers = Handlers(Networks({"own": own}), ())
    path = tmp_path / "picture.png"
    example_pictures(1)[0].image.save(path)
    assert handlers.ratio_of("own", "as saved", 0.9) == round(own.saved_share, 2)
    assert own.saved_share == pytest.approx(0.6, abs=0.02)
    assert handlers.ratio_of("own", "ToMe", 0.9) == 0.9
    assert handlers.look_at_ratio(path, "own", "ToMe", 0.8, 1, None)[0] == "ToMe"
    assert handlers.look_at_ratio(path, "own", "as saved", 0.8, 1, None)[0] == "LTM"
    moved = conversion_of(handlers.networks.merging("own", "LTM", 0.8))
    assert moved.config == LTM(ratio=0.8, weights="uniform")
