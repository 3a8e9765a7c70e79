"""Published measurements of attention and of whole models, predicted by the timing model."""
