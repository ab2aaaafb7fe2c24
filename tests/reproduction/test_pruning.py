"""Pruning peers: budgets are met, what is removed was silent, pruning nothing changes nothing."""

from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from ltm.core.cost import count_macs, meta_copy, meta_images
from reproduction.pruning import PEERS
from reproduction.pruning.channels import find_hiddens, gated, remove_channels_
from reproduction.pruning.s2vite import exchange_, kept_counts
from reproduction.pruning.savit import choose, importances
from reproduction.pruning.spvit import SoftlyPruned

pytestmark = pytest.mark.slow

SIZE = (64, 64)


@pytest.fixture
def model() -> nn.Module:
    return timm.create_model(
        "efficientvit_b0",
        num_classes=4,
        widths=(4, 4, 8, 32, 64),
        depths=(1, 1, 1, 1, 1),
        head_dim=8,
        head_widths=(32, 32),
    )


def batches() -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(4, 3, *SIZE), torch.arange(4)) for _ in range(2)]


def macs(model: nn.Module) -> int:
    return count_macs(meta_copy(model), meta_images(model, SIZE))


@pytest.mark.parametrize("peer", PEERS)
def test_budget_is_met_and_the_network_still_learns(peer: str, model: nn.Module) -> None:
    before = macs(model)
    PEERS[peer](model, batches(), 0.9, image_size=SIZE, steps=4, lr=1e-4)
    assert 0.85 < macs(model) / before <= 0.9
    model.train()
    loss = model(torch.randn(2, 3, *SIZE)).square().sum()
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("peer", PEERS)
def test_a_share_that_cannot_be_reached_is_refused(peer: str, model: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"share is 0\.05"):
        PEERS[peer](model, batches(), 0.05, image_size=SIZE, steps=1, lr=1e-4)


def test_removed_channels_are_those_that_were_gated(model: nn.Module) -> None:
    model.eval()
    images = torch.randn(2, 3, *SIZE)
    hiddens = find_hiddens(model, SIZE)
    keep = {block.name: torch.rand(block.count) < 0.7 for block in hiddens.blocks}
    with gated(model, hiddens) as gates, torch.no_grad():
        for name, gate in gates.items():
            gate.copy_(keep[name].float())
        expected = model(images)
    remove_channels_(model, keep, SIZE)
    with torch.no_grad():
        torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-5)


def test_the_least_important_per_mac_go_first(model: nn.Module) -> None:
    hiddens = find_hiddens(model, SIZE)
    scores = importances(model, hiddens, batches(), steps=2)
    keep = choose(scores, hiddens, 0.9)
    costs = {block.name: block.macs for block in hiddens.blocks}
    worth = {name: scores[name] / costs[name] for name in keep}
    gone = [float(w) for name in keep for w in worth[name][~keep[name]]]
    full = [name for name in keep if int(keep[name].sum()) > 4]
    stayed = [float(w) for name in full for w in worth[name][keep[name]]]
    assert max(gone) <= min(stayed)


def test_channels_are_exchanged_and_their_number_stays(model: nn.Module) -> None:
    hiddens = find_hiddens(model, SIZE)
    counts = kept_counts(hiddens, 0.8)
    gates = {
        b.name: nn.Parameter((torch.arange(b.count) < counts[b.name]).float())
        for b in hiddens.blocks
    }
    sums = {b.name: torch.arange(b.count).float() for b in hiddens.blocks}
    exchange_(gates, sums, counts, 0.1)
    assert {name: int(gate.sum()) for name, gate in gates.items()} == counts
    moved = [name for name in gates if int(gates[name][0]) == 0]
    assert moved, "the least important channel left"
    assert all(int(gates[name][-1]) == 1 for name in moved), "the largest gradient came back"


def test_pruning_no_token_changes_nothing(model: nn.Module) -> None:
    host: Any = model.stages[-1].blocks[-1].local_module.main
    host.eval()
    x = torch.randn(2, host.inverted_conv.conv.in_channels, 4, 4)
    assert torch.equal(SoftlyPruned(host, 1.0).eval()(x), host(x))


def test_kept_tokens_hardly_feel_it_where_pruned_ones_are_alike(model: nn.Module) -> None:
    """On a constant map a package is what it stands for: only borders can differ."""
    host: Any = model.stages[-1].blocks[-1].local_module.main
    host.eval()
    x = torch.randn(2, host.inverted_conv.conv.in_channels, 1, 1).expand(-1, -1, 6, 6)
    with torch.no_grad():
        ours, expected = SoftlyPruned(host, 0.5).eval()(x), host(x)
    kept = (ours - expected).abs().amax(dim=1).flatten(1) < 1e-4
    assert bool((kept.sum(1) >= 18).all())
