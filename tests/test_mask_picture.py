"""Pictures of masks and the command that draws them."""

from __future__ import annotations

import math

import pytest
import torch

from sdpa_router import KeyRange, Window, cli, plot_mask
from sdpa_router.decision import TileCounts
from sdpa_router.mask_picture import CONSTANT, KEPT, MIXED, SKIPPED, count, tile_kinds
from sdpa_router.mask_summary import summarised

pytest.importorskip("matplotlib")


def example():
    mask = torch.zeros(130, 256)
    mask[:64, 64:128] = 2.5
    mask[:, 128:] = -math.inf
    mask[64:128, 128:192] = torch.finfo(torch.float32).min
    mask[70, 3] = 1.0
    return mask


def test_kinds_of_a_mask_are_those_that_attention_goes_by(device):
    mask = example()
    kinds, edge = tile_kinds(mask)
    assert edge == (130, 256)
    assert kinds.tolist() == [
        [KEPT, CONSTANT, SKIPPED, SKIPPED],
        [MIXED, KEPT, SKIPPED, SKIPPED],
        [KEPT, KEPT, SKIPPED, SKIPPED],
    ]
    assert count(kinds) == summarised(mask.to(device)).counts()


@pytest.mark.parametrize("endless", [math.nan, math.inf])
@pytest.mark.parametrize("rows", [slice(0, 70), slice(3, 4), slice(0, 64)])
def test_rows_that_see_nan_or_inf_are_counted_as_attention_counts_them(device, endless, rows):
    mask = torch.zeros(70, 200)
    mask[:, 64:128] = -9000.0
    mask[:, 128:] = -20000.0
    mask[rows, 5] = endless
    assert count(tile_kinds(mask)[0]) == summarised(mask.to(device)).counts()


def test_windows_are_those_that_banded_attention_takes():
    named = [Window(0, 64, (KeyRange(0, 128, 0, 64),)), Window(64, 128, (KeyRange(64, 192),))]
    plain = [(0, 64, [(0, 128, 0, 64)]), Window(64, 128, ((64, 192),))]
    assert torch.equal(tile_kinds(plain)[0], tile_kinds(named)[0])


def test_kinds_of_tiles_and_windows():
    tiles = torch.tensor([[True, False], [False, True]])
    assert tile_kinds(tiles, tiles=True)[0].tolist() == [[KEPT, SKIPPED], [SKIPPED, KEPT]]
    windows = [Window(0, 64, (KeyRange(0, 128, 0, 64),)), Window(64, 128, (KeyRange(64, 192),))]
    kinds, edge = tile_kinds(windows)
    assert kinds.tolist() == [[KEPT, MIXED, SKIPPED], [SKIPPED, KEPT, KEPT]]
    assert edge == (128, 192)


def test_a_figure_names_its_counts_and_density(tmp_path):
    figure = plot_mask(example(), tmp_path / "mask.png", heads=24)
    assert (tmp_path / "mask.png").stat().st_size > 5000
    assert "6 of 12 tiles of 64x64 are visited: density 0.500" in figure.axes[0].get_title()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "kept: 4", "one number: 1", "read: 1", "skipped: 6"
    ]  # fmt: skip


def test_what_is_no_mask():
    for wrong, message in (
        (torch.zeros(5), r"float32 \[5\]; accepted: bool or floating"),
        (torch.zeros(5, 5, dtype=torch.int32), "int32"),
        (torch.zeros(5, 5).to_sparse(), "sparse"),
        (torch.zeros(5, 5, device="meta"), "without values"),
        ([], "neither a tensor nor windows"),
        ([1, 2], "neither a tensor nor windows"),
        (None, "neither a tensor nor windows"),
        ([Window(0, 5, ())], "has no keys"),
        ([Window(0, 5, (KeyRange(9, 4),))], "keys 9 to 4"),
    ):
        with pytest.raises(ValueError, match=message):
            plot_mask(wrong)
    for numbers in ({"heads": 0}, {"head_dim": 0}, {"head_dim": 257}):
        with pytest.raises(ValueError, match="accepted: from 1, and 1 to 256"):
            plot_mask(torch.zeros(5, 5), **numbers)
    with pytest.raises(ValueError, match=r"tile mask is torch\.float32; accepted: bool"):
        plot_mask(torch.zeros(5, 5), tiles=True)


def test_the_command(tmp_path, capsys):
    file, picture = tmp_path / "mask.pt", tmp_path / "mask.png"
    torch.save(example().half(), file)
    assert cli.main(["mask", str(file), "--plot", str(picture), "--heads", "2"]) == 0
    assert picture.exists()
    out = capsys.readouterr().out
    assert str(TileCounts(4, 1, 1, 6)) in out
    assert "density 0.500" in out
    assert "for 2 heads of 128" in out


def test_the_command_refuses_in_one_line(tmp_path, capsys):
    torch.save({"a": 1}, tmp_path / "dict.pt")
    torch.save(torch.eye(5).to_sparse(), tmp_path / "sparse.pt")
    torch.save(torch.empty(5, 5, device="meta"), tmp_path / "meta.pt")
    (tmp_path / "text.pt").write_text("hello")
    for file, message in (
        *(("dict.pt", "holds a dict"), ("text.pt", "can't read"), ("none.pt", "a file that exists")),
        *(("sparse.pt", "accepted: a dense one"), ("meta.pt", "accepted: a dense one")),
    ):
        with pytest.raises(SystemExit) as stopped:
            cli.main(["mask", str(tmp_path / file)])
        assert stopped.value.code == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
