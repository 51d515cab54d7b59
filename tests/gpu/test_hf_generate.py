"""transformers' models on a GPU: under CUDA graphs what they give without."""

import pytest
import torch
from gpu_inputs import only_on

import blockscale as bs
from blockscale.kernels.common.gpu import GPUS

only_on(*GPUS)
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SIZES = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "vocab_size": 512,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("batch", [1, 4])
def test_generate(name, batch):
    """With a static cache transformers compiles the model, and inductor records it. Not compiled it
    rounds otherwise between the products, whatever the weights."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES)
    model = transformers.LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
    bs.quantize_(model, bs.Recipe(name, activations="bfloat16"))
    ids = torch.arange(8 * batch, device="cuda").view(batch, 8)
    how = {"max_new_tokens": 24, "do_sample": False}
    found = []
    for mode in ("default", "reduce-overhead"):
        torch._dynamo.reset()
        compiled = transformers.CompileConfig(mode=mode, fullgraph=False)
        how |= {"cache_implementation": "static", "compile_config": compiled}
        found.append(model.generate(ids, **how))
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "mxfp4"])
def test_a_recorded_step(name):
    """By hand, without a compiler: the logits of eager, bit for bit, of each replay."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES)
    model = transformers.LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
    bs.quantize_(model, bs.Recipe(name, activations="bfloat16"))
    caches = [transformers.StaticCache(config=config, max_cache_len=64) for _ in range(2)]
    token = torch.zeros(1, 1, dtype=torch.long, device="cuda")
    place = torch.zeros(1, dtype=torch.long, device="cuda")
    mask = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16, device="cuda")

    def step(cache: object) -> torch.Tensor:
        given = {"cache_position": place, "position_ids": place[None], "attention_mask": mask}
        return model(token, past_key_values=cache, use_cache=True, **given).logits

    with torch.no_grad():
        for cache in caches:
            step(cache)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = step(caches[0])
        for i in range(1, 6):
            place.fill_(i)
            graph.replay()
            wanted = step(caches[1])
            assert torch.equal(logits, wanted)
            token.copy_(wanted[:, -1].argmax(-1, keepdim=True))
