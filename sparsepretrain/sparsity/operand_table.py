"""Rows of the operand table: what each matmul of a sparse layer multiplies."""

from __future__ import annotations

from typing import Literal, NamedTuple

FPROP, DGRAD, WGRAD = 0, 1, 2  # numbers of the matmuls in noise keys


class Operand(NamedTuple):
    """One operand of one matmul.

    Operands are compared by value: one that is not :data:`W`, :data:`X`, :data:`G` or :data:`DW`
    makes the engine call the method's function for it.
    """

    text: str  # formula
    pattern: tuple[int, int] | None = None  # (N, M) if N:M along the axis the matmul sums over
    axis: Literal["in", "out", "tokens"] | None = None  # that axis; set with a pattern

    def __str__(self) -> str:
        return f"{self.text} {':'.join(map(str, self.pattern))}" if self.pattern else self.text


W, X, G, DW = Operand("W"), Operand("X"), Operand("G"), Operand("dW")  # unchanged


class Row(NamedTuple):
    """One row of the table; the default is a dense layer."""

    A: Operand = W  # forward weight
    B: Operand = Operand("A")  # backward weight; the text `A` means that A serves both matmuls
    Xf: Operand = X  # input of fprop
    Xw: Operand = X  # input of wgrad
    P: Operand = G  # output gradient of dgrad
    U: Operand = G  # output gradient of wgrad
    J: Operand = DW  # gradient that the optimizer receives

    @property
    def operands(self) -> dict[str, tuple[Operand, ...]]:
        """Matmul -> operands: the weight (in wgrad U), and X or G where the method changes them."""
        # A is N:M along in_features; dgrad sums over out_features, where it counts as dense
        backward = Operand(self.A.text, *self.B[1:]) if self.B.text == "A" else self.B
        return {
            "fprop": (self.A,) if self.Xf == X else (self.A, self.Xf),
            "dgrad": (backward,) if self.P == G else (backward, self.P),
            "wgrad": (self.U,) if self.Xw == X else (self.U, self.Xw),
        }

    # torch 2.9 compiles no properties of named tuples

    def keeps_inputs(self) -> bool:
        """Return True if the matmuls see X and G unchanged."""
        return (self.Xf, self.Xw, self.P, self.U) == (X, X, G, G)

    def has_two_weights(self) -> bool:
        """Return True if B is not A; FSDP then gathers both."""
        return self.B.text != "A"

    @property
    def sparse(self) -> list[str]:
        """The matmuls with an N:M operand, which sparse hardware could run."""
        return [k for k, operands in self.operands.items() if any(o.pattern for o in operands)]

    @property
    def halved(self) -> list[str]:
        """Matmuls with an operand of which at most half is kept."""
        return [
            name
            for name, operands in self.operands.items()
            if any(o.pattern and 2 * o.pattern[0] <= o.pattern[1] for o in operands)
        ]


_HEADS = ("A(W)", "B(W)", "Xf(X)", "Xw(X)", "P(G)", "U(G)", "J(dW, W)")
COLUMNS = dict(zip(Row._fields, _HEADS, strict=True))  # field of a row -> head of its column
