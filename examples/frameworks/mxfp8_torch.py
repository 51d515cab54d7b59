"""One layer, forward and backward under the MXFP8 recipe, in PyTorch.

python -m examples.frameworks.mxfp8_torch
"""

import torch

import blockscale as bs


def main() -> torch.Tensor:
    torch.manual_seed(0)
    layer = bs.nn.Linear(256, 128, recipe=bs.Recipe("mxfp8"))
    x = torch.randn(32, 256)
    loss = layer(x).square().mean()
    loss.backward()
    print(f"loss {loss.item():.4f}, gradient {layer.weight.grad.norm().item():.4f}")
    return layer.weight.grad


if __name__ == "__main__":
    main()
