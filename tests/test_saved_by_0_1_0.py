"""Folders that version 0.1.0 saved still load, and give what they gave then."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ltm
from saved_by_0_1_0.hosts import host, images

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent / "saved_by_0_1_0"
OUTPUTS = load_file(HERE / "outputs.safetensors")


@pytest.mark.parametrize("name", sorted(OUTPUTS))
def test_a_saved_folder_gives_what_it_gave(name: str) -> None:
    family = name.partition("-")[0]
    model = ltm.load(HERE / "folders" / name, host(family))
    with torch.no_grad():
        # Another processor rounds sums differently: a few units in the last place of large logits.
        torch.testing.assert_close(model(images(family)), OUTPUTS[name], rtol=1e-5, atol=1e-6)


def test_every_folder_has_its_outputs() -> None:
    assert {folder.name for folder in (HERE / "folders").iterdir()} == set(OUTPUTS)
