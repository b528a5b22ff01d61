"""Results of a study: finished runs, results as parquet, planned tests and exploratory differences."""
