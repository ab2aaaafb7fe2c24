"""What the benchmark of learning adds to the library's methods."""

import torch

import ltm
from ltm.api import collect_statistics_
from ltm.methods import methods
from reproduction.benchmarks.learning import Answers, BoundDecides
from toys import pictures, size_of, toy


def test_the_bound_decides_who_leaves() -> None:
    images = pictures("vit")
    weights = ltm.Informative(gain=1.0)
    answers = []
    for config in (ltm.LTM(ratio=0.8, weights=weights), BoundDecides(ratio=0.8, weights=weights)):
        model = toy("vit")
        ltm.merge_tokens_(model, config, size_of("vit"))
        with torch.no_grad():
            before = model(images)
            collect_statistics_(model, [(images, torch.arange(len(images)))], passes=2)
            answers.append(model(images))
        assert not torch.equal(answers[-1], before)
    assert not torch.equal(*answers)
    assert BoundDecides not in methods().values()


def test_a_network_is_asked_once_for_each_batch() -> None:
    asked = []
    answers = Answers(torch.nn.Identity())
    answers.model.register_forward_hook(lambda *_: asked.append(1))
    first, second = torch.ones(1), torch.zeros(1)
    assert [float(answers(x)) for x in (first, second, first)] == [1, 0, 1]
    assert len(asked) == 2
