"""Where a model's blocks are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import blockscale as bs
from blockscale.training.gpt import GPT


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(16, 4) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))


class Model(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.embedding = nn.Embedding(4096, 16)
        self.model = nn.ModuleDict({"layers": nn.ModuleList(Block() for _ in range(layers))})
        self.head = nn.Linear(16, 4096)


@pytest.mark.parametrize("layers", [2, 12])
def test_lists_of_blocks(layers):
    assert bs.nn.block_names(Model(layers)) == [f"model.layers.{i}" for i in range(layers)]
    assert bs.nn.block_names(nn.Sequential(Model(layers))) == [
        f"0.model.layers.{i}" for i in range(layers)
    ]


def test_a_gpt_and_a_sequential():
    assert bs.nn.block_names(GPT(32, 4, 2, 16)) == [f"blocks.{i}" for i in range(4)]
    assert bs.nn.block_names(nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))) == ["0", "1", "2"]


def test_for_overrides():
    model = GPT(32, 4, 2, 16)
    last = {f"{name}.*": None for name in bs.nn.block_names(model)[-2:]}
    bs.convert(model, bs.Recipe.nvfp4(overrides=last))
    names = [name for name, module in model.named_modules() if isinstance(module, bs.nn.Linear)]
    found = {".".join(name.split(".")[:2]) for name in names}
    assert found == {"blocks.0", "blocks.1"}


def test_none():
    with pytest.raises(ValueError, match=r"model: has no list of blocks .*by hand"):
        bs.nn.block_names(nn.Linear(8, 8))
    with pytest.raises(TypeError, match=r"model: got Tensor; expected a torch\.nn\.Module"):
        bs.nn.block_names(torch.zeros(3))
