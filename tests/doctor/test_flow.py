"""Gradient flow on real models: what is missing, where it is cut, which remedy works."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from driftscope.doctor import Facts, foresee
from driftscope.errors import UsageError
from driftscope.hooks.doctor.flow import gradient_flow
from driftscope.hooks.tiny import tiny_model

REENTRANT = {"use_reentrant": True}
FIXES = ("enable_input_require_grads", "use_reentrant=False", "gradient_checkpointing=False")
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": None, "eos_token_id": 1}
UNTIED = {"tie_word_embeddings": False}
ARCHITECTURES = ("qwen2", "llama", "gemma2", "cohere", "mistral", "gpt2")


def build(arch, auto=AutoModelForCausalLM, **more):
    torch.manual_seed(0)
    return auto.from_config(AutoConfig.for_model(arch, **(GPT2 if arch == "gpt2" else SHAPE), **UNTIED, **more))


def lora(arch="qwen2", **more):
    targets = ["c_attn"] if arch == "gpt2" else ["q_proj", "v_proj"]
    settings = {"r": 4, "target_modules": targets, "task_type": "CAUSAL_LM", "fan_in_fan_out": arch == "gpt2"}
    return LoraConfig(**settings | more)


def adapted(arch="qwen2", **more):
    return get_peft_model(build(arch), lora(arch, **more))


def cut(model):
    """Checkpoint reentrantly without input gradients, as transformers 4 leaves a PEFT model."""
    model.gradient_checkpointing_enable(REENTRANT)
    if getattr(model.get_base_model(), "_require_grads_hooks", None):
        model.disable_input_require_grads()  # transformers 5 enables them with checkpointing
    return model


def trainable(model):
    return tuple(name for name, p in model.named_parameters() if p.requires_grad)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture_flows_and_is_cut_by_reentrant_checkpointing(arch):
    model = adapted(arch)
    before = gradient_flow(model)
    assert before.ok and before.missing == () and before.fixes == () and before.checkpointing == "none"
    assert foresee(Facts(flow=before)).rules == ()
    flow = gradient_flow(cut(model))
    assert flow.missing == trainable(model) and flow.error is not None
    assert flow.cut_at == next(n for n, _ in model.named_modules() if n.endswith((".layers.0", ".h.0")))
    assert (flow.cut_kind, flow.checkpointing) == ("reentrant", "reentrant")
    assert flow.adapters == flow.adapters_missing == flow.trainable == len(trainable(model))
    assert "does not require grad" in flow.message and flow.cut_at in flow.message
    assert tuple(fix.name for fix in flow.fixes) == FIXES and all(fix.works for fix in flow.fixes)
    assert foresee(Facts(flow=flow)).rules == ("DS301", "DS303")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture_cut_silently(arch):
    """A trained head keeps the backward going while no adapter learns."""
    model = adapted(arch, modules_to_save=["lm_head"])
    assert foresee(Facts(flow=gradient_flow(model))).rules == ()
    flow = gradient_flow(cut(model))
    assert flow.error is None and flow.missing == tuple(n for n in trainable(model) if "lora_" in n) != ()
    found = foresee(Facts(flow=flow))
    assert found.rules == ("DS302", "DS303") and {f.severity for f in found} == {"critical"}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_reentrant_checkpointing_with_input_gradients_flows(arch):
    model = adapted(arch)
    model.gradient_checkpointing_enable(REENTRANT)
    model.enable_input_require_grads()
    flow = gradient_flow(model)
    assert flow.ok and flow.checkpointing == "reentrant"


def test_non_reentrant_checkpointing_flows():
    model = adapted()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    flow = gradient_flow(model)
    assert flow.ok and flow.checkpointing == "non-reentrant"


def test_giving_checkpointing_up_costs_memory_and_it_is_measured():
    inputs, non_reentrant, off = gradient_flow(cut(adapted())).fixes
    assert off.saved_bytes > 1.5 * inputs.saved_bytes > 0
    assert off.saved_bytes > 1.5 * non_reentrant.saved_bytes > 0
    twice = {"input_ids": torch.arange(32).view(2, 16)}
    assert gradient_flow(cut(adapted()), twice).fixes[2].saved_bytes > 1.9 * off.saved_bytes


def test_the_gradient_is_the_one_of_a_plain_backward():
    """What is missing is what a backward written by hand leaves without a gradient."""
    model = cut(adapted(modules_to_save=["lm_head"]))
    batch = {"input_ids": torch.arange(12).view(1, 12), "labels": torch.arange(12).view(1, 12)}
    flow = gradient_flow(model, batch)
    model.train()
    with pytest.warns(UserWarning, match="requires_grad"):
        model(**batch).loss.backward()
    assert flow.missing == tuple(n for n, p in model.named_parameters() if p.requires_grad and p.grad is None)
    assert flow.missing == tuple(n for n in trainable(model) if "lora_" in n)
    assert flow.error is None and flow.cut_kind == "reentrant"
    assert (flow.adapters_missing, flow.adapters, flow.trainable) == (8, 8, 9)


@pytest.mark.parametrize("more", [{}, {"use_dora": True}, {"init_lora_weights": "gaussian"}, {"bias": "lora_only"}])
def test_the_zero_of_an_adapters_start_is_no_finding(more):
    flow = gradient_flow(adapted(**more))
    assert flow.ok and flow.zero == ()


@pytest.mark.parametrize("kind", ["VeraConfig", "LoHaConfig", "AdaLoraConfig", "IA3Config"])
def test_the_start_of_other_adapters_is_no_finding(kind):
    import peft

    more = {"IA3Config": {"feedforward_modules": []}, "AdaLoraConfig": {"init_r": 4, "total_step": 9}}.get(
        kind, {"r": 4}
    )
    model = get_peft_model(
        build("llama"), getattr(peft, kind)(target_modules=["q_proj"], task_type="CAUSAL_LM", **more)
    )
    assert gradient_flow(model).ok


def test_an_adapter_on_the_embeddings_flows():
    flow = gradient_flow(adapted(target_modules=["embed_tokens", "q_proj"]))
    assert flow.ok and flow.trainable == 6


def test_a_dead_adapter_is_a_zero_that_its_start_does_not_explain():
    model = adapted()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layers.1.self_attn.o_proj" in name:  # nothing of the last attention goes on
                parameter.zero_()
    flow = gradient_flow(model)
    assert flow.missing == () and flow.error is None and not flow.ok
    assert flow.zero == tuple(n for n in trainable(model) if "layers.1" in n)
    assert "exactly zero" in flow.message and flow.cut_at is None
    finding = foresee(Facts(flow=flow))[0]
    assert (finding.rule, finding.severity) == ("DS302", "warning") and "zero weights" in finding.remedy


def test_transformers_own_adapters():
    model = build("qwen2")
    model.add_adapter(LoraConfig(r=4, target_modules=["q_proj"]))
    assert gradient_flow(model).ok
    model._set_gradient_checkpointing(True, partial(torch.utils.checkpoint.checkpoint, use_reentrant=True))
    flow = gradient_flow(model)
    assert flow.missing == trainable(model) and flow.cut_at == "model.layers.0"
    assert flow.fixes[0].works


@pytest.mark.parametrize("place", ["detach", "no_grad", "inside"])
def test_a_module_that_cuts_is_named(place):
    model = adapted()
    layer = model.base_model.model.model.layers[1]
    if place == "detach":  # the last norm's: nothing of the trunk is left
        norm = model.base_model.model.model.norm
        norm.forward = lambda x, before=norm.forward: before(x).detach()
        expected, kind = "base_model.model.model.norm", "detached"
    elif place == "no_grad":
        attention = layer.self_attn.forward
        layer.self_attn.forward = torch.no_grad()(attention)
        expected, kind = "base_model.model.model.layers.1.self_attn", "no_grad"
    else:
        model.base_model.model.model.layers[0].mlp = Inner(model.base_model.model.model.layers[0].mlp)
        expected, kind = "base_model.model.model.layers.0.mlp", "inside"
    flow = gradient_flow(model)
    assert (flow.cut_at, flow.cut_kind) == (expected, kind)
    assert expected in flow.message
    if place == "no_grad":
        assert flow.missing == tuple(n for n in trainable(model) if "layers.1" in n) and flow.error is None
    if place == "inside":
        assert flow.missing == tuple(n for n in trainable(model) if "mlp" in n)


def test_a_cut_behind_checkpointed_blocks_is_not_laid_to_them():
    model = adapted()
    model.gradient_checkpointing_enable(REENTRANT)
    model.enable_input_require_grads()
    norm = model.base_model.model.model.norm
    norm.forward = lambda x, before=norm.forward: before(x).detach()
    flow = gradient_flow(model)
    assert flow.missing == trainable(model) and flow.checkpointing == "reentrant"
    assert (flow.cut_at, flow.cut_kind) == ("base_model.model.model.norm", "detached")
    assert foresee(Facts(flow=flow)).rules == ("DS301",)


def test_a_cut_inside_a_recomputed_block():
    model = adapted(target_modules=["q_proj", "up_proj"])
    model.gradient_checkpointing_enable(REENTRANT)
    model.enable_input_require_grads()
    mlp = model.base_model.model.model.layers[1].mlp
    mlp.forward = lambda x, before=mlp.forward: before(x).detach()
    flow = gradient_flow(model)
    assert flow.missing == tuple(n for n in trainable(model) if "layers.1.mlp" in n)
    assert (flow.cut_at, flow.cut_kind) == ("base_model.model.model.layers.1.mlp", "detached")


class Inner(nn.Module):
    """Adds a trainable map and detaches it in its own forward."""

    def __init__(self, mlp):
        super().__init__()
        self.mlp, self.extra = mlp, nn.Linear(32, 32)

    def forward(self, x):
        return self.mlp(x) + x + self.extra(x).detach()


def test_a_module_that_is_never_called():
    model = build("qwen2")
    model.spare = nn.ModuleDict({"proj": nn.Linear(8, 8)})
    flow = gradient_flow(get_peft_model(model, lora(target_modules=["q_proj", "proj"])))
    assert flow.missing == tuple(f"base_model.model.spare.proj.lora_{side}.default.weight" for side in "AB")
    assert (flow.cut_at, flow.cut_kind) == ("base_model.model.spare.proj", "not called")
    assert not any(fix.works for fix in flow.fixes)


def test_an_inactive_adapter_is_not_called():
    model = adapted()
    model.add_adapter("other", lora())
    for name, parameter in model.named_parameters():
        if ".other." in name:
            parameter.requires_grad_(True)
    flow = gradient_flow(model)
    assert flow.missing == tuple(n for n in trainable(model) if ".other." in n)
    assert flow.cut_kind == "not called" and flow.cut_at.endswith("lora_A.other")


def test_a_parameter_that_its_module_does_not_use():
    model = adapted()
    layer = model.base_model.model.model.layers[1].mlp
    layer.register_parameter("spare", nn.Parameter(torch.ones(3)))
    flow = gradient_flow(model)
    assert flow.missing == ("base_model.model.model.layers.1.mlp.spare",)
    assert (flow.cut_at, flow.cut_kind) == ("base_model.model.model.layers.1.mlp", "inside")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.inner(x)


class Keyword(nn.Module):
    """Hands hidden states to a checkpointed block by keyword, which reentrant checkpointing loses."""

    def __init__(self, keyword):
        super().__init__()
        self.embed, self.block, self.keyword = nn.Embedding(16, 8), Block(), keyword

    def get_input_embeddings(self):
        return self.embed

    def forward(self, input_ids):
        x = self.embed(input_ids)
        if self.keyword:
            dummy = torch.zeros(1)
            x = torch.utils.checkpoint.checkpoint(lambda _: self.block(x=x), dummy, use_reentrant=True)
        else:
            x = torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=True)
        return {"logits": x}


def test_hidden_states_by_keyword():
    model, batch = Keyword(keyword=True), {"input_ids": torch.arange(8).view(1, 8)}
    flow = gradient_flow(model, batch)
    assert flow.missing == trainable(model) and flow.cut_kind == "reentrant-keyword"
    assert [fix.works for fix in flow.fixes] == [False, True, True]


def test_a_model_of_ones_own_with_frozen_embeddings():
    model, batch = Keyword(keyword=False), {"input_ids": torch.arange(8).view(1, 8)}
    assert gradient_flow(model, batch).ok
    model.embed.requires_grad_(False)
    flow = gradient_flow(model, batch)
    assert flow.missing == ("block.inner.weight", "block.inner.bias") and flow.cut_at == "block"
    assert [fix.works for fix in flow.fixes] == [True, True, True]


def test_a_loss_of_ones_own():
    model = adapted()
    batch = {"anything": torch.arange(8).view(1, 8)}
    assert gradient_flow(model, batch, loss=lambda m, b: m(input_ids=b["anything"]).logits.square().mean()).ok
    flow = gradient_flow(model, batch, loss=lambda m, b: m(input_ids=b["anything"]).logits.detach().mean())
    assert flow.cut_kind == "after" and flow.cut_at is None and flow.missing == trainable(model)


def test_a_sequence_classifier_whose_head_is_frozen_still_reaches_its_adapters():
    base = build("qwen2", AutoModelForSequenceClassification, num_labels=1)
    model = get_peft_model(base, lora(task_type="SEQ_CLS"))
    assert gradient_flow(model).ok


def test_nothing_to_train():
    model = build("qwen2").requires_grad_(False)
    flow = gradient_flow(model)
    assert flow.trainable == 0 and flow.missing == () and not flow.ok
    assert "no trainable parameter" in flow.message


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ({"input_ids": torch.tensor([[1, 64]])}, "vocabulary has 64"),
        ({"input_ids": torch.tensor([[-1, 3]])}, "from -1"),
        ({"input_ids": torch.tensor([1, 2])}, r"\(B, L\)"),
        ({"input_ids": torch.tensor([[1, 2]]), "attention_mask": torch.ones(1, 3)}, "attention_mask"),
        ({"input_ids": torch.tensor([[1, 2]]), "labels": torch.tensor([[1, 99]])}, "labels"),
        ({"input_ids": torch.tensor([[1, 2]]), "labels": torch.tensor([[1, 2, 3]])}, "does not fit"),
        ({"input_ids": torch.tensor([[1, 2]]), "prompt_ids": torch.tensor([[1]])}, "takes no 'prompt_ids'"),
        ({"attention_mask": torch.ones(1, 3)}, "neither input_ids"),
        ([1, 2], "list"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(batch, says):
    model = cut(adapted())
    with pytest.raises(UsageError, match=says):
        gradient_flow(model, batch)
    assert all(p.grad is None for p in model.parameters())


def test_what_is_no_model_is_refused():
    with pytest.raises(UsageError, match="neither a torch"):
        gradient_flow("qwen2")
    with pytest.raises(UsageError, match="Pass a batch"):
        gradient_flow(nn.Linear(2, 2))
    with pytest.raises(UsageError, match="single number"):
        gradient_flow(adapted(), {"input_ids": torch.arange(4).view(1, 4)}, loss=lambda m, b: m(**b).logits)


def test_a_tiny_model_of_the_tree():
    assert gradient_flow(get_peft_model(tiny_model("cohere"), lora())).ok
