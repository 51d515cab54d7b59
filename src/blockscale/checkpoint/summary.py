"""What was done to a checkpoint, in a few numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Summary"]


@dataclass
class Summary:
    """Sums over the manifests of files.

    Attributes:
        quantized: how many tensors are, by format.
        dequantized: how many were.
        others: how many were copied.
        copied: matrices that were copied, by the reason.
        rounded_again: tensors of a quantized source whose values were rounded a second time.
        rounded_reciprocals: those whose values changed by a unit of fp32 at most, as the reciprocal
            of their global scale is stored.
        source_bytes, quantized_bytes: of the quantized tensors, before and after.
        bytes: of all files.
        lowest, highest: SQNR in dB of the tensors that have one, and the name of the lowest.
        nonfinite: name -> elements that are NaN or infinite, before or after.
    """

    quantized: dict[str, int] = field(default_factory=dict)
    dequantized: int = 0
    others: int = 0
    copied: dict[str, int] = field(default_factory=dict)
    rounded_again: int = 0
    rounded_reciprocals: int = 0
    source_bytes: int = 0
    quantized_bytes: int = 0
    bytes: int = 0
    lowest: tuple[float, str] | None = None
    highest: float | None = None
    nonfinite: dict[str, int] = field(default_factory=dict)

    def add(self, manifest: Mapping[str, Any]) -> None:
        """Count a file."""
        self.bytes += manifest["file"]["size"]
        for name, tensor in manifest["tensors"].items():
            if "copied" in tensor:
                self.others += 1
                if len(tensor["shape"]) > 1:
                    _count(self.copied, tensor["copied"])
                continue
            self.source_bytes += tensor["source_bytes"]
            self.quantized_bytes += tensor["bytes"]
            if "dequantized" in tensor:
                self.dequantized += 1
                continue
            _count(self.quantized, tensor["format"])
            self.rounded_again += tensor.get("rounded_again", False)
            self.rounded_reciprocals += tensor.get("rounded_reciprocal", False)
            if "error" in tensor:
                self._add_error(name, tensor["error"])

    def _add_error(self, name: str, error: Mapping[str, Any]) -> None:
        if error["nonfinite"]:
            self.nonfinite[name] = error["nonfinite"]
        sqnr = error["sqnr_db"]
        if sqnr is not None:
            self.lowest = min(self.lowest or (sqnr, name), (sqnr, name))
            self.highest = max(self.highest or sqnr, sqnr)

    def to_json(self) -> dict[str, Any]:
        """JSON, from which ``Summary(**content)`` makes the same."""
        return dict(vars(self))


def _count(counts: dict[str, int], what: str) -> None:
    counts[what] = counts.get(what, 0) + 1
