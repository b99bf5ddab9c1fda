"""The operand table: what each of the three products of a linear layer sees.

    fprop   Y  = Xf(X) · A(W)ᵀ
    dgrad   dX = P(G) · B(W)
    wgrad   dW = U(G)ᵀ · Xw(X),  then the optimiser receives J(dW, W)

A row is data that coverage, dry runs, documentation and executions read alike.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class Operand(NamedTuple):
    """What one product sees in one place."""

    text: str  # for people
    pattern: tuple[int, int] | None = None  # (N, M) if N:M along the axis its product reduces over
    axis: Literal["in", "out", "tokens"] | None = None
    """That axis: in (fprop), out (dgrad) or tokens (wgrad). None without a pattern."""

    def __str__(self) -> str:
        return f"{self.text} {':'.join(map(str, self.pattern))}" if self.pattern else self.text


W, X, G = Operand("W"), Operand("X"), Operand("G")  # as they are


class Row(NamedTuple):
    """One row of the table; the default is a dense layer."""

    A: Operand = W  # forward weight
    B: Operand = Operand("A")  # backward weight; with the text `A` the forward weight serves both
    Xf: Operand = X  # input of fprop
    Xw: Operand = X  # input of wgrad
    P: Operand = G  # output gradient of dgrad
    U: Operand = G  # output gradient of wgrad
    J: Operand = Operand("dW")  # what the optimiser receives

    @property
    def products(self) -> dict[str, tuple[Operand, ...]]:
        """fprop, dgrad and wgrad -> their operands: weights always, X and G where changed.

        Wgrad has no weight: G is its first operand.
        """
        backward = Operand(self.A.text, *self.B[1:]) if self.B.text == "A" else self.B
        return {
            "fprop": (self.A, *[self.Xf] * (self.Xf != X)),
            "dgrad": (backward, *[self.P] * (self.P != G)),
            "wgrad": (self.U, *[self.Xw] * (self.Xw != X)),
        }

    @property
    def sparse(self) -> list[str]:
        """The products with an N:M operand, which sparse hardware could run."""
        return [k for k, operands in self.products.items() if any(o.pattern for o in operands)]


_HEADS = ("A(W)", "B(W)", "Xf(X)", "Xw(X)", "P(G)", "U(G)", "J(dW, W)")
COLUMNS = dict(zip(Row._fields, _HEADS, strict=True))  # field of a row -> head of its column


class Phase(NamedTuple):
    """What the next step does; one value per step for the whole model."""

    training: bool = True  # training products see the row's operands; else W, X and G
    evaluation: bool = True  # whether evaluation, `densify` and proofs use A(W)
    why: str = ""  # of dense training: until or since when, and the option that decides it
