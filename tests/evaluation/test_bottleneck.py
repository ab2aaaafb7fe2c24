"""The bottleneck of watched blocks against the same formula on features gathered by hand."""

import pytest
import torch
from torch import Tensor, nn

import ltm
from evaluation_worker import batches_of, small_vit
from ltm.api import is_merging
from ltm.core.bottleneck import image_features, information_bottleneck
from ltm.evaluation.bottleneck import measure_bottleneck, overall, watchable

METHODS = {
    "tome": ltm.ToMe(counts=(13, 11, 9)),
    "ltmp": ltm.LTMP(counts=(13, 11, 9), merge_threshold=0.2),
    "ltm": ltm.LTM(counts=(10,), sites=(1,)),
}


@pytest.fixture
def data() -> dict[str, Tensor]:
    labels = torch.arange(14) % 3
    images = 0.1 * torch.randn(3, 3, 64, 64)[labels] + torch.randn(14, 3, 64, 64)
    return {"images": images, "labels": labels}


def converted(name: str) -> nn.Module:
    model = small_vit()
    ltm.merge_tokens_(model, METHODS[name])
    return model


@pytest.mark.parametrize("keep_mib", [0, 64])
def test_an_untouched_network_is_measured_on_its_own_tokens(
    data: dict[str, Tensor], keep_mib: int
) -> None:
    model = small_vit()
    rows = measure_bottleneck(
        {"base": model}, batches_of(data, 0, 14), 3, beta=5.0, keep_mib=keep_mib
    )
    assert not is_merging(model)
    tokens: list[Tensor] = []
    for block in model.blocks:  # pyright: ignore[reportGeneralTypeIssues]
        # What enters the second half of a block is the attention output with its residual.
        block.norm2.register_forward_pre_hook(lambda _, args: tokens.append(args[0]))
    with torch.no_grad():
        model(data["images"])
    assert [row.block for row in rows] == [0, 1, 2]
    for row, z in zip(rows, tokens, strict=True):
        inputs = image_features(data["images"])
        expected = information_bottleneck(z[:, 1:].mean(1), inputs, data["labels"], 3, 5.0)
        assert row.loss == pytest.approx(float(expected.loss), abs=1e-5)
        assert row.bound == pytest.approx(float(expected.bound), abs=1e-5)
        assert row.c0 == pytest.approx(float(expected.c0), abs=1e-5)
        assert row.num_images == 14
    assert overall(rows) == {"base": rows[-1]}


def test_merged_tokens_weigh_as_many_patches_as_they_stand_for(data: dict[str, Tensor]) -> None:
    """A merge by size-weighted means leaves the mean over patches where it was."""
    models = {"base": small_vit(), "tome": small_vit()}
    ltm.merge_tokens_(models["tome"], ltm.ToMe(counts=(9,), sites=(0,)))
    rows = measure_bottleneck(models, batches_of(data, 0, 14), 3)
    first = {row.model: row for row in rows if row.block == 0}
    assert first["tome"].loss == pytest.approx(first["base"].loss, abs=1e-5)
    last = overall(rows)
    assert last["tome"].loss != pytest.approx(last["base"].loss, abs=1e-7)


def test_all_methods_are_measured_on_the_same_images_and_the_bound_holds(
    data: dict[str, Tensor],
) -> None:
    models = {"base": small_vit(), **{name: converted(name) for name in METHODS}}
    rows = measure_bottleneck(models, batches_of(data, 0, 14), 3)
    assert {row.model for row in rows} == set(models)
    assert {(row.model, row.block) for row in rows} == {(m, b) for m in models for b in range(3)}
    for row in rows:
        assert row.loss <= row.bound - row.c0 + 1e-6
        assert row.c0 == pytest.approx(rows[0].c0)
    alone = measure_bottleneck({"tome": models["tome"]}, batches_of(data, 0, 14), 3)
    assert alone == [row for row in rows if row.model == "tome"]


def test_padding_of_other_images_does_not_count(data: dict[str, Tensor]) -> None:
    """LTMP pads a batch to its longest image: batches of one give the same."""
    model = converted("ltmp")
    one_by_one = [(image[None], label[None]) for image, label in zip(*data.values(), strict=True)]
    batched = measure_bottleneck({"ltmp": model}, batches_of(data, 0, 14), 3)
    single = measure_bottleneck({"ltmp": model}, one_by_one, 3)
    for row, other in zip(batched, single, strict=True):
        assert row.loss == pytest.approx(other.loss, abs=1e-5)


@pytest.mark.parametrize("name", ["test_efficientvit", "mobilevit_xxs", "swin"])
def test_grid_networks_are_watched_as_well(name: str) -> None:
    import timm

    arguments = {
        "mobilevit_xxs": {"model_name": name},
        "test_efficientvit": {"model_name": "efficientvit_b0"},
        "swin": {
            "model_name": "swin_tiny_patch4_window7_224",
            "img_size": 56,
            "embed_dim": 12,
            "depths": (1, 1),
            "num_heads": (1, 2),
        },
    }[name]
    model = timm.create_model(num_classes=3, **arguments).eval()
    size = 56 if name == "swin" else 64
    batches = [(torch.randn(4, 3, size, size), torch.tensor([0, 1, 2, 0]))] * 2
    rows = measure_bottleneck({"base": model}, batches, 3, image_size=(size, size))
    assert len(rows) >= 2
    for row in rows:
        assert row.loss <= row.bound - row.c0 + 1e-6


def test_labels_must_be_classes_of_the_network(data: dict[str, Tensor]) -> None:
    with pytest.raises(ValueError, match="labels range from 0 to 2"):
        measure_bottleneck({"base": small_vit()}, batches_of(data, 0, 14), 2)


def test_watchable_gives_back_what_fails() -> None:
    model = small_vit()

    def fail() -> None:
        with watchable(model):
            assert is_merging(model)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert not is_merging(model)
