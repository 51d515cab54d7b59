"""The memory that ranks of a mega MoE share: what is written of it, and that it is enough."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from blockscale.kernels.mega.buffers import Buffers, Sizes

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "mega_moe.md"
LARGE = Sizes(8, 8192, 6, 4096, 2048, 32, "mxfp8")


def rows(sizes: Sizes) -> list[str]:
    return [
        f"| `{name}` | {region.dtype} | {tuple(region.shape)} | {region.offset:,} | "
        f"{region.nbytes:,} | {region.use} |"
        for name, region in Buffers(sizes).regions.items()
    ]


def test_the_page_has_every_region_and_counter():
    text = PAGE.read_text()
    for row in rows(LARGE):
        assert row in text, row
    for name, (start, count) in Buffers(LARGE).signals.items():
        assert f"| `{name}` | {start} | {count} |" in text, (name, start, count)


def test_at_most_700_mebibytes():
    """8 ranks, 8192 tokens of 4096/2048, 256 experts, top-6: tokens 264, results 384, and rings."""
    buffers = Buffers(LARGE)
    other = Buffers(replace(LARGE, activations="fp8_1x128", bf16_rings=True))
    assert buffers.nbytes < other.nbytes <= 700 << 20
    regions = buffers.regions
    assert regions["x"].nbytes + regions["x_scale"].nbytes == 264 << 20
    assert regions["results"].nbytes == 384 << 20


@pytest.mark.parametrize("activations", ["nvfp4", "mxfp8", "fp8_1x128"])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 128, 128, 1), (4, 37, 3, 384, 256, 33)])
def test_regions_do_not_overlap(sizes, activations):
    buffers = Buffers(Sizes(*sizes, activations))
    regions = list(buffers.regions.values())
    assert all(each.offset % 128 == 0 for each in regions)
    for one, other in pairwise(regions):
        assert one.offset + one.nbytes <= other.offset
    assert regions[-1].offset + regions[-1].nbytes <= buffers.nbytes


@pytest.mark.parametrize("activations", ["nvfp4", "mxfp8", "fp8_1x128"])
def test_at_most_052_of_the_bytes_of_bf16_travel(activations):
    sizes = Sizes(8, 8192, 6, 4096, 2048, 32, activations)
    assert sizes.row_bytes(4096) + 4 * sizes.scale_words(4096) <= 0.52 * 2 * 4096


def test_build_15_the_buffer_has_room_for_scales_of_16():
    """Twice as many as MXFP4's, at equal columns."""
    found = {
        name: Buffers(LARGE.__class__(8, 8192, 6, 4096, 2048, 32, name)).regions["x_scale"].nbytes
        for name in ("nvfp4", "mxfp4")
    }
    assert found["nvfp4"] == 2 * found["mxfp4"]
