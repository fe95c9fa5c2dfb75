"""Make a tiny chat model with random weights: half a million parameters, no download, the same bytes at every run.

Usage: tiny_model.py FOLDER. Needs torch, transformers and tokenizers. Its answers mean nothing. What they are good for
is everything around an answer: loading, API format, streaming, tool calls, guided decoding, caches.

Random weights alone would ramble: under guided decoding in whitespace, until the limit is reached. One channel of the
embedding is therefore the same for every token, so that its column in the output layer is a bias per token, and that
favours what closes strings, objects and messages.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

CONTEXT = 4096  # tokens
VOCABULARY = 768
SEED = 0
END, PAD = "<|im_end|>", "<|endoftext|>"
SPECIAL = (PAD, "<|im_start|>", END)
# Not special, so that they stay in the text in which a tool parser looks for them.
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
TEXT = """
the of and to in is it you that he was for on are with as his they at be this have from or one had by word but not what
all were we when your can said there use an each which she do how weather city temperature celsius name arguments
object string integer boolean true false null system user assistant tool function parameters required
"""
# Greedy decoding takes the highest: first what closes, then what goes on, never whitespace or a marker.
BIAS = {'"': 0.30, '":': 0.36, ":": 0.36, ",": 0.12, '"}': 0.36, "}": 0.36, "]": 0.36, "}]": 0.36, '"}}': 0.36}
BIAS |= {"}}": 0.36, '"]': 0.36, END: -0.06}
AVOID = -2.0

TEMPLATE = """\
{%- if tools %}<|im_start|>system
Tools, one JSON object in a line each; call one as <tool_call>{"name": ..., "arguments": ...}</tool_call>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}<|im_start|>user
<tool_response>{{ message.content }}</tool_response>
{%- else %}<|im_start|>{{ message.role }}
{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor %}
{%- endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def corpus() -> Iterator[str]:
    """Yield sentences and JSON for the tokenizer to find its pieces in."""
    draw, words = random.Random(7), TEXT.split()
    for _ in range(1500):
        yield " ".join(draw.choices(words, k=draw.randint(4, 14))).capitalize() + "."
        yield json.dumps({"name": draw.choice(words), "arguments": {draw.choice(words): draw.randint(0, 99)}})
        yield json.dumps({draw.choice(words): draw.choice([True, False])}, separators=(",", ":"))


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL) - len(MARKERS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in MARKERS])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, model_max_length=CONTEXT)
    fast.chat_template = TEMPLATE
    return fast


def make_model(tokenizer: PreTrainedTokenizerFast) -> Any:
    """Return a Qwen3 of two layers with random weights and the bias."""
    torch.manual_seed(SEED)
    config = Qwen3Config(
        vocab_size=(len(tokenizer) + 63) // 64 * 64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 0.5
        head = model.get_output_embeddings().weight
        head[:, 0] = 0.0
        for token in range(len(tokenizer)):
            text = tokenizer.decode([token])
            if text and (not text.strip() or text.lstrip().startswith("<")):
                head[token, 0] = AVOID
        for text, bias in BIAS.items():
            token = tokenizer.convert_tokens_to_ids(text)
            if token is not None:
                head[token, 0] = bias
    model = model.to(torch.bfloat16)
    model.config.dtype = "bfloat16"
    return model


def main(folder: str) -> int:
    """Write tokenizer, weights and settings into ``folder``."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    make_model(tokenizer).save_pretrained(folder)
    settings = {"eos_token_id": [tokenizer.eos_token_id, tokenizer.pad_token_id], "do_sample": False}
    (Path(folder) / "generation_config.json").write_text(json.dumps(settings, sort_keys=True) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
