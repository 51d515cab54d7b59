"""Files with what a command compiled."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from .outputs import check_output

__all__ = ["CubinOption", "KeptCode", "PtxOption", "SassOption"]

CubinOption = Annotated[
    Path | None, typer.Option(help="File to write: machine code of the kernel that multiplies.")
]
SassOption = Annotated[
    Path | None, typer.Option(help="File to write: the same as text; needs nvdisasm.")
]
PtxOption = Annotated[Path | None, typer.Option(help="File to write: the PTX of that kernel.")]


@dataclass(frozen=True, slots=True)
class KeptCode:
    """Files to write, where they are given; an error at once where one cannot be."""

    cubin: Path | None
    sass: Path | None
    ptx: Path | None

    def __post_init__(self) -> None:
        for name, path in (("cubin", self.cubin), ("sass", self.sass), ("ptx", self.ptx)):
            check_output(name, path)
        if self.sass is not None:
            from ..kernels.common.machine_code import disassembler

            disassembler()

    @property
    def wanted(self) -> bool:
        return any(path is not None for path in (self.cubin, self.sass, self.ptx))

    def write(self, kernel: Any) -> None:
        """``kernel``: what the DSL compiled, with its machine code."""
        if self.cubin is not None:
            self.cubin.write_bytes(kernel.__cubin__)
        if self.sass is not None:
            from ..kernels.common.machine_code import disassemble

            self.sass.write_text(disassemble(kernel.__cubin__), encoding="utf-8")
        if self.ptx is not None:
            self.ptx.write_text(kernel.__ptx__, encoding="utf-8")
