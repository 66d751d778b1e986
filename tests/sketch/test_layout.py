from __future__ import annotations

import pytest

from driftscope.errors import UsageError
from driftscope.sketch import SketchLayout

LAYERS = {
    f"model.layers.{i}.{part}.weight": 5000
    for i in range(80)
    for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm")
}


def test_a_row_is_a_module_that_holds_parameters():
    layout = SketchLayout.of({"a.weight": 10, "a.bias": 2, "b.weight": 200, "c": 1}, 64)
    assert layout.rows == ("a", "b", "")
    assert layout.row_of == {"a.weight": 0, "a.bias": 0, "b.weight": 1, "c": 2}
    assert layout.index_of == {"a.weight": 0, "a.bias": 1, "b.weight": 2, "c": 3}
    assert layout.blocks == (2, 4, 1)


def test_many_modules_share_rows_with_their_neighbours():
    layout = SketchLayout.of(LAYERS, 64)
    assert len(layout.rows) == 240  # of 400 modules: self_attn, mlp, norm of each layer
    assert "model.layers.7.self_attn" in layout.rows
    layers = SketchLayout.of(LAYERS, 64, max_rows=100)
    assert len(layers.rows) == 80 and layers.rows[7] == "model.layers.7"
    assert SketchLayout.of(LAYERS, 64, max_rows=1).rows == ("model.layers",)
    assert SketchLayout.of({"a.w": 1, "b.w": 1}, 64, max_rows=1).rows == ("all modules",)
    with pytest.raises(UsageError, match="max_rows=0"):
        SketchLayout.of(LAYERS, 64, max_rows=0)


def test_the_variance_factor_is_zero_for_one_block_and_1_over_k_for_many():
    layout = SketchLayout.of({"a.w": 64, "b.w": 128, "c.w": 64_000}, 64)
    assert layout.variance() == pytest.approx((0.0, 0.5 / 64, 0.999 / 64))


def test_layouts_are_equal_where_sketches_add_up():
    assert SketchLayout.of(LAYERS, 64) == SketchLayout.of(dict(LAYERS), 64)
    assert SketchLayout.of(LAYERS, 64) != SketchLayout.of(LAYERS, 64, seed=1)
    assert SketchLayout.of(LAYERS, 64) != SketchLayout.of(LAYERS, 128)
