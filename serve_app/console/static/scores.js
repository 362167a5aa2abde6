// Rerank and classify.

import { json } from "./api.js";
import { field, h, table } from "./dom.js";
import { linesOf, modelChoice, noModel, workbench } from "./playground.js";

const bar = (score) => h("meter", { min: 0, max: 1, value: Math.max(0, Math.min(1, score)), "aria-hidden": "true" });

export function rerank(main, live) {
  const model = modelChoice(live, (each) => each.task === "reranker");
  if (!model.options.length) return noModel(main, "Rerank", "is a reranker");
  const query = h("input", { value: "How do plants make food?" });
  const texts = h("textarea", { rows: 10, value: "Leaves turn light, water and carbon dioxide into sugar.\nThe stock market fell on Tuesday.\nRoots take up water and minerals." });
  const request = () => ["v1/rerank", { model: model.value, query: query.value, documents: linesOf(texts) }];
  return workbench(main, "Rerank", [field("Model", model), field("Query", query), field("Texts, one per line", texts)], request, async (result, signal) => {
    const [path, body] = request();
    const { results } = await json(path, { body, signal });
    result.replaceChildren(table("Texts by relevance", ["#Rank", "#Score", "", "Text"],
      results.map((each, rank) => [rank + 1, each.relevance_score.toFixed(4), bar(each.relevance_score), body.documents[each.index]])));
  });
}

export function classify(main, live) {
  const model = modelChoice(live, (each) => each.task === "classifier");
  if (!model.options.length) return noModel(main, "Classify", "is a classifier");
  const texts = h("textarea", { rows: 8, value: "I love this.\nThe box came late and was broken." });
  const request = () => ["predict", { model: model.value, inputs: linesOf(texts).map((text) => [text]) }];
  return workbench(main, "Classify", [field("Model", model), field("Texts, one per line", texts)], request, async (result, signal) => {
    const [path, body] = request();
    const answers = await json(path, { body, signal });
    result.replaceChildren(table("Classes of the texts", ["Text", "Class", "#Score", ""],
      answers.flatMap((classes, index) => classes.slice(0, 5).map((each, place) => [place ? "" : body.inputs[index][0], each.label, each.score.toFixed(4), bar(each.score)]))));
  });
}
