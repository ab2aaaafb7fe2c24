"""Calibrated schedules: budgets kept, outputs kept close, the same every time."""

import copy
import dataclasses

import pytest
import torch
from timm.layers import Mlp
from torch import Tensor, nn

import ltm
from ltm.adapters import select_adapter
from ltm.adapters.planning import Planner
from ltm.calibration import CalibrateSettings, Calibration, Trial, calibrate
from ltm.calibration.calibration import within_milliseconds
from ltm.calibration.search import Setting, config_of
from ltm.calibration.sequences import token_levels
from ltm.methods.ltm.matched import Choice
from toys import pictures, size_of, toy

pytestmark = pytest.mark.slow

USUAL = ltm.LTM.choices[0]
QUICK = CalibrateSettings(trials=60, sites=3)


def sharpened(name: str) -> nn.Module:
    """A toy whose outputs depend on its tokens: larger weights than at initialisation."""
    model = toy(name)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
    return model


@pytest.fixture(scope="module")
def vit() -> nn.Module:
    return sharpened("vit")


@pytest.fixture(scope="module")
def images() -> Tensor:
    return pictures("vit", batch=48)


@pytest.fixture(scope="module")
def found(vit, images):
    return calibrate(vit, images, budget=0.7, settings=QUICK)


def divergence(model: nn.Module, merging: nn.Module, images: Tensor) -> float:
    with torch.no_grad():
        expected, outputs = model(images).log_softmax(-1), merging(images).log_softmax(-1)
    return float((expected.exp() * (expected - outputs)).sum(-1).mean())


def test_the_config_meets_the_budget_and_the_divergence(vit, images, found):
    merging = copy.deepcopy(vit)
    report = ltm.merge_tokens_(merging, found.config)
    assert report.share == pytest.approx(found.share)
    assert 0.6 < found.share <= 0.7
    assert divergence(vit, merging, images) == pytest.approx(found.divergence, rel=1e-3)


def test_no_worse_than_what_it_started_from(found):
    assert found.uncalibrated is not None
    assert found.divergence <= found.uncalibrated
    assert {trial.phase for trial in found.history} == {"sensitivity", "start", "refinement"}
    best = [trial.divergence for trial in found.history if trial.is_best]
    assert best == sorted(best, reverse=True)
    assert best[-1] == found.divergence


def test_the_same_every_time_and_the_network_is_left_alone(vit, images, found):
    before = copy.deepcopy(vit.state_dict())
    again = calibrate(vit, images, budget=0.7, settings=QUICK)
    assert again == found
    assert all(torch.equal(before[name], value) for name, value in vit.state_dict().items())
    assert not hasattr(vit, "token_merging")


def test_a_converted_network_is_calibrated_anew(vit, images, found):
    merging = copy.deepcopy(vit)
    ltm.merge_tokens_(merging, ltm.LTM(per_block=0.5))
    counts = ltm.token_counts(merging)
    again = calibrate(merging, images, budget=0.7, settings=QUICK)
    assert again.config.counts == found.config.counts
    assert ltm.token_counts(merging) == counts


def test_settings_of_the_method_are_chosen_where_they_pay(vit, images):
    plain, chosen = (
        calibrate(vit, images, budget=0.45, settings=QUICK, adjust=adjust)
        for adjust in (False, None)
    )
    assert not any(trial.phase == "settings" for trial in plain.history)
    assert any(trial.phase == "settings" and trial.is_best for trial in chosen.history)
    settings, usual = chosen.config.to_settings(), ltm.LTM().to_settings()
    assert any(settings[name] != usual[name] for name in ("attended", "size_power"))
    assert chosen.divergence < plain.divergence
    merging = copy.deepcopy(vit)
    assert ltm.merge_tokens_(merging, chosen.config).share <= 0.45
    assert divergence(vit, merging, images) == pytest.approx(chosen.divergence, rel=1e-3)


def test_all_trials_count_also_those_that_try_settings(vit, images):
    result = calibrate(vit, images, budget=0.45, settings=QUICK)
    assert len(result.history) == 60
    assert {trial.phase for trial in result.history[-6:]} == {"settings"}, "kept back for the best"


def test_another_budget_measures_no_sensitivity_again(vit, images):
    calibration = Calibration(vit, images, None, dataclasses.replace(QUICK, trials=100))
    calibration.within(0.8)
    probed = sum(trial.phase == "sensitivity" for trial in calibration.search.history)
    again = calibration.within(0.8)
    assert sum(trial.phase == "sensitivity" for trial in again.history) == probed > 0


@pytest.mark.parametrize("stop_at", [1, 30])
def test_an_interrupted_search_keeps_the_best(vit, images, stop_at):
    tried: list[Trial] = []

    def stop(trial: Trial) -> None:
        tried.append(trial)
        if len(tried) >= stop_at:
            raise KeyboardInterrupt

    result = calibrate(vit, images, budget=0.7, settings=QUICK, progress=stop)
    assert result.interrupted
    assert len(result.history) == stop_at
    assert result.share <= 0.7


def test_what_was_computed_before_changes_no_divergence(vit, images):
    schedule = (
        Setting(1, 30, USUAL),
        Setting(3, 16, Choice("merge", 0.0)),
        Setting(4, 9, Choice("prune_redundant")),
    )
    forgetful = CalibrateSettings(memory_bytes=0, batch_size=20)
    values = []
    for settings in (CalibrateSettings(batch_size=20), forgetful):
        trials = Calibration(vit, images, None, settings).trials
        list(trials.stream(schedule[:2]))
        values.append(torch.cat(list(trials.stream(schedule))))
    torch.testing.assert_close(*values, rtol=1e-5, atol=1e-7)


def test_memory_counts_all_that_is_kept_and_keeps_to_its_limit(vit, images):
    limit = 3 << 20
    calibration = Calibration(vit, images, None, CalibrateSettings(memory_bytes=limit, trials=40))
    memory, most = calibration.trials.memory, []
    calibration.search.progress = lambda _: most.append(memory.used)
    calibration.within(0.7)
    assert limit / 2 < max(most) <= limit
    tensors = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for output, tokens in memory._kept.values()
        for tensor in (
            output,
            tokens.size,
            *(m.weight for m in tokens.merges if hasattr(m, "weight")),
        )
        if tensor is not None
    }
    assert sum(tensors.values()) <= memory.used


def check_costs(calibration: Calibration, model: nn.Module) -> None:
    schedules = [
        (Setting(2, 20, USUAL),),
        (Setting(0, 33, Choice("norm", 0.0)), Setting(3, 17, USUAL)),
        (
            Setting(1, 30, USUAL),
            Setting(4, 21, Choice("prune_unimportant", 0.0)),
            Setting(5, 5, Choice("merge")),
        ),
    ]
    for schedule in schedules:
        config = config_of(schedule, calibration.config)
        plan = Planner(model, select_adapter(model), config, calibration.size).plan()
        assert calibration.cost(schedule) == pytest.approx(
            plan.macs_after / plan.macs_before, rel=1e-6
        )


@pytest.mark.parametrize("matching", ["free", "alternate"])
@pytest.mark.parametrize("name", ["vit", "registers", "pooled"])
def test_costs_are_those_of_the_counter(name, matching):
    model, config = toy(name), ltm.LTM(support=ltm.Matched(matching=matching))
    calibration = Calibration(model, pictures(name, batch=32), config, QUICK)
    assert calibration.cost.exact
    check_costs(calibration, model)


def test_costs_that_no_polynomial_fits_are_counted(images):
    model = toy("vit")
    model.blocks[2].mlp = Mlp(32, 80)
    calibration = Calibration(model, images, None, QUICK)
    assert not calibration.cost.exact
    check_costs(calibration, model)


def test_alternate_matching_keeps_to_the_budget(vit, images):
    """Its cost jumps where more than half of the tokens leave."""
    config = ltm.LTM(support=ltm.Matched(matching="alternate"))
    for budget in (0.6, 0.8):
        result = calibrate(vit, images, budget=budget, config=config, settings=QUICK)
        assert result.config.to_settings()["matching"] == "alternate"
        report = ltm.merge_tokens_(copy.deepcopy(vit), result.config)
        assert report.share == pytest.approx(result.share)
        assert report.share <= budget


@pytest.mark.parametrize("name", [pytest.param("mobilevit", marks=pytest.mark.slow), "swin"])
def test_grids_are_calibrated_too(name):
    model = toy(name)
    settings = CalibrateSettings(trials=2)
    result = calibrate(model, pictures(name, batch=32), budget=0.8, settings=settings,
                       image_size=size_of(name))  # fmt: skip
    report = ltm.merge_tokens_(model, result.config, size_of(name))
    assert report.share == pytest.approx(result.share)
    assert report.share <= 0.8
    assert result.uncalibrated is None or result.divergence <= result.uncalibrated


def test_networks_without_classes_are_compared_by_their_features(images):
    result = calibrate(toy("headless"), images, budget=0.8, settings=CalibrateSettings(trials=1))
    assert "cosine" in result.measure
    assert result.share <= 0.8


def test_a_budget_in_milliseconds(vit, images):
    """On a clock that takes 10 ms for all multiply-adds, and 1 ms whatever is left."""
    calibration = Calibration(vit, images, None, CalibrateSettings(trials=2))

    def clock(config: ltm.LTM) -> float:
        return 1 + 9 * ltm.merge_tokens_(copy.deepcopy(vit), config).share

    result = within_milliseconds(calibration, clock, budget_ms=8.0, original=10.0)
    assert result.milliseconds == clock(result.config)
    assert 7.5 < result.milliseconds <= 8.0
    with pytest.raises(ValueError, match=r"the original takes 10.00 ms .* nothing has to merge"):
        within_milliseconds(calibration, clock, budget_ms=11.0, original=10.0)
    with pytest.raises(ValueError, match=r"budget_ms: got 1.1; merging tokens cannot go below"):
        within_milliseconds(calibration, clock, budget_ms=1.1, original=10.0)


def test_time_is_measured_on_this_device(vit, images):
    with pytest.raises(ValueError, match=r"budget_ms: got 1e-06; merging tokens cannot go below"):
        calibrate(vit, images, budget_ms=1e-6, settings=CalibrateSettings(trials=1))


def test_a_default_schedule_that_suits_no_hardware_is_a_start_too(vit, images):
    result = calibrate(vit, images, budget=0.7, settings=CalibrateSettings(trials=70, multiple=5))
    assert len(result.history) == 70, "every trial counts, whatever it was for"
    assert any(trial.phase == "refinement" for trial in result.history)
    assert all((count + 1) % 5 == 0 for count in result.config.counts)
    assert len(result.config.sites) <= 4


def test_the_default_schedule_is_the_result_where_it_is_better(vit, images):
    """Its many sites, and counts of its own, are nothing that the search would find."""
    config = ltm.ToMe()
    few = CalibrateSettings(trials=2, multiple=None)
    result = calibrate(vit, images, budget=0.75, config=config, settings=few)
    assert len(result.history) == 2
    own = Calibration(vit, images, config, few).space.default(0.75)
    assert [*zip(result.config.sites, result.config.counts, strict=True)] == [
        (setting.block, setting.count) for setting in own
    ]
    assert result.divergence == result.uncalibrated
    merging = copy.deepcopy(vit)
    ltm.merge_tokens_(merging, ltm.ToMe(ratio=0.75))
    assert divergence(vit, merging, images) == pytest.approx(result.divergence, rel=1e-3)
    three = CalibrateSettings(trials=6, sites=3)
    asked = calibrate(vit, images, budget=0.75, config=config, settings=three)
    assert len(asked.config.sites) <= 3, "unless fewer sites were asked for"


def test_a_default_schedule_that_loses_a_site_to_the_hardware_is_no_start(vit, images):
    """Of 14 and 3 tokens only the 13 are left: 3 is less than the smallest level, 6."""
    settings = CalibrateSettings(trials=1, sites=2, multiple=7)
    result = calibrate(vit, images, budget=0.6, settings=settings)
    assert all(trial.share <= 0.6 for trial in result.history if trial.is_best)


def test_the_last_block_pays_where_nobody_reads_its_patches(vit, images):
    settings = CalibrateSettings(trials=1, sites=4, multiple=1)
    calibration = Calibration(vit, images, None, settings)
    last = len(vit.blocks) - 1
    calibration.space.budget = 0.7
    [start] = calibration.space.without_last()
    assert (start[-1].block, start[-1].count) == (last, 1)
    assert calibration.cost(start) <= 0.7
    default = calibration.space.default(0.7)
    assert sum(s.count for s in start[:-1]) > sum(s.count for s in default)
    assert calibration.search.probe((start[-1],)) < 1e-7
    averaging = toy("vit")
    averaging.global_pool = "avg"
    space = Calibration(averaging, images, None, settings).space
    space.budget = 0.7
    assert space.without_last() == []


def test_counts_suit_the_hardware():
    levels = token_levels(196, 1, None)
    assert all((level + 1) % 8 == 0 for level in levels)
    assert levels[-1] == 191
    assert token_levels(36, 1, None) == list(range(1, 36))


@pytest.mark.parametrize("budget", [0, -0.5, 1.01])
def test_a_budget_is_a_share(vit, images, budget):
    with pytest.raises(ValueError, match=f"budget: got {budget}; it is a share"):
        calibrate(vit, images, budget=budget)


def test_what_cannot_be_is_refused(vit, images):
    with pytest.raises(ValueError, match=r"budget: got 0.01; merging tokens cannot bring"):
        calibrate(vit, images, budget=0.01, settings=QUICK)
    with pytest.raises(ValueError, match=r"images: got 31; at least 32 are needed"):
        calibrate(vit, images[:31], budget=0.7)
    with pytest.raises(ValueError, match=r"images: got 40 x 48 pixels; the network takes 48 x 48"):
        calibrate(vit, images[:, :, :40], budget=0.7)
    with pytest.raises(ValueError, match="budget and budget_ms: give one of them"):
        calibrate(vit, images)
    with pytest.raises(ValueError, match="multiple: got 256; the network has 37 tokens"):
        calibrate(vit, images, budget=0.7, settings=CalibrateSettings(multiple=256))
    with pytest.raises(ValueError, match="a learned support on a sequence has no schedule"):
        calibrate(vit, images, budget=0.7, config=ltm.LTM(support=ltm.Learned()))
    with pytest.raises(ValueError, match="time_batch: got 64, but there are only 48"):
        calibrate(vit, images, budget_ms=1.0, settings=CalibrateSettings(time_batch=64))
    with pytest.raises(ValueError, match="trials is 0"):
        CalibrateSettings(trials=0)


def test_the_whole_budget_merges_nothing(vit, images):
    result = calibrate(vit, images, budget=1.0)
    assert result.config.ratio == 1
    assert result.divergence == 0
