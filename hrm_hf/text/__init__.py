"""Language models: data, training, evaluation and serving."""
