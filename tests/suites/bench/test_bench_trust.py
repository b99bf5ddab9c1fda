"""The published layout of packed matrices against an encoder in loops."""

import pytest
import torch

import trust

CPU = torch.device("cpu")


def pack(x):
    """Values row by row, then nibbles at the places that FlagGems' decoder reads them from."""
    rows, columns = x.shape
    tiles = 2 * -(-columns // 64)  # of 32 columns, in pairs
    nibbles = [0] * (-(-rows // 64) * tiles * 512)
    values = []
    for row in range(rows):
        for group in range(columns // 4):
            four = x[row, 4 * group : 4 * group + 4]
            low, high = four.nonzero().flatten().tolist()
            values += [four[low], four[high]]
            inner, high_row, column = row % 32, row // 32, group % 8
            place = (inner % 8) * 16 + (inner // 8) % 2 + (inner // 8) // 2 * 128
            place += (column % 4) * 4 + (2 if column >= 4 else 0)
            place += (high_row % 2) * 256 + (group // 8) * 512 + (high_row // 2) * tiles * 512
            nibbles[place] = low | high << 2
    meta = torch.tensor(nibbles, dtype=torch.uint8).view(-1, 2)
    packed = torch.stack(values).view(torch.uint8)
    return torch.cat([packed, meta[:, 0] | meta[:, 1] << 4])


@pytest.mark.parametrize("rows, columns", [(64, 32), (128, 64), (48, 80), (80, 144)])
@pytest.mark.parametrize("name", trust.TYPES)
def test_the_formula_unpacks_what_it_says_is_packed(rows, columns, name):
    (case,) = trust.layout(pack, name, rows, columns, CPU)
    assert (case.status, case.name) == ("ok", f"layout, {name}, {rows}×{columns}")


@pytest.mark.parametrize("rows, columns", [(48, 80), (80, 64), (64, 80)])
def test_sizes_that_torch_rounds_up_to_whole_columns_are_right(rows, columns):
    """Since version 2.10 torch views the bytes as a matrix with the rows of the operand."""

    def compress(x):
        packed = pack(x)
        return torch.cat([packed, packed.new_zeros(-packed.numel() % (2 * rows))]).view(rows, -1)

    (case,) = trust.layout(compress, "bf16", rows, columns, CPU)
    assert case.status == "ok"


def test_another_layout_or_size_is_reported():
    def status(change):
        (row,) = trust.layout(lambda x: change(pack(x)), "bf16", 80, 64, CPU)
        assert row.ok is (None if row.status == "ok" else False)
        return row.status

    assert status(lambda packed: packed) == "ok"
    swapped = status(lambda packed: torch.cat([packed[: 80 * 64], packed[80 * 64 :].flip(0)]))
    assert swapped == "wrong: the formula unpacks another matrix"
    sixteenths = status(lambda packed: packed[: 80 * 64 * 9 // 8])
    assert sixteenths == "wrong: 5760 bytes, the formula gives 6144"


def test_sizes_beside_whole_tiles_are_among_them():
    assert any(rows % 64 for rows, _ in trust.SIZES) and any(k % 64 for _, k in trust.SIZES)
    assert any(rows % 64 == 0 and k % 64 == 0 for rows, k in trust.SIZES)
