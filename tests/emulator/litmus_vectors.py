"""Random programs of which most strong accesses are vectors, or packed: each of their scalars is an
operation of its own (PTX ISA 8.2.4, 8.2.5)."""

from __future__ import annotations

import re

from litmus import PLAIN, Program

__all__ = ["Vectors"]


class Vectors(Program):
    """A random one, by its seed."""

    def _flag(self, space: str, place: str) -> list[str]:
        rng = self.rng
        if rng.random() < 0.5:
            return super()._flag(space, place)
        pair, four = place.format(""), re.sub(r"\+\d+\{\}", "", place)
        loads = self._order(("relaxed", "acquire", "acquire", "volatile"))
        stores = self._order(("relaxed", "release", "release", "volatile"))
        atom = f"atom.{rng.choice(PLAIN)}.{rng.choice(self._scopes)}.{space}"
        kinds = [
            (f"ld{loads}.{space}.v2.u32 {{%r1, %r3}}, {pair};", ""),
            (f"ld{loads}.{space}.v4.u32 {{%r1, %r3, %r4, %r5}}, {four};", ""),
            (f"ld{loads}.{space}.v2.u64 {{%rd1, %rd3}}, {four};", ""),
            ("", f"st{stores}.{space}.v2.u32 {pair}, {{%r2, %r2}};"),
            ("", f"st{stores}.{space}.v4.u32 {four}, {{%r2, %r2, %r2, %r2}};"),
            ("", f"st{stores}.{space}.v2.u64 {four}, {{%rd2, %rd2}};"),
            ("", f"{atom}.cas.b32 %r1, {pair}, %r1, %r2;"),
            ("", f"{atom}.add.noftz.bf16x2 %r1, {pair}, %r2;"),
        ]
        if space == "global":
            kinds.append(("", f"{atom}.add.v2.f32 {{%f1, %f2}}, {pair}, {{%f3, %f3}};"))
        load, store = rng.choice(kinds)
        return [load] if load else [*self._value(), store]
