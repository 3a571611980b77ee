"""Bits per byte and perplexity from token log-probabilities, for the `evaluate` library.

To load it offline, pass the path of this folder: evaluate.load(".../hrm_hf/metrics/bits_per_byte").
"""

# One import per line, because `evaluate` scans imports line by line.
import math

import datasets
import evaluate


_DESCRIPTION = "Bits a model needs per byte of text. Unlike perplexity, this is comparable across tokenizers."

_KWARGS_DESCRIPTION = """
Args:
    predictions: natural log-probabilities of the tokens, one list per text.
    references: texts, measured in UTF-8 bytes.

Returns:
    bits_per_byte: negative sum of log2 probabilities, divided by the number of bytes in all texts.
    perplexity: exp of the mean loss per token, over all texts.
    tokens, bytes: number of tokens and of bytes.
"""


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _KWARGS_DESCRIPTION)
class BitsPerByte(evaluate.Metric):
    """Metric that computes bits per byte and perplexity."""

    def _info(self):
        values = datasets.Sequence(datasets.Value("float64"))
        features = datasets.Features({"predictions": values, "references": datasets.Value("string")})
        return evaluate.MetricInfo(_DESCRIPTION, "", features, _KWARGS_DESCRIPTION)

    def _compute(self, predictions, references):
        for i, text in enumerate(predictions):
            if any(not value <= 0 for value in text):
                worst = max(text, key=lambda value: (value != value, value))
                raise ValueError(f"text {i}: {worst} is not a log-probability; must be <= 0")
        tokens, size = sum(map(len, predictions)), sum(len(text.encode()) for text in references)
        if not tokens or not size:
            raise ValueError(f"{tokens} tokens and {size} bytes: nothing to score; pass at least one token")
        nats = -math.fsum(value for text in predictions for value in text)
        mean = nats / tokens
        return {
            "bits_per_byte": nats / math.log(2) / size,
            "perplexity": math.exp(mean) if mean < 700 else math.inf,
            "tokens": tokens,
            "bytes": size,
        }
