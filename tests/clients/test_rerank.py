"""Clients of rerankers on the routes of TEI, Cohere and Jina. The scores equal those of sentence-transformers' CrossEncoder."""

import asyncio
from collections.abc import Iterable
from typing import Any

import cohere
import litellm
import pytest
from conftest import KEY, Server, close
from haystack import Document
from haystack.utils import Secret
from haystack_integrations.components.rankers.huggingface_api import HuggingFaceTEIRanker
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.postprocessor.tei_rerank import TextEmbeddingInference
from material import DOCUMENTS, QUERY
from pymilvus.model.reranker.tei import TEIRerankFunction
from rerankers import Reranker
from tei_client import HttpClient

MODEL = "reranker"


def check(ours: Iterable[tuple[int, float]], scores: list[float]) -> None:
    """`ours`: indices and scores of all documents or of the best documents, in descending order of the scores."""
    ours = list(ours)
    best = sorted(enumerate(scores), key=lambda each: -each[1])[: len(ours)]
    assert [index for index, _ in ours] == [index for index, _ in best]
    close([score for _, score in ours], [score for _, score in best])


def test_llama_index(open_server: Server, reference: dict[str, Any]) -> None:
    """LlamaIndex puts no `Bearer` before the token."""
    reranker = TextEmbeddingInference(base_url=open_server.root, top_n=3, auth_token=f"Bearer {KEY}")
    nodes = [NodeWithScore(node=TextNode(text=text, id_=str(index))) for index, text in enumerate(DOCUMENTS)]
    ranked = reranker.postprocess_nodes(nodes, QueryBundle(QUERY))
    assert len(ranked) == 3
    check([(int(node.node.node_id), node.score) for node in ranked], reference["scores"])


@pytest.mark.parametrize("raw_scores", [False, True])
def test_haystack(open_server: Server, reference: dict[str, Any], raw_scores: bool) -> None:
    """Haystack posts to /rerank at the server's root, and ignores the path of the URL."""
    ranker = HuggingFaceTEIRanker(url=open_server.root, top_k=3, raw_scores=raw_scores, token=Secret.from_token(KEY))
    documents = [Document(content=text, meta={"index": index}) for index, text in enumerate(DOCUMENTS)]
    ranked = [ranker.run(QUERY, documents)["documents"], asyncio.run(ranker.run_async(QUERY, documents))["documents"]]
    for each in ranked:
        assert len(each) == 3
        check([(document.meta["index"], document.score) for document in each], reference["logits" if raw_scores else "scores"])


@pytest.mark.parametrize(
    ("provider", "documents"),
    [
        ("huggingface", True),  # /rerank with `texts`
        ("hosted_vllm", True),  # /rerank with `documents`
        ("infinity", False),  # as vLLM's route, but this client expects a string as a document; the others expect an object
        ("jina_ai", True),  # /v1/rerank
        ("cohere", True),  # /v2/rerank
    ],
)
def test_litellm(open_server: Server, reference: dict[str, Any], provider: str, documents: bool) -> None:
    asked = {"query": QUERY, "documents": DOCUMENTS, "return_documents": documents}
    there = {"model": f"{provider}/{MODEL}", "api_base": open_server.root, "api_key": KEY}
    check(_results(litellm.rerank(**there, **asked)), reference["scores"])
    best = litellm.rerank(**there, **asked, top_n=2)
    check(_results(best), reference["scores"])
    if provider != "huggingface":  # TEI's route has no top_n
        assert len(best.results) == 2
    if documents:
        assert [each["document"]["text"] for each in best.results] == [DOCUMENTS[each["index"]] for each in best.results]


def _results(answer: Any) -> list[tuple[int, float]]:
    return [(each["index"], each["relevance_score"]) for each in answer.results]


def test_cohere_version_2(open_server: Server, reference: dict[str, Any]) -> None:
    client = cohere.ClientV2(api_key=KEY, base_url=open_server.root)
    answer = client.rerank(model=MODEL, query=QUERY, documents=DOCUMENTS)
    check([(each.index, each.relevance_score) for each in answer.results], reference["scores"])
    best = client.rerank(model=MODEL, query=QUERY, documents=DOCUMENTS, top_n=2, max_tokens_per_doc=64)
    assert len(best.results) == 2
    check([(each.index, each.relevance_score) for each in best.results], reference["scores"])


def test_cohere_version_1(open_server: Server, reference: dict[str, Any]) -> None:
    client = cohere.Client(api_key=KEY, base_url=open_server.root)
    answer = client.rerank(model=MODEL, query=QUERY, documents=DOCUMENTS, top_n=3, return_documents=True)
    check([(each.index, each.relevance_score) for each in answer.results], reference["scores"])
    assert [each.document.text for each in answer.results] == [DOCUMENTS[each.index] for each in answer.results]
    bare = client.rerank(model=MODEL, query=QUERY, documents=[{"text": text} for text in DOCUMENTS])
    assert len(bare.results) == 4
    assert {each.document for each in bare.results} == {None}


def test_coheres_errors(open_server: Server) -> None:
    client = cohere.ClientV2(api_key=KEY, base_url=open_server.root)
    with pytest.raises(cohere.BadRequestError, match="cannot be empty"):
        client.rerank(model=MODEL, query=QUERY, documents=[])


@pytest.mark.parametrize(
    ("kind", "path"), [("text-embeddings-inference", "/rerank"), ("cohere", "/v1/rerank"), ("jina", "/v1/rerank")]
)
def test_rerankers(open_server: Server, reference: dict[str, Any], kind: str, path: str) -> None:
    ranker = Reranker(MODEL, model_type=kind, api_key=KEY, api_provider=kind, url=open_server.root + path)
    assert ranker is not None
    ranked = ranker.rank(QUERY, DOCUMENTS, doc_ids=list(range(len(DOCUMENTS))))
    check([(result.doc_id, result.score) for result in ranked.results], reference["scores"])


@pytest.mark.parametrize("raw_scores", [False, True])
def test_tei_client(open_server: Server, reference: dict[str, Any], raw_scores: bool) -> None:
    expected = reference["logits" if raw_scores else "scores"]
    client = HttpClient(open_server.root)
    ranks = client.rerank(QUERY, DOCUMENTS, return_text=True, raw_scores=raw_scores).ranks
    check([(rank.index, rank.score) for rank in ranks], expected)
    assert [rank.text for rank in ranks] == [DOCUMENTS[rank.index] for rank in ranks]
    later = asyncio.run(client.async_rerank(QUERY, DOCUMENTS, raw_scores=raw_scores)).ranks
    check([(rank.index, rank.score) for rank in later], expected)
    assert {rank.text for rank in later} == {None}


def test_pymilvus(open_server: Server, reference: dict[str, Any]) -> None:
    ranked = TEIRerankFunction(open_server.root)(QUERY, DOCUMENTS)
    check([(result.index, result.score) for result in ranked], reference["scores"])
