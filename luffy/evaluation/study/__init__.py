"""What a study came to: which runs are finished, its results as parquet, planned tests and exploratory differences."""
