"""The capsule on disk: a directory with ``capsule.safetensors`` (tensors) and ``capsule.json`` (everything else).

Nothing in it is code: no pickle. The JSON holds the SHA-256 of the tensors' file and of itself, so that damage is seen
before anything is computed. Shapes: B sequences, T completion tokens, N rows of the head pass, n of them with hidden
states, D hidden size, V vocabulary.

    completion_ids completion_mask rows tool_mask old_logps ref_logps sampling_logps       (B, T)
    advantages is_ratio                                                                    (B,), (B, 1) or (B, T)
    reference.c reference.e liger.c               coefficients that the path's own code gave (B, T)
    gg kept_mass view.<head>.{logps,entropies,uu,gu,uw,ww,gw} cross.<head>.<head>          (N,)
    hidden hidden_grad                            at the rows hidden_rows (n,)             (n, D)
    head.weight head.bias                         lm_head as it was in that batch          (V, D), (V,)
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

from driftscope._journal_reader import Run
from driftscope._jsonable import drop_incomplete, to_jsonable
from driftscope.capsule.checks import check_tensors, read_measured
from driftscope.errors import CapsuleError, UsageError
from driftscope.journal import encode
from driftscope.records import AlertRecord, RunInfo, StepRecord
from driftscope.spec import LossSpec

FORMAT = "driftscope-capsule"
CAPSULE_SCHEMA = 1
TENSORS_NAME = "capsule.safetensors"
JSON_NAME = "capsule.json"
MAX_JSON_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class Capsule:
    """One analysed micro-batch, complete enough to be computed again.

    measured: how the numbers were made: live head, compute dtype, sampling settings, Liger's call (see ``checks``).
    findings: what the rules said of this very record. alarm: the findings of its accumulation window.
    """

    record: StepRecord
    spec: LossSpec
    info: RunInfo | None
    tensors: dict[str, Tensor]
    measured: dict[str, Any]
    findings: list[AlertRecord] = field(default_factory=list)
    alarm: list[AlertRecord] = field(default_factory=list)
    why: str = "on demand"
    notes: list[str] = field(default_factory=list)
    texts: list[str] | None = None

    def run(self, record: StepRecord | None = None, alerts: list[AlertRecord] | None = None) -> Run:
        """The capsule as a run of one record, for the verdict and the report."""
        chosen = self.findings if alerts is None else alerts
        return Run(info=self.info, steps=[record or self.record], alerts=list(chosen), notes=[])


def write_capsule(directory: Path, capsule: Capsule) -> Path:
    """Write a capsule as the new directory ``directory``, all of it or nothing; returns the directory.

    Raises ``CapsuleError`` where it cannot be written, ``UsageError`` where safetensors is missing.
    """
    save = _safetensors().save_file
    partial = directory.with_name(f".{directory.name}.{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        file = partial / TENSORS_NAME
        save(_whole(capsule.tensors), str(file))
        text = json.dumps(_document(capsule, file), indent=1, allow_nan=False)
        (partial / JSON_NAME).write_text(text + "\n", encoding="utf-8", newline="\n")
        file.chmod((partial / JSON_NAME).stat().st_mode)  # safetensors writes for its owner alone
        partial.rename(directory)
    except Exception as error:
        why = getattr(error, "strerror", None) or error
        raise CapsuleError(
            f"The capsule {directory} cannot be written ({why}). Free some space, choose another run_dir, or set "
            "capsules=0."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(partial)
    return directory


def read_capsule(path: Path) -> Capsule:
    """Read a capsule from its directory, or from either file in it.

    Raises ``CapsuleError`` for one that is missing, damaged, foreign or of a newer schema; ``UsageError`` where
    safetensors is missing.
    """
    path = Path(path)
    directory = path if path.is_dir() else path.parent
    if not path.exists() or not (directory / JSON_NAME).is_file():
        raise CapsuleError(
            f"{path} is no capsule: there is no {JSON_NAME}. Give a directory that Driftscope saved, such as "
            "runs/mine/capsules/step-000007."
        )
    document = _read_document(directory / JSON_NAME)
    tensors = _read_tensors(directory, document)
    with _damage(directory / JSON_NAME):
        capsule = _from_document(document, tensors)
    check_tensors(directory, capsule.tensors, capsule.record, capsule.spec, capsule.measured)
    return capsule


# -- the JSON side ----------------------------------------------------------------------------------------------------


def _document(capsule: Capsule, file: Path) -> dict[str, Any]:
    body: dict[str, Any] = {
        "format": FORMAT,
        "schema": CAPSULE_SCHEMA,
        "why": capsule.why,
        "notes": capsule.notes,
        "tensors": {
            "sha256": _file_digest(file),
            "shapes": {k: [str(v.dtype).removeprefix("torch."), list(v.shape)] for k, v in capsule.tensors.items()},
        },
        "run": None
        if capsule.info is None
        else to_jsonable(capsule.info.model_dump(by_alias=True, warnings=False))[0],
        "spec": capsule.spec.as_dict(),
        "measured": capsule.measured,
        "record": encode(capsule.record),
        "findings": [encode(alert) for alert in capsule.findings],
        "alarm": [encode(alert) for alert in capsule.alarm],
        "texts": capsule.texts,
    }
    body = to_jsonable(body)[0]
    return {"digest": _digest(body), **body}


def _digest(body: dict[str, Any]) -> str:
    """SHA-256 of the document without its digest, in one canonical form."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _read_document(path: Path) -> dict[str, Any]:
    with _damage(path):
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CapsuleError(f"{path} is no capsule: it is larger than {MAX_JSON_BYTES // 2**20} MiB.")
        document = json.loads(path.read_bytes())
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CapsuleError(f"{path} is no capsule of Driftscope: its format is not {FORMAT!r}.")
    schema = document.get("schema")
    if isinstance(schema, int) and schema > CAPSULE_SCHEMA:
        raise CapsuleError(
            f"{path} has schema version {schema}; this Driftscope reads version {CAPSULE_SCHEMA}. It was written by a "
            "newer Driftscope: upgrade to read it."
        )
    with _damage(path):
        intact = document.pop("digest", None) == _digest(document) and schema == CAPSULE_SCHEMA
    if not intact:
        raise CapsuleError(
            f"{path} is damaged: its content does not match its own digest. Copy the capsule again from where it was "
            "saved."
        )
    return document


def _from_document(document: dict[str, Any], tensors: dict[str, Tensor]) -> Capsule:
    step = to_jsonable(document["record"])[0]
    drop_incomplete(step)
    run = document["run"]
    texts = document["texts"]
    return Capsule(
        record=StepRecord.model_validate(step),
        spec=LossSpec(**document["spec"]),
        info=RunInfo.model_validate(run) if run is not None else None,
        tensors=tensors,
        measured=read_measured(document["measured"]),
        findings=[AlertRecord.model_validate(alert) for alert in document["findings"]],
        alarm=[AlertRecord.model_validate(alert) for alert in document["alarm"]],
        why=str(document["why"]),
        notes=[str(note) for note in document["notes"]],
        texts=[str(text) for text in texts] if texts is not None else None,
    )


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    """Whatever goes wrong while reading is damage, told as such."""
    try:
        yield
    except CapsuleError:
        raise
    except OSError as error:
        raise CapsuleError(f"{path} cannot be read ({error.strerror or error}). Check its permissions.") from error
    except Exception as error:
        why = " ".join(str(error).split())[:200]
        raise CapsuleError(
            f"{path} is damaged or was not written by Driftscope ({type(error).__name__}: {why}). Copy the capsule "
            "again from where it was saved."
        ) from error


# -- the tensors ------------------------------------------------------------------------------------------------------


def _read_tensors(directory: Path, document: dict[str, Any]) -> dict[str, Tensor]:
    load = _safetensors().load_file
    path = directory / TENSORS_NAME
    if not path.is_file():
        raise CapsuleError(f"{directory} is no complete capsule: {TENSORS_NAME} is missing. Copy it again.")
    with _damage(path):
        listed = document["tensors"]
        if _file_digest(path) != listed["sha256"]:
            raise CapsuleError(
                f"{path} is damaged: its bytes are not those that {JSON_NAME} was written for. Copy the capsule again "
                "from where it was saved."
            )
        tensors: dict[str, Tensor] = load(str(path))
        shapes = {k: [str(v.dtype).removeprefix("torch."), list(v.shape)] for k, v in tensors.items()}
        if shapes != listed["shapes"]:
            raise ValueError(f"its tensors are not those that {JSON_NAME} lists")
    return tensors


def _whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the host, each with memory of its own: safetensors refuses those that share it."""
    out, seen = {}, set()
    for name, value in tensors.items():
        host = value.detach().cpu().contiguous()
        storage = host.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != host.numel() * host.element_size():
            host = host.clone()
        seen.add(host.untyped_storage().data_ptr())
        out[name] = host
    return out


def _file_digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _safetensors() -> ModuleType:
    try:
        import safetensors.torch
    except ImportError as error:
        raise UsageError(
            "A capsule holds its tensors as safetensors, and that package is not installed here. Install it: "
            "pip install safetensors."
        ) from error
    module: ModuleType = safetensors.torch
    return module
