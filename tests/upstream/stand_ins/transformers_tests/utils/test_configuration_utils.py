"""Stand-in: a non-default value for each common config field."""

config_common_kwargs = {
    "architectures": ["Something"],
    "chunk_size_feed_forward": 5,
    "dtype": "float16",
    "id2label": {0: "zero", 1: "one"},
    "label2id": {"zero": 0, "one": 1},
    "is_encoder_decoder": True,
    "output_hidden_states": True,
    "problem_type": "regression",
    "return_dict": False,
}
