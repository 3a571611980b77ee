"""Bits per byte and perplexity of texts as a module of the `evaluate` library, from log-likelihoods.

Load it by the path of this folder, which needs no network: evaluate.load(".../hrm_hf/metrics/bits_per_byte").
"""

# One import per line: the scanner of `evaluate` reads imports line by line.
import math

import datasets
import evaluate


_DESCRIPTION = "Bits that a model needs for a byte of text: comparable between tokenizers, unlike perplexity."

_KWARGS_DESCRIPTION = """
Args:
    predictions: natural logarithms of the probabilities of a text's tokens, one list per text.
    references: the texts; their length in UTF-8 bytes counts.

Returns:
    bits_per_byte: -sum of log2 probabilities over the bytes of all texts.
    perplexity: exp of the mean loss of a token, over all tokens of all texts.
    tokens, bytes: how many there are.
"""


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _KWARGS_DESCRIPTION)
class BitsPerByte(evaluate.Metric):
    """See the module's text."""

    def _info(self):
        values = datasets.Sequence(datasets.Value("float64"))
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_KWARGS_DESCRIPTION,
            features=datasets.Features({"predictions": values, "references": datasets.Value("string")}),
        )

    def _compute(self, predictions, references):
        for i, text in enumerate(predictions):
            if any(not value <= 0 for value in text):
                raise ValueError(
                    f"text {i}: {max(text, key=lambda value: (value != value, value))} is no log-probability"
                )
        tokens, size = sum(map(len, predictions)), sum(len(text.encode()) for text in references)
        if not tokens or not size:
            raise ValueError(f"{tokens} tokens and {size} bytes: there is nothing to score")
        nats = -math.fsum(value for text in predictions for value in text)
        mean = nats / tokens
        return {
            "bits_per_byte": nats / math.log(2) / size,
            "perplexity": math.exp(mean) if mean < 700 else math.inf,
            "tokens": tokens,
            "bytes": size,
        }
