"""What nobody wrote is no number: registers show when they are used."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_kernels import run


@pytest.mark.undefined
@pytest.mark.parametrize(
    ("register", "store", "dtype"),
    [("%f1", "f32", np.float32), ("%fd", "f64", np.float64), ("%h1", "b16", np.float16)],
)
def test_registers_are_nan(register: str, store: str, dtype: type) -> None:
    out = np.zeros(32, dtype)
    body = f".reg .f64 %fd; mad.wide.u32 %at, %t, {out.itemsize}, %out; st.global.{store} [%at], "
    run(f"{body}{register};", out)
    assert np.isnan(out).all()


def test_addresses_in_registers_are_of_nothing() -> None:
    with pytest.raises(ValueError, match="address 0xff"):
        run("ld.global.u8 %h1, [%rd1];", np.zeros(32, np.uint32))
