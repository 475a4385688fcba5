"""model.generate(custom_generate=…): whatever transformers has for a decoding loop is used, or refused by its name."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from support.small_models import VOCABULARY  # noqa: E402
from transformers import GenerationConfig  # noqa: E402

from pass_ext import custom_generate  # noqa: E402
from pass_ext.integrations.transformers.refusals import _FIELDS  # noqa: E402

IDS = torch.randint(3, VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(0))
OPTIONS = dict(attention_mask=torch.ones_like(IDS), max_new_tokens=4, do_sample=False, pad_token_id=0)


def run(model, **options):
    return model.generate(IDS, **{**OPTIONS, "custom_generate": custom_generate(), **options})


@pytest.mark.parametrize(
    "value", [torch.ones(2, 6), {"image": torch.ones(2, 6)}, [torch.ones(2, 6)], 3, 0.5, True, False, "all", object()]
)
def test_a_model_input_of_any_type_is_refused_by_its_name(llama, value):
    with pytest.raises(ValueError, match=r"the model input pictures is not supported, got .*leave it out"):
        custom_generate()(llama, IDS, generation_config=prepared_config(), pictures=value)


@pytest.mark.parametrize("value", [None, {}, [], ()])
def test_a_model_input_with_nothing_in_it_changes_nothing(llama, value):
    """transformers prepares ``mm_encoder_outputs={}`` for a prompt without pictures."""
    assert custom_generate()(llama, IDS, generation_config=prepared_config(), pictures=value).shape == (2, 9)


def prepared_config(**fields):
    """A config as transformers prepares it for a loop."""
    config = GenerationConfig(max_length=9, **fields)
    config._pad_token_tensor = torch.tensor(0)
    return config


def test_an_argument_that_transformers_keeps_to_itself_is_refused_by_the_callers_name(llama, monkeypatch):
    """It encodes pictures before the loop, and takes ``pixel_values`` out of what the loop gets."""
    monkeypatch.setattr(type(llama), "_validate_model_kwargs", lambda self, named: None)
    prepare = type(llama)._prepare_model_inputs

    def kept(self, inputs, bos_token_id, model_kwargs):
        model_kwargs.pop("pixel_values")
        return prepare(self, inputs, bos_token_id, model_kwargs)

    monkeypatch.setattr(type(llama), "_prepare_model_inputs", kept)
    with pytest.raises(ValueError, match="the model input pixel_values is not supported, got Tensor"):
        run(llama, pixel_values=torch.ones(1, 3, 4, 4))


@pytest.mark.parametrize(
    "positions",
    [torch.arange(4, 10)[None], torch.arange(7)[None], torch.tensor([[0, 1, 2, 5, 6, 9], [0, 1, 2, 3, 4, 7]])],
)
def test_other_positions_are_transformers_own(llama, positions):
    """Rows after the prompt go on from its last one."""
    assert torch.equal(run(llama, position_ids=positions), run(llama, position_ids=positions, custom_generate=None))


@pytest.mark.parametrize(
    "positions",
    [
        torch.arange(6).expand(3, 2, -1) + 1,
        torch.stack([torch.arange(6).expand(2, -1), torch.arange(1, 7).expand(2, -1)]),
        torch.tensor([[3, 5]]),
    ],
    ids=lambda positions: str(list(positions.shape)),
)
def test_positions_of_another_shape_are_refused(llama, positions):
    with pytest.raises(ValueError, match="LlamaForCausalLM cannot read prompts with position_ids"):
        run(llama, position_ids=positions)


@pytest.mark.parametrize(
    "positions",
    [torch.arange(6)[None], torch.arange(6).expand(2, -1), torch.arange(6).expand(3, 2, -1), torch.tensor([[4, 5]])],
    ids=lambda positions: str(list(positions.shape)),
)
def test_positions_that_count_the_tokens_are_taken(llama, positions):
    got = custom_generate()(llama, IDS, generation_config=prepared_config(), position_ids=positions)
    assert torch.equal(got, custom_generate()(llama, IDS, generation_config=prepared_config()))


ASSISTED = {
    "num_assistant_tokens": (3, r"Speculative\(assistant_model, length"),
    "num_assistant_tokens_schedule": ("heuristic", 'length="auto"'),
    "assistant_confidence_threshold": (0.3, "MultiCandidate"),
    "max_matching_ngram_size": (2, r"NGram\(longest"),
    "assistant_lookbehind": (9, "Speculative"),
    "target_lookbehind": (9, "Speculative"),
    "assistant_ensemble_weight": (0.5, "Speculative"),
    "speculation_type": ("dflash", "Speculative"),
    "use_mtp": (True, "load_drafter"),
}


@pytest.mark.parametrize("name", ASSISTED)
def test_settings_of_assisted_decoding_are_refused_where_a_caller_writes_them(llama, name):
    """In a config they lie unused, as transformers' own loop without an assistant leaves them."""
    if not hasattr(GenerationConfig(), name):
        pytest.skip("this transformers has no such setting")
    value, instead = ASSISTED[name]
    with pytest.raises(ValueError, match=rf"{name} is not implemented, got {value}; give .*{instead}"):
        run(llama, **{name: value})
    if name != "use_mtp":
        assert run(llama, generation_config=GenerationConfig(**{name: value})).shape == (2, 10)


@pytest.mark.parametrize("name", ["prefill_chunk_size", "compile_config", "is_assistant"])
def test_fields_of_a_config_that_change_how_the_model_is_called_are_refused(llama, name):
    value = {"compile_config": transformers.CompileConfig()}.get(name, 2)
    with pytest.raises(ValueError, match=f"{name} of the generation config is not implemented, got .*leave it out"):
        run(llama, **{name: value})


def test_a_field_that_another_transformers_adds_is_refused_unless_it_is_at_its_default(llama, monkeypatch):
    made = GenerationConfig.__init__

    def with_more(self, **named):
        value = named.pop("rounds_of_thought", 1)
        made(self, **named)
        self.rounds_of_thought = value

    monkeypatch.setattr(GenerationConfig, "__init__", with_more)
    with pytest.raises(ValueError, match="rounds_of_thought of the generation config is not implemented, got 3"):
        custom_generate()(llama, IDS, generation_config=prepared_config(rounds_of_thought=3))
    assert custom_generate()(llama, IDS, generation_config=prepared_config()).shape == (2, 9)
    with_own = prepared_config()
    with_own.of_this_model_alone = 3  # transformers reads no such names
    assert custom_generate()(llama, IDS, generation_config=with_own).shape == (2, 9)


def test_every_field_of_a_config_is_known_or_refused():
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert fields - _FIELDS <= {"prefill_chunk_size", "compile_config", "is_assistant"}


def test_a_cache_of_states_by_its_former_name_is_refused(llama):
    """``cache_params``, which transformers took before 5.24."""
    with pytest.raises(ValueError, match="the model input cache_params is not supported, got object"):
        custom_generate()(llama, IDS, generation_config=prepared_config(), cache_params=object())
