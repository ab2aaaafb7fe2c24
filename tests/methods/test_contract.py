"""What the rest of the house knows of a method: the contract, and no method by name."""

import re
from pathlib import Path

import pytest
import torch

import ltm
from ltm.methods import BASELINE, DEFAULT, MethodConfig, config_from_dict, methods
from toys import toy

SOURCE = Path(ltm.__file__).parent
MAY_NAME_THEM = ("methods", "__init__.py", "zoo.py")
NAMED = "LTM|LTMP|ToMe|ToFu"


def sources() -> list[Path]:
    return [
        path
        for path in sorted(SOURCE.rglob("*.py"))
        if path.relative_to(SOURCE).parts[0] not in MAY_NAME_THEM
    ]


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_nobody_above_asks_which_method_it_is(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    asked = rf"isinstance\([^()]*,\s*\(?[^()]*\b({NAMED})(Merger)?\b"
    assert not re.search(asked, text)
    assert not re.search(r"""[!=]=\s*["'](ltm|ltmp|tome|tofu)["']""", text)
    assert not re.search(rf"^\s*from ltm\.methods.* import .*\b({NAMED})\b", text, re.MULTILINE)


@pytest.mark.parametrize("config", methods().values(), ids=methods())
def test_methods_say_who_they_are(config: type[MethodConfig]) -> None:
    assert methods()[config.name] is config
    assert config.title
    assert config.description
    assert "\n" not in config.description
    assert config.colour is None or re.fullmatch("#[0-9a-f]{6}", config.colour)


def test_methods_look_different() -> None:
    found = [config for config in methods().values() if config.colour is not None]
    assert len({config.colour for config in found}) == len(found)
    assert len({config.title for config in methods().values()}) == len(methods())


def test_verbs_have_a_method_to_take() -> None:
    assert DEFAULT in methods()
    assert BASELINE in methods()
    assert DEFAULT != BASELINE


@pytest.mark.parametrize("config", methods().values(), ids=methods())
def test_settings_are_flat_and_come_back(config: type[MethodConfig]) -> None:
    made = config(ratio=0.6)
    settings = made.to_settings()
    assert settings.keys() == config.settings_types().keys()
    assert config.from_settings(settings) == made
    assert config_from_dict(made.to_dict()) == made
    with pytest.raises(ValueError, match=f"{config.name} has no setting suport"):
        config.from_settings({"suport": 1})


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("config", methods().values(), ids=methods())
def test_an_empty_batch_gives_empty_scores(config: type[MethodConfig], training: bool) -> None:
    """LTMP of 0.1.0 ended in torch's `max(): Expected reduction dim` in evaluation."""
    model = toy("vit")
    ltm.merge_tokens_(model, config(per_block=0.7))
    model.train(training)
    assert model(torch.zeros(0, 3, 48, 48)).shape == (0, 10)
