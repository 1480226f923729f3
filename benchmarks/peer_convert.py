"""Make the files of a form of benchmarks/peers.py with the tools of its environment.

    python benchmarks/peer_convert.py FORM CHECKPOINT SLOTS FOLDER    # run by the benchmark, one process per form
    python benchmarks/peer_convert.py model MODEL CHECKPOINT SLOTS BITS

CHECKPOINT is the folder that the second command wrote: a Hugging Face checkpoint, a tokenizer, and the logits of
transformers. MODEL is `llama-110m`, or the name of a published shape (benchmarks/published_shapes.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peer_forms import CHECKED_PROMPT, CHECKED_STEPS, FORMS, SMALL_MODEL, Form, token_ids


def random_model(name: str, folder: Path, slots: int, bits: int) -> None:
    """Write a checkpoint with random weights, an unused tokenizer, and the logits of transformers in float32."""
    import numpy
    import torch

    if name == SMALL_MODEL:
        small_model(folder, slots, bits)
    else:
        from published_shapes import write_checkpoint

        write_checkpoint(name, folder)
    write_tokenizer(folder)
    ids = torch.tensor([token_ids(CHECKED_PROMPT + CHECKED_STEPS)])
    numpy.save(folder / "logits.npy", exact_logits(folder, ids)[0, CHECKED_PROMPT - 1 :].numpy())


def small_model(folder: Path, slots: int, bits: int) -> None:
    """Write a random Llama of 110M parameters in float32, which all converters read.

    With 16 bits, all parameters are representable in bfloat16, and are written so.
    """
    import torch
    from executorch_forms import LLAMA
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**LLAMA, max_position_embeddings=slots, bos_token_id=1, eos_token_id=2)
    model = LlamaForCausalLM(config)
    (model.to(torch.bfloat16) if bits == 16 else model).save_pretrained(folder)


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of bytes, because the converters require one."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: index for index, word in enumerate(["<unk>", "<s>", "</s>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)


def exact_logits(folder: Path, ids: Any) -> Any:
    """Return the logits of transformers in float32 for token ids [1, tokens], [1, tokens, vocabulary].

    The weights stay in the checkpoint's dtype, and each layer is converted while it runs, because a large model in
    float32 does not fit into memory.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", attn_implementation="eager").eval()
    stored = model.dtype

    def widen(module: Any, *_: Any) -> None:
        module.to(torch.float32)

    def narrow(module: Any, _: Any, result: Any) -> None:
        module.to(stored)

    body = model.model
    if hasattr(body.embed_tokens, "embed_scale"):
        # Gemma's factor was rounded to the checkpoint's dtype.
        body.embed_tokens.embed_scale = torch.tensor(body.config.hidden_size**0.5)
    for module in (*body.layers, body.norm, model.lm_head, body.embed_tokens):
        module.register_forward_pre_hook(widen)
        module.register_forward_hook(narrow)
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def ours(form: Form, model: Path, slots: int, folder: Path) -> None:
    """Export a bundle as the command line does, without the verification."""
    from exportable_cache import export

    export(model, "executorch", slots, folder / "bundle", verify=False, **form.options)


def reading(form: Form, model: Path, slots: int, folder: Path) -> None:
    """Write the number of bytes that a token's weights have.

    These are the matrices of linear layers, and of a mixture's experts those that a token chooses. With 4 bits a group
    of 32 weights has a scale of 16 bits.
    """
    config = json.loads((model / "config.json").read_text())
    tied = config.get("tie_word_embeddings", False)
    share = config.get("num_experts_per_tok", 1) / config.get("num_experts", 1)
    count = 0
    for name, weight in weights(model):
        if weight.ndim > 1 and ("embed_tokens" not in name or tied):
            count += weight.size * (share if ".experts." in name else 1)
    (folder / "bytes.txt").write_text(str(int(count * (4.5 if form.bits == 4 else form.bits) / 8)))


def weights(model: Path) -> Iterator[tuple[str, Any]]:
    """Return the names and float32 values of a checkpoint's tensors; numpy has no bfloat16."""
    import numpy

    for path in sorted(model.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        data = numpy.memmap(path, numpy.uint8, "r", 8 + length)
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            if entry["dtype"] == "BF16":
                values = (data[begin:end].view(numpy.uint16).astype(numpy.uint32) << 16).view(numpy.float32)
            else:
                values = data[begin:end].view({"F32": numpy.float32}[entry["dtype"]])
            yield name, values.reshape(entry["shape"])


def paired(weight: Any, heads: int) -> Any:
    """Interleave the rows of a projection [heads * width, hidden] for the rotary layout of llama.cpp's Llama.

    Hugging Face's checkpoints have the two rows of a rotation half a head apart.
    """
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def onnxruntime(form: Form, model: Path, slots: int, folder: Path) -> None:
    """Run ONNX Runtime GenAI's model builder."""
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(model), "-o", str(folder / "onnx")]
    command += ["-p", form.options["precision"], "-e", "cpu", "-c", str(folder / "cache")]
    run_tool([*command, "--extra_options", "hf_token=false"])


def openvino(form: Form, model: Path, slots: int, folder: Path) -> None:
    """Run optimum-intel's export."""
    command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino", "--model", str(model)]
    command += ["--task", "text-generation-with-past", "--weight-format", *form.options["weights"]]
    run_tool([*command, str(folder / "openvino")])


def run_tool(command: list[str]) -> None:
    """Run a converter, and end as it ends, so that the last line of the log is its own."""
    code = subprocess.run(command, check=False).returncode
    if code:
        sys.exit(code)


#: llama.cpp's name of each architecture.
ARCHITECTURES = {"llama": "llama", "qwen3": "qwen3", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3"}


def llama_cpp(form: Form, model: Path, slots: int, folder: Path) -> None:
    """Write a GGUF file with the `gguf` package; 4-bit weights in Q4_0, also those of tables, the norms in float32.

    Raises:
        KeyError: If the architecture is not one of `ARCHITECTURES`.
    """
    import gguf
    import numpy

    config = json.loads((model / "config.json").read_text())
    name = ARCHITECTURES[config["model_type"]]
    heads, key_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf.GGUFWriter(folder / "model.gguf", name)
    writer.add_context_length(max(slots, config["max_position_embeddings"]))
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(key_heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(rope_theta(config))
    if name == "gemma3":
        writer.add_sliding_window(config["sliding_window"])
    if name == "qwen3moe":
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    kind = gguf.GGMLQuantizationType[form.options["type"]]
    types = {32: gguf.LlamaFileType.ALL_F32, 16: gguf.LlamaFileType.MOSTLY_BF16, 4: gguf.LlamaFileType.MOSTLY_Q4_0}
    writer.add_file_type(types[form.bits])
    architecture = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    experts: dict[str, list[Any]] = {}

    def add(key: str, weight: Any, is_quantized: bool = False) -> None:
        # A mixture's router stays in float32.
        stored = kind if weight.ndim > 1 and "mlp.gate." not in key else gguf.GGMLQuantizationType.F32
        data = weight
        if stored != gguf.GGMLQuantizationType.F32 and not is_quantized:
            data = gguf.quants.quantize(weight, stored)
        writer.add_tensor(names.get_name(key, try_suffixes=(".weight",)), data, raw_dtype=stored)

    for key, weight in weights(model):
        layer, _, part = key.partition(".experts.")
        if part:
            index, _, projection = part.partition(".")
            merged = experts.setdefault(f"{layer}.experts.{projection}", [None] * config["num_experts"])
            merged[int(index)] = gguf.quants.quantize(weight, kind)
            continue
        for projection, count in ({"q_proj": heads, "k_proj": key_heads} if name == "llama" else {}).items():
            if projection in key:
                weight = paired(weight, count)
        # llama.cpp multiplies by the weight alone, where Gemma multiplies by one more.
        add(key, weight + 1 if name == "gemma3" and weight.ndim == 1 else weight)
    for key, merged in experts.items():
        add(key, numpy.stack(merged), is_quantized=True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rope_theta(config: dict[str, Any]) -> float:
    """Return the base of the rotary frequencies; of hybrids, that of the layers with full attention."""
    found = config.get("rope_parameters") or config
    return float(found.get("full_attention", found).get("rope_theta", 10000.0))


CONVERTERS = {
    "ours": ours,
    "reading": reading,
    "onnxruntime": onnxruntime,
    "openvino": openvino,
    "llama_cpp": llama_cpp,
}


def main() -> None:
    """Make one form, or the checkpoint; output goes to the caller's log."""
    name = sys.argv[1]
    if name == "model":
        random_model(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
    else:
        CONVERTERS[FORMS[name].runtime](FORMS[name], Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))


if __name__ == "__main__":
    main()
