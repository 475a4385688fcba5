"""The plugin in SGLang itself, on the CPU: what ``load_plugins`` replaces, and our results beside those of SGLang's own
functions, on trees that SGLang's own drafting code builds.

No server and no model runs: batches are made up.
"""

import importlib.metadata
import inspect
import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from integrations.sglang.batches import (
    SIGNATURE,
    TOP_K_ALL,
    random_parents,
    schedule_batch,
    without_types,
)
from sglang.kernels.ops.speculative.eagle import fill_bonus_tokens
from sglang.kernels.ops.speculative.reconstruct_tree import reconstruct_indices_from_tree_mask_func
from sglang.kernels.ops.speculative.reject_sampling import chain_speculative_sampling_triton
from sglang.srt import plugins
from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject, GrammarMask
from sglang.srt.environ import envs
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import get_parallel, get_spec, publish
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative import eagle_utils, eagle_worker_common, ngram_worker
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from sglang.srt.speculative.spec_utils import select_top_k_tokens
from support.chi_square import chi_square_tail
from support.paths import ROOT

import pass_ext.integrations.sglang as plugin
from pass_ext.integrations.sglang import eagle

IMPORTERS = (eagle_utils, eagle_worker_common, ngram_worker)
SGLANGS = (
    eagle_utils.eagle_sample,
)  # in a tuple: SGLang replaces its function in every module that has it, so in this one
V = 23


@pytest.fixture(scope="module", autouse=True)
def process():
    """A process as a scheduler has it: arguments published, one rank. SGLang's compiled helpers run uncompiled."""
    publish(ServerArgs(model_path="none"), role="scheduler")
    torch.compiler.set_stance("force_eager")
    with get_parallel().override(tp_group=SimpleNamespace(world_size=1)):
        yield
    torch.compiler.set_stance("default")


@pytest.fixture
def fresh(monkeypatch):
    """An SGLang without plugins, before and after."""

    def clear():
        HookRegistry.reset()
        for module in IMPORTERS:
            module.eagle_sample = SGLANGS[0]

    clear()
    monkeypatch.setattr(plugins, "_plugins_loaded", False)
    monkeypatch.setattr(plugin, "_registered", False)
    monkeypatch.delenv("PASS_EXT_SGLANG_RULE", raising=False)
    eagle._warn_once.cache_clear()
    eagle._say_once.cache_clear()
    yield
    clear()


# ---- loading ----


def test_on_replaces_the_name_in_every_module_that_imported_it(fresh, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("PASS_EXT_SGLANG", "on")
    plugins.load_plugins()
    for module in IMPORTERS:
        assert module.eagle_sample is eagle_utils.eagle_sample is not SGLANGS[0]
        assert inspect.unwrap(module.eagle_sample) is SGLANGS[0]
    loaded = [vars(module).values() for name, module in sys.modules.items() if name.startswith("sglang") and module]
    assert not any(value is SGLANGS[0] for values in loaded for value in list(values))
    ((kind, hook, source),) = HookRegistry._hooks[plugin.TARGET]
    assert kind.name == "REPLACE" and hook is eagle.eagle_sample and source.plugin_name == "pass_ext"
    HookRegistry.apply_hooks()
    plugin.register()
    assert len(HookRegistry._hooks[plugin.TARGET]) == 1
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_the_replaced_name_runs_ours_and_falls_back_to_sglangs(fresh, monkeypatch, caplog):
    """A step that we decline comes back from SGLang's own function, through its wrapper."""
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("PASS_EXT_SGLANG", "on")
    plugins.load_plugins()
    drafts, batch, logits = eagle_step(3)
    mine = ngram_worker.eagle_sample(drafts, batch, output(logits.clone()))
    assert "pass_ext: verifies drafts in the place of" in caplog.text
    with get_spec().override(speculative_accept_threshold_acc=0.5):
        own = eagle_worker_common.eagle_sample(drafts, batch, output(logits.clone()))
    assert "--speculative-accept-threshold-acc is not 1" in caplog.text
    assert_same(mine, own)


@pytest.mark.parametrize("value", [None, "off"])
def test_off_leaves_everything(fresh, monkeypatch, value):
    monkeypatch.delenv("PASS_EXT_SGLANG", raising=False)
    if value:
        monkeypatch.setenv("PASS_EXT_SGLANG", value)
    plugins.load_plugins()
    assert all(module.eagle_sample is SGLANGS[0] for module in IMPORTERS)
    assert plugin.TARGET not in HookRegistry._hooks


def test_an_untested_version_is_refused(fresh, monkeypatch, caplog):
    monkeypatch.setenv("PASS_EXT_SGLANG", "on")
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.5.24" if name == "sglang" else version(name))
    plugins.load_plugins()
    assert all(module.eagle_sample is SGLANGS[0] for module in IMPORTERS)
    assert "tested with sglang 0.5.23, and this is 0.5.24" in caplog.text


def test_a_new_process_that_imports_later_gets_ours():
    """As a scheduler starts: plugins first, workers later."""
    code = (
        "from integrations.engines.sglang import stand_ins; stand_ins.install()\n"
        "from sglang.srt.plugins import load_plugins; load_plugins()\n"
        "from sglang.srt.speculative import eagle_utils, ngram_worker\n"
        "assert ngram_worker.eagle_sample is eagle_utils.eagle_sample\n"
        "assert ngram_worker.eagle_sample.__wrapped__.__module__ == 'sglang.srt.speculative.eagle_utils'\n"
    )
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PASS_EXT_SGLANG": "on", "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_the_signature_is_the_recorded_one():
    assert importlib.metadata.version("sglang") == "0.5.23"
    assert without_types(inspect.signature(SGLANGS[0])) == SIGNATURE


# ---- made-up batches of SGLang's own types ----


def output(logits):
    return SimpleNamespace(next_token_logits=logits)


def info_of(batch, **changes):
    """A ``SamplingBatchInfo``; all greedy unless ``changes`` says otherwise."""
    fields = dict(
        temperatures=torch.ones(batch, 1),
        top_ps=torch.ones(batch),
        top_ks=torch.ones(batch, dtype=torch.int32),
        min_ps=torch.zeros(batch),
        is_all_greedy=True,
        is_any_greedy=True,
        need_top_p_sampling=False,
        need_top_k_sampling=True,
        need_min_p_sampling=False,
        vocab_size=V,
        device="cpu",
    )
    return SamplingBatchInfo(**{**fields, **changes})


def sampled(batch, **changes):
    return info_of(
        batch,
        **{
            "top_ks": torch.full((batch,), TOP_K_ALL, dtype=torch.int32),
            "is_all_greedy": False,
            "is_any_greedy": False,
            "need_top_k_sampling": False,
            **changes,
        },
    )


def eagle_step(batch, topk=3, steps=3, nodes=8, seed=0, info=None, draft_probs=None):
    """(EagleVerifyInput, batch, logits): a tree from SGLang's own candidates, scores and builder, with some likely tokens."""
    generator = torch.Generator().manual_seed(seed)
    scores, score_list, token_list, parents_list = None, [], [], []
    for i in range(steps):
        rows = batch if i == 0 else batch * topk
        probs, tokens = torch.rand(rows, V, generator=generator).softmax(-1).topk(topk)
        _, _, scores, found = select_top_k_tokens(i, probs, tokens, None, scores, topk)
        for items, item in zip((score_list, token_list, parents_list), found, strict=True):
            items.append(item)
    parent_list, top_scores, draft_tokens = eagle_utils.organize_draft_results(
        score_list, token_list, parents_list, nodes
    )
    seq_lens = torch.randint(3, 30, (batch,), generator=generator)
    mask, positions, index, child, sibling, tokens = eagle_utils.build_tree_kernel_efficient(
        torch.randint(V, (batch,), generator=generator), parent_list, top_scores, draft_tokens, seq_lens,
        int(seq_lens.sum()), topk, steps, nodes,
    )  # fmt: skip
    drafts = EagleVerifyInput(
        draft_token=tokens, custom_mask=mask, positions=positions, retrieve_index=index, retrieve_next_token=child,
        retrieve_next_sibling=sibling, retrieve_cum_len=None, spec_steps=steps, topk=topk, draft_token_num=nodes,
        capture_hidden_mode=CaptureHiddenMode.FULL, seq_lens_sum=int(seq_lens.sum()), seq_lens_cpu=seq_lens,
        draft_probs=draft_probs,
    )  # fmt: skip
    return drafts, schedule_batch(info or info_of(batch), seq_lens), liked(generator, tokens, child, batch, nodes)


def liked(generator, tokens, child, batch, nodes):
    """Logits ``[B * N, V]`` that often like the token of a node's first child best."""
    logits = torch.randn(batch * nodes, V, generator=generator)
    for b in range(batch):
        for node in range(nodes):
            if child[b, node] >= 0 and torch.rand((), generator=generator) < 0.7:
                logits[b * nodes + node, tokens.view(batch, nodes)[b, child[b, node]]] += 9
    return logits


def ngram_step(batch, nodes, seed=0, info=None):
    """(NgramVerifyInput, batch, logits): a tree with padding, from SGLang's own mask to links."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.zeros(batch, nodes, nodes, dtype=torch.bool)
    for b in range(batch):
        parents = random_parents(generator, nodes, strays=True)
        for node, parent in enumerate(parents):
            if parent >= 0:
                mask[b, node] = mask[b, parent]
            mask[b, node, node] = True
    seq_lens, tokens = (torch.randint(3, 30, (size,), generator=generator) % V for size in (batch, batch * nodes))
    positions, index, child, sibling = (torch.full((batch * nodes,), -1) for _ in range(4))
    reconstruct_indices_from_tree_mask_func(mask.flatten(), seq_lens, positions, index, child, sibling, batch, nodes)
    index, child, sibling = (links.view(batch, nodes) for links in (index, child, sibling))
    drafts = NgramVerifyInput(
        draft_token=tokens, custom_mask=mask.flatten(), positions=positions, retrieve_index=index,
        retrieve_next_token=child, retrieve_next_sibling=sibling, draft_token_num=nodes,
    )  # fmt: skip
    return drafts, schedule_batch(info or info_of(batch), seq_lens), liked(generator, tokens, child, batch, nodes)


def assert_same(mine, own):
    for actual, expected in zip(mine, own, strict=True):
        assert actual.dtype == expected.dtype and actual.device == expected.device
        assert torch.equal(actual, expected)


# ---- results ----


@pytest.mark.parametrize(
    "batch, topk, steps, nodes", [(1, 3, 3, 8), (4, 2, 4, 11), (3, 1, 3, 4), (2, 4, 1, 5), (5, 8, 5, 33), (1, 1, 1, 2)]
)
def test_greedy_eagle_trees_are_sglangs_own(batch, topk, steps, nodes):
    accepted = 0
    for seed in range(6):
        drafts, schedule, logits = eagle_step(batch, topk, steps, nodes, seed)
        own = SGLANGS[0](drafts, schedule, output(logits.clone()))
        assert_same(eagle.eagle_sample(drafts, schedule, output(logits.clone())), own)
        accepted += int(own[1].sum()) - batch
    assert accepted > 0


@pytest.mark.parametrize("batch, nodes", [(1, 1), (1, 12), (4, 7), (3, 16)])
def test_greedy_ngram_trees_are_sglangs_own(batch, nodes):
    for seed in range(6):
        drafts, schedule, logits = ngram_step(batch, nodes, seed)
        own = SGLANGS[0](drafts, schedule, output(logits.clone()))
        assert_same(eagle.eagle_sample(drafts, schedule, output(logits.clone())), own)


class Grammar(BaseGrammarObject):
    """A grammar whose mask is true where a token is forbidden."""

    def apply_vocab_mask(self, logits, vocab_mask):
        logits.masked_fill_(vocab_mask, -torch.inf)


def test_processors_leave_the_logits_that_sglang_leaves():
    """Penalties, bias and grammar: the same results, and the same logits for the log-probabilities computed from them."""
    generator = torch.Generator().manual_seed(2)
    info = info_of(
        4,
        acc_additive_penalties=-torch.rand(4, V, generator=generator) * 5,
        acc_scaling_penalties=1 + torch.rand(4, V, generator=generator) * 5,
        logit_bias=torch.randn(4, V, generator=generator) * 3,
    )
    drafts, schedule, logits = eagle_step(4, info=info)
    logits[3, 5], logits[9, 2] = float("nan"), float("inf")
    mask = GrammarMask(Grammar(), torch.rand(logits.shape, generator=generator) < 0.3)
    mine, own = logits.clone(), logits.clone()
    with envs.SGLANG_SANITIZE_NAN_LOGITS.override(True):
        results = eagle.eagle_sample(drafts, schedule, output(mine), mask)
        assert_same(results, SGLANGS[0](drafts, schedule, output(own), mask))
    assert torch.equal(mine, own) and not torch.equal(mine.nan_to_num(), logits.nan_to_num())


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("batch, steps", [(1, 3), (4, 2), (3, 5)])
def test_drawn_chains_of_greedy_requests_are_sglangs_own(batch, steps, block):
    """A greedy request of a server that samples by rejection: SGLang's chain kernel with one-hot targets decides the same."""
    nodes, generator = steps + 1, torch.Generator().manual_seed(steps)
    probs = torch.rand(batch, steps, V, generator=generator).softmax(-1)
    info = sampled(
        batch, top_ks=torch.ones(batch, dtype=torch.int32), is_any_greedy=True, need_top_k_sampling=True
    )  # not all greedy, as in a batch with a sampled request elsewhere
    drafts, schedule, logits = eagle_step(batch, 1, steps, nodes, steps, info, probs)
    with get_spec().override(speculative_use_rejection_sampling=True, speculative_use_block_verification=block):
        mine = eagle.eagle_sample(drafts, schedule, output(logits.clone()))
    predict = torch.zeros(batch * nodes, dtype=torch.int32)
    accept_index, accepted = torch.full((batch, nodes), -1, dtype=torch.int32), torch.empty(batch, dtype=torch.int32)
    one_hot = torch.nn.functional.one_hot(logits.argmax(-1), V).float().view(batch, nodes, V)
    chain_speculative_sampling_triton(
        predict, accept_index, accepted, drafts.draft_token.view(batch, nodes), drafts.retrieve_index,
        drafts.retrieve_next_token, drafts.retrieve_next_sibling, torch.full((batch, nodes), 0.5),
        torch.full((batch,), 0.5), one_hot, probs, 1.0, 1.0, True, block_verification=block,
    )  # fmt: skip
    assert_same(mine, (predict, accepted + 1, accept_index))


@pytest.mark.parametrize("block", [False, True])
def test_drawn_chains_have_the_law_of_sglangs_chain_kernel(block):
    """Numbers of accepted drafts, ours and theirs, against each other: the rows of q belong to the same drafts."""
    batch, steps, v, generator = 400, 2, 5, torch.Generator().manual_seed(7)
    logits = torch.randn(steps + 1, v, generator=generator) * 1.5
    q = (torch.randn(steps, v, generator=generator) * 1.5).softmax(-1)
    tokens = torch.stack([torch.multinomial(row, 50 * batch, True, generator=generator) for row in q], 1)
    tokens = torch.nn.functional.pad(tokens, (1, 0))

    def counts_of(tokens, verify):
        many = len(tokens)
        links = torch.tensor([[1, 2, -1]]).expand(many, -1).contiguous()
        index, none = torch.arange(3 * many).view(many, 3), torch.full((many, 3), -1)
        return torch.bincount(verify(many, tokens, index, links, none), minlength=3).double()

    def ours(many, tokens, index, child, sibling):
        drafts = EagleVerifyInput(
            draft_token=tokens.flatten(), custom_mask=None, positions=None, retrieve_index=index, retrieve_next_token=child,
            retrieve_next_sibling=sibling, retrieve_cum_len=None, spec_steps=2, topk=1, draft_token_num=3,
            capture_hidden_mode=None, seq_lens_sum=0, seq_lens_cpu=None, draft_probs=q.expand(many, -1, -1),
        )  # fmt: skip
        schedule = schedule_batch(sampled(many), [5] * many)
        with get_spec().override(speculative_use_rejection_sampling=True, speculative_use_block_verification=block):
            return eagle.eagle_sample(drafts, schedule, output(logits.repeat(many, 1)))[1] - 1

    def theirs(many, tokens, index, child, sibling):
        accepted = torch.empty(many, dtype=torch.int32)
        chain_speculative_sampling_triton(
            torch.zeros(3 * many, dtype=torch.int32), torch.full((many, 3), -1, dtype=torch.int32), accepted, tokens, index,
            child, sibling, torch.rand(many, 3, generator=generator), torch.rand(many, generator=generator),
            logits.softmax(-1).repeat(many, 1, 1), q.repeat(many, 1, 1), 1.0, 1.0, True, block_verification=block,
        )  # fmt: skip
        return accepted

    law = counts_of(tokens, ours) / len(tokens)  # 50 times as many of ours, so that its own noise does not matter
    assert chi_square_tail(counts_of(tokens[:batch], theirs), law) > 1e-4


def test_sampled_requests_are_sampled_where_sglang_takes_the_arg_max():
    """One step without drafts on the CPU, 4,000 requests alike; two of them are enough for SGLang."""
    logits = torch.tensor([1.0, 0.0, 2.0, 1.5] + [-9.0] * (V - 4))

    def predict(verify, batch):
        drafts, schedule, _ = ngram_step(2, 1, info=sampled(batch, temperatures=torch.full((batch, 1), 0.7)))
        drafts.draft_token, schedule.seq_lens = torch.zeros(batch, dtype=torch.int64), torch.full((batch,), 9)
        drafts.retrieve_index = torch.arange(batch).view(batch, 1)
        drafts.retrieve_next_token = drafts.retrieve_next_sibling = torch.full((batch, 1), -1)
        return verify(drafts, schedule, output(logits.repeat(batch, 1)))[0]

    assert predict(SGLANGS[0], 2).tolist() == [2, 2]
    counts = torch.bincount(predict(eagle.eagle_sample, 4000).long(), minlength=V)
    assert chi_square_tail(counts, (logits / 0.7).double().softmax(0)) > 1e-4


def test_min_p_and_seeds_are_the_requests_own():
    """Seeds as deterministic inference gives them; min-p, which SGLang's verification leaves out."""
    info = sampled(
        3,
        sampling_seed=torch.tensor([4, 4, 5]),
        temperatures=torch.full((3, 1), 4.0),
        min_ps=torch.tensor([0.0, 0.0, 1.0]),
        need_min_p_sampling=True,
    )
    drafts, schedule, _ = ngram_step(3, 1, info=info)
    schedule.seq_lens = torch.tensor([9, 9, 9])
    logits = torch.randn(V, generator=torch.Generator().manual_seed(1)).repeat(3, 1)
    results = [eagle.eagle_sample(drafts, schedule, output(logits.clone()))[0].tolist() for _ in range(2)]
    assert results[0] == results[1] and results[0][0] == results[0][1]
    assert results[0][2] == int(logits[2].argmax())


def test_the_last_token_is_the_one_that_sglang_reads_back():
    """SGLang takes predict[accept_index] and finds the added token at the number of tokens."""
    drafts, schedule, logits = eagle_step(4, seed=3)
    predict, counts, accept_index = eagle.eagle_sample(drafts, schedule, output(logits))
    tokens, bonus = predict[accept_index], torch.empty(4, dtype=torch.int32)
    fill_bonus_tokens[(4,)](tokens, counts, bonus, accept_index.shape[1])
    best = logits.argmax(-1)
    for b in range(4):
        last = int(accept_index[b, counts[b] - 1])
        assert int(bonus[b]) == int(best[last]) and bool((accept_index[b, counts[b] :] == -1).all())


def test_idle_ranks():
    schedule = schedule_batch(info_of(0), [])
    schedule.forward_mode = SimpleNamespace(is_idle=lambda: True)
    drafts = EagleVerifyInput.create_idle_input(2, 3, 4, "cpu")
    assert_same(eagle.eagle_sample(drafts, schedule, None), SGLANGS[0](drafts, schedule, None))
