"""The implementation "sdpa_router" of transformers against its own "sdpa", on models from tiny configurations."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sdpa_router
from sdpa_router import testing

transformers = pytest.importorskip("transformers", minversion="5.0")
integration = pytest.importorskip("sdpa_router.integrations.transformers")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAME = "sdpa_router"
# For a whole model as for one call: the residual stream dilutes what its two layers add. Measured: 0.001 to 0.006.
BUDGET = testing.BUDGET.gaussian


RELEASE = tuple(int(part) for part in transformers.__version__.split(".")[:2])
dispatched = pytest.mark.skipif(RELEASE < (5, 24), reason="in transformers 5.0 this model has attention of its own")


@pytest.fixture(autouse=True)
def _registered():
    """min_kv=1: tiny models are shorter than what pays."""
    sdpa_router.reset_stats()
    integration.register(min_kv=1, log=False)
    yield
    integration.unregister()


def build(name, **sizes):
    """A model in fp16 from `name`Config and `name`Model, 2 layers of 2 heads of 32 unless sizes say otherwise."""
    sizes = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96} | sizes
    sizes = {"num_attention_heads": 2, "max_position_embeddings": 128, "attn_implementation": "sdpa"} | sizes
    # Larger weights than usual: attention of a wrong mask is then off by 0.1, not by less than the budget.
    sizes = ({} if name == "T5" else {"initializer_range": 0.1}) | sizes
    config = getattr(transformers, f"{name}Config")(**sizes)
    torch.manual_seed(0)
    return getattr(transformers, f"{name}Model")(config).eval().to(DEVICE, torch.float16)


def llama(**sizes):
    return build("Llama", num_attention_heads=4, num_key_value_heads=2, head_dim=32, pad_token_id=0, **sizes)


def tokens(batch=2, length=40, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (batch, length), generator=generator).to(DEVICE)


def attend(places, ids):
    """A padding mask that hides the given (row, slice) places."""
    mask = torch.ones_like(ids)
    for row, hidden in places:
        mask[row, hidden] = 0
    return mask


RIGHT = [(1, slice(25, None))]
LEFT = [(1, slice(None, 13))]
GAP = [(0, slice(10, 20)), (1, slice(25, None))]


@torch.no_grad()
def native_and_routed(model, implementation=NAME, field="last_hidden_state", **inputs):
    """Outputs under "sdpa" and under `implementation`, and the records of the latter."""
    model.set_attn_implementation("sdpa")
    native = getattr(model(**inputs), field)
    model.set_attn_implementation(implementation)
    with sdpa_router.record() as seen:
        routed = getattr(model(**inputs), field)
    return native, routed, seen.records


def routes(records):
    return {record["backend"] for record in records}


def reasons(records):
    return {reason for record in records for reason in record["reasons"]}


@pytest.mark.parametrize("places", [RIGHT, LEFT, GAP], ids=["right", "left", "gap"])
def test_case_29_padding_is_not_attended(places):
    model, ids = build("Bert"), tokens()
    mask = attend(places, ids)
    native, routed, records = native_and_routed(model, input_ids=ids, attention_mask=mask)
    assert sum(record["count"] for record in records) == 2
    assert routes(records) == {"int8"}
    assert {record["mask"]["kind"] for record in records} == {"per_key"}
    assert {tuple(record["mask"]["shape"]) for record in records} == {(2, 1, 1, 40)}
    valid = mask.bool()
    assert testing.relative_error(routed[valid], native[valid]) < BUDGET
    # What stands in the padding changes nothing, not a bit.
    noise = torch.where(valid, ids, tokens(seed=2))
    with torch.no_grad():
        assert torch.equal(model(input_ids=noise, attention_mask=mask).last_hidden_state[valid], routed[valid])


def test_case_29_is_what_happens_to_attention_registered_alone():
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    transformers.AttentionInterface.register("attention_alone", sdpa_attention_forward)
    try:
        model, ids = build("Bert"), tokens()
        mask = attend(RIGHT, ids)
        native, alone, _ = native_and_routed(model, "attention_alone", input_ids=ids, attention_mask=mask)
        assert testing.relative_error(alone[1, :25], native[1, :25]) > 4 * BUDGET
    finally:
        transformers.AttentionInterface._global_mapping.pop("attention_alone")


def test_without_padding_there_is_no_mask():
    native, routed, records = native_and_routed(build("Bert"), input_ids=tokens())
    assert routes(records) == {"int8"}
    assert {record["mask"]["kind"] for record in records} == {"none"}
    assert testing.relative_error(routed, native) < BUDGET


def test_case_31_grouped_queries_causal():
    native, routed, records = native_and_routed(llama(), input_ids=tokens(), use_cache=False)
    assert routes(records) == {"int8"}
    assert all(record["signature"]["is_causal"] for record in records)
    assert {record["signature"]["key"]["shape"][1] for record in records} == {2}
    assert testing.relative_error(routed, native) < BUDGET


def test_case_31_grouped_queries_causal_with_padding_stay_with_torch():
    ids = tokens()
    inputs = {"input_ids": ids, "attention_mask": attend(LEFT, ids), "use_cache": False}
    native, routed, records = native_and_routed(llama(), **inputs)
    assert routes(records) == {"sdpa"}
    assert reasons(records) == {"full_mask"}
    assert torch.equal(routed, native)


def grouped_call(mask, groups=2):
    """Arguments of an attention function, with as many query heads to a key head."""
    module = nn.Module()
    module.num_key_value_groups, module.is_causal = groups, False
    query, key, value = testing.gaussian(2, 2 * groups, 40, 40, 32, kv_heads=2, device=DEVICE)
    return module, query, key, value, mask


def test_case_31_grouped_queries_with_padding_are_not_copied():
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    mask = attend(RIGHT, tokens())[:, None, None, :].bool()
    call = grouped_call(mask)
    ours = transformers.AttentionInterface()[NAME]
    with sdpa_router.record() as seen:
        out, weights = ours(*call, scaling=0.3)
    assert weights is None
    assert out.is_contiguous()
    assert [record["backend"] for record in seen.records] == ["int8"]
    assert seen.records[0]["signature"]["key"]["shape"] == [2, 2, 40, 32]
    assert testing.relative_error(out, sdpa_attention_forward(*call, scaling=0.3)[0]) < 2 * BUDGET


def test_grouped_queries_that_can_not_be_routed_are_answered_by_transformers():
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    module, query, key, value, mask = grouped_call(attend(RIGHT, tokens())[:, None, None, :].bool())
    call = (module, query.float(), key.float(), value.float(), mask)
    with sdpa_router.record() as seen:
        out, _ = transformers.AttentionInterface()[NAME](*call)
    assert reasons(seen.records) == {"dtype"}
    # With a mask and enable_gqa torch would take its slowest path on a GPU: transformers repeats the heads instead.
    assert seen.records[0]["signature"]["key"]["shape"] == [2, 4, 40, 32]
    assert torch.equal(out, sdpa_attention_forward(*call)[0])


@dispatched
def test_case_31_t5_position_bias():
    sizes = {"d_model": 64, "d_kv": 32, "d_ff": 96, "num_heads": 2, "num_layers": 2, "vocab_size": 97}
    model, ids = build("T5", **sizes), tokens()
    inputs = {"input_ids": ids, "attention_mask": attend(RIGHT, ids), "decoder_input_ids": tokens(length=9)}
    native, routed, records = native_and_routed(model, use_cache=False, **inputs)
    # Cross-attention has a bias of zeros of one row for each query, so it is full too.
    assert reasons(records) == {"full_mask"}
    assert torch.equal(routed, native)


@pytest.mark.parametrize("padded", [False, True])
def test_case_31_sliding_window(padded):
    model, ids = build("Mistral", num_key_value_heads=1, head_dim=32, sliding_window=8), tokens()
    inputs = {"attention_mask": attend(LEFT, ids)} if padded else {}
    native, routed, records = native_and_routed(model, input_ids=ids, use_cache=False, **inputs)
    assert reasons(records) == {"full_mask"}
    assert torch.equal(routed, native)


@dispatched
def test_case_31_bidirectional_sliding_window():
    """ModernBERT: full layers take the padding as one row, sliding ones need one for each query."""
    model, ids = build("ModernBert", local_attention=8, global_attn_every_n_layers=2, pad_token_id=0), tokens()
    mask = attend(RIGHT, ids)
    native, routed, records = native_and_routed(model, input_ids=ids, attention_mask=mask)
    assert {record["mask"]["kind"]: record["backend"] for record in records} == {"per_key": "int8", "full": "sdpa"}
    valid = mask.bool()
    assert testing.relative_error(routed[valid], native[valid]) < BUDGET


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
@pytest.mark.parametrize("cache", ["dynamic", "static", "sliding"])
@pytest.mark.parametrize("padded", [False, True])
def test_case_31_caches(cache, padded):
    """A prompt and three more tokens, one at a time, through each kind of cache."""
    sliding = cache == "sliding"
    model = build("Mistral", num_key_value_heads=1, head_dim=32, sliding_window=8) if sliding else llama()
    ids, more = tokens(length=20), tokens(length=3, seed=3)
    mask = attend(LEFT if padded else [], ids)

    def run(implementation):
        model.set_attn_implementation(implementation)
        past = transformers.DynamicCache(config=model.config)
        if cache == "static":
            past = transformers.StaticCache(config=model.config, max_cache_len=32)
        seen, outs = mask, []
        for step in (ids, *more.split(1, dim=1)):
            seen = mask if step is ids else F.pad(seen, (0, 1), value=1)
            outs.append(model(step, attention_mask=seen, past_key_values=past).last_hidden_state[:, -1])
        return torch.stack(outs)

    native = run("sdpa")
    with sdpa_router.record() as records:
        routed = run(NAME)
    # With one query every mask is one row.
    decoding = [r for r in records.records if r["signature"]["query"]["shape"][2] in (1, 2)]
    assert routes(decoding) == {"int8"}
    assert testing.relative_error(routed, native) < BUDGET


def stop(*_):
    raise RuntimeError("stop")


def test_case_30_other_models_are_not_routed():
    one, other, ids = build("Bert"), build("Bert"), tokens()
    integration.attach(one)
    with torch.no_grad():
        with sdpa_router.record() as seen:
            other(ids)
        assert seen.records == []
        # Not an index out of range, which on a GPU would end every test after this one.
        one.encoder.layer[-1].register_forward_pre_hook(stop)
        with pytest.raises(RuntimeError, match="stop"):
            one(ids)
        with sdpa_router.record() as seen:
            other(ids)
            F.scaled_dot_product_attention(*testing.gaussian(1, 2, 64, 64, 32, device=DEVICE))
        assert seen.records == []


def test_settings_hold_and_registering_again_replaces_them():
    model, ids = build("Bert"), tokens()
    integration.attach(model)
    integration.register(min_kv=1, skip=lambda call: True, log=False)
    with torch.no_grad(), sdpa_router.record() as seen:
        model(ids)
    assert reasons(seen.records) == {"skipped"}
    integration.register(min_kv=10**6, on_unsupported="raise", log=False)
    with torch.no_grad(), pytest.raises(sdpa_router.UnsupportedError) as error:
        model(ids)
    assert [reason.code.value for reason in error.value.decision.reasons] == ["short"]


def test_surrounding_settings_hold():
    model, ids = build("Bert"), tokens()
    native, _, _ = native_and_routed(model, input_ids=ids)
    with sdpa_router.route(backends=("torch",)):
        _, routed, records = native_and_routed(model, input_ids=ids)
    assert torch.equal(routed, native)
    assert routes(records) == {"sdpa"}
    sdpa_router.enable(model, exclude=["encoder.layer.0"], min_kv=1, log=False)
    *_, records = native_and_routed(model, input_ids=ids)
    assert sorted((r["backend"], r["reasons"], r["count"]) for r in records if r["backend"] == "sdpa")[-1:] == [
        ("sdpa", ["skipped"], 1)
    ]
    assert routes(records) == {"sdpa", "int8"}


def test_an_audit_sees_each_call_once_and_leaves_out_what_it_is_told():
    model, ids = llama(), tokens()
    inputs = {"input_ids": ids, "attention_mask": torch.ones(2, 1, 1, 40, dtype=torch.bool, device=DEVICE)}
    model.set_attn_implementation(NAME)
    settings = sdpa_router.Settings(min_kv=1)
    audit = sdpa_router.audit(model, kwargs=inputs, exclude=["layers.0"], settings=settings, show=False)
    assert [row.module for row in audit.rows] == ["layers.1.self_attn"]
    assert audit.rows[0].error < BUDGET


@pytest.mark.parametrize("backends", [("torch",), ["torch-math"], ("torch-math", "int8")])
def test_backends_can_be_chosen(backends):
    model, ids = llama(), tokens()
    mask = torch.ones(2, 1, 1, 40, dtype=torch.bool, device=DEVICE)
    integration.register(min_kv=1, backends=backends, log=False)
    native, routed, records = native_and_routed(model, input_ids=ids, attention_mask=mask)
    with sdpa_router.route(min_kv=1, backends=backends):
        _, expected, _ = native_and_routed(model, input_ids=ids, attention_mask=mask)
    assert torch.equal(routed, expected)
    assert torch.equal(routed, native) or backends != ("torch",)
    assert ("int8" in routes(records)) <= ("int8" in backends)


def test_unregistering_restores_native_behaviour_to_the_bit():
    torch_attention = F.scaled_dot_product_attention
    model, ids = build("Bert"), tokens()
    mask = attend(RIGHT, ids)
    native, routed, _ = native_and_routed(model, input_ids=ids, attention_mask=mask)
    assert not torch.equal(routed, native)
    integration.unregister()
    from transformers.masking_utils import AttentionMaskInterface

    assert NAME not in transformers.AttentionInterface()
    assert NAME not in AttentionMaskInterface()
    assert F.scaled_dot_product_attention is torch_attention
    with torch.no_grad():
        with pytest.raises(KeyError, match=NAME):
            model(ids, attention_mask=mask)
        model.set_attn_implementation("sdpa")
        assert torch.equal(model(ids, attention_mask=mask).last_hidden_state, native)
    integration.unregister()  # harmless


def test_gradients_are_those_of_torch():
    model, ids = build("Bert").float(), tokens()

    def gradient(implementation):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        model(ids).last_hidden_state.square().mean().backward()
        return model.encoder.layer[0].attention.self.query.weight.grad.clone()

    # Torch's own backward is not deterministic on every GPU.
    assert testing.relative_error(gradient(NAME), gradient("sdpa")) < 1e-5


class OwnAttention(nn.Module):
    """Attention that does not look at AttentionInterface; transformers finds it in this file and logs it, no more."""


class OwnModel(transformers.PreTrainedModel):
    config_class = transformers.BertConfig
    _supports_sdpa = True


class OwnHeads(nn.Module):
    """The same under a name that transformers doesn't look for."""

    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)


def test_attach_says_what_it_was_given_and_what_it_takes():
    with pytest.raises(TypeError, match=r"PreTrainedModel; given Linear"):
        integration.attach(nn.Linear(1, 1))
    config = transformers.MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=1)
    with pytest.raises(ValueError, match=r"given MambaModel.*accepted: .*AttentionInterface.*enable\(model\)"):
        integration.attach(transformers.MambaModel(config))
    with pytest.raises(ValueError, match=r"given OwnModel, whose attention transformers does not dispatch"):
        integration.attach(OwnModel(transformers.BertConfig()))
    # Some attention of this file is dispatched, so that transformers lets it be set, but none of this model.
    vision = transformers.SamVisionModel(
        transformers.SamVisionConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=32)
    )
    with pytest.raises(ValueError, match=r"given SamVisionModel, whose attention transformers does not dispatch"):
        integration.attach(vision)
    assert vision.config._attn_implementation != NAME
    integration.unregister()
    with pytest.raises(RuntimeError, match=r"not registered; call .*register\(\)"):
        integration.attach(build("Bert"))


def test_models_that_ask_for_the_name_sdpa_are_refused():
    """DeepSeek V3.2 masks what its indexer did not choose only where the name is eager or sdpa; Falcon is alike."""
    named = r"given a model of transformers\.models\.\w+\.modeling_{}, .*accepted: .*sdpa_router\.enable\(model\)"
    falcon = build("Falcon")
    with pytest.raises(ValueError, match=named.format("falcon")):
        integration.attach(falcon)
    assert falcon.config._attn_implementation == "sdpa"
    if not hasattr(transformers, "DeepseekV32Config"):
        return
    sizes = dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank"), 16)
    sizes |= {"index_topk": 4, "index_n_heads": 2, "index_head_dim": 32, "num_key_value_heads": 2}
    sparse = build("DeepseekV32", mlp_layer_types=["dense", "dense"], **sizes)
    with pytest.raises(ValueError, match=named.format("deepseek_v32")):
        native_and_routed(sparse, input_ids=tokens())
    sparse.set_attn_implementation("sdpa")
    with torch.no_grad():
        native = sparse(tokens()).last_hidden_state
    sdpa_router.enable(sparse, min_kv=1)
    with torch.no_grad(), sdpa_router.record() as seen:
        assert testing.relative_error(sparse(tokens()).last_hidden_state, native) < BUDGET
    assert sum(entry["count"] for entry in seen.records) == 2


def test_settings_that_do_not_exist_register_nothing():
    integration.unregister()
    with pytest.raises(ValueError, match="on_unsupported"):
        integration.register(on_unsupported="ignore")
    assert NAME not in transformers.AttentionInterface()


def test_an_unsupported_version_is_named(monkeypatch):
    monkeypatch.delattr("transformers.masking_utils.bidirectional_mask_function")
    # transformers replaces its own module as it loads.
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.57.6")
    with pytest.raises(ImportError, match=r"found transformers 4\.57\.6; supported: 5\.0 or newer"):
        integration.register()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"found no transformers; supported: 5\.0 or newer"):
        integration.register()


@pytest.mark.parametrize("padded", [False, True])
def test_compiled_in_one_graph_for_all_lengths(padded):
    from torch._inductor.compile_fx import compile_fx

    graphs = []

    def inductor(graph, inputs):
        graphs.append(sum("sdpa_router.int8_attention" in str(node.target) for node in graph.graph.nodes))
        return compile_fx(graph, inputs)

    model = build("Bert", num_hidden_layers=1)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=inductor)
    for length in (40, 56, 72, 104, 88):
        ids = tokens(length=length)
        inputs = {"input_ids": ids, "attention_mask": attend(RIGHT if padded else [], ids)}
        native, _, _ = native_and_routed(model, **inputs)
        with torch.no_grad(), sdpa_router.record() as seen:
            out = compiled(**inputs).last_hidden_state
        assert {(record["backend"], record["phase"]) for record in seen.records} <= {("int8", "trace")}
        valid = inputs["attention_mask"].bool()
        assert testing.relative_error(out[valid], native[valid]) < BUDGET
    # One more where a length becomes a variable.
    assert graphs in ([1], [1, 1])


def test_import_loads_no_transformers():
    import subprocess

    code = "import sys, sdpa_router.integrations.transformers; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
