"""What the page knows about a picture, on the networks that come with the package."""

import pytest
import torch

from ltm.data.shapes import ShapesClassification, example_pictures
from ltm.data.transforms import evaluation_transform
from ltm.evaluation.measurement import tokens_by_block
from ltm.report.pictures import prepare
from ltm.web.inspection import inspect
from ltm.web.networks import (
    CLASSES,
    EMBEDDED,
    SIDE,
    Networks,
    as_network,
    embedded_network,
    weights_path,
)
from ltm.web.rendering import LEAST_SIDE, draw_groups, draw_token, layer_table, share_of, summary

pytestmark = pytest.mark.slow

TOKENS = {"ViT": [144] * 6, "Swin": [576, 576, 144, 144]}


@pytest.fixture(scope="module")
def networks() -> Networks:
    return Networks({name: embedded_network(name) for name in EMBEDDED})


def test_the_networks_are_small_files() -> None:
    assert sum(weights_path(name).stat().st_size for name in EMBEDDED) <= 1_000_000


@pytest.mark.parametrize("name", EMBEDDED)
def test_the_networks_know_images_that_they_were_not_trained_on(
    networks: Networks, name: str
) -> None:
    network = networks[name]
    transform = evaluation_transform(network.spec, normalize=True)
    unseen = ShapesClassification("val", 60, SIDE, CLASSES, transform=transform)
    with torch.inference_mode():
        scores = network.model(torch.stack([image for image, _ in unseen]))
    assert (scores.argmax(1) == torch.as_tensor(unseen.labels)).double().mean() >= 0.85


@pytest.mark.parametrize(("name", "method"), [("ViT", "LTM"), ("Swin", "LTM")])
def test_a_picture_is_inspected(networks: Networks, name: str, method: str) -> None:
    merging = networks.merging(name, method, 0.6)
    picture = example_pictures(1)[0].image
    seen = inspect(networks[name], merging, picture, rounds=1)
    assert len(seen.before) == len(seen.after) == 5
    assert seen.before[0].probability >= seen.before[1].probability
    assert seen.mmacs_after <= 0.6 * seen.mmacs_before
    assert seen.timing is not None
    assert len(seen.layers) == len(seen.tokens)
    assert seen.layers[-1].tokens_after < seen.layers[-1].tokens_before
    assert [layer.tokens_before for layer in seen.layers] == TOKENS[name]
    left = tokens_by_block(merging, prepare([picture], [""], networks[name].spec).inputs)
    assert left
    assert all(seen.layers[block].tokens_after == number for block, number in left.items())
    last = len(seen.layers) - 1
    assert draw_groups(seen, last).shape[0] >= LEAST_SIDE
    assert "→" in summary(seen)
    assert layer_table(seen).count("<tr>") == 1 + len(seen.layers)


def test_a_share_of_one_changes_nothing(networks: Networks) -> None:
    picture = example_pictures(1)[0].image
    for method in ("LTM", "LTMP"):
        seen = inspect(networks["ViT"], networks.merging("ViT", method, 1.0), picture, rounds=0)
        assert seen.before == seen.after
        assert seen.timing is None
        view = draw_token(seen, 0, share_of(seen, 0, 0))
        assert view.caption == "After block 0, the patch in row 1, column 1 is a token of its own."


def test_the_token_under_a_click_is_the_one_described(networks: Networks) -> None:
    seen = inspect(
        networks["ViT"], networks.merging("ViT", "LTM", 0.6), example_pictures(1)[0].image, rounds=0
    )
    height, width = draw_groups(seen, 5).shape[:2]
    point = share_of(seen, width - 1, height // 2)
    assert "the patch in row 7, column 12" in draw_token(seen, 5, point).caption
    weights = seen.tokens[5].of_target(0, (6, 11))
    assert weights[6, 11] > 0
    torch.testing.assert_close(float(weights.sum()), 1.0, atol=1e-4, rtol=0)


def test_merging_copies_share_their_weights_and_few_are_kept(networks: Networks) -> None:
    original = dict(networks["ViT"].model.named_parameters())
    few = Networks(networks.by_name, kept=2)
    for method in ("LTM", "ToMe", "ToFu"):
        copied = dict(few.merging("ViT", method, 1.0).named_parameters())
        assert all(copied[path] is weight for path, weight in original.items())
    assert few.num_kept == 2


def test_what_is_not_known_is_named(networks: Networks) -> None:
    with pytest.raises(ValueError, match="model: got ResNet; known are ViT, Swin"):
        networks.merging("ResNet", "LTM", 0.7)
    with pytest.raises(ValueError, match="method: got PiToMe; known are LTM, LTMP, ToFu, ToMe"):
        networks.merging("ViT", "PiToMe", 0.7)
    with pytest.raises(ValueError, match="embedded is ResNet: known are ViT, Swin"):
        embedded_network("ResNet")


def test_a_saved_network_is_shown_as_saved(networks: Networks) -> None:
    vit = networks["ViT"]
    saved = networks.merging("ViT", "LTM", 0.6)
    own = as_network("own", saved, vit.spec, vit.class_names)
    assert own.methods == ("as saved", "LTM", "ToFu", "ToMe")  # LTMP would need images
    shown = Networks({"own": own})
    picture = example_pictures(1)[0].image
    seen = inspect(own, shown.merging("own", "as saved", 0.9), picture, rounds=0)
    plain = inspect(vit, saved, picture, rounds=0)
    assert seen.before == plain.before
    assert seen.after == plain.after
