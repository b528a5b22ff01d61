"""Results of a comparison of methods: accuracies over seeds and problems, tests, learning curves, costs."""
