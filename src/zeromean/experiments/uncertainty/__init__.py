"""What uncertainty is good for: foreign inputs, rejection, questions to a person."""
