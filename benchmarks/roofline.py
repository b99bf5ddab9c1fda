"""Predict a micro-batch on an H100 by arithmetic, part by part, for docs/gpu.md.

    python benchmarks/roofline.py

Each part takes its FLOPs over a rate or its bytes over the bandwidth. Rates are those that tuned
libraries reach, not data sheets. Nothing is measured here: a measurement that misses a figure by
more than 15 % asks for a profile.
"""

from __future__ import annotations

from dataclasses import dataclass

BANDWIDTH = 3.0e12
"""Bytes per second of a copy."""
PEAK = 989.4e12
"""Dense bf16 FLOP/s of the data sheet, which MFU is a share of."""
ISSUE = 0.8 * 132 * 128 * 1.755e9
"""Instructions per second of all lanes, at 80 %: MVUE is bound by them, not by memory."""
MVUE_INSTRUCTIONS = 57.6
"""Per element of G, counted in the machine code of the kernel."""
ATTENTION = 300e12
"""FLOP/s of the attention core, forward and backward; FASTER_ATTENTION with cuDNN or
FlashAttention-3."""
FASTER_ATTENTION = 450e12
HEAD = 650e12
"""FLOP/s of the matmuls of the output layer, which are large."""
PACKING = 0.4
"""Share of the bandwidth that cuSPARSELt's compression reaches."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A recipe with its micro-batch."""

    name: str
    width: int
    ffn: int
    layers: int
    vocabulary: int
    length: int
    micro: int
    rate: float
    """FLOP/s of dense matmuls of this size."""
    gated: bool = False
    """Three FFN matrices and an output layer of its own (Llama), else two and tied embeddings."""
    sparse: float = 1.4
    """Speed of a 2:4 matmul over the dense one."""

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.length * self.micro

    @property
    def ffn_weights(self) -> int:
        """Entries of all FFN matrices."""
        return self.layers * (3 if self.gated else 2) * self.width * self.ffn

    @property
    def embedding_weights(self) -> int:
        """Entries of the embedding."""
        return self.vocabulary * self.width

    @property
    def parameters(self) -> int:
        """Entries of all matrices."""
        attention = 4 * self.width**2 * self.layers
        return self.ffn_weights + attention + (2 if self.gated else 1) * self.embedding_weights

    @property
    def gradients(self) -> int:
        """Entries of the output gradients of the FFN layers, which MVUE samples."""
        inner = 2 if self.gated else 1
        return self.tokens * self.layers * (inner * self.ffn + self.width)

    def parts(self) -> dict[str, float]:
        """Return part -> seconds of a dense micro-batch."""
        attention = 4 * self.width**2 * self.layers
        # fp32 residuals, two norms and their backwards move 68 bytes per token and feature
        moved = 68 * self.width + (16 if self.gated else 10) * self.ffn
        # casts of weights and sums of gradients recur in every micro-batch
        passes = 6 if self.gated else 9
        return {
            "FFN": 6 * self.tokens * self.ffn_weights / self.rate,
            "attention linears": 6 * self.tokens * attention / (0.95 * self.rate),
            "attention core": self.core_flops() / ATTENTION,
            "output layer": 6 * self.tokens * self.embedding_weights / HEAD,
            "element-wise": moved * self.tokens * self.layers / BANDWIDTH,
            "loss": 8 * self.tokens * self.vocabulary / BANDWIDTH,
            "weights": 24 * self.parameters / BANDWIDTH,
            "embedding": passes * 4 * self.embedding_weights / BANDWIDTH,
        }

    def core_flops(self) -> float:
        """Return FLOPs of the causal attention core; the backward has two and a half as many."""
        return 3.5 * 0.5 * 4 * self.tokens * self.length * self.width * self.layers

    @property
    def seconds(self) -> float:
        """Seconds of a dense micro-batch."""
        return sum(self.parts().values())

    @property
    def mfu(self) -> float:
        """Model FLOPs over the peak."""
        embedding = self.embedding_weights if self.gated else 0
        flops = 6 * (self.parameters - embedding) * self.tokens
        flops += 12 * self.layers * self.length * self.width * self.tokens
        return flops / self.seconds / PEAK

    @property
    def mvue(self) -> float:
        """Seconds of sampling G."""
        return max(4 * self.gradients / BANDWIDTH, MVUE_INSTRUCTIONS * self.gradients / ISSUE)

    @property
    def packing(self) -> float:
        """Seconds of packing the sampled G: 16-bit values in, 9/16 of them out."""
        return 3.125 * self.gradients / (PACKING * BANDWIDTH)

    @property
    def saved(self) -> float:
        """Seconds that one 2:4 matmul of three saves in the FFN."""
        return self.parts()["FFN"] / 3 * (1 - 1 / self.sparse)

    def ratios(self) -> dict[str, float]:
        """Return variant -> time over dense; stored operands spare the cast of FFN weights."""
        cast = 6 * self.ffn_weights / BANDWIDTH
        emulated = self.seconds - cast
        # wgrad is sparse only where packing costs less than the matmul saves
        wgrad = max(0.0, self.saved - self.packing)
        seconds = {
            "ste": emulated,
            "sste": emulated + self.mvue,
            "sste:auto": emulated + self.mvue - self.saved - wgrad,
            "tsrste:auto": emulated + self.mvue - 2 * self.saved - wgrad,
            "slope:auto": emulated - 2 * self.saved,
        }
        return {name: each / self.seconds for name, each in seconds.items()}


GPT2 = Model(
    name="GPT-2 124M", width=768, ffn=3072, layers=12, vocabulary=50304, length=1024, micro=8,
    rate=550e12,
)  # fmt: skip
MODELS = (
    GPT2,
    Model(
        name="GPT-2 124M", width=768, ffn=3072, layers=12, vocabulary=50304, length=1024, micro=32,
        rate=580e12,
    ),
    Model(
        name="GPT-2 774M", width=1280, ffn=5120, layers=36, vocabulary=50304, length=1024, micro=4,
        rate=580e12,
    ),
    Model(
        name="Llama 130M", width=768, ffn=2048, layers=12, vocabulary=32128, length=256, micro=32,
        rate=520e12, gated=True,
    ),
    Model(
        name="Llama 1B", width=2048, ffn=5504, layers=24, vocabulary=32128, length=256, micro=16,
        rate=600e12, gated=True, sparse=1.5,
    ),
    Model(
        name="Llama 1B", width=2048, ffn=5504, layers=24, vocabulary=32128, length=256, micro=64,
        rate=640e12, gated=True, sparse=1.5,
    ),
)  # fmt: skip


def expected() -> list[str]:
    """Return the rows of the table of expected figures."""
    rows = []
    for model in MODELS:
        found = model.ratios()
        speed = f"{1e3 * model.seconds:.1f} | {model.tokens / model.seconds / 1e3:.0f}"
        emulated = f"{found['ste']:.2f}, {found['sste']:.2f}"
        chosen = [found[f"{name}:auto"] for name in ("sste", "tsrste", "slope")]
        auto = ", ".join(f"{ratio:.2f}" for ratio in chosen)
        size = f"{model.name}, micro {model.micro} × {model.length}"
        rows.append(f"| {size} | {speed} | {model.mfu:.0%} | {emulated} | {auto} |")
    return rows


def gains() -> dict[str, float]:
    """Return change -> share of a micro-batch of GPT-2 124M that it would save."""
    activations = GPT2.tokens * GPT2.layers * GPT2.width
    core = GPT2.parts()["attention core"]
    seconds = {
        "sample and pack wgrad's operand in one Triton kernel": GPT2.saved,
        "cuDNN attention or FlashAttention-3": core * (1 - ATTENTION / FASTER_ATTENTION),
        # 20 of the 68 bytes are reads and writes of the fp32 residual beyond 2 bytes each
        "residual stream in bf16": 20 * activations / BANDWIDTH,
        # a gradient is written, read back and its sum written: 8 of these bytes go
        "weight gradients summed inside the matmul": 8 * GPT2.parameters / BANDWIDTH,
        "gradient of tied embeddings accumulated once": 12 * GPT2.embedding_weights / BANDWIDTH,
    }
    return {change: each / GPT2.seconds for change, each in seconds.items()}


def main() -> None:
    """Print both tables, and the parts of a micro-batch."""
    print("\n".join(expected()))
    for change, share in gains().items():
        print(f"{change}: {share:.1%}")
    for model in MODELS:
        parts = ", ".join(f"{part} {1e3 * each:.2f}" for part, each in model.parts().items())
        own = f"MVUE {1e3 * model.mvue:.2f}, packing {1e3 * model.packing:.2f}"
        saved = f"a 2:4 matmul saves {1e3 * model.saved:.2f}"
        print(f"{model.name}, micro {model.micro}, ms: {parts}; {own}; {saved}")


if __name__ == "__main__":
    main()
