"""The demo model's tokenizer and chat template: the real marker strings over a vocabulary of 128.

    0 … 4      <pad> <eos> <bos> <unk> <mask>
    5 … 19     tools, thinking, channels, turns, images
    20 … 115   newline and printable ASCII, one token each, the space as ▁
    116 … 119  system, user, model, thought, as whole words
    120 … 127  unused

Anything else a prompt holds becomes <unk>. 128 because kernels want multiples of it.
"""

import json
from pathlib import Path

SPECIAL = [
    "<pad>", "<eos>", "<bos>", "<unk>", "<mask>",
    "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>',
    "<|think|>", "<|channel>", "<channel|>", "<|turn>", "<turn|>", "<|image>", "<|image|>", "<image|>",
]  # fmt: skip
CHARACTERS = ["\n", "▁", *(chr(code) for code in range(0x21, 0x7F))]
WORDS = ["system", "user", "model", "thought"]
UNUSED = [f"<unused{i}>" for i in range(8)]
TOKENS = [*SPECIAL, *CHARACTERS, *WORDS, *UNUSED]

# The shape of the published template: a system turn when there is something to put in it, thoughts cut from history.
TEMPLATE = """\
{%- set first_is_system = messages and messages[0]['role'] in ['system', 'developer'] -%}
{{- bos_token -}}
{%- if enable_thinking or first_is_system -%}
    {{- '<|turn>system\\n' -}}
    {%- if enable_thinking -%}{{- '<|think|>\\n' -}}{%- endif -%}
    {%- if first_is_system -%}{{- messages[0]['content'] | trim -}}{%- endif -%}
    {{- '<turn|>\\n' -}}
{%- endif -%}
{%- for message in (messages[1:] if first_is_system else messages) -%}
    {%- if message['role'] not in ['user', 'assistant', 'model'] -%}
        {{- raise_exception('the demo model knows system, user and assistant turns only') -}}
    {%- endif -%}
    {{- '<|turn>' + ('user' if message['role'] == 'user' else 'model') + '\\n' -}}
    {%- set visible = namespace(text='') -%}
    {%- for part in message['content'].split('<channel|>') -%}
        {%- set visible.text = visible.text + part.split('<|channel>')[0] -%}
    {%- endfor -%}
    {{- visible.text | trim + '<turn|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|turn>model\\n' -}}{%- endif -%}
"""


def write(folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja into `folder`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    ids = {token: i for i, token in enumerate(TOKENS)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[], unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(word, normalized=False, single_word=True) for word in WORDS])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
