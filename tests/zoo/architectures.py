"""Which architectures there are: transformers' own mappings, one row per model that generates text step by step."""

from __future__ import annotations

from dataclasses import dataclass

import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

#: Group -> transformers' mapping. A model type that is in several belongs to the first.
GROUPS = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "image": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    "audio": modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "speech": modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
}

#: Not a generative text model of its own, with the reason.
LEFT_OUT = {
    "encoder-decoder": "glues two other models of the list",
    "speech-encoder-decoder": "glues two other models of the list",
    "vision-encoder-decoder": "glues two other models of the list",
    "gemma4_assistant": "a drafter: it reads the cache of the model it assists",
    "gemma4_unified_assistant": "a drafter: it reads the cache of the model it assists",
    "diffusion_gemma": "denoises blocks of tokens, it does not generate step by step",
    "pi0": "generates robot actions",
    "vibevoice": "generates speech by diffusion, text only inside",
    "gemma3n": "its vision tower needs timm; the text model is in the list",
    "perception_lm": "its vision tower needs timm",
    "qwen2_5_omni": "a pipeline around qwen2_5_omni_thinker",
    "qwen3_omni_moe": "a pipeline around qwen3_omni_moe_thinker",
}


@dataclass(frozen=True)
class Architecture:
    """One row: `Architecture("llama", "causal", "LlamaForCausalLM")`."""

    model_type: str
    group: str
    class_name: str

    #: Fields of a published config; None for the class's default.
    fields = None

    @property
    def config_class(self) -> type[transformers.PreTrainedConfig]:
        return CONFIG_MAPPING[self.model_type]

    @property
    def model_class(self) -> type[transformers.PreTrainedModel]:
        return getattr(transformers, self.class_name)

    @property
    def shrinks(self) -> type[transformers.PreTrainedConfig]:
        """Class of the config that the tiny model is made from."""
        return self.model_class.config_class

    @property
    def name(self) -> str:
        """Unique: `causal-whisper` is the decoder alone, `speech-whisper` the encoder-decoder."""
        return f"{self.group}-{self.model_type}"


def architectures() -> list[Architecture]:
    """Every architecture, in the order of transformers' mappings: each model class once."""
    rows: dict[str, Architecture] = {}
    # A class that several model types share is known by the type that has its name.
    for group, mapping in GROUPS.items():
        for model_type, class_name in mapping.items():
            if model_type in LEFT_OUT:
                continue
            if group == "causal" and _is_composite(class_name, model_type):
                continue
            row = Architecture(model_type, group, class_name)
            known = rows.get(class_name)
            if known is None or (known.group == group and _matches(row) and not _matches(known)):
                rows[class_name] = row
    return sorted(rows.values(), key=lambda row: (list(GROUPS).index(row.group), row.model_type))


def _is_composite(class_name: str, model_type: str) -> bool:
    """Whether the causal mapping lists the multimodal config of a text model that it lists by itself as well, or a
    multimodal class.
    """
    twins = [other for other, name in GROUPS["causal"].items() if name == class_name and other != model_type]
    multimodal = class_name in GROUPS["image"].values() or class_name in GROUPS["audio"].values()
    return multimodal or any(other.startswith(f"{model_type}_text") for other in twins)


def _matches(row: Architecture) -> bool:
    plain = row.model_type.replace("_", "").replace("-", "").removesuffix("text")
    return row.class_name.lower().startswith(plain)
