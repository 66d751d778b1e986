"""Norms, distances and identification of paths, read together, against one plain sum after another."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from driftscope.algebra import coefficients
from driftscope.attribute import Change, PathCoefs, Scene, attribute, identify, possible_changes
from driftscope.batch import TokenBatch
from driftscope.errors import UsageError
from driftscope.spec import LossSpec
from driftscope.spectrum import HeadView, Spectrum

B, T, D = 4, 9, 5
EXACT = 1e-12
BASE = {"is_correction": True, "is_mode": "token_truncate", "tool_mask": True, "accumulation_steps": 2}
SPECS = {
    "dapo": LossSpec(loss_type="dapo", delta=1.2, max_completion_length=16, num_processes=2, **BASE),
    "dapo, kl": LossSpec(loss_type="dapo", beta=0.1, kl_bias_correction=True, max_completion_length=16, **BASE),
    "bnpo, bonus": LossSpec(loss_type="bnpo", beta=0.1, entropy_coef=0.3, **BASE),
    "grpo": LossSpec(loss_type="grpo", delta=1.2, **BASE),
    "luspo": LossSpec(loss_type="luspo", importance_sampling_level="sequence", tool_mask=True),
}


def scene(spec: LossSpec, seed: int = 0, **changes) -> Scene:
    """Real directions of two heads, so that every product belongs to vectors."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    mask, tools = torch.ones(B, T), torch.ones(B, T)
    mask[0, 5:] = 0
    mask[2, 7:] = 0
    tools[1, 2:5] = 0
    logps = -2 + 0.3 * draw(B, T)
    inputs = {
        "logps_BT": logps,
        "old_logps_BT": logps + 0.3 * draw(B, T),
        "ref_logps_BT": logps + 0.3 * draw(B, T),
        "sampling_logps_BT": logps + 0.2 * draw(B, T) + 0.5,
        "entropies_BT": draw(B, T).abs(),
        "advantages": draw(B),
        "completion_mask_BT": mask,
        "tool_mask_BT": tools,
        "num_items_in_batch": 50.0,
        "rank_mean_tokens": (20.0, 24.0),
    }
    batch = TokenBatch(**{**inputs, **changes})
    rows = mask.bool()
    n = int(rows.sum())
    directions = {head: (draw(n, D), draw(n, D) if spec.entropy_coef else None) for head in ("model", "raw")}
    zero = torch.zeros(n, dtype=torch.float64)
    views = {}
    for head, (u, w) in directions.items():
        extra = (None,) * 3 if w is None else ((u * w).sum(-1), (w * w).sum(-1), zero)
        views[head] = HeadView(zero, zero, (u * u).sum(-1), zero, *extra)
    cross = {("model", "raw"): (directions["model"][0] * directions["raw"][0]).sum(-1)}
    return Scene({"model": batch, "raw": batch}, Spectrum(views, zero, cross), rows)


def plain_path(s: Scene, spec: LossSpec, head: str) -> PathCoefs:
    made = coefficients(spec, s.batches[head])
    e = made.entropies_BT
    return PathCoefs(head, made.logps_BT[s.rows_BT], None if e is None else e[s.rows_BT])


def plain_square(s: Scene, head: str, c: torch.Tensor, e: torch.Tensor | None) -> float:
    v = s.spectrum.views[head]
    total = c * c * v.uu_N
    if e is not None and v.ww_N is not None:
        total = total + 2 * c * e * v.uw_N + e * e * v.ww_N
    return float(total.sum())


def plain_inner(s: Scene, a: PathCoefs, b: PathCoefs) -> float:
    if a.head != b.head:
        return float((a.c_N * b.c_N * s.spectrum.cross_N[("model", "raw")]).sum())
    minus = PathCoefs(b.head, -b.c_N, None if b.e_N is None else -b.e_N)
    return (plain_square(s, a.head, *plus(a, b)) - plain_square(s, a.head, *plus(a, minus))) / 4


def plus(a: PathCoefs, b: PathCoefs) -> tuple[torch.Tensor, torch.Tensor | None]:
    if a.e_N is None or b.e_N is None:
        return a.c_N + b.c_N, b.e_N if a.e_N is None else a.e_N
    return a.c_N + b.c_N, a.e_N + b.e_N


def plain_distance(s: Scene, path: PathCoefs, other: PathCoefs) -> float:
    """As defined: one sum after another, each read by itself."""
    own, size = (plain_square(s, p.head, p.c_N, p.e_N) for p in (path, other))
    if path.head == other.head:
        minus = PathCoefs(other.head, -other.c_N, None if other.e_N is None else -other.e_N)
        square = plain_square(s, path.head, *plus(path, minus))
    else:
        square = own + size - 2 * plain_inner(s, path, other)
    if size <= 0:
        return 0.0 if own <= 0 else math.inf
    return math.sqrt(max(square, 0.0) / size)


def plain_identify(s: Scene, base: LossSpec, path: PathCoefs, tolerance: float):
    """Every candidate computed anew, and judged before the next."""
    best = None
    for spec, chosen in candidates(base):
        try:
            error = plain_distance(s, plain_path(s, spec, path.head), path)
        except UsageError:
            continue
        if best is None or error < best[2] / 2:
            best = (spec, chosen, error)
        if best[2] <= tolerance:
            break
    return best


def candidates(base: LossSpec):
    groups = possible_changes(base)
    for count in range(len(groups) + 1):
        for picked in itertools.combinations(groups, count):
            for chosen in itertools.product(*picked):
                spec = base
                for change in chosen:
                    spec = change.apply(spec)
                yield spec, chosen


def close(found: float, wanted: float, scale: float = 1.0) -> bool:
    return found == wanted or abs(found - wanted) <= EXACT * max(abs(wanted), scale)


@pytest.mark.parametrize("name", SPECS)
def test_a_spec_has_the_coefficients_of_its_own_computation(name):
    s = scene(SPECS[name])
    for spec, _ in candidates(SPECS[name]):
        for head in ("model", "raw"):
            found, wanted = s.path(spec, head), plain_path(s, spec, head)
            torch.testing.assert_close(found.c_N, wanted.c_N, rtol=EXACT, atol=0.0)
            assert (found.e_N is None) is (wanted.e_N is None)
            if wanted.e_N is not None:
                torch.testing.assert_close(found.e_N, wanted.e_N, rtol=EXACT, atol=0.0)
            assert s.path(spec, head) is found


def test_normalisers_share_one_computation(monkeypatch):
    from driftscope import scene as module

    made = []
    monkeypatch.setattr(module, "coefficients", lambda *a: made.append(a[0]) or coefficients(*a))
    spec = SPECS["dapo, kl"]
    s = scene(spec)
    for candidate, _ in candidates(spec):
        s.path(candidate, "model")
    assert len(made) == len({c.replace(normalizer=None) for c, _ in candidates(spec)}) == 8


@pytest.mark.parametrize("name", SPECS)
def test_relations_are_the_plain_sums(name):
    s = scene(SPECS[name])
    dropped = SPECS[name].replace(tool_mask=False, entropy_coef=0.0)
    paths = [
        s.path(SPECS[name], "model"),
        s.path(dropped, "model"),
        s.path(SPECS[name], "raw"),
        s.path(dropped, "raw"),
        PathCoefs("model", torch.zeros(int(s.rows_BT.sum()), dtype=torch.float64)),
        PathCoefs("model", s.path(SPECS[name], "model").c_N * 2, None, measured_norm=7.0),
    ]
    related = s.relate([*paths, paths[0]])
    assert len(related.paths) == len(paths)
    for a, b in itertools.product(paths, paths):
        size = math.sqrt(plain_inner(s, a, a) * plain_inner(s, b, b))
        assert close(related.product(a, b), plain_inner(s, a, b), size)
        wanted = plain_distance(s, a, b)
        # Across heads the distance is a difference of large numbers; on one head it is exact however near they are.
        assert close(related.distance(a, b), wanted, 1.0 if a.head == b.head else 1e3)
        assert close(s.distance(a, b), wanted, 1.0 if a.head == b.head else 1e3)
        cosine = related.cosine(a, b)
        assert cosine is None if size == 0 else close(cosine, plain_inner(s, a, b) / size)
        assert s.cosine(a, b) == pytest.approx(cosine, rel=EXACT) if cosine is not None else s.cosine(a, b) is None
    for path, square in zip(paths, s.squares(paths), strict=True):
        norm = 7.0 if path.measured_norm else math.sqrt(plain_square(s, path.head, path.c_N, path.e_N))
        assert close(math.sqrt(square), norm)
        assert close(related.norm(path), norm)
        assert close(s.norm(path), norm)
    for head in ("model", "raw"):
        same = [p for p in paths if p.head == head]
        for path in same:
            for found, other in zip(s.distances(same, path), same, strict=True):
                assert close(found, plain_distance(s, other, path))


def test_a_distance_is_exact_where_two_paths_nearly_agree():
    s = scene(SPECS["dapo"])
    path = s.path(SPECS["dapo"], "model")
    near = PathCoefs("model", path.c_N * (1 + 1e-10))
    assert s.distance(near, path) == pytest.approx(1e-10, rel=1e-5)
    assert s.distances([near], path) == [pytest.approx(1e-10, rel=1e-5)]


def test_a_stranger_has_no_relations():
    s = scene(SPECS["dapo"])
    with pytest.raises(KeyError):
        s.relate([s.path(SPECS["dapo"], "model")]).norm(s.path(SPECS["dapo"], "raw"))
    assert s.relate([]).inner == ()


@pytest.mark.parametrize("tolerance", [1e-9, 0.2])
@pytest.mark.parametrize("name", SPECS)
def test_the_search_finds_what_the_plain_search_finds(name, tolerance):
    base = SPECS[name]
    plain = scene(base)
    for number, (spec, _) in enumerate(candidates(base)):
        for head in ("model", "raw") if number % 7 == 0 else ("model",):
            s = scene(base)  # nothing is cached beforehand
            exact = plain_path(plain, spec, head)
            odd = PathCoefs(head, exact.c_N * torch.linspace(0.5, 1.6, exact.c_N.numel()), exact.e_N)
            for path in (exact, odd) if number % 5 == 0 else (exact,):
                found = identify(s, base, "model", path, tolerance=tolerance)
                wanted = plain_identify(plain, base, path, tolerance)
                assert found.spec == wanted[0]
                assert found.changes[: len(wanted[1])] == wanted[1]
                assert abs(found.error - wanted[2]) <= EXACT
                told = attribute(s, base, "model", path, found, tolerance=tolerance)
                for chosen, square in told.squares.items():
                    changed, at = base, "model"
                    for change in found.changes:
                        if change.cause in chosen:
                            changed, at = change.apply(changed), change.head or at
                    whole = plain_path(plain, changed, at)
                    assert close(square, plain_square(plain, at, whole.c_N, whole.e_N), 0.0)


def test_a_normaliser_that_the_batch_cannot_say_is_no_candidate():
    base = LossSpec(loss_type="bnpo", max_completion_length=16)
    s = scene(base, num_items_in_batch=None)
    path = s.path(base.replace(normalizer="max_length"), "model")
    found = identify(s, base, "model", path, tolerance=1e-9)
    assert found.changes == (Change("normalizer", (("normalizer", "max_length"),)),)
    with pytest.raises(UsageError, match="num_items_in_batch"):
        s.path(base.replace(normalizer="generation_batch"), "model")


def test_no_more_is_computed_than_the_search_needs(monkeypatch):
    """A healthy path takes one look and no computation; a normaliser alone takes no second computation."""
    from driftscope import scene as module

    base, made, looks = SPECS["dapo, kl"], [], []
    s = scene(base)
    own, other = s.path(base, "model"), s.path(base.replace(normalizer="micro_batch"), "model")
    dropped = plain_path(s, base.replace(is_correction=False), "model")
    monkeypatch.setattr(module, "coefficients", lambda *a: made.append(a[0]) or coefficients(*a))
    real = Scene.distances
    monkeypatch.setattr(Scene, "distances", lambda *a: looks.append(len(a[1])) or real(*a))
    assert identify(s, base, "model", own, tolerance=1e-9).changes == ()
    assert (made, looks) == ([], [1])
    looks.clear()
    assert identify(s, base, "model", dropped, tolerance=1e-9).changes[0].cause == "is_correction"
    assert (len(made), looks) == (1, [1, 1])
    looks.clear()
    assert identify(s, base, "model", other, tolerance=1e-9).changes[0].cause == "normalizer"
    assert len(made) == 3  # and without tool mask, and without KL correction; no normaliser
    assert sum(looks) == 7


def test_the_reads_of_a_comparison_do_not_grow_with_its_paths(monkeypatch):
    s = scene(SPECS["dapo"])
    paths = [s.path(spec, head) for spec, _ in candidates(SPECS["dapo"]) for head in ("model", "raw")]
    reads = []
    for name in ("tolist", "item", "__float__", "__bool__", "__int__"):
        real = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda t, *a, _real=real: reads.append(1) or _real(t, *a))
    for few_or_many in (paths[:2], paths):
        reads.clear()
        s.relate(few_or_many)
        s.squares(few_or_many)
        s.distances([p for p in few_or_many if p.head == "model"], paths[0])
        assert len(reads) == 3
