"""The Hugging Face config of a small Llama."""

LLAMA = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64},
    **{"intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2},
    "vocab_size": 256,
}
