"""Open a live session over a named model, on a device and in a dtype that are checked first.

Importing this module imports no torch: the command line makes its options from the fields.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..cache.spec import CACHE_LEN, CacheSpec
from ..common.progress import silent
from ..common.settings import check_settings, same_setting, setting
from ..errors import InputError
from ..program.spec import LORA_RANK

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from transformers import PreTrainedModel

    from ..common.progress import Progress
    from ..models.loading.loading import LoadedModel
    from .session import Session

#: Value of `Use.draft` that leaves the draft head of a bundle unused.
NO_DRAFT = "none"
#: Tokens that a draft model proposes at once.
MODEL_DRAFTED = 4


@dataclass(frozen=True)
class ModelOptions:
    """Options of a model that runs in this process: `ModelOptions(device="cuda", dtype="bfloat16")`.

    Attributes:
        device: Device, such as `cpu`, `cuda`, `cuda:1` or `mps`; None for an NVIDIA GPU if there is one, else cpu.
        dtype: Dtype of weights, keys and values; None for the stored dtype.
        max_cache_len: Tokens that a full-attention layer holds; None for `CACHE_LEN`, or the model's positions.
        kv_dtype: See `CacheSpec`.
        compile: False to run steps uncompiled.

    Raises:
        InputError: If a value is out of range.
    """

    device: str | None = setting(
        None,
        "Run a model on cpu, cuda or mps.",
        flags=("--device",),
        metavar="NAME",
        shown_default="cuda if torch finds a GPU, else cpu",
    )
    dtype: torch.dtype | str | None = same_setting(CacheSpec, "dtype")
    max_cache_len: int | None = setting(
        None,
        "Tokens that a model's full-attention layers hold.",
        flags=("--max-cache-len", "--max-seq-len", "-n"),
        metavar="N",
        kind=int,
        least=1,
        shown_default=f"{CACHE_LEN}, or the model's positions",
    )
    kv_dtype: str | None = same_setting(CacheSpec, "kv_dtype")
    compile: bool = setting(True, "Compile a model's steps.", flags=("--compile/--no-compile",), kind=bool)

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True)
class Use:
    """The way a session over a model will be used.

    Attributes:
        kinds: Kinds of the files in its prompts: `image`, `audio`.
        lookup: Number of tokens that prompt lookup proposes for each step.
        draft: Draft head of the model, see `Session.from_model`; "none" for none, also if a bundle has one that pays.
        draft_model: Name of a smaller model that proposes tokens; None for none.
        waits: True if every step must be compiled; False to run steps uncompiled while their graphs are compiled.
        adapter: LoRA adapter that every step uses: a file of `exportable-cache adapter`, or peft's folder.
        adapters: LoRA adapters that are loaded for later use, by name.
        files: Files of the first prompt by kind, which give the sizes that the config of a model does not give.
        image_size: Height and width of images in pixels, where neither the config nor a file gives it.

    Raises:
        InputError: If a draft head and a draft model are asked for.
    """

    kinds: Sequence[str] = ()
    lookup: int = 0
    draft: str | None = None
    draft_model: str | None = None
    waits: bool = False
    adapter: Path | None = None
    adapters: Mapping[str, Path] = field(default_factory=dict)
    files: Mapping[str, Sequence[Path]] = field(default_factory=dict)
    image_size: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.head is not None and self.draft_model is not None:
            raise InputError(
                f"--draft {self.head} cannot be combined with --draft-model {self.draft_model}; leave one of them out"
            )

    @property
    def head(self) -> str | None:
        """Draft head that is asked for by name; None for none."""
        return None if self.draft == NO_DRAFT else self.draft

    def load_adapters(self, session: Session, key: Path | None = None) -> None:
        """Load the adapters into a session.

        Args:
            session: The session.
            key: File of the public key that must have signed them, or None.

        Raises:
            BundleError, InputError, UnsupportedModelError: See `Session.load_adapter`.
        """
        for name, path in self.adapters.items():
            session.load_adapter(path, name, key)
        if self.adapter is not None:
            session.use_adapter(session.load_adapter(self.adapter, key=key))


#: To score texts, many tokens a step; they are one more than the tokens that are proposed.
SCORING = Use(lookup=63, waits=True)


def open_model(
    name: str, options: ModelOptions, use: Use | None = None, progress: Progress = silent
) -> tuple[Session, LoadedModel]:
    """Load a model onto a device, allocate its cache, and return a session over both, with the loaded model.

    Args:
        name: `demo`, a local folder or GGUF file, or a hub id.
        options: Device, dtype and sizes.
        use: What the session must be able to do.
        progress: Called with each stage.

    Raises:
        InputError: If torch does not find the device, or as `load_model` and `Session.from_model` do.
        DeviceMemoryError: If weights and cache do not fit the device.
        UnsupportedModelError, MissingDependencyError: See `load_model`.
    """
    from ..cache.layer_spec import DRAFTED
    from ..common.devices import check_fits, chosen_device, memory_errors
    from ..models.cache_factory import ExportableCache
    from ..models.draft_heads import attach_head, check_head_name
    from ..models.loading.adapters import read_lora
    from ..models.loading.loading import load_model
    from ..models.lora import check_changes
    from ..models.positions import default_cache_len
    from ..program.inputs.modalities import takes_encoder_items
    from .inputs.prompt import sized_modalities
    from .session import Session

    # Checked before the weights are read, which takes long.
    device, use = chosen_device(options.device), use or Use()
    paths = [path for path in (use.adapter, *use.adapters.values()) if path is not None]
    if use.head is not None:
        check_head_name(use.head)
    adapters = [read_lora(path) for path in paths]
    compiles = options.compile and _can_compile(device, use.waits)
    loaded = load_model(name, options.dtype, progress=progress, whole=bool(use.kinds))
    model, proposed = loaded.model, use.lookup
    if use.head is not None:
        attach_head(model, use.head)
        proposed = max(proposed, DRAFTED)
    if use.draft_model is not None:
        proposed = max(proposed, MODEL_DRAFTED)
    for path, one in zip(paths, adapters, strict=True):
        check_changes(model, one.tensors, f"the adapter in {path}")
    spec = CacheSpec(
        options.max_cache_len or default_cache_len(model.config), kv_dtype=options.kv_dtype, rollback_slots=proposed
    )
    progress(f"allocating the cache on {device}", 0, None)
    if device.type != "cpu":
        check_fits(device, _needed(model, spec))
    with memory_errors(device, lambda: _needed(model, spec)):
        # Tensor by tensor, so that host and device together hold little more than the weights once.
        model.to(device)  # type: ignore[arg-type]  # transformers wraps it without its signature
        cache = ExportableCache.from_model_spec(model, spec)
    has_encoder = getattr(model.config, "is_encoder_decoder", False)
    # Encoder-decoders score no proposals, and encode their file by another method.
    scored = proposed + 1 if proposed and not has_encoder else 0
    if cache.max_length is not None:
        scored = min(scored, cache.max_length)
    modalities: Mapping[str, Any] = dict.fromkeys(use.kinds)
    size: int | Sequence[int] | None = use.image_size
    if use.kinds and (takes_encoder_items(model) or not has_encoder):
        if loaded.processor_files:
            modalities, size = sized_modalities(model, use.kinds, loaded.processor, use.image_size, use.files)
    elif use.kinds:
        # The file is the encoder's input.
        modalities = {}
    session = Session.from_model(
        model,
        cache,
        compile=compiles and ("wait" if use.waits else True),
        score_length=scored if scored > 1 else 0,
        modalities=modalities,
        image_size=size,
        lora_slots=len(adapters),
        lora_rank=max((one.rank for one in adapters), default=LORA_RANK),
        lora_targets=tuple({name: None for one in adapters for name in one.tensors}),
        graph_cache=_graph_folder() if compiles and device.type != "mps" else None,
        tokenizer=loaded.tokenizer,
    )
    use.load_adapters(session)
    if loaded.processor_files:
        session.load_processor = functools.cache(loaded.processor)
    return session, loaded


def open_rows(session: Session, model: PreTrainedModel, options: ModelOptions, rows: int) -> Session:
    """Return a session that decodes several rows of a model, next to a session of one row, which feeds their prompts.

    Args:
        session: The session that `open_model` returned.
        model: Its model.
        options: Its options.
        rows: Number of rows.

    Raises:
        DeviceMemoryError: If the rows do not fit the device.
    """
    from ..models.cache_factory import ExportableCache
    from ..models.lora import slots_of
    from ..models.positions import default_cache_len
    from .session import Session

    length, slots = options.max_cache_len or default_cache_len(model.config), slots_of(model)
    spec = CacheSpec(length, batch_size=rows, kv_dtype=options.kv_dtype)
    cache = ExportableCache.from_model_spec(model, spec, attn_implementation=None)
    compiles = session.target == "compiled"
    folder = _graph_folder() if compiles and session.device.type != "mps" else None
    # The same slots, because the sessions share the adapters in them.
    lora: dict[str, Any] = {}
    if slots is not None:
        targets = tuple(one.name for one in slots.targets)
        lora = {"lora_slots": slots.slots, "lora_rank": slots.rank, "lora_targets": targets}
    return Session.from_model(model, cache, compile=compiles, graph_cache=folder, tokenizer=session.tokenizer, **lora)


def _can_compile(device: torch.device, is_required: bool) -> bool:
    """Return False if steps cannot be compiled, because there is no compiler.

    Raises:
        InputError: If they must be compiled.
    """
    from ..common.compat.torch import default_backend
    from ..common.devices import missing_compiler

    missing = missing_compiler(device.type) if default_backend() == "inductor" else None
    if missing is None:
        return True
    language, package = missing
    if is_required:
        raise InputError(
            f"compiled steps need a {language} compiler, and none was found; install {package}, or pass --no-compile"
        )
    return False


def _needed(model: PreTrainedModel, spec: CacheSpec) -> dict[str, int]:
    """Return the bytes of weights and cache by name; without the cache if the config does not describe it."""
    from ..common.devices import weights_bytes
    from ..errors import UnsupportedModelError
    from ..models.cache_factory import ExportableCache

    needed = {"the weights": weights_bytes(model)}
    try:
        sizes = replace(spec, device="meta", dtype=spec.dtype or model.dtype)
        needed["the cache"] = ExportableCache.from_config_spec(model.config, sizes, attn_implementation=None).nbytes
    except (InputError, UnsupportedModelError):  # an encoder-decoder, or sizes that only the model's code knows
        pass
    return needed


def _graph_folder() -> Path | None:
    """Return the user's folder of compiled graphs, so that a later command loads them; None if there is no safe one."""
    from ..common.fs.user_files import home_folder, user_folder, user_key

    try:
        folder = user_folder(home_folder() / "graphs")
        user_key()
    except (InputError, OSError, RuntimeError):
        return None
    return folder
