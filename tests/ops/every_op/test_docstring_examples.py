"""help() of every public op has an example, and its output is what the op gives."""

import doctest

import pytest
import torch
from ops.every_op.test_hostile_arguments import PUBLIC
from support.faces import function_of

import pass_ext

OF_A_PROTOCOL = {"shard_local", "shard_combine", "shard_best"}  # rounds of one: docs/distributed.md has it whole


@pytest.mark.parametrize("op", sorted({*PUBLIC, "adapter_rows"} - OF_A_PROTOCOL))
def test_the_example_is_right(op):
    function = function_of(op) if op in PUBLIC else pass_ext.layers.adapter_rows
    examples = doctest.DocTestFinder(recurse=False).find(function, op, globs={"torch": torch, "pass_ext": pass_ext})
    runner = doctest.DocTestRunner(verbose=False)
    for example in examples:
        runner.run(example)
    assert runner.tries > 0 and runner.failures == 0
