"""What the kernels must return, block by block in plain Python and NumPy.

They share no code with the package and follow the papers and the rules that the public docstrings
state: ties, signed zeros, subnormals, infinities, NaN, and where rounding happens.
"""

import bisect
import itertools
import math

import numpy as np
import torch

COLUMN_PAIRS = list(itertools.combinations(range(4), 2))


def wide_rows(blocks):
    """Rows of NumPy scalars of the arithmetic's type: fp32, or fp64 for fp64."""
    return (blocks if blocks.dtype == torch.float64 else blocks.float()).numpy()


def mask(blocks, n, ties="high"):
    """Exactly n of each row: sort by (NaN, |x|, index), NaN above infinity."""
    mask = torch.zeros(blocks.shape, dtype=torch.bool)
    m, sign = blocks.shape[1], 1 if ties == "high" else -1
    for kept, row in zip(mask, blocks.double().tolist(), strict=True):
        key = [
            (math.isnan(v), 0.0 if math.isnan(v) else abs(v), sign * i) for i, v in enumerate(row)
        ]
        kept[sorted(range(m), key=key.__getitem__)[m - n :]] = True
    return mask


def soft_threshold(blocks, n, gamma=0.0):
    """sign(x)·(|x| - t) where |x| > t, else +0.0; t from the largest dropped and smallest kept."""
    rows = wide_rows(blocks)
    m, single = rows.shape[1], rows.dtype.type
    most = np.finfo(single).max
    out = np.zeros_like(rows)
    with np.errstate(all="ignore"):
        for result, row in zip(out, rows, strict=True):
            if any(map(math.isnan, row)):
                result[:] = math.nan
                continue
            magnitudes = sorted(abs(v) for v in row)
            t = dropped = magnitudes[m - n - 1]
            if gamma:
                kept = magnitudes[m - n]
                t = single(1 - gamma) * min(dropped, most) + single(gamma) * min(kept, most)
                t = max(t, dropped)
            for i, v in enumerate(row):
                if abs(v) > t:
                    result[i] = math.copysign(abs(v) - t, v)
    return torch.from_numpy(out).to(blocks.dtype)


def transposable_patterns():
    """The 90 masks of a 4×4 block as tuples of four column pairs, in descending bit order."""

    def bits(rows):
        return [int(column in row) for row in rows for column in range(4)]

    found = [
        rows
        for rows in itertools.product(COLUMN_PAIRS, repeat=4)
        if all(sum(column in row for row in rows) == 2 for column in range(4))
    ]
    assert len(found) == 90
    return sorted(found, key=bits, reverse=True)


def transposable_mask(blocks):
    """(count, 4, 4) -> masks: the largest sum of magnitudes, the first pattern of equals.

    Sums are fp32 in the order pairs, rows of a half, halves. NaN counts as infinite, infinities as
    the largest number, and blocks that could overflow are compared at a sixteenth.
    """
    patterns = transposable_patterns()
    x, most = blocks.float().abs().numpy(), np.finfo(np.float32).max
    x = np.minimum(np.where(np.isnan(x), most, x), most)
    x = np.where((x > most / 16).any((1, 2), keepdims=True), x / np.float32(16), x)
    first, second = np.transpose(COLUMN_PAIRS)
    pairs = x[:, :, first] + x[:, :, second]  # of each row, by column pair
    upper, lower = (pairs[:, i, :, None] + pairs[:, i + 1, None, :] for i in (0, 2))
    a, b, c, d = np.transpose([[COLUMN_PAIRS.index(pair) for pair in rows] for rows in patterns])
    best = (upper[:, a, b] + lower[:, c, d]).argmax(1)
    masks = torch.tensor([[[k in pair for k in range(4)] for pair in rows] for rows in patterns])
    return masks[torch.from_numpy(best)]


def masked_decay(grad, weight, mask, decay):
    """Grad + decay·weight where the mask is 0, formed in fp32 (fp64 for fp64), rounded once."""
    wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
    g, w = grad.to(wide).numpy(), weight.to(wide).numpy()
    lam = g.dtype.type(decay)
    out = np.empty_like(g)
    with np.errstate(all="ignore"):
        for i in np.ndindex(*g.shape):
            out[i] = g[i] + (g.dtype.type(0) if mask[i] else w[i] * lam)
    return torch.from_numpy(out).to(grad.dtype)


def fp8_values(format):
    """The finite magnitudes of a format in the order of their codes, exactly."""
    exponent_bits, mantissa, largest = {"e4m3": (4, 3, 448.0), "e5m2": (5, 2, 57344.0)}[format]
    bias = 2 ** (exponent_bits - 1) - 1
    values = []
    for code in range(128):
        exponent, fraction = code >> mantissa, code & (2**mantissa - 1)
        lead = 2**mantissa if exponent else 0
        values.append((lead + fraction) * 2.0 ** (max(exponent, 1) - bias - mantissa))
    return values[: values.index(largest) + 1]


def quantize_fp8(x, format):
    """(codes, scale) of a finite tensor: x·scale clamped, then rounded to nearest, ties to even."""
    values = fp8_values(format)
    flat = x.float().flatten().numpy()
    scale = np.float32(1.0)
    with np.errstate(all="ignore"):
        amax = max((abs(v) for v in flat), default=np.float32(0))
        if amax:
            scale = min(np.float32(values[-1]) / amax, np.finfo(np.float32).max)
        scaled = [float(v * scale) for v in flat]
    codes = []
    for v in scaled:
        a = min(abs(v), values[-1])
        low = bisect.bisect_right(values, a) - 1
        high = min(low + 1, len(values) - 1)
        down, up = a - values[low], values[high] - a  # exact: neighbors are within a factor of 2
        code = low if down < up or (down == up and low % 2 == 0) else high
        codes.append(code | (128 if math.copysign(1, v) < 0 else 0))
    return torch.tensor(codes, dtype=torch.uint8).view(x.shape), torch.tensor(scale)


def pack(mask):
    """Bit k % 8 of byte k // 8 is element k in row-major order."""
    bits = mask.flatten().tolist()
    return [sum(bit << i for i, bit in enumerate(bits[k : k + 8])) for k in range(0, len(bits), 8)]


def mvue(row, uniforms, estimator, tiny):
    """(estimate, whether every draw is clear of the ends of its interval) of a finite group, fp64.

    A group with at most two non-zeros is returned as it is, and so is what remains of one in which
    only two reach 2^30·``tiny`` of the largest, where ``tiny`` is the smallest normal number.
    """
    largest = max(abs(v) for v in row)
    if sum(v != 0 for v in row) <= 2:
        return row, True
    floor = tiny * 2.0**30 * max(largest, tiny)
    if sum(abs(v) >= floor for v in row) <= 2:
        return [v if abs(v) >= floor else 0.0 for v in row], True
    # Scaled so that no ratio above 10⁻⁵⁹⁵ underflows: an entry that became zero would lose its
    # interval, and a draw at its end, which decides nothing, would look clear.
    exponent = 900 - math.frexp(largest)[1]
    a = [math.ldexp(abs(v), exponent) for v in row]
    pick = _pick_approximate if estimator == "approximate" else _pick_exact
    chosen, p, margin = pick(a, uniforms)
    possible = {i for i in chosen if p[i] > 0}  # the quotient of a subnormal may round to 0
    return [v / p[i] if i in possible else 0.0 for i, v in enumerate(row)], margin > 1e-5


def _draw(weights, u):
    """(index whose interval holds u, distance of u from the nearest end between two intervals)."""
    total, c, ends = math.fsum(weights), 0.0, []
    for weight in weights:
        c += weight / total
        ends.append(c)
    index = next((i for i, end in enumerate(ends[:3]) if u < end), 3)
    between = [ends[i] for i in range(3) if any(weights[: i + 1]) and any(weights[i + 1 :])]
    return index, min((abs(u - end) for end in between), default=1.0)


def _pick_approximate(a, uniforms):
    s = math.fsum(a)
    others = [math.fsum(a[:i] + a[i + 1 :]) for i in range(4)]
    i, near = _draw(a, uniforms[0])
    j, near2 = _draw([0.0 if k == i else v for k, v in enumerate(a)], uniforms[1])
    odds = [v / o for v, o in zip(a, others, strict=True)]
    p = [a[k] / s * (1 + math.fsum(odds[:k] + odds[k + 1 :])) for k in range(4)]
    return {i, j}, [min(v, 1.0) for v in p], min(near, near2)


def _pick_exact(a, uniforms):
    k = max(range(4), key=a.__getitem__)
    rest = math.fsum(a[:k] + a[k + 1 :])
    share = rest if a[k] > rest else (a[k] + rest) / 2
    p = [min(v / share, 1.0) for v in a]
    ends = [0.0, p[0], p[0] + p[1], p[0] + p[1] + p[2], 2.0]
    u = uniforms[0]
    chosen = {i for i in range(4) for v in (u, u + 1) if ends[i] <= v < ends[i + 1]}
    return chosen, p, min(abs(u - end % 1) for end in (*ends, 1.0 - 1e-16))
