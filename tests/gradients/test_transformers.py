"""Models of transformers as they come: batches and outputs that name what they hold, and a loss of their own."""

from contextlib import nullcontext

import pytest
import torch
import zoo  # first: pytorch_lightning imports torchvision, where there is one

# isort: split
from reference import clipped_sums, engine_of, relative_error
from test_docs import DOCS, blocks, commands
from torch.utils.data import default_collate
from transformers import BatchEncoding
from zoo.text import classified, of

import dpexp
from dpexp.errors import RecordError
from dpexp.privacy.gradients.step import LOOP, TRACED
from dpexp.privacy.sampling.batches import SingleCollation
from dpexp.training.classifier import Classifier


@pytest.mark.parametrize("texts", [False, True])
def test_a_batch_encoding_is_a_batch_like_any_other(texts):
    """Its texts are the same for all records that are processed together, and keep the step from being traced."""
    torch.manual_seed(0)
    module = of("BertForSequenceClassification")(False).double()
    batch = classified()
    items = [{name: values[i] for name, values in batch.items()} for i in range(zoo.B)]
    languages = ["de", "en"] + ["de"] * (zoo.B - 2)

    def collate(chosen):
        (i,) = chosen
        return BatchEncoding(default_collate([items[i]]) | ({"language": languages[i], "none": None} if texts else {}))

    def loss_of(one):
        assert type(one) is BatchEncoding and one.get("none") is None
        loss = module(one.input_ids, attention_mask=one["attention_mask"], labels=one["labels"]).loss
        return loss * (2 if one.get("language") == "de" else 1)

    engine = engine_of(module)
    engine.begin()
    found = SingleCollation(collate)([*range(zoo.B)])
    assert sorted(some.size for some in found) == ([1, zoo.B - 1] if texts else [zoo.B])
    with pytest.warns(UserWarning, match="a batch holds a str besides tensors") if texts else nullcontext():
        for some in found:
            engine.add_chunk(lambda _, one: loss_of(one), some.batch, some.size)
    assert engine.step.mode == (LOOP if texts else TRACED)
    reference = clipped_sums(engine.plan, module, lambda i: loss_of(collate(i)), torch.arange(zoo.B), zoo.B)
    assert relative_error(engine._sums, reference) < 1e-9


def test_a_batch_by_name_is_trained_with_the_models_own_loss():
    torch.manual_seed(0)
    model = of("BertForSequenceClassification")(False)
    module, batch = Classifier(model, torch.optim.Adam), classified()
    module.log = lambda *_, **__: None
    assert module.training_step(batch) == model(**batch).loss
    measured = {}
    module.log_dict = lambda values, **_: measured.update(values)
    module.test_step(BatchEncoding(batch))
    assert measured["test_loss"] == model(**batch).loss
    assert measured["test_accuracy"] == (model(**batch).logits.argmax(1) == batch["labels"]).float().mean()
    del batch["labels"]
    with pytest.raises(RecordError, match=r"input_ids, attention_mask, from which \w+ computes no loss"):
        module.training_step(batch)


def test_a_model_and_data_by_name_train(dpexp_job, tmp_path, monkeypatch, recwarn):
    """As docs/own.md has it."""
    for title, content in blocks(DOCS / "own.md", "yaml", "python"):
        if title:
            (tmp_path / title).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / title).write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    _, arguments = commands(DOCS / "own.md")
    output = dpexp_job(*arguments, "sampling.steps=3", "tracking=none")
    said = " ".join(str(w.message) for w in recwarn).replace("what training_step logs", "")
    assert "training_step" not in said and "one at a time" not in said
    trained = dpexp.load(output)
    scores = trained(torch.arange(1, 13)[None], torch.ones(1, 12, dtype=torch.long)).logits
    assert scores.shape == (1, 2) and scores.isfinite().all()
