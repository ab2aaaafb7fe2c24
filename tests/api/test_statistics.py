"""Class statistics of the sites."""

import copy

import pytest
import torch
from timm.utils import ModelEmaV3

import ltm
from ltm.api import fit_, measure_share, mergers
from ltm.core.mask_gradient import weigh
from toys import pictures, size_of, toy


def converted(name="vit", **settings):
    model = toy(name)
    ltm.merge_tokens_(model, ltm.LTM.from_settings({"ratio": 0.8, **settings}), size_of(name))
    return model


def test_without_statistics_the_step_is_zero():
    images, counts = pictures("vit"), {"ratio": None, "per_block": 0.8}
    with torch.no_grad():
        informative = converted(**counts)(images)
        uniform = converted(weights="uniform", **counts)(images)
    torch.testing.assert_close(informative, uniform)


def test_statistics_wake_the_step():
    model, images = converted(gain=1.0), pictures("vit", batch=6)
    with torch.no_grad():
        before = model(images)
        assert ltm.collect_statistics_(model, [(images, torch.arange(6))]) == 6
        assert all(merger.active for _, merger in mergers(model))
        assert not torch.allclose(model(images), before)


def test_own_predictions_serve_as_labels():
    images = pictures("vit", batch=6)
    model = converted()
    ltm.collect_statistics_(model, [images])
    own = model(images).argmax(dim=1)
    step = next(m.informative for _, m in mergers(model))
    assert set(step.present.nonzero()[:, 0].tolist()) <= set(range(10))
    assert step.present.sum() <= own.unique().numel() + 2
    columns = step.costs.neg().exp().sum(dim=1)
    torch.testing.assert_close(columns, torch.ones_like(columns), atol=1e-3, rtol=0)


def test_batches_add_up():
    images, labels = pictures("vit", batch=6), torch.arange(6)
    one, many = converted(), converted()
    ltm.collect_statistics_(one, [(images, labels)])
    ltm.collect_statistics_(many, [(images[:1], labels[:1]), (images[1:], labels[1:])])
    for (_, a), (_, b) in zip(mergers(one), mergers(many), strict=True):
        torch.testing.assert_close(
            a.informative.centroids, b.informative.centroids, atol=1e-5, rtol=1e-5
        )
        torch.testing.assert_close(a.informative.costs, b.informative.costs, atol=1e-4, rtol=1e-4)


def test_one_pass_is_refused():
    with pytest.raises(ValueError, match="passes: got 1; at least 2"):
        ltm.collect_statistics_(converted(), [pictures("vit")], passes=1)


@pytest.mark.parametrize("settings", [{}, {"scope": "batch"}])
def test_what_is_known_stays_where_collecting_fails(settings):
    model, images = converted(**settings), pictures("vit", batch=6)
    ltm.collect_statistics_(model, [(images, torch.arange(6))])
    model.train()
    model(images)  # with a batch's scope: its running mean
    model.eval()
    before = copy.deepcopy(model.state_dict())
    for batch in ((images, images, images), (images, torch.full((6,), 10))):
        with pytest.raises((TypeError, ValueError, RuntimeError, IndexError)):
            ltm.collect_statistics_(model, [images, batch])
        assert all(merger.active for _, merger in mergers(model))
        assert all(torch.equal(value, before[n]) for n, value in model.state_dict().items())


@pytest.mark.slow
def test_statistics_that_do_not_fit_are_forgotten_whole():
    model = converted(space="token", ratio=None, per_block=0.8)
    ltm.collect_statistics_(model, [pictures("vit")])
    ltm.set_ratio_(model, 0.7)
    assert not any(merger.active for _, merger in mergers(model))


def test_other_classes_have_no_running_mean_yet():
    model = converted(scope="batch", ratio=None, per_block=0.8)
    ltm.collect_statistics_(model, [(pictures("vit", batch=6), torch.arange(6))])
    model.train()
    model(pictures("vit"))
    assert all(merger.running_logits.any() for _, merger in mergers(model))
    model.reset_classifier(5)
    assert not any(merger.running_logits.any() for _, merger in mergers(model))


def test_tables_of_too_many_classes_are_left_out():
    model = toy("vit")
    model.reset_classifier(9000)
    with pytest.warns(UserWarning, match="the informative step is left out"):
        ltm.merge_tokens_(model, ltm.LTM())
    assert not any(
        hasattr(merger, "informative") and merger.informative for _, merger in mergers(model)
    )
    assert model(pictures("vit")).isfinite().all()


@pytest.mark.parametrize("name", ["vit", "swin", "mobilevit", "efficientvit"])
def test_a_layer_in_the_mask_module_has_the_width_of_a_token(name):
    model = converted(name, space="token", mlp=True, ratio=None, per_block=0.6)
    ltm.collect_statistics_(model, [pictures(name)])
    assert all(
        merger.informative.mlp.in_features == merger.site.width for _, merger in mergers(model)
    )
    assert model(pictures(name)).isfinite().all()


@pytest.mark.parametrize("settings", [{"mlp": True}, {"scope": "batch"}])
def test_hosts_in_half_precision_have_mask_modules(settings):
    model, images = toy("vit").bfloat16(), pictures("vit").bfloat16()
    ltm.merge_tokens_(model, ltm.LTM.from_settings({"per_block": 0.8, **settings}))
    ltm.collect_statistics_(model, [images])
    model.bfloat16().train()
    assert model(images).isfinite().all()


def test_a_batch_shares_one_state_in_the_letter_too():
    model = converted(scope="batch", mask_form="letter", ratio=None, per_block=0.8)
    ltm.collect_statistics_(model, [(pictures("vit", batch=6), torch.arange(6))])
    for mode in (True, False):
        model.train(mode)
        assert model(pictures("vit")).isfinite().all()


def test_an_empty_loader_is_refused():
    with pytest.raises(ValueError, match="no images"):
        ltm.collect_statistics_(converted(), [])


def test_a_loader_that_can_be_gone_through_once_is_refused_at_the_door():
    model, images = converted(), pictures("vit", batch=6)
    ltm.collect_statistics_(model, [(images, torch.arange(6))])
    with pytest.raises(ValueError, match=r"loader: got a generator, .* needed 2 times"):
        ltm.collect_statistics_(model, (batch for batch in [images]))
    assert all(merger.active for _, merger in mergers(model))


def test_a_share_without_merging_is_one():
    model = toy("vit")
    ltm.merge_tokens_(model, ltm.ToMe(ratio=1))
    assert measure_share(model, [pictures("vit")]) == pytest.approx(1)


def test_a_share_needs_images_that_can_be_read_again():
    model = toy("vit")
    ltm.merge_tokens_(model, ltm.LTMP(ratio=0.8))
    with pytest.raises(ValueError, match="batches: they hold no images"):
        fit_(model, [])
    with pytest.raises(ValueError, match=r"batches: got a generator, .* needed several times"):
        fit_(model, (batch for batch in [pictures("vit")]))


@pytest.mark.parametrize(
    ("batch", "error", "sentence"),
    [
        ({"image": pictures("vit")}, TypeError, r"loader: got a batch of \(dict\)"),
        ([pictures("vit")], TypeError, r"loader: got a batch of \(Tensor\)"),
        ((pictures("vit"), [0, 1]), TypeError, r"loader: got a batch of \(Tensor, list\)"),
        ((pictures("vit"), torch.arange(3)), ValueError, r"loader: got labels of shape \(3,\)"),
        ((pictures("vit"), torch.rand(2, 10)), ValueError, "the number of its class"),
    ],
)
def test_what_is_no_batch_is_said(batch, error, sentence):
    with pytest.raises(error, match=sentence):
        ltm.collect_statistics_(converted(), [batch])


def test_the_informative_step_lowers_the_bound():
    """A small step along the logits reduces the bound that it descends."""
    model, images, labels = converted(), pictures("vit", batch=6), torch.arange(6)
    ltm.collect_statistics_(model, [(images, labels)])
    step = next(m.informative for _, m in mergers(model))
    tokens = torch.randn(6, 20, 32)
    size = torch.ones(6, 20)

    def bound(logits):
        weight = (size * logits.exp()) / (size * logits.exp()).sum(1, keepdim=True)
        feature = (weight[:, None] @ tokens)[:, 0]
        from ltm.core.bottleneck import class_membership

        phi = class_membership(feature, step.centroids, 10.0, step.present)
        return (phi * step.costs[labels]).sum(1)

    flat = torch.zeros(6, 20)
    direction, _ = weigh(tokens, size, None, step.step(labels), 0)
    assert (bound(1e-2 * direction) < bound(flat) + 1e-7).all()
    assert (bound(1e-2 * direction) < bound(flat)).any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "support"),
    [
        ("vit", None),
        ("vit", "learned"),
        ("headless", "learned"),
        ("swin", None),
        ("mobilevit", None),
    ],
)
def test_a_model_costs_one_number_whatever_is_known_of_its_classes(name, support, tmp_path):
    model, images = converted(name, ratio=0.7, support=support), pictures(name)

    def cost():
        report = ltm.api.report(model)
        assert round(1e9 * ltm.gmacs(model)) == report.macs_after
        return report.share

    planned = cost()
    assert planned <= 0.7
    resting = ltm.freeze_(copy.deepcopy(model))
    assert round(1e9 * ltm.gmacs(resting)) == ltm.api.report(resting).macs_after
    if name != "headless":
        assert ltm.gmacs(resting) < ltm.gmacs(model)
        ltm.collect_statistics_(model, [images])
        assert cost() == planned
    ltm.freeze_(model)
    assert cost() <= 0.701
    ltm.save(model, tmp_path)
    assert ltm.api.report(ltm.load(tmp_path, toy(name))) == ltm.api.report(model)


@torch.no_grad()
def test_timms_average_of_weights_takes_statistics_over():
    model, images = toy("vit"), pictures("vit", batch=5)
    ltm.merge_tokens_(model, ltm.LTM(ratio=0.8, weights=ltm.Informative(gain=2.0)))
    average = ModelEmaV3(model, decay=0.0)
    ltm.collect_statistics_(model, [(images, torch.arange(5))])
    average.update(model)
    torch.testing.assert_close(average.module.eval()(images), model(images))
