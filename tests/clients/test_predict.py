"""Clients of /predict; the scores are those of transformers and of sentence-transformers' CrossEncoder."""

from typing import Any

from conftest import KEY, Server, close
from huggingface_hub import InferenceClient
from material import LABELS, PAIR, TEXTS
from tei_client import ClassificationTuple, HttpClient
from tei_client.models import ClassificationResult


def test_huggingface_hub(classifier_server: Server, reference: dict[str, Any]) -> None:
    """The client returns the first label of TEI's flat list. The first label is the best one."""
    best = InferenceClient(model=classifier_server.root + "/predict", token=KEY).text_classification(TEXTS[0])
    score, label = max(zip(reference["label_scores"], LABELS, strict=True))
    assert best.label == label
    close(best.score, score)


def test_tei_client(classifier_server: Server, reference: dict[str, Any]) -> None:
    client = HttpClient(classifier_server.root)
    both = client.classify([TEXTS[0], TEXTS[0]])
    assert len(both) == 2
    for each in (*both, *client.classify(TEXTS[0])):
        check(each, reference["label_scores"])
    for pair in (PAIR, ClassificationTuple(*PAIR)):
        check(client.classify(pair)[0], reference["pair_label_scores"])


def check(ours: ClassificationResult, expected: list[float]) -> None:
    assert [each.score for each in ours.scores] == sorted((each.score for each in ours.scores), reverse=True)
    by_label = {each.label: each.score for each in ours.scores}
    close([by_label[label] for label in LABELS], expected)
