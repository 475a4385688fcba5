"""A byte-level tokenizer of transformers with the vocabulary of the small models: one token for each printable character but
the space, and a few merged ones in place of rare characters.
"""

from support.small_models import VOCABULARY

MERGED = ('{"', '":', "na", "me", "name")
RARE = "~`^|\\"
LETTERS = [chr(code) for code in range(33, 127) if chr(code) not in RARE]


def small_tokenizer():
    """Tokens 0 to 2 are padding, beginning and end."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["<pad>", "<s>", "</s>", *LETTERS, *MERGED]
    merges = [("{", '"'), ('"', ":"), ("n", "a"), ("m", "e"), ("na", "me")]
    tokenizer = Tokenizer(models.BPE({piece: id for id, piece in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    assert len(pieces) == VOCABULARY
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )
