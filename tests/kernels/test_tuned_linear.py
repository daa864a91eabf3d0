"""Which launch a dense linear takes, and where its arguments go. The launches need Triton, no GPU."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interlock.kernels.triton.tuned_linear import (
    Library,
    LinearShape,
    Simple,
    Stream,
    Tiles,
    choose,
    choose_from,
    from_json,
    load_table,
    parse_table,
    simple_config,
    to_json,
)

SMALL = Stream(16, 64, 4, 2, 1, 2, True)
MIDDLE = Stream(64, 64, 2, 3, 1, 2, False)
LARGE = Tiles(256, True, 16, 4)
QKV = LinearShape(14848, 4096, "fp8")
TABLE = ((QKV, ((16, SMALL), (64, MIDDLE), (512, LARGE))),)


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [(1, SMALL), (16, SMALL), (17, MIDDLE), (64, MIDDLE), (65, LARGE), (512, LARGE), (9000, LARGE)],
)
def test_a_block_is_never_smaller_than_the_rows_it_was_tuned_for(rows, wanted) -> None:
    assert choose_from(TABLE, QKV, rows) == wanted


def test_an_entry_that_does_not_fit_is_passed_over() -> None:
    odd = LinearShape(14848, 4096 + 128, "fp8")
    assert choose_from(TABLE, odd, 1) == simple_config(odd, 1)
    narrow = LinearShape(384, 4096, "fp8")
    assert choose_from(TABLE, narrow, 4096) == simple_config(narrow, 4096)


def test_another_library_is_taken_only_for_a_shape_that_was_measured() -> None:
    offered = Tiles(256, True, 16, 4, deep_gemm_from=8192)
    table = ((QKV, ((512, offered),)),)
    assert choose_from(table, QKV, 8192) == offered
    assert choose_from(table, LinearShape(14848, 8192, "fp8"), 8192) == LARGE
    assert from_json(to_json(offered)) == offered
    stored = choose(QKV, 16384)
    assert isinstance(stored, Tiles)
    assert stored.deep_gemm_from == 8192
    assert getattr(choose(QKV, 2048), "deep_gemm_from", 0) == 0


def test_bfloat16_takes_the_library_where_nothing_near_was_tuned() -> None:
    o = LinearShape(4096, 8192, "bfloat16")
    table = ((o, ((32, Stream(32, 32, 4, 4, 1, 1, False)), (64, Library()))),)
    assert isinstance(choose_from(table, o, 8), Stream)
    assert choose_from(table, o, 4096) == Library()
    assert choose_from(table, LinearShape(152576, 4096, "bfloat16"), 8) == Library()
    assert choose_from(TABLE, o, 8) == Library()


@given(
    width=st.integers(1, 40000),
    groups=st.integers(1, 256),
    rows=st.integers(1, 20000),
    weight_dtype=st.sampled_from(["fp8", "bfloat16"]),
)
def test_whatever_the_package_holds_fits_every_shape(width, groups, rows, weight_dtype) -> None:
    shape = LinearShape(width, groups * 128, weight_dtype)
    config = choose(shape, rows)
    assert config.fits(shape.width, shape.depth, weight_dtype)
    if isinstance(config, Simple):
        assert groups >= config.splits


def test_a_table_survives_json() -> None:
    configs = [SMALL, MIDDLE, LARGE, Library(), simple_config(QKV, 100)]
    assert [from_json(to_json(config)) for config in configs] == configs
    named = {"width": 14848, "depth": 4096, "weight_dtype": "fp8"}
    by_rows = {str(rows): to_json(config) for rows, config in reversed(TABLE[0][1])}
    assert parse_table({"linear": [{"shape": named, "by_rows": by_rows}]}) == TABLE
    assert load_table()
    with pytest.raises(KeyError):
        from_json({"kernel": "unknown"})


class Recorder:
    """Stands in for a kernel: binds the launch to the kernel's parameters."""

    def __init__(self, kernel) -> None:
        self._signature = inspect.signature(kernel.fn)
        self.launches: list[tuple[tuple[int, ...], dict[str, object], dict[str, object]]] = []

    def __getitem__(self, grid):
        def launch(*args, **named) -> None:
            options = {key: named.pop(key) for key in ("num_warps", "maxnreg", "launch_pdl") if key in named}
            self.launches.append((grid, dict(self._signature.bind(*args, **named).arguments), options))

        return launch


@pytest.fixture
def launches(monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed: torch's CPU builds bring none")
    from interlock.kernels.triton import linear_launch

    recorders = {name: Recorder(getattr(linear_launch, name)) for name in ("stream_kernel", "tiles_kernel")}
    for name, recorder in recorders.items():
        monkeypatch.setattr(linear_launch, name, recorder)
    facts = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    return linear_launch.launch, recorders


def fp8_operands(rows: int, width: int, depth: int):
    x = torch.zeros(rows, depth, dtype=torch.float8_e4m3fn)
    weight = torch.zeros(width, depth, dtype=torch.float8_e4m3fn)
    return x, torch.ones(depth // 128, rows), weight, torch.ones(-(-width // 128), depth // 128)


def test_where_a_stream_gets_its_arguments(launches) -> None:
    launch, recorders = launches
    x, x_scales, weight, scales = fp8_operands(20, 300, 1024)
    config = Stream(16, 64, 4, 2, 2, 2, True, early=True)
    out = launch(config, x, x_scales, weight, scales, torch.bfloat16)
    [(grid, bound, options)] = recorders["stream_kernel"].launches
    assert grid == (5 * 2, 2)
    assert (out.shape, out.dtype) == ((20, 300), torch.bfloat16)
    assert bound["rows"].base is x
    assert bound["rows"].block_shape == [16, 128]
    assert bound["weight"].base is weight
    assert bound["weight"].block_shape == [64, 128]
    assert bound["row_scales"] is x_scales
    assert bound["weight_scales"] is scales
    assert (bound["row_count"], bound["scale_stride"], bound["out_stride"]) == (20, 20, 300)
    assert bound["split_stride"] == 20 * 300
    assert bound["out"].shape == (2, 20, 300)
    assert bound["out"].dtype == torch.float32
    assert options == {"num_warps": 4, "maxnreg": 128, "launch_pdl": True}


def test_a_bfloat16_stream_has_no_scales(launches) -> None:
    launch, recorders = launches
    x, weight = torch.zeros(3, 512, dtype=torch.bfloat16), torch.zeros(64, 512, dtype=torch.bfloat16)
    out = launch(Stream(16, 32, 4, 4, 1, 1, False), x, None, weight, None, torch.bfloat16)
    [(grid, bound, options)] = recorders["stream_kernel"].launches
    assert grid == (2, 1)
    assert not bound["fp8"]
    assert bound["rows"].block_shape == [16, 64]
    assert bound["weight"].block_shape == [32, 64]
    assert bound["out"].data_ptr() == out.data_ptr()
    assert options == {"num_warps": 4, "launch_pdl": False}


@pytest.mark.parametrize(("rows", "programs"), [(1, 3), (129, 6), (128 * 100, 132)])
def test_tiles_are_shared_among_the_multiprocessors(launches, rows, programs) -> None:
    launch, recorders = launches
    x, x_scales, weight, scales = fp8_operands(rows, 768, 256)
    out = launch(LARGE, x, x_scales, weight, scales, torch.bfloat16)
    [(grid, bound, _)] = recorders["tiles_kernel"].launches
    assert grid == (programs,)
    assert bound["rows"].block_shape == [64, 128]
    assert bound["weight"].block_shape == [64, 128]
    assert (bound["row_count"], bound["scale_stride"], bound["out_stride"]) == (rows, rows, 768)
    assert (bound["depth"], bound["width"], bound["columns"]) == (256, 768, 256)
    assert bound["out"].data_ptr() == out.data_ptr()


def test_tiles_refuse_bfloat16(launches) -> None:
    launch, _ = launches
    x = torch.zeros(3, 512, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="fp8 only"):
        launch(LARGE, x, None, x, None, torch.bfloat16)
