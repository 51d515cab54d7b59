"""Copies are issued by each thread that comes to them, also where all lanes say the same."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_kernels import HEAD

from blockscale import emulator as em

KERNEL = """
.visible .entry k(.param .u64 out, .param .align 64 .b8 map[128], .param .u32 zero) {
    .reg .b32 %r<9>; .reg .b64 %rd<9>;
    .shared .align 128 .b8 box[64];
    ld.param.u64 %rd1, [out]; ld.param.u32 %r5, [zero];
    mov.u32 %r1, %laneid; mov.u32 %r2, box;
    and.b32 %r3, %r1, 15; shl.b32 %r3, %r3, 2; add.u32 %r3, %r3, %r2;
    mov.u32 %r4, 1; st.shared.u32 [%r3], %r4;
    fence.proxy.async.shared::cta;
    bar.warp.sync 0xffffffff;
    mov.b64 %rd2, map; cvta.param.u64 %rd2, %rd2;
    {copy}
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
    ret;
}
"""
COPIES = {
    "bulk": "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd1], [%r2], 64;",
    "tensor": (
        "cp.reduce.async.bulk.tensor.1d.global.shared::cta.add.tile.bulk_group "
        "[%rd2, {%r5}], [%r2];"
    ),
}


@pytest.mark.parametrize("copy", COPIES)
def test_every_lane_issues(copy: str) -> None:
    room = np.zeros(64, np.uint32)
    out = room[-room.ctypes.data % 64 // 4 :][:16]
    ptx = HEAD.format(target="sm_90a") + KERNEL.replace("{copy}", COPIES[copy])
    tensor = em.TensorMap.of(out, [16])
    em.Device("sm_90a").launch(ptx, "k", 1, 32, [out, tensor, 0])
    assert (out == 32).all()
