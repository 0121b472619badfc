"""Make small models for tests: SmolLM2's architecture with random weights, for what happens around a model.

Their text is noise, but the same noise each time. This needs the extra `transformers`, and for llama.cpp's format the
package gguf.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

START, END = "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_TEXT = """
The library keeps the context of a model on the worker, so that the next batch finds it warm. A worker may be
taken away at any time; then another worker takes the batch, and nothing is lost. Which worker should take
which batch? The policy decides: it sees what each worker holds, how fast it was, and how much work is left
over. When the answer to a question is true, write SUPPORTED; when it is false, write REFUTED; when nobody can
tell from the evidence, write NOT ENOUGH INFO. Rivers carry water from the mountains to the sea. The river
that flows through the city is longer than the one that flows around it. Numbers such as 0, 1, 2, 3, 10, 12,
100, 1850, 1999 and 2024 appear in claims about people, places and things. This was the first time that there
had been more than one of them here.
"""


def make_causal_lm(
    folder: str | os.PathLike[str],
    *,
    hidden_size: int = 64,
    layers: int = 2,
    head_size: int = 16,
    full_size: bool = False,
    seed: int = 0,
    dtype: str = "float32",
    device: str = "cpu",
) -> Path:
    """Make a causal language model of random weights with a working tokenizer, and save it to a folder.

    The weights are the same for the same parameters and version of torch, and large enough for the text to vary with
    the whole prompt. The tokenizer is a byte-level BPE of 512 tokens, with a chat template, start, end and padding
    tokens, that takes any text.

    :param hidden_size, layers: of the small model; `hidden_size` is a multiple of `head_size`.
    :param head_size: of each attention head; some engines have kernels for 32, 64 and more only.
    :param full_size: SmolLM2-1.7B's dimensions instead: 24 layers of 2048, 49,152 tokens, 1.7 billion weights.
    :param device: where the weights are made before they are saved.
    :returns: the folder.
    :raises ValueError: for a hidden size that is no multiple of the heads'.

    >>> import tempfile
    >>> from transformers import AutoTokenizer
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tokenizer = AutoTokenizer.from_pretrained(make_causal_lm(folder))
    >>> tokenizer.decode(tokenizer("any text at all: ÄÖÜ")["input_ids"])
    'any text at all: ÄÖÜ'
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    from ctxflow.models.transformers import without_progress_bars

    if hidden_size < head_size or hidden_size % head_size:
        examples = ", ".join(str(head_size * factor) for factor in (1, 2, 3))
        raise ValueError(f"hidden_size={hidden_size} is no multiple of {head_size}: give {examples}, ...")
    path = Path(folder)
    tokenizer = _make_tokenizer()
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    devices = [torch.device(device).index or 0] if device.startswith("cuda") else []
    config = _config(len(tokenizer), full_size, hidden_size, head_size, layers, special)
    with torch.random.fork_rng(devices=devices), torch.device(device):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.generation_config = GenerationConfig(**special)
    with without_progress_bars():
        model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


_IMAGE_TOKENS = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
_IMAGE_SIZE, _PATCH_SIZE, _SCALE = 56, 14, 2


def make_image_lm(folder: str | os.PathLike[str], *, words: Sequence[str] = (), seed: int = 0) -> Path:
    """Make a model of random weights that reads text and images, of Idefics3's architecture, and save it to a folder.

    Its language model and tokenizer are as those of `make_causal_lm`. What it writes depends on the image, of which it
    reads 56 by 56 points as four tokens.

    :param words: further texts that are one token each, such as "</think>".
    :returns: the folder.

    >>> import tempfile
    >>> from transformers import AutoConfig
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     AutoConfig.from_pretrained(make_image_lm(folder)).architectures
    ['Idefics3ForConditionalGeneration']
    """
    import torch
    from transformers import GenerationConfig, Idefics3Config, Idefics3ForConditionalGeneration

    from ctxflow.models.transformers import without_progress_bars

    path = Path(folder)
    tokenizer = _make_tokenizer([*_IMAGE_TOKENS, *words])
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    vision = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": _IMAGE_SIZE, "patch_size": _PATCH_SIZE, "initializer_range": 0.3,
    }  # fmt: skip
    config = Idefics3Config(
        vision_config=vision,
        text_config=_config(len(tokenizer), False, 64, 32, 2, special),
        image_token_id=tokenizer.convert_tokens_to_ids(_IMAGE_TOKENS[0]),
        scale_factor=_SCALE,
        tie_word_embeddings=False,
        **special,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Idefics3ForConditionalGeneration(config)
    model.generation_config = GenerationConfig(**special)
    with without_progress_bars():
        model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    # Written here, since the processor itself wants libraries for images, without which a model can be made.
    size, tokens = {"longest_edge": _IMAGE_SIZE}, (_IMAGE_SIZE // _PATCH_SIZE // _SCALE) ** 2
    images = {"image_processor_type": "Idefics3ImageProcessor", "size": size, "max_image_size": size}
    written = {
        "preprocessor_config.json": {**images, "do_image_splitting": False, "do_convert_rgb": True},
        "processor_config.json": {"processor_class": "Idefics3Processor", "image_seq_len": tokens},
    }
    for name, settings in written.items():
        (path / name).write_text(json.dumps(settings))
    return path


def make_adapter(model: str | os.PathLike[str], folder: str | os.PathLike[str], *, seed: int = 1) -> Path:
    """Make a LoRA adapter of random weights for a model made here, large enough to change every answer.

    :returns: the folder.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as parent:
    ...     sorted(path.name for path in make_adapter(make_causal_lm(f"{parent}/lm"), f"{parent}/lora").iterdir())
    ['adapter_config.json', 'adapter_model.safetensors']
    """
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    path, adapted, weights = Path(folder), ["q_proj", "o_proj"], {}
    random = torch.Generator().manual_seed(seed)
    with safe_open(Path(model) / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118
            module = name.removesuffix(".weight")
            if module.endswith(tuple(adapted)) and "vision" not in module:
                out, into = file.get_slice(name).get_shape()
                weights[f"base_model.model.{module}.lora_A.weight"] = torch.randn(4, into, generator=random)
                weights[f"base_model.model.{module}.lora_B.weight"] = torch.randn(out, 4, generator=random)
    path.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 16, "target_modules": adapted, "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(config))
    save_file(weights, path / "adapter_model.safetensors")
    return path


def _config(
    tokens: int, full_size: bool, hidden_size: int, head_size: int, layers: int, special: Mapping[str, Any]
) -> Any:
    """Return SmolLM2-1.7B's dimensions, or those of a small model of the same architecture."""
    from transformers import LlamaConfig

    heads = 32 if full_size else hidden_size // head_size
    return LlamaConfig(
        vocab_size=49_152 if full_size else tokens,
        hidden_size=2048 if full_size else hidden_size,
        intermediate_size=8192 if full_size else 4 * hidden_size,
        num_hidden_layers=24 if full_size else layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=8192 if full_size else 512,
        rope_theta=130_000.0 if full_size else 10_000.0,
        rms_norm_eps=1e-5,
        # With random weights tied embeddings repeat the last token; the small model is to be sensitive.
        tie_word_embeddings=full_size,
        initializer_range=0.02 if full_size else 0.3,
        **special,
    )


def _make_tokenizer(words: Sequence[str] = ()) -> Any:
    """Return the tokenizer; `words` are tokens beside those for the start and the end."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=[AddedToken(token, normalized=False, special=True) for token in ("<|endoftext|>", START, END)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_TEXT.splitlines(), trainer)
    bpe.add_tokens([AddedToken(word, normalized=False) for word in words])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=START,
        eos_token=END,
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def make_gguf(folder: str | os.PathLike[str], file: str | os.PathLike[str]) -> Path:
    """Write a model that `make_causal_lm` made in llama.cpp's format, with its tokenizer and chat template.

    The weights stay as they are, as float32 or float16; llama.cpp has no use for padding tokens.

    :param folder: where the model was made.
    :param file: the file to write, which ends in .gguf by convention.
    :returns: the file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = make_gguf(make_causal_lm(folder), f"{folder}/tiny.gguf")
    ...     file.read_bytes()[:4]
    b'GGUF'
    """
    import gguf
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    config = model.config
    writer = gguf.GGUFWriter(os.fspath(file), "llama")
    writer.add_name("random weights")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, AutoTokenizer.from_pretrained(folder), config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        for kind, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if name.endswith(f"{kind}.weight"):  # llama.cpp turns neighbours, transformers halves, by the same angle.
                halves = values.reshape(heads, 2, values.shape[0] // heads // 2, values.shape[1])
                values = halves.swapaxes(1, 2).reshape(values.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(file)


def _add_tokenizer(writer: Any, tokenizer: Any, size: int) -> None:
    """Add a byte-level BPE to a GGUF file, filled up to the size of the embeddings."""
    import gguf

    known = {number: token for token, number in tokenizer.get_vocab().items()}
    special = set(tokenizer.all_special_ids)
    kinds = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([known.get(number, f"[unused{number}]") for number in range(size)])
    writer.add_token_types([
        kinds.CONTROL if number in special else kinds.NORMAL if number in known else kinds.UNUSED
        for number in range(size)
    ])  # fmt: skip
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in merges])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_add_bos_token(False)
    writer.add_chat_template(tokenizer.chat_template)
