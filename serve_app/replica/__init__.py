"""One replica: a Ray actor that holds one model and its engine."""
