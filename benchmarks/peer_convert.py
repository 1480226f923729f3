"""Make the files of a form of benchmarks/peers.py with the tools of its environment.

    python benchmarks/peer_convert.py FORM MODEL SLOTS FOLDER    # run by the benchmark, one process per form
    python benchmarks/peer_convert.py model MODEL SLOTS BITS

MODEL is the folder that `random_model` wrote: a Hugging Face checkpoint, a tokenizer, and the logits of transformers.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from peer_forms import CHECKED_PROMPT, CHECKED_STEPS, CHUNK, FORMS, VOCABULARY, Form, token_ids


def random_model(folder: Path, slots: int, bits: int) -> None:
    """Write a random Llama of 110M parameters in float32, an unused tokenizer, and the logits of transformers.

    With 16 bits, all parameters are representable in bfloat16. They are written in float32, which all converters read.
    """
    import numpy
    import torch
    from executorch_forms import LLAMA
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(**LLAMA, max_position_embeddings=slots, bos_token_id=1, eos_token_id=2)
    model = LlamaForCausalLM(config).eval()
    if bits == 16:
        # Only the parameters, because rotary frequencies are not stored.
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().float()
    model.save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: index for index, word in enumerate(["<unk>", "<s>", "</s>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    ids = torch.tensor([token_ids(CHECKED_PROMPT + CHECKED_STEPS)])
    with torch.no_grad():
        logits = model(ids).logits[0, CHECKED_PROMPT - 1 :]
    numpy.save(folder / "logits.npy", logits.numpy())


def ours(form: Form, model: Path, slots: int, folder: Path) -> None:
    """Export a bundle."""
    from transformers import AutoModelForCausalLM

    from exportable_cache import export

    loaded = AutoModelForCausalLM.from_pretrained(model)
    # Named, because the default depends on what is installed.
    options = {"prefill_chunk": CHUNK, "kernels": "executorch", **form.options.get("export", {})}
    export(loaded, "executorch", slots, folder / "bundle", verify=False, **options)


def executorch(form: Form, model: Path, slots: int, folder: Path) -> None:
    """Run ExecuTorch's Llama export, from a checkpoint with Meta's names and rotary layout."""
    import torch
    from executorch_forms import LLAMA, executorch_llama
    from safetensors.torch import load_file

    names = {"self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv"}
    names |= {"self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3"}
    names |= {"mlp.down_proj": "feed_forward.w2", "input_layernorm": "attention_norm"}
    names |= {"post_attention_layernorm": "ffn_norm", "lm_head": "output", "model.embed_tokens": "tok_embeddings"}
    names |= {"model.norm": "norm", "model.layers": "layers"}
    heads = {"attention.wq": LLAMA["num_attention_heads"], "attention.wk": LLAMA["num_key_value_heads"]}
    weights = {}
    for name, weight in load_file(model / "model.safetensors").items():
        for theirs, meta in names.items():
            name = name.replace(theirs, meta)
        for part, count in heads.items():
            if part in name:
                weight = paired(weight, count)
        weights[name] = weight
    # Outside the form's folder, because the export takes words such as "8da4w" in the path for the checkpoint's format.
    checkpoint = model / "consolidated.pth"
    torch.save(weights, checkpoint)
    executorch_llama("llama-110m", slots, folder, f"base.checkpoint={checkpoint}", *form.options.get("settings", []))
    checkpoint.unlink()


def paired(weight: Any, heads: int) -> Any:
    """Interleave the rows of a projection [heads * width, hidden] for Meta's rotary layout.

    Hugging Face's checkpoints have the two rows of a rotation half a head apart.
    """
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def onnxruntime(form: Form, model: Path, slots: int, folder: Path) -> None:
    """Run ONNX Runtime GenAI's model builder."""
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(model), "-o", str(folder / "onnx")]
    command += ["-p", form.options["precision"], "-e", "cpu", "-c", str(folder / "cache")]
    subprocess.run([*command, "--extra_options", "hf_token=false"], check=True)


def openvino(form: Form, model: Path, slots: int, folder: Path) -> None:
    """Run optimum-intel's export."""
    command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino", "--model", str(model)]
    command += ["--task", "text-generation-with-past", "--weight-format", *form.options["weights"]]
    subprocess.run([*command, str(folder / "openvino")], check=True)


def llama_cpp(form: Form, model: Path, slots: int, folder: Path) -> None:
    """Write a GGUF file with the `gguf` package; 4-bit weights in Q4_0, the norms in float32."""
    import gguf
    from safetensors.numpy import load_file

    config = json.loads((model / "config.json").read_text())
    heads, key_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    writer.add_context_length(slots)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(key_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("no_vocab")
    kind = gguf.GGMLQuantizationType[form.options["type"]]
    types = {32: gguf.LlamaFileType.ALL_F32, 16: gguf.LlamaFileType.MOSTLY_BF16, 4: gguf.LlamaFileType.MOSTLY_Q4_0}
    writer.add_file_type(types[form.bits])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, weight in load_file(model / "model.safetensors").items():
        for part, count in ({"q_proj": heads, "k_proj": key_heads}).items():
            if part in name:
                weight = paired(weight, count)
        stored = kind if weight.ndim > 1 else gguf.GGMLQuantizationType.F32
        data = weight if stored == gguf.GGMLQuantizationType.F32 else gguf.quants.quantize(weight, stored)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


CONVERTERS = {
    "ours": ours,
    "executorch": executorch,
    "onnxruntime": onnxruntime,
    "openvino": openvino,
    "llama_cpp": llama_cpp,
}


def main() -> None:
    """Make one form, or the model; output goes to the caller's log."""
    name, model, slots = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    if name == "model":
        random_model(model, slots, int(sys.argv[4]))
    else:
        CONVERTERS[FORMS[name].runtime](FORMS[name], model, slots, Path(sys.argv[4]))


if __name__ == "__main__":
    main()
