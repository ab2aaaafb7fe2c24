"""One typed source for YAML and the command line, and the recipes written in it."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tyro
import yaml

from ltm.cli.commands import OPTIONS
from ltm.models import changed, check_name, read_words
from ltm.training.recipes import BACKBONES, FINETUNE, SCRATCH, find_recipe, recipe_of
from ltm.training.settings import TrainSettings, read_settings, to_yaml

RECIPES = {f"train {k}": v for k, v in SCRATCH.items()} | {
    f"finetune {k}": v for k, v in FINETUNE.items()
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_survive_yaml_and_name_what_exists(name: str, tmp_path: Path) -> None:
    from ltm.training.network import method_config

    settings = RECIPES[name]
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(settings))
    assert read_settings(path, TrainSettings()) == settings
    check_name(settings.model.name)
    method = method_config(settings.merge)
    if name == "train demo_vit":
        assert method is None  # it learns without merging
    else:
        assert method is not None
        assert method.ratio == 0.7
    command, _, recipe = name.partition(" ")
    usual = "all" if command == "train" else "mergers"
    trained = recipe.removeprefix("distil_") if "distil_" in recipe else usual
    assert settings.tune.trainable == trained


def test_data_settings_that_0_1_0_wrote_are_read(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("data: {source: shapes, batch_size: 8, resident: true, shuffle_buffer: 1000}")
    assert read_settings(path, TrainSettings()).data.batch_size == 8


def test_rates_that_0_1_0_kept_apart_go_to_their_method(tmp_path: Path) -> None:
    path, rates = tmp_path / "config.yaml", "{merge_threshold_lr: 0.01, prune_threshold_lr: 5.0e-6}"
    path.write_text(f"merge: {{method: ltmp, ratio: 0.8}}\noptim: {rates}")
    assert read_settings(path, TrainSettings()).merge.method_options == ("merge_threshold_lr=0.01",)
    path.write_text(f"merge: {{method: ltm}}\noptim: {rates}\nobjective: {{budget_weight: 3.0}}")
    assert read_settings(path, TrainSettings()).merge.method_options == ()


def test_short_names_of_methods_are_read_as_everywhere() -> None:
    from ltm.methods import LTM
    from ltm.training.network import method_config

    merge = changed(TrainSettings(), {"merge": {"method": "ltm-uniform"}}).merge
    assert method_config(merge) == LTM(weights="uniform")


def test_every_backbone_of_the_paper_has_both_recipes() -> None:
    assert set(BACKBONES) <= set(SCRATCH)
    assert set(BACKBONES) <= set(FINETUNE)
    assert recipe_of("vit_small_patch16_224") == "vit_small"
    assert recipe_of("efficientvit_b1") == "efficientvit_b1_r224"
    assert recipe_of("vit_tiny_patch16_224") == "general"
    with pytest.raises(ValueError, match="no recipe is named vit_smal: did you mean vit_small"):
        find_recipe("vit_smal", SCRATCH)


def test_command_line_and_yaml_say_the_same() -> None:
    args = "--model swin_tiny --data shapes --epochs 7 --lr 2e-3 --augment.mixup 0.1 --ratio 0.6"
    args += " --method-options support=learned beta=5 --unfreeze head.* --pretrained"
    with OPTIONS:
        parsed = tyro.cli(TrainSettings, args=args.split())
    text = """
    model: {name: swin_tiny, pretrained: true}
    merge: {ratio: 0.6, method_options: [support=learned, beta=5]}
    data: {source: shapes}
    augment: {mixup: 0.1}
    optim: {epochs: 7, lr: 2e-3}
    tune: {unfreeze: [head.*]}
    """
    assert changed(TrainSettings(), yaml.safe_load(text)) == parsed


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optm": {}}, "optm is no setting; did you mean optim?"),
        ({"optim": {"epoch": 3}}, "optim.epoch is no setting; did you mean epochs?"),
        ({"optim": {"epochs": "many"}}, "optim.epochs is 'many', but must be a whole number"),
        ({"optim": {"epochs": 2.5}}, "optim.epochs is 2.5, but must be a whole number"),
        ({"optim": {"epochs": True}}, "optim.epochs is True, but must be of type int"),
        ({"merge": {"method": "tomme"}}, "merge.method is 'tomme'; choose from ltm, ltmp"),
        ({"model": 3}, "model is 3, but must be a group of settings"),
        ({"augment": {"scale": [1.0]}}, "augment.scale has 1 values, but must have 2"),
        ({"run": {"sync_batchnorm": "yes"}}, "run.sync_batchnorm is 'yes', but must be of type"),
        ({"optim": {"epochs": 0}}, "epochs is 0, but must be at least 1"),
        ({"optim": {"lr": 0}}, "lr is 0.0, but must be positive"),
        ({"optim": {"reference_batch": -1}}, "reference_batch is -1, but must be at least 0"),
        ({"optim": {"lr_warmup_epochs": -0.5}}, "lr_warmup_epochs is -0.5, but must be at least 0"),
        ({"run": {"keep_every": -1}}, "keep_every is -1, but must be at least 0"),
        ({"optim": {"ema": 1}}, "ema is 1.0, but must be at least 0 and below 1"),
        ({"data": {"batch_size": 3}}, "batch_size is 3, but mixup and cutmix need an even number"),
        (
            {"model": {"model_args": ["depth"]}},
            "model_args: 'depth' is no setting; write name",
        ),
        ({"run": {"strategy": "fsdp"}, "optim": {"ema": 0.9}}, "ema needs whole copies"),
    ],
)
def test_wrong_settings_are_one_sentence(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^" + message.replace("?", r"\?").replace("*", r"\*")):
        changed(TrainSettings(), values)


@pytest.mark.parametrize("text", ["[1, 2", "just words", "- a\n- b"])
def test_a_file_that_holds_no_settings_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=str(path)):
        read_settings(path, TrainSettings())


def test_words_become_values() -> None:
    words = ("depth=4", "window=(4,4)", "act=gelu", "flag=true", "rate=1.0e-3", "none=null")
    values = {"depth": 4, "window": [4, 4], "act": "gelu", "flag": True, "rate": 1e-3, "none": None}
    assert read_words(words, owner="model_args") == values


def test_settings_are_light_to_import() -> None:
    code = "import sys, ltm.training.recipes; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == 0


def test_the_most_exact_budget_goes_first(tiny: Callable[..., TrainSettings]) -> None:
    from ltm.training.network import method_config

    def budget(**merge: Any) -> tuple[Any, ...]:
        config = method_config(tiny(merge={"ratio": 0.7, "method_options": []} | merge).merge)
        assert config is not None
        return config.ratio, config.per_block, config.counts

    assert budget() == (0.7, None, None)
    assert budget(per_block=0.8) == (None, 0.8, None)
    assert budget(per_block=0.8, method_options=["counts=[3,2]"]) == (None, None, (3, 2))
    assert method_config(tiny(merge={"method": "none"}).merge) is None


def test_clean_labels_decide_where_statistics_come_from(tiny: Callable[..., TrainSettings]) -> None:
    assert tiny().statistics_from_epoch
    assert not tiny(augment={"mixup": 0.8}).statistics_from_epoch
    assert tiny(augment={"mixup": 0.8}, merge={"statistics": "epoch"}).statistics_from_epoch
