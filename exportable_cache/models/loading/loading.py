"""Loading of models: the demo, a local folder, a hub id, or a model that is already loaded."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    AutoProcessor,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
    ProcessorMixin,
)

from ...common.compat.transformers import has_adapters
from ...common.devices import host_memory
from ...common.progress import bytes_text, silent
from ...common.tensors import dtype_name, parse_dtype
from ...errors import (
    BundleError,
    DeviceMemoryError,
    InputError,
    MissingDependencyError,
    UnsupportedModelError,
    first_line,
)
from ..patches.mechanisms.rope import ROPE_REMARK, fix_rope
from ..weights import converted
from .adapters import ADAPTER_CONFIG, base_of, check_adapters, is_peft, merge_folder, merged, merged_line
from .location import Location, file_in, locate, quiet, shards
from .prequantized import (
    check_plain,
    check_readable,
    dequantised,
    dequantising,
    is_of_activations,
    modelopt_fields,
    stored_quantization,
)
from .support import check_sizes, encoder_decoder_config, encoder_decoder_of
from .tokenizer import check_generation_config, eos_tokens_of, tokenizer_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ...common.progress import Progress
    from .integers import IntegerWeight


#: Model types that are loaded whole although transformers also has their text decoder alone.
MULTIMODAL = ("llava", "smolvlm", "idefics3", "voxtral", "gemma3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")


def auto_class(config: PreTrainedConfig, whole: bool = False) -> type[Any] | None:
    """Return the auto class that loads the generating model of a config, or None.

    Args:
        config: The config.
        whole: True to load the encoders of images, video and audio, too, where transformers also has the text decoder
            alone (Llama 3.2 Vision, Llama 4).
    """
    kind = type(config)
    if getattr(config, "is_encoder_decoder", False):
        speech_model: Any = MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING.get(kind, None)
        # Because Seamless has a text model and a speech model for the same config class.
        is_named = speech_model is not None and speech_model.__name__ in (config.architectures or ())
        if kind in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING and not is_named:
            return AutoModelForSeq2SeqLM
        if speech_model is not None:
            return AutoModelForSpeechSeq2Seq
        if kind in MODEL_FOR_MULTIMODAL_LM_MAPPING:
            # Encoders of images: Florence-2, Pix2Struct, TrOCR and Donut.
            return AutoModelForMultimodalLM
    elif config.model_type in MULTIMODAL or (whole and kind in MODEL_FOR_MULTIMODAL_LM_MAPPING):
        return AutoModelForMultimodalLM
    elif kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        if kind in MODEL_FOR_MULTIMODAL_LM_MAPPING:
            return AutoModelForMultimodalLM
        # Because some decoders with audio input are listed as encoder-decoders.
        return AutoModelForSeq2SeqLM if kind in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING else None
    return AutoModelForCausalLM if kind in MODEL_FOR_CAUSAL_LM_MAPPING else None


# Files of a processor, in addition to the tokenizer's.
_PROCESSOR_FILES = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)
#: Largest float32 size of a model that is loaded in float32 before it is quantised.
MOST_WIDENED_BYTES = 1 << 30
_GGUF_NEEDS = ("gguf", "accelerate")
# Because with tied embeddings such weights would load as a causal LM's.
_OTHER_HEADS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForMaskedLM")
#: Start of names of tensors that may be missing: the pooler of an encoder of images, which the decoder does not read.
#: TrOCR's checkpoints lack it.
_UNREAD = "encoder.pooler."


@dataclass
class LoadedModel:
    """A model ready to export.

    Attributes:
        model: In eval mode.
        tokenizer: None if the model came without one.
        source: "demo", the hub id, the folder's name, or the class name of a model object.
        processor_files: Files of the image or audio processor; empty if the model came without one.
        remarks: Lines about changes to the weights, such as dequantisation.
        integers: Integers of the checkpoint by the names of the model's parameters; empty unless asked for.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    source: str
    processor_files: tuple[Path, ...] = ()
    remarks: tuple[str, ...] = ()
    integers: Mapping[str, IntegerWeight] = field(default_factory=dict)

    def processor(self) -> ProcessorMixin:
        """Return the processor of images or audio.

        Raises:
            InputError: If the model came without one.
            MissingDependencyError, BundleError: See `load_processor`.
        """
        if not self.processor_files:
            raise InputError(
                f"{self.source} has no processor of images or audio; pass a folder with its preprocessor_config.json"
            )
        folder = self.processor_files[0].parent
        return load_processor(folder, folder)


def load_model(
    model_or_path: PreTrainedModel | str | os.PathLike,
    dtype: torch.dtype | str | None = None,
    *,
    lora: Sequence[str | os.PathLike] = (),
    progress: Progress = silent,
    keep: bool = False,
    whole: bool = False,
) -> LoadedModel:
    """Load a causal LM with its tokenizer, in eval mode, without running code from the checkpoint.

    Args:
        model_or_path: `demo`, a local folder or GGUF file, a hub id, or a model object. A model object is returned
            itself, or copied if `dtype` differs from its dtype. Adapters of a PEFT model are merged into a copy.
        dtype: Dtype of the weights, such as torch.float32 or "float32"; the stored dtype by default.
        lora: Folder of an adapter to merge into the weights; at most one.
        progress: Called with a message, the amount done and the total.
        keep: True to return the integers of quantised weights, too.
        whole: See `auto_class`.

    Raises:
        InputError: If there is no such folder or hub id, its files cannot be read, or a model object is in training
            mode or offloaded.
        UnsupportedModelError: If the model type is unknown or has no causal LM, the weights belong to another kind of
            model or use an unsupported quantisation, or an adapter cannot be merged.
        MissingDependencyError: If the checkpoint or the adapter needs a package that is not installed.
        DeviceMemoryError: If weights in another dtype than the stored one exceed the memory.
    """
    wanted, folders = parse_dtype(dtype), check_adapters(lora)
    if isinstance(model_or_path, PreTrainedModel) or is_peft(model_or_path):
        loaded = _from_model(model_or_path, wanted, progress)
    else:
        loaded = _from_checkpoint(locate(model_or_path), wanted, progress, keep and not folders, whole)
    for folder in folders:
        progress(f"merging {folder}", 0, None)
        with quiet():
            model = merge_folder(loaded.model, folder)
        name = Path(folder).expanduser().resolve().name
        remark = f"merged the adapter {name!r} into the weights"
        loaded = replace(loaded, model=model, source=f"{loaded.source} + {name}", remarks=(*loaded.remarks, remark))
    return loaded


def load_to_quantise(
    model_or_path: PreTrainedModel | str | os.PathLike,
    *,
    lora: Sequence[str | os.PathLike] = (),
    progress: Progress = silent,
    keep: bool = False,
    whole: bool = False,
) -> LoadedModel:
    """Load a model to quantise, in float32 if that takes at most `MOST_WIDENED_BYTES`, else in the stored dtype.

    The quantised weights do not depend on it, because each is converted to float32 first. Constants that a model
    computes when it is built, such as a scale of its embeddings, keep the dtype of loading. Adapters are merged in
    float32.

    Args:
        model_or_path: See `load_model`.
        lora: See `load_model`.
        progress: See `load_model`.
        keep: See `load_model`.
        whole: See `auto_class`.

    Raises:
        InputError, UnsupportedModelError: See `load_model`.
    """
    if lora or is_peft(model_or_path):
        return load_model(model_or_path, torch.float32, lora=lora, progress=progress, whole=whole)
    loaded = load_model(model_or_path, progress=progress, keep=keep, whole=whole)
    small = 4 * loaded.model.num_parameters() <= MOST_WIDENED_BYTES
    if small and loaded.model.dtype != torch.float32:
        return load_model(model_or_path, torch.float32, progress=progress, keep=keep, whole=whole)
    return loaded


def _from_checkpoint(
    location: Location, wanted: torch.dtype | None, progress: Progress, keep: bool = False, whole: bool = False
) -> LoadedModel:
    progress(f"loading {location.source}", 0, None)
    with quiet():
        config = _config(location)
        check_readable(config, location.source)
        check_generation_config(location)
        stored = stored_quantization(config)
        dequantising(config)
        reading = None
        if stored is not None:
            # Imported here because transformers' quantizers import torchao.
            from .integers import dequantised_by_us

            reading = dequantised_by_us(config, location, keep)
        quantization = {"quantization_config": GgufConfig(dequantize=True)} if location.gguf else {}
        kind = auto_class(config, whole)
        assert kind is not None
        if wanted is not None and stored is None:
            _check_memory(location, stored_dtype(config), wanted)
        try:
            model, info = kind.from_pretrained(
                location.path,
                config=config,
                dtype=wanted or "auto",
                output_loading_info=True,
                **quantization,
                **location.options,
            )
        except Exception as error:  # several libraries read files, with errors of many classes
            if reading is not None and reading.problem is not None:
                raise reading.problem from None
            if location.gguf is not None and isinstance(error, NotImplementedError):
                raise UnsupportedModelError(
                    f"gguf cannot read weights of {location.source!r} ({first_line(error)}); pass a file in other "
                    "types, such as Q8_0 or Q4_K_M, or the original checkpoint"
                ) from error
            raise InputError(
                f"cannot load the weights of {location.source!r}: {first_line(error)}; download or save it again"
            ) from error
        if reading is not None and reading.problem is not None:
            raise reading.problem
        missing = sorted(one for one in info["missing_keys"] if not one.startswith(_UNREAD))
        if missing:
            raise UnsupportedModelError(
                f"{location.source!r} has no weights for {len(missing)} tensors of {type(model).__name__}, "
                f"such as {missing[0]}: it is not a complete causal LM; pass one"
            )
        if stored is None:
            _check_unscaled(model, info["unexpected_keys"], location.source)
        unread = sorted(one for one in info["unexpected_keys"] if not is_of_activations(one)) if stored else []
        if unread:
            raise UnsupportedModelError(
                f"{location.source!r} is quantised ({stored}) with {len(unread)} tensors that transformers "
                f"ignores, such as {unread[0]}; pass the original checkpoint"
            )
        integers: Mapping[str, IntegerWeight] = {} if reading is None else reading.weights
        if stored is not None and stored.method == "torchao" and keep:
            from .integers import kept_tensors

            integers = kept_tensors(model)
        if stored is not None:
            model = dequantised(model, location.source, wanted or stored_dtype(config) or model.dtype)
        tokenizer = tokenizer_of(location)
        ends = eos_tokens_of(location, model.generation_config)
        if ends is not None:
            model.generation_config.eos_token_id = ends
        processor_files = tuple(path for name in _PROCESSOR_FILES if (path := file_in(location, name)) is not None)
    remarks = () if stored is None or integers else (stored.remark,)
    if location.gguf is not None and keep:
        from .gguf_blocks import kept_blocks

        integers, remark = kept_blocks(Path(location.path) / location.gguf, model)
        remarks = (remark,) if remark else ()
    elif location.gguf is not None:
        remarks = (
            f"weights of {location.gguf} were dequantised; quantize='keep' (--quantize keep) stores their integers "
            "where the target has the form",
        )
    for remark in remarks:
        progress(remark, 0, None)
    model = encoder_decoder_of(model.eval())
    return LoadedModel(model, tokenizer, location.source, processor_files, remarks, integers)


def _check_unscaled(model: PreTrainedModel, unread: Collection[str], source: str) -> None:
    """Check that no weight has a scale that was ignored, because float8 values are read without it in silence.

    Raises:
        UnsupportedModelError: If one has.
    """
    names = {name for name, _ in model.named_parameters()}
    scales = sorted(one for one in unread if one.rpartition("_scale")[0] in names)
    if scales:
        raise UnsupportedModelError(
            f"{source!r} has {len(scales)} scales of weights, such as {scales[0]}, but its config.json has no "
            "quantization_config that says how to use them; pass the original checkpoint, and quantise it on export "
            "(quantize='8da4w', --quantize 8da4w)"
        )


def _check_memory(location: Location, stored: torch.dtype | None, wanted: torch.dtype) -> None:
    """Check that the memory has room for weights that are converted; others stay in their mapped files.

    Weights on a hub that can be reached are not checked, because they would have to be downloaded first.

    Raises:
        DeviceMemoryError: If it does not, because the system would end the process without a message.
    """
    if stored is None or stored == wanted or not location.local or location.gguf is not None:
        return
    read = sum(path.stat().st_size for path in shards(location))
    needed, free = read * wanted.itemsize // stored.itemsize, host_memory()
    if free is not None and needed > free:
        raise DeviceMemoryError(
            f"the weights of {location.source!r}, stored in {dtype_name(stored)}, take {bytes_text(needed)} in "
            f"{dtype_name(wanted)}, but {bytes_text(free)} of memory and swap space are free; export a bundle with "
            f"`--recipe fast`, which loads them in {dtype_name(stored)}, run a live session with "
            f"dtype={dtype_name(stored)!r}, or add swap space"
        )


def load_config(model_or_path: PreTrainedModel | PreTrainedConfig | str | os.PathLike) -> PreTrainedConfig:
    """Load the config of a causal LM, without weights. See `load_model` for the argument and the errors."""
    if isinstance(model_or_path, PreTrainedConfig):
        return model_or_path
    if is_peft(model_or_path):
        return model_or_path.get_base_model().config
    if isinstance(model_or_path, PreTrainedModel):
        return model_or_path.config
    with quiet():
        return encoder_decoder_config(_config(locate(model_or_path)))


def live_model(model_or_path: Any) -> PreTrainedModel | None:
    """Return a model object, without its PEFT wrapper; None for the name of a model."""
    if is_peft(model_or_path):
        return model_or_path.get_base_model()
    return model_or_path if isinstance(model_or_path, PreTrainedModel) else None


def check_checkpoint(model_or_path: Any, config: PreTrainedConfig) -> None:
    """Check that weights are not quantised or can be dequantised, before they are read; see `prequantized`.

    Raises:
        UnsupportedModelError: If they cannot be dequantised.
        MissingDependencyError: If a package is missing.
    """
    model = live_model(model_or_path)
    if model is not None:
        check_plain(model)
    else:
        check_readable(config, locate(model_or_path).source)


def load_processor(folder: Path, config_folder: Path) -> ProcessorMixin:
    """Load the image or audio processor of a local folder.

    Args:
        folder: Folder with the files of the processor and of the tokenizer.
        config_folder: Folder with the model's config.json, which names the processor's class if its files do not.

    Raises:
        MissingDependencyError: If it needs a package that is not installed.
        BundleError: If its files cannot be read, or are not a processor's.
    """
    with quiet():
        try:
            config = AutoConfig.from_pretrained(config_folder, local_files_only=True, trust_remote_code=False)
            processor = AutoProcessor.from_pretrained(
                folder, config=config, local_files_only=True, trust_remote_code=False
            )
        except ImportError as error:
            raise MissingDependencyError(f"the processor in {folder} needs a package: {first_line(error)}") from error
        except Exception as error:  # processors raise errors of many classes
            raise BundleError(
                f"cannot read the processor in {folder}: {first_line(error)}; export the model again"
            ) from error
    if not isinstance(processor, ProcessorMixin):
        raise BundleError(
            f"{folder} must contain a processor, got a {type(processor).__name__}; export the model again"
        )
    return processor


def _from_model(given: PreTrainedModel, dtype: torch.dtype | None, progress: Progress) -> LoadedModel:
    model = live_model(given)
    assert model is not None
    if given.training:
        raise InputError(f"{type(given).__name__} is in training mode; call model.eval() first")
    check_plain(model)
    if has_adapters(model) and model is given:
        raise UnsupportedModelError(
            f"{type(model).__name__} has adapters loaded; load the model without them, and pass their folder as lora, "
            "which merges them"
        )
    # Found by the attributes that accelerate sets, because accelerate may not be installed.
    absent = [name for name, parameter in model.named_parameters() if parameter.device.type == "meta"]
    hooked = [name for name, module in model.named_modules() if hasattr(module, "_hf_hook")]
    if absent or hooked:
        found = f"{absent[0]} is on device meta" if absent else f"{hooked[0] or 'the model'} has a hook of accelerate"
        raise InputError(
            f"{type(model).__name__} must not be offloaded or split over devices ({found}), because a program needs "
            "every weight in memory; load it with from_pretrained(..., device_map='cpu'), or pass its folder"
        )
    if dtype is not None and dtype != model.dtype:
        progress(f"converting {type(model).__name__} to {dtype_name(dtype)}", 0, None)
        given = converted(given, dtype)
    if not is_peft(given):
        return LoadedModel(given, None, type(given).__name__)
    line = merged_line(given)
    progress(line, 0, None)
    return LoadedModel(merged(given), None, type(model).__name__, remarks=(line,))


def _config(location: Location) -> PreTrainedConfig:
    if location.gguf is not None:
        _check_gguf(location)
    adapter = file_in(location, ADAPTER_CONFIG)
    if adapter is not None:
        raise InputError(
            f"{location.source!r} holds an adapter ({ADAPTER_CONFIG}), trained for {base_of(adapter.parent)!r}; pass "
            "that model, and the adapter's folder as lora (--lora)"
        )
    try:
        fields, _ = PreTrainedConfig.get_config_dict(location.path, **location.options)
    except OSError as error:
        if Path(location.path).is_dir():
            raise InputError(
                f"folder {location.source!r} has no readable config.json ({first_line(error)}); pass a model folder"
            ) from error
        raise InputError(
            f"{location.source!r} is not a local folder, and the hub has no such model ({first_line(error)}); check "
            "the path or the id"
        ) from error
    except Exception as error:  # a file may hold any JSON, or no JSON at all
        if location.gguf is not None:
            raise UnsupportedModelError(
                f"transformers cannot read {location.source!r}: {first_line(error)}; download it again, or pass the "
                "original checkpoint"
            ) from error
        raise InputError(f"cannot read config.json of {location.source!r}: {first_line(error)}; correct it") from error
    model_type = fields.get("model_type") if isinstance(fields, dict) else None
    if not model_type:
        if (
            location.gguf is None
            and Path(location.path).is_dir()
            and not (Path(location.path) / "config.json").exists()
        ):
            raise InputError(f"folder {location.source!r} has no config.json; pass a model folder")
        raise InputError(
            f"config.json of {location.source!r} states no model_type; pass the folder of a transformers model"
        )
    # Checked before a config is created, because its lists have an item for each layer.
    check_sizes(fields, location.source)
    if model_type not in CONFIG_MAPPING:
        raise UnsupportedModelError(
            f"{location.source!r} is of model type {model_type!r}, which this transformers release does not know; "
            "upgrade transformers (code that comes with a model is not run)"
        )
    try:
        config = AutoConfig.from_pretrained(location.path, **location.options)
    except Exception as error:  # configs validate their fields with errors of many classes
        raise InputError(f"cannot read config.json of {location.source!r}: {first_line(error)}; correct it") from error
    if auto_class(config) is None:
        raise UnsupportedModelError(
            f"model type {model_type!r} has neither a causal LM nor an encoder-decoder that generates text in "
            "transformers; pass a model that generates text"
        )
    if stored_quantization(config) is None and (modelopt := modelopt_fields(location)) is not None:
        config.quantization_config = modelopt
    heads = [name for name in config.architectures or () if name.endswith(_OTHER_HEADS)]
    if heads:
        raise UnsupportedModelError(
            f"{location.source!r} is a {heads[0]}, whose head does not predict the next token; pass a causal LM"
        )
    return config


def _check_gguf(location: Location) -> None:
    missing = [name for name in _GGUF_NEEDS if util.find_spec(name) is None]
    if missing:
        raise MissingDependencyError(
            f"{location.source!r} is a GGUF file, and reading it needs {' and '.join(missing)}; "
            "pip install 'exportable-cache[gguf]', or pass the original checkpoint"
        )


def stored_dtype(model_or_config: PreTrainedModel | PreTrainedConfig) -> torch.dtype | None:
    """Return the dtype of a model's weights, or the one that a config states; None if it does not."""
    if isinstance(model_or_config, PreTrainedModel):
        return model_or_config.dtype
    for config in (model_or_config, model_or_config.get_text_config(decoder=True)):
        named = getattr(config, "dtype", None)
        named = getattr(torch, named.removeprefix("torch."), None) if isinstance(named, str) else named
        if isinstance(named, torch.dtype):
            return named
    return None


def with_rope_length(loaded: LoadedModel, length: int | None) -> LoadedModel:
    """Return a loaded model with the RoPE of a length, see `fix_rope`; the same model for None."""
    if length is None:
        return loaded
    model = fix_rope(loaded.model, length)
    return replace(loaded, model=model, remarks=(*loaded.remarks, ROPE_REMARK.format(length)))
