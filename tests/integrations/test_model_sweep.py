"""A sample of the sweep over the models of transformers; `tests/helpers/sweep.py` runs all of them."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
import sweep

#: A class for each way in which models differ, and the begin of what the sweep says about it.
SAMPLE = {
    "AfmoeForCausalLM": "exact",
    "ModernBertForTokenClassification": "exact",
    "OPTModel": "exact",
    "PhimoeForCausalLM": "exact",
    "Qwen2MoeForCausalLM": "exact",
    "CLIPTextModel": "refused: Unsupported: CLIPTextModel returns a tuple (return_dict=False), or a pooler_output",
    "DogeForCausalLM": "refused: Unsupported: DogeForCausalLM has a mask made of its values",
    "MobileBertForMaskedLM": "refused: Unsupported: MobileBertForMaskedLM has embeddings of neighbouring tokens",
    "NemotronForCausalLM": "refused: Unsupported: NemotronAttention is not given cu_seq_lens_q",
    "Qwen2ForQuestionAnswering": "refused: Unsupported: Qwen2ForQuestionAnswering has a head that reads whole",
}


@pytest.mark.multi
@pytest.mark.timeout(240)
def test_accepted_models_are_exact_and_others_refused_by_name(run_ranks) -> None:  # type: ignore[no-untyped-def]
    for name, words in SAMPLE.items():
        assert sweep.verdict(run_ranks(sweep.one, 3, name, timeout=120)).startswith(words), name
