"""Text and chats become the tokens the model was taught, and templates stay in their sandbox."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from llamarl.errors import ConfigError, ModelError
from llamarl.model.chat_template import NoChatTemplate
from llamarl.model.tokenizer import Tokenizer

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHAT = [
    {"role": "system", "content": "Be brief. <b>&amp;</b> 'quotes'"},
    {"role": "user", "content": "Wie viel ist 12 - 3?\n\n日本 🎉"},
]


@pytest.fixture(scope="module")
def backend() -> Backend:
    """Byte-level, so that any text has tokens: 256 bytes and three special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Backend(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer


def write(folder: Path, backend: Backend, **settings_: Any) -> Path:
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    settings_ = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", **settings_}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings_))
    return folder


def chat_with(folder: Path, backend: Backend, template: str) -> str:
    tokenizer = Tokenizer.load(write(folder, backend, chat_template=template))
    return tokenizer.decode(tokenizer.chat(CHAT), skip_special_tokens=False)


@settings(max_examples=100, deadline=None)
@given(text=st.text())
def test_any_text_comes_back_from_its_tokens(backend: Backend, text: str) -> None:
    tokenizer = Tokenizer(backend, eos_ids=(), template=NoChatTemplate(Path()))
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens, skip_special_tokens=False) == text
    assert all(token < tokenizer.vocab_size for token in tokens)


def test_special_tokens_are_one_token_and_leave_the_text_unless_asked_for(backend: Backend, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write(tmp_path, backend))
    tokens = tokenizer.encode("<|im_start|>hi<|im_end|>")
    assert (tokens[0], tokens[-1], len(tokens)) == (256, 257, 4)
    assert tokenizer.decode(tokens) == "hi"
    assert tokenizer.decode(tokens, skip_special_tokens=False) == "<|im_start|>hi<|im_end|>"
    assert tokenizer.vocab_size == 259


TEMPLATES = {
    "chatml": CHATML,
    "whitespace": "{% for m in messages %}\n  {% if m.role %}\n    U {{ m.content }}\n  {% endif %}\n{% endfor %}",
    "json": "{{ messages | tojson }}|{{ messages[1] | tojson(indent=2) }}",
    "special tokens": "{{ eos_token }}{{ pad_token }}{{ bos_token }}",
    "loop controls": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}!",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "no tools": "{% if tools is not none %}tools{% else %}none{% endif %}{{ documents is none }}",
    "date": "{{ strftime_now('%Y') }}",
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_chats_render_as_in_transformers(hf: ModuleType, backend: Backend, tmp_path: Path, template: str) -> None:
    pad = {"content": "<|endoftext|>", "lstrip": False, "rstrip": False, "__type": "AddedToken", "normalized": False}
    folder = write(tmp_path, backend, pad_token=pad, bos_token="<|im_start|>", chat_template=template)
    theirs = hf.AutoTokenizer.from_pretrained(folder)
    for prompted in (True, False):
        expected = theirs.apply_chat_template(CHAT, add_generation_prompt=prompted, tokenize=False)
        tokens = Tokenizer.load(folder).chat(CHAT, add_generation_prompt=prompted)
        assert tokens == Tokenizer.load(folder).encode(expected)


def test_a_template_file_wins_over_the_one_in_the_config(backend: Backend, tmp_path: Path) -> None:
    write(tmp_path, backend, chat_template="old")
    (tmp_path / "chat_template.jinja").write_text("new")
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.decode(tokenizer.chat(CHAT)) == "new"


def test_of_several_templates_the_default_is_used(backend: Backend, tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    tokenizer = Tokenizer.load(write(tmp_path, backend, chat_template=named))
    assert tokenizer.decode(tokenizer.chat(CHAT)) == "yes"


def test_gemmas_token_of_images_is_plain_text_for_a_model_without_images(backend: Backend, tmp_path: Path) -> None:
    """Its tokenizer knows one token more than the model has rows. In any other family that is refused."""
    image = "<image_soft_token>"
    more = Backend.from_str(backend.to_str())
    more.add_special_tokens([AddedToken(image, special=True, normalized=False)])
    write(tmp_path, more)
    config = {"vocab_size": 259, "eos_token_id": 257, "model_type": "gemma3_text"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.load(tmp_path)
    tokens = tokenizer.encode(f"a {image} <|im_end|>")
    assert tokenizer.vocab_size == 259 and max(tokens) < 259
    assert tokenizer.decode(tokens, skip_special_tokens=False) == f"a {image} <|im_end|>"
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    with pytest.raises(ModelError, match="the tokenizer knows token 259"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(("num_rows", "eos"), [(258, 257), (259, 300)])
def test_a_token_beyond_the_embedding_is_refused(backend: Backend, tmp_path: Path, num_rows: int, eos: int) -> None:
    write(tmp_path, backend)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 259, "eos_token_id": 257}))
    assert Tokenizer.load(tmp_path).vocab_size == 259
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": num_rows, "eos_token_id": eos}))
    with pytest.raises(ModelError, match=f"vocab_size {num_rows}"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [258, 257]}, {"eos_token_id": 3}, (258, 257)),
        ({"eos_token_id": 258}, {}, (258, 257)),
        ({}, {"eos_token_id": 3}, (3, 257)),
        (None, None, (257,)),
    ],
)
def test_every_end_token_is_known(
    backend: Backend, tmp_path: Path, generation: Any, config: Any, expected: tuple[int, ...]
) -> None:
    write(tmp_path, backend)
    for name, value in (("generation_config.json", generation), ("config.json", config)):
        if value is not None:
            (tmp_path / name).write_text(json.dumps(value))
    assert Tokenizer.load(tmp_path).eos_ids == expected


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ 'x' * 10**9 }}",
        "{{ 10 ** (10 ** 9) }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(90000) %}{{ 'x' * 1000 }}{% endfor %}",
        "{{ raise_exception('only user\nand assistant') }}",
        "{{ 1 / 0 }}",
        "{{ messages[7].content }}",
        "{% include '/etc/passwd' %}",
        "{% for %}",
        "{{ undefined_function() }}",
    ],
)
def test_a_template_that_fails_or_strays_is_one_line(backend: Backend, tmp_path: Path, template: str) -> None:
    with pytest.raises(ModelError, match="chat template") as refused:
        chat_with(tmp_path, backend, template)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["raise_exception.__globals__", "strftime_now.__code__", "cycler.__init__", "range.x"])
def test_a_template_sees_nothing_behind_what_it_is_given(backend: Backend, tmp_path: Path, name: str) -> None:
    assert chat_with(tmp_path, backend, f"[{{{{ {name} }}}}]") == "[]"


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("tokenizer.json", None, r"no tokenizer\.json"),
        ("tokenizer.json", "{", r"tokenizer\.json: not a tokenizer"),
        ("tokenizer.json", '{"model": {"type": "Nonsense"}}', r"tokenizer\.json: not a tokenizer"),
        ("tokenizer_config.json", "[", r"tokenizer_config\.json"),
        ("tokenizer_config.json", '{"chat_template": 3}', "chat_template"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id"),
        ("generation_config.json", '{"eos_token_id": [-1]}', "eos_token_id"),
        ("chat_template.jinja", b"\xff\xff", r"chat_template\.jinja"),
    ],
)
def test_damaged_files_are_one_line_that_names_them(
    backend: Backend, tmp_path: Path, name: str, text: str | bytes | None, named: str
) -> None:
    path = write(tmp_path, backend) / name
    if text is None:
        path.unlink()
    else:
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ModelError, match=named) as refused:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(refused.value)


def test_without_a_template_chat_says_so(backend: Backend, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no chat template"):
        Tokenizer.load(write(tmp_path, backend)).chat(CHAT)


def test_smollm2_splits_digits_and_knows_its_chat(hf: ModuleType, smollm2: Path) -> None:
    tokenizer = Tokenizer.load(smollm2)
    # The published tokenizer's ids: digits one by one, a space before them on its own.
    assert tokenizer.encode("Hello world 12345") == [19556, 905, 216, 33, 34, 35, 36, 37]
    assert tokenizer.eos_ids == (2,)
    expected = hf.AutoTokenizer.from_pretrained(smollm2).apply_chat_template(
        CHAT, add_generation_prompt=True, tokenize=False
    )
    assert tokenizer.chat(CHAT) == tokenizer.encode(expected)
    assert tokenizer.chat(CHAT)[0] == 1


def test_a_reply_continues_a_chat_as_the_template_would_have_written_it(tmp_path: Path, backend: Backend) -> None:
    """Token for token: the prompt, what the model said with the stop token that ended it, and the reply."""
    tokenizer = Tokenizer.load(write(tmp_path, backend, chat_template=CHATML))
    said = "Let me see: 12 - 3"
    whole = [*CHAT, {"role": "assistant", "content": said}, {"role": "tool", "content": "9 <|im_end|> ✓"}]
    stop = tokenizer.encode("<|im_end|>")
    assert len(stop) == 1
    behind = tokenizer.chat_reply(CHAT, "tool", "9 <|im_end|> ✓")
    assert [*tokenizer.chat(CHAT), *tokenizer.encode(said), *stop, *behind] == tokenizer.chat(whole)


def test_a_template_that_hides_what_was_said_cannot_go_on(tmp_path: Path, backend: Backend) -> None:
    hiding = (
        "{% for message in messages %}{% if message.role != 'assistant' %}{{ message.content }}{% endif %}{% endfor %}"
    )
    tokenizer = Tokenizer.load(write(tmp_path, backend, chat_template=hiding))
    with pytest.raises(ModelError, match="a conversation cannot go on"):
        tokenizer.chat_reply(CHAT, "user", "9")


THINKING = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if enable_thinking is defined and enable_thinking is false %}<none>{% endif %}{{ bos_token }}"
)


def test_options_reach_the_chat_template_in_prompts_and_in_replies(tmp_path: Path, backend: Backend) -> None:
    folder = write(tmp_path, backend, chat_template=THINKING, bos_token="<|im_start|>")
    plain, quiet = Tokenizer.load(folder), Tokenizer.load(folder, {"enable_thinking": False})
    assert "<none>" not in plain.decode(plain.chat(CHAT)) and "<none>" in quiet.decode(quiet.chat(CHAT))
    assert quiet.decode(quiet.chat_reply(CHAT, "user", "so?")).endswith("so?<none>")
    assert Tokenizer.load(folder, {"enable_thinking": True}).chat(CHAT) == plain.chat(CHAT)


@pytest.mark.parametrize("wrong", ["enable_thinkin", "messages", "add_generation_prompt", "bos_token", "m"])
def test_an_option_that_the_template_does_not_read_is_refused(tmp_path: Path, backend: Backend, wrong: str) -> None:
    folder = write(tmp_path, backend, chat_template=THINKING, bos_token="<|im_start|>")
    with pytest.raises(ConfigError, match=rf"task\.chat_options: .* has no option '{wrong}'; it has: enable_thinking"):
        Tokenizer.load(folder, {wrong: False})
