"""A tokenizer built like Gemma's, small: BPE with byte fallback, ▁ for spaces, the published ids of the markers, gaps."""

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Raw

from dgemma_local.tokens import KNOWN_IDS, Tokenizer

VOCAB_SIZE = 800
MARKERS = {name: i for name, i in KNOWN_IDS.items() if i < 200}
IMAGES = {"<|image>": 600, "<|image|>": 601, "<image|>": 602}
WORDS = ["thought", "user", "model", "system", "call", "Hi", "€"]
BYTE = 200  # id of <0x00>
GAP = 5  # an id without a token

# What the published template does with plain, thinking and system messages.
TEMPLATE = """\
{%- set first_is_system = messages[0]['role'] == 'system' -%}
{{- bos_token -}}
{%- if enable_thinking or tools or first_is_system -%}
    {{- '<|turn>system\\n' -}}
    {%- if enable_thinking -%}{{- '<|think|>\\n' -}}{%- endif -%}
    {%- if first_is_system -%}{{- messages[0]['content'] | trim -}}{%- endif -%}
    {%- for tool in tools or [] -%}
        {{- '<|tool>' + (tool | tojson) + '<tool|>' -}}
    {%- endfor -%}
    {{- '<turn|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message['role'] == 'system' -%}{%- continue -%}{%- endif -%}
    {%- if message['role'] not in ['user', 'assistant'] -%}{{- raise_exception('no such role\\n') -}}{%- endif -%}
    {%- set seen = namespace(text='') -%}
    {%- for part in message['content'].split('<channel|>') -%}
        {%- set seen.text = seen.text + part.split('<|channel>')[0] -%}
    {%- endfor -%}
    {{- '<|turn>' + ('user' if message['role'] == 'user' else 'model') + '\\n' + seen.text | trim + '<turn|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|turn>model\\n' -}}{%- endif -%}
"""


def raw(markers: dict[str, int] = MARKERS | IMAGES) -> Raw:
    vocab = {"<unk>": 3, "<mask>": 4, "\n": 107, "\n\n": 108, "▁": 110} | markers
    vocab |= {f"<0x{byte:02X}>": BYTE + byte for byte in range(256)}
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        for n, letter in enumerate(word):
            vocab.setdefault(letter, 460 + len(vocab))
            if n:
                vocab.setdefault(word[: n + 1], 460 + len(vocab))
                merges.append((word[:n], letter))
    tokenizer = Raw(models.BPE(vocab=vocab, merges=merges, fuse_unk=True, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    specials = [name for name in ("<unk>", "<mask>", *markers) if name in vocab]
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in specials])
    tokenizer.add_tokens([AddedToken("\n", normalized=False), AddedToken("\n\n", normalized=False)])
    if "<bos>" in vocab:  # as Gemma's does, and templates write it too
        tokenizer.post_processor = processors.TemplateProcessing("<bos> $A", None, [("<bos>", vocab["<bos>"])])
    return tokenizer


def write(folder: Path, template: str | None = TEMPLATE, config: dict[str, Any] | None = None, **markers: Any) -> Path:
    raw(**markers).save(str(folder / "tokenizer.json"))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@cache
def small() -> Tokenizer:
    with TemporaryDirectory() as folder:
        return Tokenizer.load(write(Path(folder)), VOCAB_SIZE)
