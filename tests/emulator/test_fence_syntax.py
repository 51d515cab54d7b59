"""The syntax of fence and membar: PTX ISA 9.7.13.4."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_kernels import text

from blockscale import emulator as em

SCOPES = ("cta", "cluster", "gpu", "sys")
TO, FROM = "sync_restrict::shared::cluster", "sync_restrict::shared::cta"
ACCEPTED = [
    *(f"fence.{scope};" for scope in SCOPES),
    *(f"fence.{s}.{scope};" for s in ("sc", "acq_rel", "acquire", "release") for scope in SCOPES),
    f"fence.acquire.{TO}.cluster;",
    f"fence.release.{FROM}.cluster;",
    "fence.mbarrier_init.release.cluster;",
    *(
        f"{opcode}.proxy.{kind};"
        for opcode in ("fence", "membar")
        for kind in ("alias", "async", "async.global", "async.shared::cta", "async.shared::cluster")
    ),
    *(f"fence.proxy.tensormap::generic.release.{scope};" for scope in SCOPES),
    *(f"fence.proxy.tensormap::generic.acquire.{scope} [%out], 128;" for scope in SCOPES),
    f"fence.proxy.async::generic.acquire.{TO}.cluster;",
    f"fence.proxy.async::generic.release.{FROM}.cluster;",
    *(f"membar.{level};" for level in ("cta", "gl", "sys")),
]
REFUSED = [
    "fence;",
    "fence.sc;",
    "fence.async;",
    "fence.gl;",
    "fence.sc.acq_rel.cta.gpu;",
    "fence.cta.sc;",
    "fence.cta.cta;",
    "fence.proxy;",
    "fence.proxy.alias.global;",
    "fence.proxy.async.cta;",
    "fence.async.proxy;",
    "fence.proxy.tensormap::generic.gpu;",
    "fence.proxy.tensormap::generic.sc.gpu;",
    "fence.proxy.tensormap::generic.release;",
    "fence.proxy.async::generic.acquire.cluster;",
    f"fence.proxy.async::generic.acquire.{FROM}.cluster;",
    "fence.mbarrier_init;",
    "fence.mbarrier_init.release.cta;",
    "fence.mbarrier_init.acquire.cluster;",
    "fence.mbarrier_init.release.cluster.proxy.async;",
    f"fence.acquire.{FROM}.cluster;",
    f"fence.release.{TO}.cluster;",
    f"fence.release.{FROM}.gpu;",
    f"fence.acq_rel.{TO}.cluster;",
    "membar;",
    "membar.gpu;",
    "membar.cluster;",
    "membar.sc.cta;",
    "membar.mbarrier_init;",
    "membar.proxy.tensormap::generic.release.gpu;",
]


@pytest.mark.parametrize("fence", ACCEPTED)
def test_accepted(fence: str) -> None:
    em.Device().launch(text(fence), "k", 1, 32, [np.zeros(64, np.uint32)])


@pytest.mark.parametrize("fence", REFUSED)
def test_refused(fence: str) -> None:
    with pytest.raises(em.PtxError, match="there is no such fence; there are"):
        em.Device().launch(text(fence), "k", 1, 32, [np.zeros(64, np.uint32)])


@pytest.mark.parametrize("size", ["64", "%r1", "256"])
def test_the_size_of_a_tensor_map(size: str) -> None:
    fence = f"fence.proxy.tensormap::generic.acquire.gpu [%out], {size};"
    with pytest.raises(em.PtxError, match="the size must be the constant 128"):
        em.Device().launch(text(fence), "k", 1, 32, [np.zeros(64, np.uint32)])


@pytest.mark.parametrize(
    "fence",
    [
        "fence.sc.cta [%out], 128;",
        "fence.proxy.tensormap::generic.release.gpu [%out], 128;",
        "fence.proxy.tensormap::generic.acquire.gpu;",
        "fence.proxy.tensormap::generic.acquire.gpu [%out];",
    ],
)
def test_operands(fence: str) -> None:
    with pytest.raises(em.PtxError, match="operands"):
        em.Device().launch(text(fence), "k", 1, 32, [np.zeros(64, np.uint32)])
