"""Every operation in every layout and dtype: the bits of the reference.

Values and patterns are tested block by block in tests/kernels/test_block_properties.py, which
``make test-triton`` runs with this backend; here are the options that it does not draw.
"""

import pytest
import torch

from sparsepretrain import kernels
from support.parity import DTYPES, nasty
from support.same_bits import DEVICE, LAYOUTS, assert_same, lay_out

SHAPE = (12, 96)
SCALE = torch.tensor(1.37, device=DEVICE)
SCALED = {"scale": SCALE, "dtype": torch.bfloat16}
ACROSS = SCALED | {"dim": 0, "gamma": 1.0}
MASK = nasty(SHAPE, 1) > 0
WEIGHT = nasty(SHAPE, 2)


def quantized(x, backend, format):
    q, scale = kernels.quantize_fp8(x.nan_to_num(0, 1, -1), format, backend=backend)
    return q, scale, kernels.dequantize_fp8(q, scale, backend=backend)


def packed(x, backend):
    code = kernels.pack_24(x > 0, backend=backend)
    return code, kernels.unpack_24(code, x.shape, backend=backend)


def decayed(x, backend, decay):
    return kernels.masked_decay_(x.clone(), WEIGHT, MASK, decay, backend=backend)


OPERATIONS = {
    "nm_prune": lambda x, b: kernels.nm_prune(x, backend=b),
    "nm_prune 2:4 across": lambda x, b: kernels.nm_prune(x, dim=0, ties="low", backend=b),
    "nm_prune 2:8": lambda x, b: kernels.nm_prune(x, 2, 8, ties="low", backend=b),
    "nm_mask 16:32": lambda x, b: kernels.nm_mask(x, 16, 32, backend=b),
    "soft_threshold": lambda x, b: kernels.soft_threshold(x, gamma=0.3, **SCALED, backend=b),
    "soft_threshold 2:6": lambda x, b: kernels.soft_threshold(x, 2, 6, **ACROSS, backend=b),
    # Triton's interpreter before 3.8 returns NaN for tl.minimum(x, NaN); machine code returns x
    "transposable_mask": lambda x, b: kernels.transposable_mask(x.nan_to_num(), backend=b),
    "mvue": lambda x, b: kernels.mvue(x, dim=0, key=9, backend=b),
    "mvue exact": lambda x, b: kernels.mvue(x, estimator="exact", key=9, backend=b),
    "mvue turned": lambda x, b: kernels.mvue(x, dim=0, key=9, order="tokens_last", backend=b),
    "prune_gradient": lambda x, b: kernels.prune_gradient(x, 1, 4, backend=b),
    "masked_decay_": lambda x, b: decayed(x, b, 6e-5),
    "masked_decay_ by a tensor": lambda x, b: decayed(x, b, SCALE),
    "flip_count": lambda x, b: kernels.flip_count(x > 0, MASK, backend=b),
    "quantize_fp8 e4m3": lambda x, b: quantized(x, b, "e4m3"),
    "quantize_fp8 e5m2": lambda x, b: quantized(x, b, "e5m2"),
    "pack_24": packed,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_layout_equals_the_reference(name, dtype):
    for layout in LAYOUTS:
        x = lay_out(nasty(SHAPE, 3).to(dtype), layout)
        both = [OPERATIONS[name](x, backend) for backend in ("triton", "reference")]
        pairs = zip(*both, strict=True) if isinstance(both[0], tuple) else [both]
        for got, wanted in pairs:
            assert_same(got, wanted)
