"""Verification of a bundle or a session against the model it was made from."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..backends.base import target_dtypes
from ..common.progress import silent
from ..errors import BundleError, InputError
from .compare import compare
from .report import VerifyReport
from .spec import VerifySpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..bundle.bundle import Bundle
    from ..bundle.manifest import Calibrated
    from ..common.progress import Progress
    from ..models.loading.loading import LoadedModel
    from ..models.quantization.calibration import Calibration
    from ..session.session import Session

_CONFIG = "config.json"
#: Fields of a config that a model of another size has, and the same model does not.
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers")


def verify_session(
    session: Session, model: PreTrainedModel, *, progress: Progress = silent, **asked: Any
) -> VerifyReport:
    """Call `compare` with the fields of a `VerifySpec`: `verify_session(session, model, prompts=[40])`."""
    return compare(session, model, VerifySpec(**asked), progress)


def verify(
    path_or_bundle: str | os.PathLike | Bundle,
    model_or_path: PreTrainedModel | str | os.PathLike,
    *,
    lora: Sequence[str | os.PathLike] = (),
    adapter: str | os.PathLike | None = None,
    calibrate: str | os.PathLike | None = None,
    trust: bool = False,
    key: str | os.PathLike | None = None,
    record: bool = False,
    sign: str | os.PathLike | None = None,
    progress: Progress = silent,
    **asked: Any,
) -> VerifyReport:
    """Verify a bundle against the model it was made from; see `compare`. A mismatch is reported, not raised.

    A quantised program is compared with the model quantised the same way.

    Args:
        path_or_bundle: The bundle, or its folder.
        model_or_path: `demo`, a local folder, a hub id, or a loaded model.
        lora: Folder of the adapter that was merged, if any.
        adapter: Adapter to verify the program with, see `Session.load_adapter`; the model computes its products next to
            its linear layers. It cannot be recorded.
        calibrate: Text file that the weights were calibrated on, if they were.
        trust: See `load`, if a folder is given.
        key: See `load`, if a folder is given.
        record: If True, write the report into the bundle's manifest, replacing the one recorded before.
        sign: File of the private key to sign the new manifest with, if the bundle is signed.
        progress: Called for each stage.
        **asked: Fields of `VerifySpec`: tolerance, prompts, decode_steps, seed, full.

    Raises:
        BundleError: If the bundle cannot be opened, or `record` cannot write to it.
        InputError: If the model cannot be loaded, has another type, size or vocabulary, or a value is out of range.
    """
    from ..bundle.bundle import Bundle
    from ..models.loading.loading import load_model, load_to_quantise, with_rope_length
    from ..models.vocabulary import VOCABULARY_FILE, read_vocabulary, reduced
    from ..session.native import NotNative, runtime_chosen
    from ..session.session import Session
    from .native_runner import NativeProcess
    from .references import session_to_verify

    # Checked before the model is loaded, which takes long.
    spec = VerifySpec(**asked)
    if sign is not None and not record:
        raise InputError(f"sign requires record=True (--record), got {str(sign)!r}; leave it out, or record the report")
    if adapter is not None and record:
        raise InputError("record cannot be combined with adapter, because the report is of the program itself; omit it")
    bundle = (
        path_or_bundle
        if isinstance(path_or_bundle, Bundle)
        else Bundle.open(path_or_bundle, trust=trust, key=key, progress=progress)
    )
    manifest = bundle.manifest
    _check_calibrate(None if manifest.quantization is None else manifest.quantization.calibration, calibrate)
    whole = any(name.startswith("encode_") for name in manifest.program.methods)
    if manifest.quantization is None:
        loaded = load_model(model_or_path, manifest.dtype, lora=lora, progress=progress, whole=whole)
    else:
        from ..models.quantization.spec import KEEP_SCHEME

        keep = manifest.quantization.linear == KEEP_SCHEME
        loaded = load_to_quantise(model_or_path, lora=lora, progress=progress, keep=keep, whole=whole)
    model = loaded.model
    if model.config.model_type != manifest.model_type:
        raise InputError(
            f"the model must be of type {manifest.model_type!r}, from which {bundle.path.name} was made, got "
            f"{model.config.model_type!r}; pass the model it was made from"
        )
    _check_sizes(bundle, model.config.to_dict())
    if VOCABULARY_FILE in manifest.files:
        loaded = reduced(loaded, read_vocabulary(bundle.path / VOCABULARY_FILE))
    loaded = with_rope_length(loaded, manifest.program.rope_length)
    model = loaded.model
    if manifest.quantization is not None:
        from ..models.quantization.quantize import quantize
        from ..models.quantization.spec import Quantization

        recorded = manifest.quantization
        quantization = Quantization(
            recorded.linear,
            recorded.group_size,
            recorded.embeddings,
            recorded.scales or "absmax",
            recorded.experts,
            recorded.kept,
        )
        calibration = _calibration_of(recorded.calibration, calibrate, loaded)
        progress(f"quantising to {quantization}", 0, None)
        dtype = getattr(torch, manifest.dtype)
        model = quantize(model, quantization, dtype=dtype, stored=loaded.integers, calibration=calibration).model
    spec = replace(spec, rounded=target_dtypes(manifest.target, manifest.options).rounded)
    try:
        with runtime_chosen(bundle.path):
            session, remark, runtime = Session.from_bundle(bundle, NativeProcess(bundle)), "", "native"
    except NotNative as left:
        session, remark = session_to_verify(bundle, model, progress=progress)
        runtime = "torch"
        if left.reason:
            progress(f"using torch's runtime: {left.reason}", 0, None)
    with session:
        products: AbstractContextManager[None] = nullcontext()
        if adapter is not None:
            session.use_adapter(session.load_adapter(adapter))
            products = _with_products(model, session.read_adapter(adapter).tensors)
        with products:
            report = compare(session, model, spec, progress)
    report = replace(report, remark=remark, runtime=runtime)
    if record:
        # Keeps the part that only an export measures.
        earlier = manifest.verification or {}
        bundle.record_verification({**report.to_dict(), "stored": earlier.get("stored")}, sign)
    return report


def _check_sizes(bundle: Bundle, config: Mapping[str, Any]) -> None:
    """Refuse a model of another size, whose differences of logits would not say so.

    Raises:
        BundleError: If the bundle's config is not a JSON object.
        InputError: If a size differs.
    """
    if _CONFIG not in bundle.manifest.files:
        return
    try:
        recorded = json.loads((bundle.path / _CONFIG).read_text(encoding="utf-8"))
        made, given = (dict(fields.get("text_config") or fields) for fields in (recorded, config))
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise BundleError(
            f"{_CONFIG} of {bundle.path.name} must be a model's config in JSON; export the model again"
        ) from error
    for name in _SIZES:
        sizes = made.get(name), given.get(name)
        # Lists have a size for each layer, and another release of transformers may have other names.
        if all(isinstance(size, int) for size in sizes) and sizes[0] != sizes[1]:
            raise InputError(
                f"the model must have {name}={sizes[0]}, with which {bundle.path.name} was made, got {sizes[1]}; pass "
                "the model it was made from"
            )


def _check_calibrate(recorded: Calibrated | None, calibrate: str | os.PathLike | None) -> None:
    """Check that a text is given if the weights were calibrated, and none if they were not.

    Raises:
        InputError: If it is missing, or is not needed.
    """
    if recorded is None and calibrate is not None:
        raise InputError(
            "calibrate must be None, because the weights of this bundle were not calibrated, got "
            f"{str(calibrate)!r}; leave it out"
        )
    if recorded is not None and calibrate is None:
        raise InputError(
            f"calibrate must be the text of {recorded.tokens:,} tokens that the weights were calibrated on, got None; "
            "pass calibrate= (--calibrate FILE)"
        )
    if calibrate is not None and not Path(calibrate).is_file():
        raise InputError(f"calibrate must be a text file, got {str(calibrate)!r}; pass the path of a text in UTF-8")


def _calibration_of(
    recorded: Calibrated | None, calibrate: str | os.PathLike | None, loaded: LoadedModel
) -> Calibration | None:
    """Return the text that weights were calibrated on, or None if they were not.

    Raises:
        InputError: If it is another one.
    """
    from ..models.quantization.calibration import read_calibration

    if calibrate is None or recorded is None:
        return None
    found = read_calibration(calibrate, loaded.tokenizer)
    if found.sha256 != recorded.sha256:
        raise InputError(
            f"calibrate must be the text that the weights were calibrated on, got {str(calibrate)!r}, whose tokens are "
            f"others ({found.tokens:,} of {recorded.tokens:,}); pass that text"
        )
    return found


@contextmanager
def _with_products(model: PreTrainedModel, tensors: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> Iterator[None]:
    """Add low-rank products, [rank, inputs] and [outputs, rank], to the outputs of a model's layers in this block."""

    def adding(a: torch.Tensor, b: torch.Tensor) -> Callable[..., torch.Tensor]:
        return lambda _, inputs, output: output + (inputs[0] @ a.t().to(output.dtype)) @ b.t().to(output.dtype)

    hooks = [model.get_submodule(name).register_forward_hook(adding(*pair)) for name, pair in tensors.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
