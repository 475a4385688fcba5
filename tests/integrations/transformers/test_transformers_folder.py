"""model.generate(custom_generate=hub_folder()): transformers' own text for the same arguments; refusals; the folder's card."""

import re
import shutil
from inspect import signature
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from support.code_blocks import blocks_of, run_blocks  # noqa: E402
from support.generation import disturbed, replace_shipped_slots, slots_for  # noqa: E402
from support.heads import eagle3_checkpoint  # noqa: E402
from support.small_models import VOCABULARY, Tokens, ragged_prompts  # noqa: E402
from transformers import AutoModelForCausalLM, GenerationConfig  # noqa: E402

import pass_ext  # noqa: E402
from pass_ext.integrations.transformers import hub_folder, hub_generate  # noqa: E402

FOLDER = Path(hub_folder())
NEW = 20


class Recorder:
    """A streamer that stores tokens, and how often it was ended."""

    def __init__(self):
        self.tokens, self.ends = [], 0

    def put(self, tokens):
        self.tokens += tokens.flatten().tolist()

    def end(self):
        self.ends += 1


@pytest.fixture(autouse=True)
def modules_folder(monkeypatch, tmp_path):
    """transformers copies the folder's code there before it imports it."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))


@pytest.fixture
def loops(monkeypatch):
    """Every loop that the folder makes."""
    made = []

    class Recorded(pass_ext.custom_generate):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            made.append(self)

    monkeypatch.setattr(hub_generate, "CustomGenerate", Recorded)
    return made


@pytest.fixture(scope="module")
def draft(llama):
    return disturbed(llama, 0.05)


def run(model, ids, mask=None, folder=False, **options):
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": [5, 6], **options}
    if folder:
        options |= {"custom_generate": str(FOLDER), "trust_remote_code": True}
    return model.generate(input_ids=ids, attention_mask=torch.ones_like(ids) if mask is None else mask, **options)


def one_prompt():
    return torch.randint(3, VOCABULARY, (1, 8), generator=torch.Generator().manual_seed(1))


# ---- methods ----

CHOICES = {
    "neither": ({}, pass_ext.NGram()),
    "plain": ({"method": "plain"}, pass_ext.Plain()),
    "ngram": ({"method": "ngram", "method_settings": {"shortest": 1, "branches": 2}}, pass_ext.NGram(4, 1, 8, 2)),
    "slots": ({"slots": "FILE", "method_settings": {"rows": 12, "ngram": {"tokens": 3}}}, pass_ext.PaSS),
    "draft": ({"assistant_model": "DRAFT", "method_settings": {"length": 3}}, pass_ext.Speculative),
    "both": ({"method": "multi_candidate", "assistant_model": "DRAFT", "slots": "FILE"}, pass_ext.MultiCandidate),
    "instance": ({"method": pass_ext.NGram(shortest=1)}, pass_ext.NGram(shortest=1)),
}


@pytest.mark.parametrize("name", CHOICES)
def test_a_method_by_name_writes_the_text_of_transformers(llama, draft, loops, name, tmp_path):
    ids, mask = ragged_prompts(4, longest=12, seed=3)
    slots_for(llama).save(tmp_path / "slots.safetensors")
    values = {"FILE": str(tmp_path / "slots.safetensors"), "DRAFT": draft}
    options, expected = CHOICES[name]
    options = {key: values.get(value, value) if isinstance(value, str) else value for key, value in options.items()}
    got = run(llama, ids, mask, folder=True, **options)
    assert torch.equal(got, run(llama, ids, mask))
    direct = pass_ext.generate(llama, ids, attention_mask=mask, max_new_tokens=NEW, eos_token_id=[5, 6])
    assert torch.equal(got, direct.sequences)
    (loop,) = loops
    method = loop.method
    assert type(method) is expected if isinstance(expected, type) else method == expected
    if name == "slots":
        assert method.rows == 12 and method.ngram == pass_ext.NGram(tokens=3)
    if name == "draft":
        assert method.draft_model is draft and method.length == 3
        assert loop.stats.mean_acceptance_length > 1.2, "the assistant's drafts are used"
    if name == "both":
        assert method.draft_model is draft and method.lookahead.lookahead.num_lookahead == 4


def test_slots_are_read_again_only_after_their_file_changed(llama, loops, tmp_path):
    file = tmp_path / "slots.safetensors"
    for count in (4, 4, 3):
        if count == 3 or not loops:
            slots_for(llama, count).save(file)
        run(llama, one_prompt(), folder=True, slots=str(file), method_settings={"rows": 8})
    first, second, third = (loop.method.lookahead for loop in loops)
    assert first is second and (first.num_lookahead, third.num_lookahead) == (4, 3)


def test_a_head_is_read_once_for_its_model(llama, loops, tmp_path):
    """``drafter`` is the path of its checkpoint; the settings are its method's."""
    eagle3_checkpoint(tmp_path / "head", llama, taps=(0, 1, 2))
    settings = {"length": 5, "ngram": {"tokens": 3}}
    for _ in range(2):
        got = run(llama, one_prompt(), folder=True, drafter=str(tmp_path / "head"), method_settings=settings)
        assert torch.equal(got, run(llama, one_prompt()))
    first, second = (loop.method for loop in loops)
    assert isinstance(first, pass_ext.drafting.Eagle3) and first.head is second.head
    assert first.length == 5 and first.ngram == pass_ext.NGram(tokens=3)
    for more, words in (
        ({"slots": "x"}, "slots must be left out with drafter"),
        ({"method": "plain"}, "method must be left out with drafter"),
        ({"method_settings": {"rows": 3}}, 'method_settings of "drafter" must be among length, branching'),
    ):
        with pytest.raises(ValueError, match=words):
            run(llama, one_prompt(), folder=True, drafter=str(tmp_path / "head"), **more)


def test_an_early_exit_of_the_model_can_be_the_assistant(llama, loops):
    early = pass_ext.EarlyExitDraft(llama, layers=1)
    ids = one_prompt()
    assert torch.equal(run(llama, ids, folder=True, assistant_model=early), run(llama, ids))
    assert loops[0].method.draft_model is early


# ---- arguments of generate ----


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.6, "bad_words_ids": [[5], [9, 11]]},
        {"generation_config": GenerationConfig(no_repeat_ngram_size=2, suppress_tokens=list(range(3, 50)))},
        {"max_new_tokens": None, "max_length": 17},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_of_transformers_mean_the_same(llama, draft, loops, options):
    ids, mask = ragged_prompts(3, longest=10, seed=5)
    expected = run(llama, ids, mask, **options)
    assert torch.equal(run(llama, ids, mask, folder=True, assistant_model=draft, **options), expected)
    plain = run(llama, ids, mask)
    assert plain.shape != expected.shape or not torch.equal(plain, expected), "the option shows"


def test_sampled_texts_depend_on_their_seeds_alone(llama, draft):
    ids, mask = ragged_prompts(3, longest=9, seed=2)
    options = {"do_sample": True, "temperature": 0.9, "top_k": 30, "top_p": 0.95}
    callable_ = pass_ext.custom_generate(pass_ext.Plain(), seeds=[4, 5, 6])
    expected = run(llama, ids, mask, custom_generate=callable_, **options)
    for more in ({}, {"assistant_model": draft}, {"method": "plain"}):
        assert torch.equal(run(llama, ids, mask, folder=True, seeds=[4, 5, 6], **more, **options), expected)
    other = run(llama, ids, mask, folder=True, seeds=[7, 8, 9], **options)
    assert other.shape != expected.shape or not torch.equal(other, expected)
    first, again = (
        run(llama, ids, mask, folder=True, seeds=torch.Generator().manual_seed(3), **options) for _ in range(2)
    )
    assert torch.equal(first, again)


def test_the_rule_arrives(llama, draft, loops):
    run(llama, one_prompt(), folder=True, assistant_model=draft, rule="block", do_sample=True, seeds=1)
    assert loops[0]._rule == "block"
    with pytest.raises(ValueError, match=r"rule must be one of .*got 'blocks'"):
        run(llama, one_prompt(), folder=True, rule="blocks")


# ---- streams and stops ----


def test_a_streamer_gets_what_transformers_would_give_it(llama, draft, loops):
    ids = one_prompt()
    theirs, ours = Recorder(), Recorder()
    text = run(llama, ids, streamer=theirs)
    got = run(llama, ids, folder=True, streamer=ours, assistant_model=draft)
    assert torch.equal(got, text)
    assert ours.tokens == theirs.tokens == text[0].tolist() and ours.ends == theirs.ends == 1
    assert loops[0].stats.mean_acceptance_length > 1.2, "steps of several tokens were streamed"


def test_stop_strings_need_no_criterion(llama, draft):
    ids, tokenizer = one_prompt(), Tokens()
    text = run(llama, ids, eos_token_id=None)[0, ids.shape[1] :].tolist()
    stop = "".join(chr(97 + token) for token in text[8:10])
    expected = run(llama, ids, stop_strings=[stop], tokenizer=tokenizer, eos_token_id=None)
    assert expected.shape[1] < ids.shape[1] + NEW
    options = {"folder": True, "assistant_model": draft, "eos_token_id": None, "tokenizer": tokenizer}
    assert torch.equal(run(llama, ids, stop_strings=stop, **options), expected)
    config = GenerationConfig(stop_strings=[stop])
    assert torch.equal(run(llama, ids, generation_config=config, **options), expected)
    assert config.stop_strings == [stop], "the caller's config stays as it is"


# ---- a model's own repository ----


def test_the_folder_in_a_models_repository_is_its_generate(llama, loops, tmp_path):
    llama.save_pretrained(tmp_path / "model")
    shutil.copytree(FOLDER, tmp_path / "model", dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", trust_remote_code=True)
    ids = one_prompt()
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": [5, 6]}
    assert torch.equal(model.generate(ids, **options), run(llama, ids))
    assert torch.equal(model.generate(ids, GenerationConfig(**options)), run(llama, ids))
    assert [loop.method for loop in loops] == [pass_ext.NGram()] * 2


# ---- refusals ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "n-gram"}, "method must be one of plain, ngram, pass, .*got 'n-gram'"),
        ({"method": "pass"}, 'method "pass" needs slots, got None'),
        ({"method": "speculative"}, 'method "speculative" needs assistant_model'),
        ({"method": "plain", "slots": "x"}, 'slots must be left out with method "plain"'),
        (
            {"method": "pass", "slots": "x", "assistant_model": "y"},
            'assistant_model must be left out with method "pass"',
        ),
        ({"slots": "x", "assistant_model": "y"}, "method must be named"),
        ({"slots": "no such file"}, "'no such file' is neither a file nor"),
        ({"method_settings": {"length": 3}}, "method_settings of \"ngram\" must be among longest, .*got 'length'"),
        (
            {"slots": "smollm2-135m-instruct", "method_settings": {"ngram": {"rows": 3}}},
            "of \"ngram\" must be .*got 'rows'",
        ),
        ({"method": "plain", "method_settings": {"rows": 3}}, "must be among none, got 'rows'"),
        ({"method": pass_ext.Plain(), "slots": "x"}, "slots must be part of the method .*got Plain"),
        ({"method": pass_ext.Plain(), "method_settings": {"rows": 3}}, "method_settings must be part of the method"),
        ({"assistant_tokenizer": Tokens()}, "assistant_tokenizer needs tokenizer"),
        ({"assistant_tokenizer": Tokens(), "tokenizer": Tokens()}, "assistant_tokenizer needs assistant_model"),
        ({"synced_gpus": True}, "synced_gpus must be False"),
        ({"negative_prompt_ids": torch.ones(1, 3)}, "negative_prompt_ids is not implemented"),
        ({"negative_prompt_attention_mask": torch.ones(1, 3)}, "negative_prompt_attention_mask is not implemented"),
        ({"prompt_lookup_num_tokens": 3}, 'prompt_lookup_num_tokens is not implemented, got 3; give method="ngram"'),
        ({"assistant_early_exit": 1}, "assistant_early_exit is not implemented, got 1; .*EarlyExitDraft"),
        ({"num_assistant_tokens": 5}, "num_assistant_tokens is not implemented"),
        ({"generation_config": GenerationConfig(prompt_lookup_num_tokens=4)}, "prompt_lookup_num_tokens .*got 4"),
        ({"stop_strings": ["a"]}, "stop_strings need tokenizer, got None"),
        ({"num_beams": 2}, "beam_search"),
        ({"guidance_scale": 1.5}, "guidance_scale"),
        ({"return_dict_in_generate": True, "output_attentions": True}, "output_attentions"),
        ({"metod": "plain"}, "metod"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # an object's address would differ among processes
)
def test_what_cannot_be_done_is_refused_by_name(llama, options, message):
    with pytest.raises(ValueError, match=message):
        run(llama, one_prompt(), folder=True, **options)


def test_a_streamer_of_several_prompts_and_another_tokenizer_are_refused(llama, draft):
    ids, mask = ragged_prompts(2, longest=8)
    with pytest.raises(ValueError, match="a streamer takes one request, got 2"):
        run(llama, ids, mask, folder=True, streamer=Recorder())
    other = Tokens()
    other.get_vocab = lambda: {f"other {token}": token for token in range(VOCABULARY)}
    options = {"assistant_model": draft, "tokenizer": Tokens(), "assistant_tokenizer": other}
    with pytest.raises(ValueError, match="tokenizer is another one"):
        run(llama, ids, mask, folder=True, **options)


# ---- the folder ----


def test_the_folder_holds_what_the_hub_wants_and_no_code_of_ours():
    files = {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*") if path.suffix != ".pyc" and path.is_file()}
    assert files == {"README.md", "custom_generate/generate.py", "custom_generate/requirements.txt"}
    code = (FOLDER / "custom_generate/generate.py").read_text()
    assert "def " not in code and "import generate" in code
    assert isinstance(hub_folder(), str), "transformers takes a Path for no path"


def test_the_card_has_the_fields_of_the_hub():
    head = re.match(r"---\n(.*?)\n---\n", (FOLDER / "README.md").read_text(), re.S)[1].splitlines()
    assert {"library_name: transformers", "license: apache-2.0", "- custom_generate"} <= set(head)


def test_the_card_names_every_argument():
    card = (FOLDER / "README.md").read_text()
    for name in signature(hub_generate.generate).parameters.keys() - {"inputs", "model", "arguments"}:
        assert re.search(rf"`{name}`|\b{name}=", card), name


def test_the_blocks_of_the_card_run(llama, draft, loops, monkeypatch):
    ids = one_prompt()
    names = dict(
        model=llama,
        assistant=draft,
        streamer=Recorder(),
        tokenizer=Tokens(),
        inputs=dict(input_ids=ids, do_sample=False),
    )
    asked = replace_shipped_slots(monkeypatch, llama)
    monkeypatch.setattr(
        hub_generate, "_slots", lambda path, modified: pass_ext.LookaheadEmbedding.from_pretrained(path)
    )
    blocks = [
        (language, code.replace("path or name of this repository", str(FOLDER)), line)
        for language, code, line in blocks_of(FOLDER / "README.md")
    ]
    assert len(blocks) == 3
    for block, kind in zip(blocks, (pass_ext.NGram, pass_ext.Speculative, pass_ext.PaSS), strict=True):
        run_blocks(FOLDER / "README.md", [block], names)
        assert type(loops[-1].method) is kind
        assert torch.equal(names["text"], llama.generate(ids, do_sample=False, max_new_tokens=100))
    assert [path.name for path in asked] == ["smollm2-135m-instruct.safetensors"]
