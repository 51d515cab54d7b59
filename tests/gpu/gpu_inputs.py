"""Help for the tests on a GPU: inputs, and bytes compared."""

import pytest
import torch

import blockscale as bs
from blockscale.kernels.common.runtime import gpu_of

DEVICE = "cuda"


def only_on(*architectures: str) -> None:
    """Skip the module that calls, where there is another GPU."""
    if not torch.cuda.is_available():
        return
    found = gpu_of(torch.device("cuda", torch.cuda.current_device()))
    if found is None or found.arch not in architectures:
        pytest.skip(f"no kernels for {found}", allow_module_level=True)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)


def nasty(dtype: torch.dtype, rows: int = 256, columns: int = 384, seed: int = 0) -> torch.Tensor:
    """Every size of number, a NaN, an infinity, -0 and a block of zeros; on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    exponent = torch.randint(-120, 100, (rows, -(-columns // 32)), generator=generator).float()
    x *= torch.exp2(exponent).repeat_interleave(32, 1)[:, :columns]
    x[3 % rows, :32] = 0.0
    x[5 % rows, 7] = float("nan")
    x[6 % rows, columns - 1] = float("inf")
    x[7 % rows, 3] = -0.0
    return x.to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bytes of tensors alike, wherever they are. A stride that nothing is apart by may be
    any."""
    strides = [[s for n, s in zip(t.shape, t.stride(), strict=True) if n > 1] for t in (a, b)]
    alike = (a.shape, strides[0], a.dtype) == (b.shape, strides[1], b.dtype)
    x, y = (t.cpu().contiguous().flatten().view(torch.uint8) for t in (a, b))
    return alike and torch.equal(x, y)


def same_parts(a: bs.ScaledTensor, b: bs.ScaledTensor) -> bool:
    return same(a.qdata, b.qdata) and same(a.qscale, b.qscale)
