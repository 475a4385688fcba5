"""Values of a wrong type at every argument of every public op: an answer, or a refusal in the op's own words, with its page."""

import inspect
import re

import pytest
import torch
from support.calls import PUBLIC, keywords_of, samples_of
from support.faces import function_of
from support.paths import ROOT

import pass_ext

WRONG = ["3", 1.5, True, [1.5], None, {}, int, 2**64, object(), torch.tensor(1.5), b"x"]


@pytest.mark.parametrize("op", PUBLIC)
def test_a_wrong_type_is_refused_in_words(op):
    function = function_of(op)
    keywords = keywords_of(op, next(samples_of(op)))
    strange = []
    for argument in inspect.signature(function).parameters:
        for value in WRONG:
            try:
                function(**keywords | {argument: value})
            except Exception as error:
                page = re.fullmatch(r"[^\[]*(?:\[.*)? \[(docs/[\w/]+\.md)\]", str(error), re.DOTALL)
                own = str(error).startswith(f"pass_ext::{op}: ") and type(error) is not AttributeError
                if not own or page is None or not (ROOT / page[1]).is_file():
                    strange.append(f"{argument}={value!r}: {type(error).__name__} {error}")
    assert strange == []


def test_what_came_is_named():
    with pytest.raises(
        TypeError, match=r"pass_ext::tree_prepare: parents must be a tensor, got \[-1, 0\] of type list"
    ):
        pass_ext.tree_prepare([-1, 0], torch.tensor([0, 2]), 2)
    with pytest.raises(
        TypeError, match="tree_prepare: max_nodes must be an integer of 64 bits, got 18446744073709551616"
    ):
        pass_ext.tree_prepare(torch.tensor([-1, 0]), torch.tensor([0, 2]), 2**64)
    with pytest.raises(RuntimeError, match="accept_chain: target_logits must have dimensions, got a single number"):
        pass_ext.accept_chain(torch.tensor(1.0), torch.zeros(1, 1, dtype=torch.int64))
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'max_nodes'"):
        pass_ext.tree_prepare(torch.tensor([-1, 0]), torch.tensor([0, 2]))
