"""What a model's response is."""


class Response:
    def __init__(self, message):
        self.message = message

    @classmethod
    def model_validate(cls, values):
        return cls(values["message"])
