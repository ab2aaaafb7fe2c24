"""Every method on every family: what a conversion must and must not change."""

import copy
import functools
import pickle
import threading

import pytest
import timm
import torch

import ltm
import ltm.api
from ltm.api import collect_statistics_, mergers
from ltm.core.cost import count_macs, meta_copy, meta_images
from ltm.methods import methods
from ltm.methods.ltm.learned import LearnedMerger
from toys import GRIDS, SEQUENCES, TOYS, VARIANTS, pairs, pictures, size_of, toy

FAMILIES = ("vit", "swin", "mobilevit", "efficientvit")


def config(method, **settings):
    return methods()[method].from_settings(settings)


def reachable(method, name):
    """A budget that every method reaches on this network."""
    if name not in GRIDS or method == "ltm":
        return 0.8
    return 0.95 if method == "ltmp" else 0.9


def converted(method, name, **settings):
    return copy.deepcopy(_converted(method, name, tuple(settings.items())))


@functools.cache
def _converted(method, name, settings):
    model = toy(name)
    chosen = dict(settings) or {"ratio": reachable(method, name)}
    ltm.merge_tokens_(model, config(method, **chosen), size_of(name))
    if method == "ltmp":
        loosen(model)
    return model


def loosen(model):
    """Thresholds at which random networks merge and prune."""
    for _, merger in mergers(model):
        merger.merge_threshold.data.fill_(0.5)
        merger.prune_threshold.data.fill_(0.3 / merger.site.num_in)


@torch.no_grad()
def run(model, images):
    return model(images)


@pytest.mark.parametrize(("method", "name"), pairs())
def test_ratio_one_is_the_identity(method, name):
    model, images = toy(name), pictures(name)
    before = run(model, images)
    report = ltm.merge_tokens_(model, config(method, ratio=1), size_of(name))
    assert report.share == 1
    assert torch.equal(run(model, images), before)


@pytest.mark.parametrize(("method", "name"), pairs())
def test_a_budget_is_met_and_merging_happens(method, name):
    images, ratio = pictures(name), reachable(method, name)
    before = run(toy(name), images)
    model = converted(method, name)
    report = ltm.api.report(model)
    assert ratio - 0.1 < report.share <= ratio
    after = run(model, images)
    assert torch.isfinite(after).all()
    assert (after - before).abs().max() > 1e-6
    assert "blocks merge" in str(report)
    learned = any(isinstance(merger, LearnedMerger) for _, merger in mergers(model))
    assert ("Its masks are learned" in str(report)) == learned
    for _, merger in mergers(model):
        merger.activate_()
    assert (
        count_macs(meta_copy(model), meta_images(model, (size_of(name),) * 2)) == report.macs_after
    )


@pytest.mark.parametrize(("method", "name"), pairs())
def test_undoing_gives_the_model_back(method, name):
    model, images = toy(name), pictures(name)
    before, keys, kinds = (
        run(model, images),
        list(model.state_dict()),
        [type(m) for m in model.modules()],
    )
    ltm.merge_tokens_(model, config(method, per_block=0.9), size_of(name))
    ltm.unmerge_tokens_(model)
    assert list(model.state_dict()) == keys
    assert [type(m) for m in model.modules()] == kinds
    assert torch.equal(run(model, images), before)


@pytest.mark.parametrize("name", FAMILIES)
def test_undoing_gives_a_frozen_model_back(name):
    model, images = toy(name), pictures(name)
    before, kinds = run(model, images), [type(m) for m in model.modules()]
    ltm.merge_tokens_(model, ltm.LTM(per_block=0.9), size_of(name))
    ltm.unmerge_tokens_(ltm.freeze_(model))
    assert [type(m) for m in model.modules()] == kinds
    assert torch.equal(run(model, images), before)


@pytest.mark.parametrize(("method", "name"), pairs())
def test_original_checkpoints_load(method, name):
    model, weights = converted(method, name), toy(name).state_dict()
    own = {key: value.clone() for key, value in model.state_dict().items() if "merger" in key}
    result = model.load_state_dict({key: value + 1 for key, value in weights.items()})
    assert not result.unexpected_keys
    assert not result.missing_keys
    after = model.state_dict()
    assert all(torch.equal(after[key], weights[key] + 1) for key in weights)
    assert all(torch.equal(after[key], own[key]) for key in own)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("method", ["ltm", "tome"])
def test_variants_of_a_family_keep_what_the_family_keeps(method, name):
    """Identity and undo to the bit, checkpoint keys, budget, batch mates, checkpointing, maps."""
    model, images, make = toy(name), pictures(name, batch=3), methods()[method]
    before, keys, kinds = (
        run(model, images),
        list(model.state_dict()),
        [*map(type, model.modules())],
    )
    ltm.merge_tokens_(model, make(ratio=1), size_of(name))
    assert torch.equal(run(model, images), before)
    ltm.unmerge_tokens_(model)
    shapes = [x.shape for x in model.forward_intermediates(images, intermediates_only=True)]
    ratio = 0.8 if method == "ltm" or name != "swinv2_cr" else 0.95
    assert ratio - 0.05 < ltm.merge_tokens_(model, make(ratio=ratio), size_of(name)).share <= ratio
    merged = run(model, images)
    alone = torch.cat([run(model, image[None]) for image in images])
    torch.testing.assert_close(merged, alone, atol=1e-5, rtol=1e-4)
    assert (merged - before).abs().max() > 1e-7
    maps = model.forward_intermediates(images, intermediates_only=True)
    assert [x.shape for x in maps] == shapes
    gradients = []
    for checkpointing in (False, True):
        model.set_grad_checkpointing(checkpointing)
        model.zero_grad()
        model(images).square().sum().backward()
        weight = next(p for n, p in model.named_parameters() if "qkv" in n or "in_proj" in n)
        gradients.append(weight.grad.clone())
    torch.testing.assert_close(*gradients)
    model.set_grad_checkpointing(False)
    model.zero_grad()
    ltm.unmerge_tokens_(model)
    assert list(model.state_dict()) == keys
    assert [*map(type, model.modules())] == kinds
    assert torch.equal(run(model, images), before)


def test_timm_loads_original_checkpoints_into_a_converted_model(tmp_path):
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=3, num_classes=7)
    torch.save(model.state_dict(), tmp_path / "host.pth")
    ltm.merge_tokens_(model, ltm.LTM(ratio=0.8))
    collect_statistics_(model, [torch.randn(4, 3, 64, 64)])
    before = copy.deepcopy(model).eval()
    timm.models.load_checkpoint(model, str(tmp_path / "host.pth"))
    images = torch.randn(2, 3, 64, 64)
    assert all(merger.active for _, merger in mergers(model))
    assert torch.equal(run(model.eval(), images), run(before, images))


def test_a_checkpoint_with_a_part_of_a_merger_is_refused():
    model = converted("ltm", "vit")
    weights = model.state_dict()
    missing = next(key for key in weights if key.endswith("costs"))
    del weights[missing]
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(weights)
    assert model.load_state_dict(weights, strict=False).missing_keys == [missing]


@pytest.mark.parametrize(("method", "name"), pairs())
def test_a_prediction_does_not_depend_on_its_batch(method, name):
    model, images = converted(method, name), pictures(name, batch=5)
    alone = torch.cat([run(model, image[None]) for image in images])
    torch.testing.assert_close(run(model, images), alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("method", "name"), pairs())
def test_copies_are_independent_and_alike(method, name):
    model, images = converted(method, name), pictures(name)
    expected = run(model, images)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(run(twin, images), expected)
        assert twin.token_merging.state is not model.token_merging.state


@pytest.mark.parametrize(("method", "name"), pairs(FAMILIES))
def test_two_threads_do_not_disturb_each_other(method, name):
    model = converted(method, name)
    batches = [pictures(name, batch=2), pictures(name, batch=3).flip(-1)]
    expected = [run(model, images) for images in batches]
    results = [[], []]

    def work(which):
        for _ in range(4):
            results[which].append(run(model, batches[which]))

    threads = [threading.Thread(target=work, args=(which,)) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for which in (0, 1):
        assert len(results[which]) == 4
        for result in results[which]:
            torch.testing.assert_close(result, expected[which], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("method", "name"), pairs([*FAMILIES, "pooled"]))
def test_extreme_merging_in_half_precision_at_batch_one(method, name, dtype):
    model = converted(method, name, per_block=0.2)
    with torch.autocast("cpu", dtype):
        assert torch.isfinite(run(model, pictures(name, batch=1))).all()


LEARNERS = [
    {},
    {"support": "learned"},
    {"support": "learned", "space": "token"},
    {"support": "learned", "scope": "batch"},
    {"support": "learned", "scope": "batch", "space": "token"},
    {"support": "learned", "mask_form": "letter"},
    {"labels": "true"},
    {"support": "learned", "step": "raw"},
    {"mlp": True},
]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("settings", LEARNERS, ids=str)
def test_gradients_reach_every_mask_parameter_and_nothing_frozen_moves(settings, name):
    model, images = toy(name), pictures(name, batch=4)
    ltm.merge_tokens_(model, ltm.LTM.from_settings({"per_block": 0.5, **settings}), size_of(name))
    labels = torch.arange(4)
    collect_statistics_(model, [(images, labels)])
    learnable = set()
    for module_name, merger in mergers(model):
        learnable |= {f"{module_name}.{n}" for n, _ in merger.named_parameters()}
        merger.train()
    for name_, parameter in model.named_parameters():
        parameter.requires_grad_(name_ in learnable)
    before = {n: p.clone() for n, p in model.named_parameters()}
    from ltm.api import announcing

    with announcing(model, labels):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
    optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    loss.backward()
    optimiser.step()
    for name_, parameter in model.named_parameters():
        if name_ in learnable:
            assert parameter.grad is not None, name_
            assert torch.isfinite(parameter.grad).all(), name_
        else:
            assert torch.equal(parameter, before[name_]), name_
    gains = [n for n in learnable if n.endswith("gain") or "logits" in n]
    moved = [n for n in gains if not torch.equal(dict(model.named_parameters())[n], before[n])]
    assert moved


@pytest.mark.parametrize("space", ["pooled", "token"])
@torch.no_grad()
def test_the_mask_of_a_batch_is_a_running_mean_in_evaluation(space):
    model, images = toy("vit"), pictures("vit", batch=4)
    support, weights = ltm.Learned(scope="batch", space=space), ltm.Informative(gain=1.0)
    config = ltm.LTM(per_block=0.6, sites=(2,), support=support, weights=weights)
    ltm.merge_tokens_(model, config)
    collect_statistics_(model, [(images, torch.arange(4))])
    before = model(images)
    for mode in [True] * 20 + [False]:
        after = model.train(mode)(images)
    assert (before - after).abs().max() > 1e-3
    torch.testing.assert_close(model(images[:1]), after[:1])
    torch.testing.assert_close(ltm.freeze_(model)(images), after, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("space", ["pooled", "token"])
@torch.no_grad()
def test_the_letter_gives_a_weight_to_tokens_outside_the_support(space):
    images = pictures("vit")
    for form, share in (("masked", 0.0), ("letter", 0.5)):
        model, support = toy("vit"), ltm.Learned(space=space, mask_form=form)
        ltm.merge_tokens_(model, ltm.LTM(per_block=0.6, support=support, sites=(2,)))
        collect_statistics_(model, [images])
        (weights,) = ltm.merge_maps(model, images).values()
        support = next(m for _, m in mergers(model)).sequence(*weights.shape[1:], 0.0)
        outside = (weights * (1 - support)).sum(dim=1)
        assert bool((outside > share).all() if share else (outside == 0).all())


@pytest.mark.parametrize("name", FAMILIES)
def test_noise_only_in_training(name):
    model, images = toy(name), pictures(name)
    ltm.merge_tokens_(model, ltm.LTM(ratio=0.8, support=ltm.Learned()), size_of(name))
    assert torch.equal(run(model, images), run(model, images))
    for _, merger in mergers(model):
        merger.noise = 3.0
    assert torch.equal(run(model, images), run(model, images))
    for _, merger in mergers(model):
        merger.train()
    assert not torch.equal(run(model, images), run(model, images))


@pytest.mark.parametrize("name", SEQUENCES)
def test_order_of_tokens(name):
    """LTM keeps the spatial order; ToMe puts the sides one after the other."""
    sorted_places = {}
    for method in ("ltm", "tome"):
        model = converted(method, name)
        records = [r for r in _records(model, pictures(name)) if r.decision is not None]
        places = records[0].decision.merge.assignment
        alone = (places[..., None] == places[:, None]).sum(dim=-1) == 1
        kept = [image[single] for image, single in zip(places, alone, strict=True)]
        sorted_places[method] = all(bool((image.diff() > 0).all()) for image in kept)
    assert sorted_places == {"ltm": True, "tome": False}


@pytest.mark.parametrize(("method", "name"), pairs(n for n in TOYS if n != "headless"))
def test_maps_come_from_the_original_patches(method, name):
    model, images = converted(method, name), pictures(name)
    maps = ltm.merge_maps(model, images)
    assert maps
    for weights in maps.values():
        assert weights.shape[0] == len(images)
        sums = weights.sum(dim=1)
        alive = sums > 0.5
        torch.testing.assert_close(sums[alive], torch.ones_like(sums[alive]), atol=1e-5, rtol=0)
        if method != "ltmp":
            assert alive.all()


def test_removing_tokens_shortens_the_sequence():
    model, images = converted("ltmp", "vit"), pictures("vit", batch=3)
    counts = [record.merged.shape[1] for record in _records(model, images)]
    assert counts[-1] < counts[0] <= 37


def _records(model, images):
    from ltm.api import watching

    with watching(model) as records:
        run(model, images)
    return records


@pytest.mark.parametrize("name", GRIDS)
def test_peers_restore_the_grid(name):
    model, images = toy(name), pictures(name)
    shape = model.forward_features(images).shape
    ltm.merge_tokens_(model, ltm.ToMe(ratio=0.9), size_of(name))
    assert model.forward_features(images).shape == shape


@pytest.mark.parametrize(
    "settings", [{"ratio": 0.8}, {"per_block": 0.8}, {"ratio": 0.8, "sites": (2,)}], ids=str
)
def test_swin_on_maps_that_its_windows_do_not_divide(settings):
    small = {"img_size": 192, "depths": (1, 1, 2, 1), "embed_dim": 24, "num_heads": (1, 2, 4, 8)}
    model = timm.create_model("swin_tiny_patch4_window7_224", num_classes=5, **small).eval()
    images = torch.rand(1, 3, 192, 192, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = model(images)
        ltm.merge_tokens_(model, ltm.LTM.from_settings(settings))
        assert model(images).isfinite().all()
        ltm.unmerge_tokens_(model)
        torch.testing.assert_close(model(images), before)
