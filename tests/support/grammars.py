"""Grammars for tests: a finite automaton over tokens, plain decoding under it, computed without trees; and a byte-level
tokenizer with the vocabulary of the small models, for the grammar libraries.
"""

import math

import torch
from support.small_models import VOCABULARY

from pass_ext import Grammar, draft_sample
from pass_ext.integrations.grammar import allow_tokens


class Automaton(Grammar):
    """A grammar from a table ``{state: {token: next state}}``.

    It counts its calls, over all forks, and fails where it is moved in ways that the interface excludes.
    """

    def __init__(self, table, complete=(), start=0, guess=()):
        self.table, self.complete, self.states, self.guess = table, set(complete), [start], guess
        self.counts = {"fork": 0, "accept": 0, "rollback": 0, "fill_mask": 0}

    def accept(self, token):
        self.counts["accept"] += 1
        following = self.table[self.states[-1]].get(token)
        if following is not None:
            self.states.append(following)
        return following is not None

    def rollback(self, count):
        self.counts["rollback"] += 1
        assert 0 < count < len(self.states), "never after the beginning"
        del self.states[-count:]

    def fill_mask(self, words):
        self.counts["fill_mask"] += 1
        allow_tokens(words, self.table[self.states[-1]])

    @property
    def may_end(self):
        return self.states[-1] in self.complete

    def forced(self):
        return self.guess

    def fork(self):
        self.counts["fork"] += 1
        other = Automaton(self.table, self.complete, self.states[-1], self.guess)
        other.counts = self.counts
        return other

    # ---- for the tests themselves ----

    def state_after(self, tokens):
        """The state after tokens; None if they are forbidden."""
        state = self.states[-1]
        for token in tokens:
            state = None if state is None else self.table[state].get(token)
        return state

    def allowed_after(self, tokens, ends=()):
        """The tokens that may follow, end tokens included."""
        state = self.state_after(tokens)
        return (
            set()
            if state is None
            else ({*self.table[state]} - {*ends}) | ({*ends} if state in self.complete else set())
        )


def random_automaton(vocabulary, states=5, share=0.3, seed=0, complete=(), ends=()):
    """Each state allows about a share of the tokens, and at least two; some lead on to a state with one way out."""
    generator = torch.Generator().manual_seed(seed)
    table = {}
    for state in range(states):
        allowed = (torch.rand(vocabulary, generator=generator) < share).nonzero().flatten().tolist()
        allowed = [token for token in allowed if token not in ends]
        allowed = allowed if len(allowed) > 1 else [3, 4]
        following = torch.randint(states + 1, (len(allowed),), generator=generator).tolist()
        table[state] = dict(zip(allowed, following, strict=True))
    only = torch.randint(
        3, vocabulary, (3,), generator=generator
    ).tolist()  # three forced tokens, then the beginning again
    table |= {states: {only[0]: states + 1}, states + 1: {only[1]: states + 2}, states + 2: {only[2]: 0}}
    return Automaton(table, complete)


def plain_text(model, prompt, grammar, new_tokens, *, ends=(), position=None, **law):
    """New tokens of one text, token by token: the whole text is read anew, and the mask is applied to its logits."""
    text = []
    while len(text) < new_tokens:
        allowed = grammar.allowed_after(text, ends)
        if not allowed:
            break
        logits = model(torch.tensor([[*prompt, *text]])).logits[0, -1:].float()
        mask = torch.full_like(logits, -math.inf).index_fill(1, torch.tensor(sorted(allowed)), 0.0)
        positions = torch.tensor([len(prompt) + len(text)])
        token = int(draft_sample(logits + mask, 1, mode="coupled", positions=positions, **law)[0])
        text.append(token)
        if token in ends:
            break
    return text


def distribution_of_texts(model, prompt, vocabulary, new_tokens, temperature, grammar):
    """Every text, and its probability by the model under the grammar."""
    texts = torch.cartesian_prod(*[torch.arange(vocabulary)] * new_tokens)
    whole = torch.cat([torch.tensor(prompt).expand(len(texts), -1), texts], 1)
    logits = model(whole[:, :-1]).logits[:, len(prompt) - 1 :].double() / temperature
    for row, text in zip(logits, texts.tolist(), strict=True):
        for place in range(new_tokens):
            allowed = grammar.allowed_after(text[:place])
            row[place, [token for token in range(vocabulary) if token not in allowed]] = -math.inf
    chances = logits.softmax(-1).nan_to_num(0.0)
    return chances.gather(2, texts[:, :, None])[:, :, 0].prod(1)


# ---- a tokenizer: one token for each printable character but the space, a few merged ones in place of rare characters ----

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
