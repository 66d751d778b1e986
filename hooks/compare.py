"""The three-way comparison of one micro-batch: live or shadow candidate, reference, oracle.

The oracle is the configured loss in float64. The reference is TRL's own algebra; it is judged against the oracle like
any other path. The candidate is the live path where that is not the reference, else the fused path as a shadow; where
the live reference itself is off, the live path is compared with the oracle.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from driftscope.attribute import Identified, PathCoefs, Scene, attribute, identify
from driftscope.batch import Coefficients
from driftscope.explanation import Explanation
from driftscope.hooks.head import MODEL_HEAD, RAW_HEAD, HeadTransform
from driftscope.records import CoefPoint, Gap, PathRecord, StepRecord
from driftscope.scene import Relations
from driftscope.spec import LossSpec
from driftscope.spectrum import Measured


@dataclass(frozen=True)
class Paths:
    """What was measured and computed of every path. ``measured``: the live gradient in the directions of each head."""

    live: str
    measured: dict[str, Measured]
    reference: Coefficients | None
    liger: Coefficients | None
    oracle: Coefficients | None


class Comparison:
    """Fills the record of one micro-batch from its paths."""

    def __init__(
        self, spec: LossSpec, scene: Scene, paths: Paths, transform: HeadTransform, dtype: torch.dtype
    ) -> None:
        self.spec, self.scene, self.paths, self.transform = spec, scene, paths, transform
        self.live_head = min(paths.measured, key=lambda name: paths.measured[name].residual)
        live = paths.measured[self.live_head]
        self.residual = live.residual
        eps = torch.finfo(dtype).eps
        self.noise = min(max(live.residual, eps / 4), 16 * eps)
        self.tolerance = max(1e-4, 4 * self.noise)
        self.explanation: Explanation | None = None
        self.coefs: dict[str, PathCoefs] = {paths.live: PathCoefs(self.live_head, live.c_N, live.e_N, live.norm)}
        self._add("reference", paths.reference, MODEL_HEAD)
        self._add("liger", paths.liger, RAW_HEAD if RAW_HEAD in scene.spectrum.views else MODEL_HEAD)
        if paths.oracle is not None:
            self.coefs["oracle"] = scene.path(spec, MODEL_HEAD)

    def _add(self, name: str, made: Coefficients | None, head: str) -> None:
        if made is not None and name not in self.coefs:
            self.coefs[name] = self.scene.at_rows(made, head)

    def fill(self, record: StepRecord, *, scatter: int) -> None:
        """Paths, gap, causes, residual and scatter of the record."""
        record.residual = self.residual
        if not math.isfinite(self.paths.measured[self.live_head].norm):
            record.nonfinite.append("live hidden gradient")
            return
        found = {name: self._identify(name) for name in self.coefs if name != "oracle" and "oracle" in self.coefs}
        specs = {name: found[name].spec if name in found else self.spec for name in self.coefs}
        models = {name: self._model(name, spec) for name, spec in specs.items()}
        scaled = [path for pair in models.values() if pair is not None for path in pair]
        related = self.scene.relate([*self.coefs.values(), *scaled])
        for name, spec in specs.items():
            self._path(name, spec, models[name], related, record)
        self._nonfinite(record)
        candidate, reference = self.sides(record)
        if candidate is None or reference is None:
            return
        self._gap(candidate, reference, related, record)
        if record.nonfinite or "oracle" not in self.coefs:
            return
        base, head = self.spec, MODEL_HEAD
        if reference in found:
            base, head = found[reference].spec, found[reference].head
        path = self.coefs[candidate]
        known = found.get(candidate) if (base, head) == (self.spec, MODEL_HEAD) else None
        nearest = known or self._nearest(base, head, path)
        self.explanation = attribute(self.scene, base, head, path, nearest, tolerance=self.tolerance)
        record.causes, record.unexplained = self.explanation.causes()
        self._scatter(candidate, reference, record, scatter)

    def sides(self, record: StepRecord) -> tuple[str | None, str | None]:
        """Names of candidate and reference."""
        live = self.paths.live
        if live != "reference":
            return live, ("reference" if "reference" in self.coefs else self._only_oracle())
        error = record.paths["reference"].coef_error
        if error is not None and error > self.tolerance:
            return "reference", "oracle"
        return ("liger", "reference") if "liger" in self.coefs else ("reference", self._only_oracle())

    def _only_oracle(self) -> str | None:
        return "oracle" if "oracle" in self.coefs else None

    def _identify(self, name: str) -> Identified:
        return self._nearest(self.spec, MODEL_HEAD, self.coefs[name])

    def _nearest(self, base: LossSpec, head: str, path: PathCoefs) -> Identified:
        return identify(self.scene, base, head, path, tolerance=self.tolerance, head_cause=self.transform.cause)

    def _model(self, name: str, spec: LossSpec) -> tuple[PathCoefs, PathCoefs] | None:
        """A path and its spec under the intended normaliser, without entropy terms, where that is one number."""
        if "oracle" not in self.coefs or self.scene.divisor(self.spec) is None:
            return None
        path = self.coefs[name]
        model = self.scene.path(spec.replace(normalizer=self.spec.normalizer), path.head)
        return _policy_part(path), _policy_part(model)

    def _path(
        self,
        name: str,
        spec: LossSpec,
        model: tuple[PathCoefs, PathCoefs] | None,
        related: Relations,
        record: StepRecord,
    ) -> None:
        out = record.paths.setdefault(name, PathRecord())
        made = {"reference": self.paths.reference, "liger": self.paths.liger, "oracle": self.paths.oracle}.get(name)
        if name == self.paths.live:
            out.source = "measured"
        else:
            out.source = "spec" if name == "oracle" else "algebra"
            out.loss = made.loss if made is not None else None
        path = self.coefs[name]
        out.hidden_grad_norm = related.norm(path)
        if "oracle" in self.coefs and name != "oracle":
            error = related.distance(path, self.coefs["oracle"])
            out.coef_error = error if math.isfinite(error) else None
        out.normalizer = self.scene.divisor(spec)
        intended = self.scene.divisor(self.spec)
        if intended is not None and model is not None:
            # The divisor that the coefficients imply: intended / (their scale under the intended normaliser).
            size = related.product(model[1], model[1])
            scale = related.product(*model) / size if size > 0 else 0.0
            out.normalizer_measured = intended / scale if scale > 0 else None

    def _gap(self, candidate: str, reference: str, related: Relations, record: StepRecord) -> None:
        a, b = record.paths[candidate], record.paths[reference]
        both = a.hidden_grad_norm is not None and b.hidden_grad_norm
        record.gap = Gap(
            candidate=candidate,
            reference=reference,
            grad_norm_ratio=a.hidden_grad_norm / b.hidden_grad_norm if both else None,  # type: ignore[operator]
            loss_diff=a.loss - b.loss if a.loss is not None and b.loss is not None else None,
            cosine=related.cosine(self.coefs[candidate], self.coefs[reference]),
            noise_floor=self.noise,
        )

    def _nonfinite(self, record: StepRecord) -> None:
        for name, path in record.paths.items():
            for field in ("loss", "hidden_grad_norm"):
                value = getattr(path, field)
                if value is not None and not math.isfinite(value):
                    record.nonfinite.append(f"paths.{name}.{field}")

    def _scatter(self, candidate: str, reference: str, record: StepRecord, limit: int) -> None:
        a, b = self.coefs[candidate].c_N, self.coefs[reference].c_N
        used = ((a != 0) | (b != 0)).nonzero().squeeze(-1)
        if limit == 0 or used.numel() == 0:
            return
        used = used[:: max(1, -(-used.numel() // limit))]
        ratio = self.scene.batches[MODEL_HEAD].is_ratio
        if ratio is not None:
            ratio = self.scene.rows_of(ratio)[used]
        rows = torch.stack([a[used], b[used], ratio.double() if ratio is not None else torch.zeros_like(a[used])], -1)
        record.scatter = [
            CoefPoint(candidate=x, reference=y, ratio=z if ratio is not None else None) for x, y, z in rows.tolist()
        ]


def _policy_part(path: PathCoefs) -> PathCoefs:
    """The path without its entropy term."""
    return path if path.e_N is None else PathCoefs(path.head, path.c_N)
