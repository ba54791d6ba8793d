"""Commands on data: statistics, audit, climatology and training store (`credit-like preprocess`), and the benchmark of loading."""
