"""A custom environment that speaks before the policy, and fails when it is told to."""

from luffy.types import Message


class OpeningGame:
    """Asks for a word, and is content with the reference answer."""

    def __init__(self):
        self.asked = 0

    async def reset(self, problem):
        self.word = problem.extra_info["word"]
        return [Message("user", "Which word?")]

    async def respond(self, conversation):
        said = conversation[-1].content
        if said == "break":
            raise ValueError("no such word")
        self.asked += 1
        return None if said == self.word else [Message("tool", "Another one.")]

    def counts(self):
        return {"asked": float(self.asked)}

    async def close(self): ...
